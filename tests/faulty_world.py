"""The search world with a tool that fails in three of ten calls, each time in one of four ways.

`TALLY` counts the calls by kind of failure. For one task in eight the tool always raises WorldError.
"""

import asyncio
import random
import zlib
from collections import Counter
from dataclasses import dataclass

from ludus.envs.base import World
from ludus.envs.tool_env import ToolEnv
from ludus.errors import WorldError
from ludus.tools.base import Traits, tool
from ludus.worlds.search.world import SearchWorld, make_search_world

RATE = 0.3
LATE_S = 2.0
GARBAGE = b"\xff\x00\xed\xa0\x80</tool_call><tool_call>" + b"{" * 5_000
KINDS = ("late", "raised", "garbage", "fault")
TALLY: Counter[str] = Counter()


@dataclass
class FaultyWorld(World):
    """The search world with another tool."""

    inner: SearchWorld
    rng: random.Random
    name: str = "faulty"

    @property
    def splits(self):
        return self.inner.splits

    @property
    def rewards(self):
        return self.inner.rewards

    def tasks(self, split):
        return self.inner.tasks(split)

    def environment(self, task):
        lost = zlib.crc32(task.id.encode()) % 8 == 0
        return ToolEnv([self._tool(lost)], self.rewards, self.inner.limits)

    def _tool(self, lost):
        plain = self.inner.tool.function

        @tool(timeout_s=LATE_S, traits=Traits(cost=0.5))
        async def search(query: str, k: int = 2) -> str:
            """Search the encyclopedia.

            Args:
                query: the words to look for.
                k: how many passages to return.
            """
            kind = self.rng.choice(KINDS) if self.rng.random() < RATE else "fine"
            TALLY[kind] += 1
            if lost or kind == "fault":
                raise WorldError("The index is gone.", "Start it.")
            match kind:
                case "late":
                    await asyncio.Event().wait()
                case "raised":
                    raise RuntimeError("the \x00 index is \ud800 broken")
                case "garbage":
                    return GARBAGE
            return plain(query, k)

        return search


def make_world(settings, limits):
    return FaultyWorld(make_search_world({}, limits), random.Random(settings.get("seed", 0)))
