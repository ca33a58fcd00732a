"""Run the learner on its own thread while the event loop runs episodes.

Work runs serially. It must not touch the event loop's state: the ledger and the episodes in flight.
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
    """Single worker thread with `threads` compute threads. `busy_s` is its total busy time."""

    def __init__(self, threads: int) -> None:
        self.busy_s = 0.0
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._executor = ThreadPoolExecutor(1, "ludus-learner", _begin, (threads, device))

    async def __call__(self, work: Callable[[], T]) -> T:
        """Run `work` and wait for its result. Started work is never abandoned, even on cancellation."""
        future = asyncio.get_running_loop().run_in_executor(self._executor, self._timed, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait({future})
            raise

    def close(self) -> None:
        """Wait for running work and end the thread."""
        self._executor.shutdown()

    def _timed(self, work: Callable[[], T]) -> T:
        begin = time.perf_counter()
        try:
            return work()
        finally:
            self.busy_s += time.perf_counter() - begin


def _begin(threads: int, device: int | None) -> None:
    """Set the compute threads and the GPU of this thread.

    OpenMP counts threads per thread, and torch sets its own number on first use.
    """
    torch.zeros(1).sum()
    torch.set_num_threads(threads)
    if device is not None:
        torch.cuda.set_device(device)
