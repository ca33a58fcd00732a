"""HTTP clients of `agent_sessions.py`, in a process without torch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from queue import Queue

import httpx

QUESTION = "In which country is the city that is served by the airport with this code?"
Work = tuple[Sequence[tuple[str, str]], int, int]


def dialogue(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{number}: {QUESTION}"}]


async def talk(address: tuple[str, str], number: int, turns: int, max_tokens: int) -> None:
    """Run one dialogue over HTTP."""
    url, key = address
    messages = dialogue(number)
    headers = {"Authorization": f"Bearer {key}"}
    # without `verify` each client reads all certificates, which takes longer than a dialogue
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=600, verify=False) as client:
        for _ in range(turns):
            response = await client.post("/chat/completions", json={"messages": messages, "max_tokens": max_tokens})
            response.raise_for_status()
            messages += [response.json()["choices"][0]["message"], {"role": "user", "content": "Go on."}]


def serve_work(work: Queue[Work], done: Queue[bool]) -> None:
    """Run rounds of dialogues, all of a round at once."""
    done.put(True)
    while True:
        addresses, turns, max_tokens = work.get()

        async def run(addresses: Sequence[tuple[str, str]], turns: int, max_tokens: int) -> None:
            await asyncio.gather(*(talk(one, number, turns, max_tokens) for number, one in enumerate(addresses)))

        asyncio.run(run(addresses, turns, max_tokens))
        done.put(True)
