"""The thread on which the learner computes while the event loop plays episodes.

Takes work, one piece after the other. Gives its result to whoever awaits it. Never touches what belongs to
the event loop: the ledger, the episodes in flight.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


class LearnerThread:
    """One thread with `threads` compute threads of its own. `busy_s` adds up the seconds that it worked."""

    def __init__(self, threads: int) -> None:
        self.busy_s = 0.0
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._executor = ThreadPoolExecutor(1, "ludus-learner", _begin, (threads, device))

    async def __call__(self, work: Callable[[], T]) -> T:
        """Have something computed, and wait for its result. Work that has begun is never abandoned."""
        future = asyncio.get_running_loop().run_in_executor(self._executor, self._timed, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait({future})
            raise

    def close(self) -> None:
        """Wait for the work under way, and end the thread."""
        self._executor.shutdown()

    def _timed(self, work: Callable[[], T]) -> T:
        begin = time.perf_counter()
        try:
            return work()
        finally:
            self.busy_s += time.perf_counter() - begin


def _begin(threads: int, device: int | None) -> None:
    """OpenMP counts compute threads thread by thread; torch sets its own number on first use.

    The GPU in use is the thread's as well.
    """
    torch.zeros(1).sum()
    torch.set_num_threads(threads)
    if device is not None:
        torch.cuda.set_device(device)
