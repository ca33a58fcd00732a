"""Waiting for what another thread does, with an end."""

import asyncio
import socket
import time
from collections.abc import Callable


async def until(condition: Callable[[], bool], limit_s: float = 60) -> None:
    """Return when it holds. Raises TimeoutError after `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"it did not come true in {limit_s:g} s")
        await asyncio.sleep(0.001)


def free_port() -> int:
    """A port of this machine on which nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
