"""Timeouts that pause while the measured work waits for a sandbox slot.

Time spent in a queue does not count towards the deadline of a tool or environment. The code that sets a
deadline uses a `PausableClock`; the code that owns slots marks waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(eq=False)
class PausableClock:
    """A pausable deadline. `on_change`, if set, is called at each change with the remaining seconds, or None
    while paused. If several tasks share a clock, it pauses while any of them waits."""

    limit_s: float
    on_change: Callable[[float | None], None] | None = None
    _begun: float = field(init=False)
    _num_waiting: int = field(default=0, init=False)
    _stood_since: float = field(default=0.0, init=False)
    stood_s: float = field(default=0.0, init=False)
    """Total seconds paused."""

    def __post_init__(self) -> None:
        self._begun = asyncio.get_running_loop().time()

    @property
    def left_s(self) -> float:
        """Remaining seconds; constant while paused."""
        now = self._stood_since if self._num_waiting else asyncio.get_running_loop().time()
        return self._begun + self.limit_s - now

    def stop(self) -> None:
        """Pause until `go` has been called as often as `stop`."""
        if not self._num_waiting:
            self._stood_since = asyncio.get_running_loop().time()
            self._tell(None)
        self._num_waiting += 1

    def go(self) -> None:
        """Resume."""
        self._num_waiting -= 1
        if not self._num_waiting:
            stood_s = asyncio.get_running_loop().time() - self._stood_since
            self._begun += stood_s
            self.stood_s += stood_s
            self._tell(self.left_s)

    def _tell(self, left_s: float | None) -> None:
        if self.on_change is not None:
            self.on_change(left_s)


_episode: ContextVar[PausableClock | None] = ContextVar("ludus-episode-clock", default=None)


@contextmanager
def episode_clock(clock: PausableClock) -> Iterator[None]:
    """Set the episode's clock within the block; it pauses in `episode_waits`."""
    token = _episode.set(clock)
    try:
        yield
    finally:
        _episode.reset(token)
        clock.on_change = None


@contextmanager
def episode_waits() -> Iterator[None]:
    """Pause the episode's clock within the block, while waiting for the next step's budget."""
    clock = _episode.get()
    if clock is not None:
        clock.stop()
    try:
        yield
    finally:
        if clock is not None:
            clock.go()


_clocks: ContextVar[tuple[PausableClock, ...]] = ContextVar("ludus-clocks", default=())


@contextmanager
def under(clock: PausableClock) -> Iterator[None]:
    """Pause this clock during waits within the block and in tasks created there. After the block `on_change`
    is not called, even from tasks that outlive it."""
    token = _clocks.set((*_clocks.get(), clock))
    try:
        yield
    finally:
        _clocks.reset(token)
        clock.on_change = None


@contextmanager
def waiting() -> Iterator[None]:
    """Pause the current clocks within the block."""
    clocks = _clocks.get()
    for clock in clocks:
        clock.stop()
    try:
        yield
    finally:
        for clock in clocks:
            clock.go()
