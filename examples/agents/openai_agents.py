"""An agent of the `openai-agents` package: python examples/agents/openai_agents.py"""

from openai import AsyncOpenAI
from search_tasks import SYSTEM, train
from search_tasks import search as run_search

from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool


@function_tool
def search(query: str, k: int = 2) -> str:
    """Search for passages that share words with the query.

    Args:
        query: What to search for.
        k: Number of passages.
    """
    return run_search({"query": query, "k": k})


async def agent(task, base_url, api_key):
    model = OpenAIChatCompletionsModel("policy", AsyncOpenAI(base_url=base_url, api_key=api_key))
    searcher = Agent("searcher", instructions=SYSTEM, model=model, tools=[search])
    config = RunConfig(tracing_disabled=True)
    result = await Runner.run(searcher, task["question"], max_turns=6, run_config=config)
    return result.final_output


if __name__ == "__main__":
    train(agent)
