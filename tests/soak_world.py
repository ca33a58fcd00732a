"""The world of prices with a tool that is slow, sometimes hangs, and sometimes fails."""

import asyncio
import random
from dataclasses import replace

import tiny_world
from ludus.errors import WorldError
from ludus.tools.base import tool

MEDIAN_S, SLOW = 0.05, 20
LATE, BROKEN, RAISES = 0.01, 0.02, 0.03


def make_world(settings, limits):
    rng = random.Random(settings.get("seed", 0))
    plain = tiny_world.make_world({}, limits)
    price = plain.tools[0].function

    @tool
    async def look(item: str) -> str:
        """Look up a price.

        Args:
            item: what it is.
        """
        await asyncio.sleep(MEDIAN_S * (SLOW if rng.random() < 0.05 else rng.lognormvariate(0, 1)))
        fate = rng.random()
        if fate < LATE:
            await asyncio.Event().wait()
        if fate < LATE + BROKEN:
            raise WorldError("The backend of the tool failed, on purpose.")
        if fate < LATE + BROKEN + RAISES:
            raise RuntimeError("A fault of the tool, on purpose.")
        return price(item)

    return replace(plain, tools=(look,))
