"""An agent of the `anthropic` package, with streamed Messages: python examples/agents/anthropic_messages.py"""

from anthropic import Anthropic
from search_tasks import SCHEMA, SYSTEM, search, train


def agent(task, base_url, api_key):
    client = Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key)
    messages = [{"role": "user", "content": task["question"]}]
    tool = {"name": SCHEMA["name"], "description": SCHEMA["description"], "input_schema": SCHEMA["parameters"]}
    while True:
        given = {"model": "policy", "max_tokens": 64, "system": SYSTEM, "messages": messages, "tools": [tool]}
        with client.messages.stream(**given) as stream:
            reply = stream.get_final_message()
        messages.append({"role": "assistant", "content": reply.content})
        calls = [block for block in reply.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in reply.content if block.type == "text")
        found = [{"type": "tool_result", "tool_use_id": one.id, "content": search(one.input)} for one in calls]
        messages.append({"role": "user", "content": found})


if __name__ == "__main__":
    train(agent)
