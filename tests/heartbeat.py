"""How long an event loop stands still while something is done beside it.

In seconds of this process' processor time, so that what else the machine does is not counted.
"""

import asyncio
import gc
import time

MOST_S = 0.5
"""What freezes a loop does so for many seconds."""


def run(work):
    """What a coroutine returns, unless the loop stood still meanwhile."""
    longest = 0.0

    async def beat():
        nonlocal longest
        last = time.process_time()
        while True:
            await asyncio.sleep(0.005)
            now = time.process_time()
            longest, last = max(longest, now - last), now

    async def both():
        beating = asyncio.create_task(beat())
        await asyncio.sleep(0.01)
        found = await work
        await asyncio.sleep(0.01)
        beating.cancel()
        return found

    gc.freeze()  # a collection goes over all that the process holds from earlier tests: up to a second
    try:
        found = asyncio.run(both())
    finally:
        gc.unfreeze()
    assert longest < MOST_S, f"the event loop stood still for {longest:.1f} s"
    return found
