"""An agent of `litellm`: python examples/agents/litellm_chat.py"""

from litellm import acompletion
from search_tasks import SCHEMA, SYSTEM, search, train


async def agent(task, base_url, api_key):
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task["question"]}]
    given = {"model": "openai/policy", "api_base": base_url, "api_key": api_key}
    while True:
        response = await acompletion(**given, messages=messages, tools=[{"type": "function", "function": SCHEMA}])
        reply = response.choices[0].message
        messages.append(reply.model_dump(exclude_none=True))
        if not reply.tool_calls:
            return reply.content
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": search(call.function.arguments)}
            for call in reply.tool_calls
        ]


if __name__ == "__main__":
    train(agent)
