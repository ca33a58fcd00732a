"""The compute thread: run commands between forward passes, and passes while there is work."""

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
    """Drives a `BatchScheduler` on its own thread with `threads` compute threads (0: torch's default).

    No other thread may touch the scheduler; `submit` and `call` run functions between two passes.
    """

    def __init__(self, core: BatchScheduler, threads: int) -> None:
        self._core = core
        self._threads = threads
        self._commands: deque[Callable[[], object]] = deque()
        self._wake = threading.Condition()
        self.closed = self._paused = False
        self._throttle = self._took_s = self._ended = 0.0
        self._thread = threading.Thread(target=self._work, name="ludus-engine", daemon=True)
        self._thread.start()

    def submit(self, command: Callable[[], object]) -> None:
        """Run `command` on the thread between two passes. Raises EngineError if closed."""
        with self._wake:
            if self.closed:
                raise EngineError("The engine is closed.")
            self._commands.append(command)
            self._wake.notify()

    async def call(self, work: Callable[[], Result]) -> Result:
        """Run `work` on the thread and return its result.

        It is skipped if the caller was cancelled before it starts.
        """
        future: Future[Result] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except BaseException as error:  # boundary: the caller gets the cause
                future.set_exception(error)

        self.submit(command)
        return await asyncio.wrap_future(future)

    def set_paused(self, paused: bool) -> None:
        """Pause or resume computation. Must run on the thread itself, through `call`."""
        self._paused = paused

    def throttle(self, factor: float) -> None:
        """Sleep after each pass for `factor` times its duration; 0 disables this."""
        with self._wake:
            self._throttle = factor
            self._wake.notify()

    async def close(self) -> None:
        """Finish the current pass, reject further work and join the thread."""
        with self._wake:
            self.closed = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    def _work(self) -> None:
        """Run commands, then a pass, until closed."""
        _set_num_threads(self._threads)
        while True:
            commands, closed = self._next()
            for command in commands:
                command()
            if closed:
                self._core.fail_all(EngineError("The engine is closed."))
                return
            self._core.expire()
            if self._has_work and not self._pause_s:
                self._step()

    def _next(self) -> tuple[deque[Callable[[], object]], bool]:
        """Wait for a command, for work or for a deadline; return the pending commands and `closed`."""
        with self._wake:
            while not (self.closed or self._commands):
                pause_s = self._pause_s
                if self._has_work and not pause_s:
                    break
                known = [left for left in (self._core.next_timeout_s, pause_s or None) if left is not None]
                self._wake.wait(min(known, default=None))
                if self._core.next_timeout_s == 0:
                    break
            commands, self._commands = self._commands, deque()
            return commands, self.closed

    @property
    def _has_work(self) -> bool:
        return self._core.busy and not self._paused

    @property
    def _pause_s(self) -> float:
        """Remaining seconds of sleep after the last pass, at least 0."""
        return max(0.0, self._ended + self._throttle * self._took_s - time.monotonic())

    def _step(self) -> None:
        """Run a pass. An error in one sequence fails that sequence; an error outside fails all."""
        begin = time.monotonic()
        try:
            self._core.step()
        except EngineError as error:
            self._core.fail_all(error)
        except Exception as error:  # boundary: if the thread died, all callers would wait forever
            count = len(self._core.running)
            self._core.fail_all(EngineError(f"Inference failed on a batch of {count}: {error}"))
        self._ended = time.monotonic()
        self._took_s = self._ended - begin


@contextmanager
def compute_threads(threads: int) -> Iterator[None]:
    """Set the number of compute threads inside the block (0: torch's default)."""
    before = torch.get_num_threads()
    _set_num_threads(threads)
    try:
        yield
    finally:
        _set_num_threads(before)


def _set_num_threads(threads: int) -> None:
    """Set the calling thread's number of compute threads, which OpenMP keeps per thread."""
    if threads:
        torch.zeros(1).sum()  # torch applies its global number on first use, so trigger that first
        torch.set_num_threads(threads)
