"""Timeouts that pause while a call waits for a sandbox slot, so that queueing time does not count."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(eq=False)
class PausableTimeout:
    """A timeout that can be paused. If several tasks share it, it pauses while any of them waits."""

    timeout: asyncio.Timeout
    paused_s: float = 0.0
    """Total seconds paused."""
    _num_pauses: int = 0
    _paused_at: float = 0.0
    _deadline: float | None = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause within the block."""
        time = asyncio.get_running_loop().time
        if not self._num_pauses:
            self._paused_at, self._deadline = time(), self.timeout.when()
            self._reschedule(None)
        self._num_pauses += 1
        try:
            yield
        finally:
            self._num_pauses -= 1
            if not self._num_pauses:
                paused_s = time() - self._paused_at
                self.paused_s += paused_s
                self._reschedule(None if self._deadline is None else self._deadline + paused_s)

    def _reschedule(self, when: float | None) -> None:
        with suppress(RuntimeError):  # this task outlives the expired timeout
            self.timeout.reschedule(when)


CALL_TIMEOUTS: ContextVar[tuple[PausableTimeout, ...]] = ContextVar("ludus-call-timeouts", default=())
"""Timeouts of the current call of a tool or environment, for `paused_in_queue`."""


@contextmanager
def paused_in_queue() -> Iterator[None]:
    """Pause the timeouts of the current call within the block."""
    with ExitStack() as stack:
        for timeout in CALL_TIMEOUTS.get():
            stack.enter_context(timeout.paused())
        yield
