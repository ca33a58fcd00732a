"""An agent of the `openai` package, with streamed Responses: python examples/agents/openai_responses.py"""

from openai import OpenAI
from search_tasks import SCHEMA, SYSTEM, search, train


def agent(task, base_url, api_key):
    client = OpenAI(base_url=base_url, api_key=api_key)
    items = [{"role": "user", "content": task["question"]}]
    while True:
        tools = [{"type": "function", **SCHEMA}]
        with client.responses.stream(model="policy", instructions=SYSTEM, input=items, tools=tools) as stream:
            response = stream.get_final_response()
        items += response.output
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        for call in calls:
            found = search(call.arguments)
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": found})


if __name__ == "__main__":
    train(agent)
