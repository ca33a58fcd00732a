"""Waiting for other threads, with a timeout, and free ports."""

import asyncio
import socket
import time
from collections.abc import Callable


async def until(condition: Callable[[], bool], limit_s: float = 60) -> None:
    """Wait until the condition holds. Raise TimeoutError after `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the condition did not hold within {limit_s:g} s")
        await asyncio.sleep(0.001)


def free_port() -> int:
    """Return a free TCP port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
