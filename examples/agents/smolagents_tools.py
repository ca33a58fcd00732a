"""An agent of `smolagents` that calls tools: python examples/agents/smolagents_tools.py"""

from search_tasks import search as run_search
from search_tasks import train
from smolagents import LogLevel, OpenAIServerModel, ToolCallingAgent, tool


@tool
def search(query: str) -> str:
    """Search for passages that share words with the query.

    Args:
        query: What to search for.
    """
    return run_search({"query": query})


def agent(task, base_url, api_key):
    model = OpenAIServerModel("policy", api_base=base_url, api_key=api_key)
    runner = ToolCallingAgent([search], model, max_steps=6, verbosity_level=LogLevel.OFF)
    return runner.run(task["question"])


if __name__ == "__main__":
    train(agent)
