"""The thread that computes: commands between passes, and passes while there is work."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

import torch

from ludus.engines.embedded.scheduler import BatchScheduler
from ludus.errors import EngineError

Result = TypeVar("Result")


class ComputeThread:
    """Drives an `BatchScheduler` on a thread of its own with `threads` compute threads (0: torch's number).

    Nothing else may touch the core: `post` and `call` have things done between two passes.
    """

    def __init__(self, core: BatchScheduler, threads: int) -> None:
        self._core = core
        self._threads = threads
        self._commands: deque[Callable[[], object]] = deque()
        self._wake = threading.Condition()
        self.closed = self._paused = False
        self._rest = self._took_s = self._ended = 0.0
        self._thread = threading.Thread(target=self._work, name="ludus-engine", daemon=True)
        self._thread.start()

    def post(self, command: Callable[[], object]) -> None:
        """Have the worker do something between two passes. Raises EngineError once closed."""
        with self._wake:
            if self.closed:
                raise EngineError("The engine is closed.")
            self._commands.append(command)
            self._wake.notify()

    async def call(self, work: Callable[[], Result]) -> Result:
        """Have the worker do something, and wait for its result.

        Where nobody waits any more when its turn comes, it is not done.
        """
        future: Future[Result] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except BaseException as error:  # boundary: the cause goes to whoever asked
                future.set_exception(error)

        self.post(command)
        return await asyncio.wrap_future(future)

    def set_paused(self, paused: bool) -> None:
        """Compute nothing more, or go on. For the worker itself: hand it to `call`."""
        self._paused = paused

    def rest(self, times: float) -> None:
        """Leave the device to others after each pass for `times` as long as it took; 0 does not rest."""
        with self._wake:
            self._rest = times
            self._wake.notify()

    async def close(self) -> None:
        """Finish the pass under way, refuse all else, and end."""
        with self._wake:
            self.closed = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    def _work(self) -> None:
        """Commands, then a pass, until closed."""
        _take_threads(self._threads)
        while True:
            commands, closed = self._next()
            for command in commands:
                command()
            if closed:
                self._core.fail_all(EngineError("The engine is closed."))
                return
            self._core.expire()
            if self._has_work and not self._rest_s:
                self._step()

    def _next(self) -> tuple[deque[Callable[[], object]], bool]:
        """Wait for a command, for work or for a deadline."""
        with self._wake:
            while not (self.closed or self._commands):
                rest_s = self._rest_s
                if self._has_work and not rest_s:
                    break
                known = [left for left in (self._core.patience, rest_s or None) if left is not None]
                self._wake.wait(min(known, default=None))
                if self._core.patience == 0:
                    break
            commands, self._commands = self._commands, deque()
            return commands, self.closed

    @property
    def _has_work(self) -> bool:
        return self._core.busy and not self._paused

    @property
    def _rest_s(self) -> float:
        """What is left of the rest after the last pass, 0 where it is over."""
        return max(0.0, self._ended + self._rest * self._took_s - time.monotonic())

    def _step(self) -> None:
        """A pass. What fails in one sequence's computation fails that one; what fails around it, all."""
        begin = time.monotonic()
        try:
            self._core.step()
        except EngineError as error:
            self._core.fail_all(error)
        except Exception as error:  # boundary: without this thread all who wait would wait for ever
            count = len(self._core.running)
            self._core.fail_all(EngineError(f"Inference failed on a batch of {count}: {error}"))
        self._ended = time.monotonic()
        self._took_s = self._ended - begin


@contextmanager
def compute_threads(threads: int) -> Iterator[None]:
    """Compute with as many threads as a worker would, for the time of the block (0: torch's number)."""
    before = torch.get_num_threads()
    _take_threads(threads)
    try:
        yield
    finally:
        _take_threads(before)


def _take_threads(threads: int) -> None:
    """Give the calling thread its own number of compute threads: OpenMP counts them thread by thread."""
    if threads:
        torch.zeros(1).sum()  # torch takes over its global number on first use, so that comes before
        torch.set_num_threads(threads)
