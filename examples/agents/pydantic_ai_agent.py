"""An agent of `pydantic-ai`: python examples/agents/pydantic_ai_agent.py"""

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from search_tasks import SYSTEM, train
from search_tasks import search as run_search


def search(query: str, k: int = 2) -> str:
    """Search for passages that share words with the query."""
    return run_search({"query": query, "k": k})


async def agent(task, base_url, api_key):
    model = OpenAIChatModel("policy", provider=OpenAIProvider(base_url=base_url, api_key=api_key))
    result = await Agent(model, system_prompt=SYSTEM, tools=[search]).run(task["question"])
    return result.output


if __name__ == "__main__":
    train(agent)
