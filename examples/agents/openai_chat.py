"""An agent of the `openai` package, with chat completions: python examples/agents/openai_chat.py"""

from openai import OpenAI
from search_tasks import SCHEMA, SYSTEM, search, train


def agent(task, base_url, api_key):
    client = OpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task["question"]}]
    tools = [{"type": "function", "function": SCHEMA}]
    while True:
        reply = client.chat.completions.create(model="policy", messages=messages, tools=tools).choices[0].message
        messages.append(reply)
        if not reply.tool_calls:
            return reply.content
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": search(call.function.arguments)}
            for call in reply.tool_calls
        ]


if __name__ == "__main__":
    train(agent)
