"""An agent of `langgraph`, with a model of `langchain-openai`: python examples/agents/langgraph_react.py"""

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from search_tasks import SYSTEM, train
from search_tasks import search as run_search


@tool
def search(query: str, k: int = 2) -> str:
    """Search for passages that share words with the query."""
    return run_search({"query": query, "k": k})


async def agent(task, base_url, api_key):
    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key)
    graph = create_agent(model, [search], system_prompt=SYSTEM)
    state = await graph.ainvoke({"messages": [("user", task["question"])]})
    return state["messages"][-1].text


if __name__ == "__main__":
    train(agent)
