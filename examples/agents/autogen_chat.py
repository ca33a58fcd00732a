"""An agent of `autogen-agentchat`, with a model of `autogen-ext`: python examples/agents/autogen_chat.py"""

from autogen_agentchat.agents import AssistantAgent
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from search_tasks import SYSTEM, train
from search_tasks import search as run_search

INFO = {
    "family": "unknown",
    "function_calling": True,
    "json_output": False,
    "structured_output": False,
    "vision": False,
}


def search(query: str, k: int = 2) -> str:
    return run_search({"query": query, "k": k})


async def agent(task, base_url, api_key):
    model = OpenAIChatCompletionClient(model="policy", base_url=base_url, api_key=api_key, model_info=INFO)
    tool = FunctionTool(search, "Search for passages that share words with the query.")
    searcher = AssistantAgent("searcher", model, tools=[tool], system_message=SYSTEM, max_tool_iterations=6)
    result = await searcher.run(task=task["question"])
    return result.messages[-1].content


if __name__ == "__main__":
    train(agent)
