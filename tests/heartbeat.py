"""Measure how long a coroutine blocks the event loop.

In processor time of this process, so that other load on the machine does not count.
"""

import asyncio
import gc
import time

MOST_S = 0.5
"""The bugs to detect block the loop for many seconds."""


def run(work):
    """Return the result of a coroutine; fail if it blocked the loop."""
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

    gc.disable()  # collecting the objects of earlier tests takes up to a second
    try:
        found = asyncio.run(both())
    finally:
        gc.enable()
    assert longest < MOST_S, f"the event loop was blocked for {longest:.1f} s"
    return found
