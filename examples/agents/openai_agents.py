"""An agent of the `openai-agents` package, which hands over to a second one: python examples/agents/openai_agents.py"""

from openai import AsyncOpenAI
from search_tasks import SYSTEM, train
from search_tasks import search as run_search

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)


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
    settings = ModelSettings(include_usage=True)
    searcher = Agent("searcher", instructions=SYSTEM, model=model, tools=[search], model_settings=settings)
    result = await Runner.run(searcher, task["question"], max_turns=6)
    return result.final_output


if __name__ == "__main__":
    train(agent)
