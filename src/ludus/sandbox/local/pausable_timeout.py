"""Clocks that stand still while what they measure waits for a place of a sandbox.

A program that has yet to begin takes no time: neither its tool nor its environment is late because others
run. Who bounds a piece of work runs it under a `PausableClock`; who has places says when work waits for one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(eq=False)
class PausableClock:
    """Seconds that something may take from now on. `on_change`, where given, is told of each change: how many
    are left, or None while the clock stands still. Of several things under one clock none need wait."""

    limit_s: float
    on_change: Callable[[float | None], None] | None = None
    _begun: float = field(init=False)
    _num_waiting: int = field(default=0, init=False)
    _stood_since: float = field(default=0.0, init=False)
    stood_s: float = field(default=0.0, init=False)
    """Seconds for which it stood still and went on again."""

    def __post_init__(self) -> None:
        self._begun = asyncio.get_running_loop().time()

    @property
    def left_s(self) -> float:
        """What is left of the limit; it does not shrink while the clock stands still."""
        now = self._stood_since if self._num_waiting else asyncio.get_running_loop().time()
        return self._begun + self.limit_s - now

    def stop(self) -> None:
        """Stand still, until `go` was called as often as this."""
        if not self._num_waiting:
            self._stood_since = asyncio.get_running_loop().time()
            self._tell(None)
        self._num_waiting += 1

    def go(self) -> None:
        """Go on."""
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
    """Within the block, this is the clock of the episode: it stands still in `episode_waits`."""
    token = _episode.set(clock)
    try:
        yield
    finally:
        _episode.reset(token)
        clock.on_change = None


@contextmanager
def episode_waits() -> Iterator[None]:
    """Within the block the episode waits for the next step's budget."""
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
    """Within the block, and in tasks that begin in it, waiting stops this clock as well. Behind the block
    nobody is told of its changes any more: tasks may outlive it."""
    token = _clocks.set((*_clocks.get(), clock))
    try:
        yield
    finally:
        _clocks.reset(token)
        clock.on_change = None


@contextmanager
def waiting() -> Iterator[None]:
    """Within the block work waits for a place."""
    clocks = _clocks.get()
    for clock in clocks:
        clock.stop()
    try:
        yield
    finally:
        for clock in clocks:
            clock.go()
