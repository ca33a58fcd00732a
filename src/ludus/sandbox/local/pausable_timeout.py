"""Timeouts that pause while the measured work waits for a sandbox slot.

Time spent in a queue does not count towards the deadline of a tool or environment. The code that sets a deadline uses a
`PausableClock`; the code that owns slots marks waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(eq=False)
class PausableClock:
    """A pausable deadline. `on_change`, if set, is called at each change with the remaining seconds, or None while
    paused. If several tasks share a clock, it pauses while any of them waits."""

    limit_s: float
    on_change: Callable[[float | None], None] | None = None
    _started: float = field(init=False)
    _num_pauses: int = field(default=0, init=False)
    _paused_since: float = field(default=0.0, init=False)
    paused_s: float = field(default=0.0, init=False)
    """Total seconds paused."""

    def __post_init__(self) -> None:
        self._started = asyncio.get_running_loop().time()

    @property
    def remaining_s(self) -> float:
        """Remaining seconds; constant while paused."""
        now = self._paused_since if self._num_pauses else asyncio.get_running_loop().time()
        return self._started + self.limit_s - now

    def pause(self) -> None:
        """Pause until `resume` has been called as often as `pause`."""
        if not self._num_pauses:
            self._paused_since = asyncio.get_running_loop().time()
            if self.on_change is not None:
                self.on_change(None)
        self._num_pauses += 1

    def resume(self) -> None:
        """Undo one `pause`."""
        self._num_pauses -= 1
        if not self._num_pauses:
            paused_s = asyncio.get_running_loop().time() - self._paused_since
            self._started += paused_s
            self.paused_s += paused_s
            if self.on_change is not None:
                self.on_change(self.remaining_s)


_Clocks = ContextVar[tuple[PausableClock, ...]]
_episode: _Clocks = ContextVar("ludus-episode-clock", default=())
_work: _Clocks = ContextVar("ludus-clocks", default=())


def use_episode_clock(clock: PausableClock) -> AbstractContextManager[None]:
    """Set the episode's clock within the block; it pauses in `episode_paused`."""
    return _using(_episode, clock, (clock,))


def use_clock(clock: PausableClock) -> AbstractContextManager[None]:
    """Pause this clock in each `paused_in_queue` within the block and in tasks created there. After the block
    `on_change` is not called, even from tasks that outlive it."""
    return _using(_work, clock, (*_work.get(), clock))


def episode_paused() -> AbstractContextManager[None]:
    """Pause the episode's clock within the block, while waiting for the next step's budget."""
    return _paused(_episode.get())


def paused_in_queue() -> AbstractContextManager[None]:
    """Pause the current clocks within the block."""
    return _paused(_work.get())


@contextmanager
def _using(variable: _Clocks, clock: PausableClock, clocks: tuple[PausableClock, ...]) -> Iterator[None]:
    token = variable.set(clocks)
    try:
        yield
    finally:
        variable.reset(token)
        clock.on_change = None


@contextmanager
def _paused(clocks: tuple[PausableClock, ...]) -> Iterator[None]:
    for clock in clocks:
        clock.pause()
    try:
        yield
    finally:
        for clock in clocks:
            clock.resume()
