"""Decode request data on threads, off the event loop.

Bodies are checked for size before decoding. Long texts use a separate thread with a short queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from ludus.errors import EngineBusy
from ludus.gateway.protocol.requests import BadRequest

_LONG = 64 * 2**10
"""Minimum characters of a long text."""
_MOST_LONG = 32
"""Maximum number of long texts running or queued."""
_CONTAINERS, _COMMAS = 2**13, 2**17
_MANY = 413

Result = TypeVar("Result")


@dataclass
class RequestThreads:
    """The worker threads of one server."""

    _short: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "ludus-door"))
    _long: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "ludus-door-long"))
    _num_long: int = 0

    async def do(self, work: Callable[[], Result], size: int = 0) -> Result:
        """Run `work` on a thread; `size` is the length of its text. Raises EngineBusy if the long-text queue
        is full."""
        loop = asyncio.get_running_loop()
        if size < _LONG:
            return await loop.run_in_executor(self._short, work)
        if self._num_long >= _MOST_LONG:
            raise EngineBusy(f"The server is already processing {_MOST_LONG} long texts.", "Retry later.")
        self._num_long += 1
        future = loop.run_in_executor(self._long, work)
        future.add_done_callback(self._one_less)
        return await future

    def _one_less(self, _: object) -> None:
        self._num_long -= 1


def check_shape(body: bytes, context_tokens: int) -> None:
    """Raise BadRequest for JSON with more values than a valid request has, since parsing each takes time.

    Punctuation inside strings counts too; text that fits the context has less.
    """
    containers = body.count(b"[") + body.count(b"{") + body.count(b":")
    commas = body.count(b",")
    if containers > _CONTAINERS + context_tokens or commas > _COMMAS + 8 * context_tokens:
        raise BadRequest(
            f"The body has {commas} commas and {containers} colons and opening brackets, more than a request "
            "of this context; send several requests.",
            _MANY,
        )
