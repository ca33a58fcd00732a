"""Simulated devices: engines and a learner that take their time and compute nothing.

An engine shares its passes among the sequences that run: with `n` of them a pass takes
`pass_s + n * sequence_s`, and each gets one token of it. So the state of an engine between two arrivals or
endings is a straight line, and only those are events, not the tokens. What is read before a turn holds up all
sequences of the engine, as a chunk of a prompt does in a pass. New weights stop an engine for as long as the
transfer takes; each token carries the version that sampled it.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from ludus.planning.costs import EngineCost

Span = tuple[int, int]
"""A weight version, and how many tokens in a row it sampled."""
_ALMOST = 1e-9
"""Passes that rounding may leave over."""


class Device(Protocol):
    """Something whose speed depends on what else works."""

    def advance(self) -> None:
        """Account for the time until now, at the speed of before."""
        ...

    def plan(self) -> None:
        """Find out anew when something ends."""
        ...


@dataclass
class Overlap:
    """What learner and engines cost each other: the speed of each while both work."""

    factor: float
    duty: float = 1.0
    """Share of its time with work in which an engine computes; in the rest of it, it rests."""
    engines: list[Device] = field(default_factory=list)
    learner: Device | None = None
    _busy_engines: int = 0
    _learning: bool = False

    @property
    def engine_speed(self) -> float:
        """Of engines now."""
        return self.duty * (self.factor if self._learning else 1.0)

    @property
    def learner_speed(self) -> float:
        """Of the learner now."""
        return 1 - (1 - self.factor) * self.duty if self._busy_engines else 1.0

    def rest(self, times: float) -> None:
        """Engines wait after each pass for `times` as long as it took."""
        with _at_another_speed([*self.engines, *self._learners]):
            self.duty = 1 / (1 + times)

    def learns(self, now: bool) -> None:
        """The learner begins or ends."""
        self._change(self.engines, learning=now)

    def samples(self, more: int) -> None:
        """Engines begin (1) or end (-1)."""
        self._change(self._learners, more=more)

    def _change(self, others: Sequence[Device], *, learning: bool | None = None, more: int = 0) -> None:
        with _at_another_speed(others if self.factor < 1 else ()):
            self._learning = self._learning if learning is None else learning
            self._busy_engines += more

    @property
    def _learners(self) -> Sequence[Device]:
        return [self.learner] if self.learner is not None else []


@contextmanager
def _at_another_speed(devices: Sequence[Device]) -> Iterator[None]:
    """Until the block these went as before; they plan anew after it."""
    for device in devices:
        device.advance()
    yield
    for device in devices:
        device.plan()


@dataclass
class _Turn:
    """One request: tokens to sample and to read."""

    tokens: int
    read: float
    done: asyncio.Future[list[Span]]
    begun: float = 0.0


@dataclass
class EngineCounts:
    """What an engine did: seconds with work, passes, tokens, and the sums over passes of its queues."""

    busy_s: float = 0.0
    passes: float = 0.0
    tokens: float = 0.0
    read: float = 0.0
    waiting: float = 0.0

    def add(self, other: EngineCounts) -> None:
        """Take another's counts into these."""
        self.busy_s += other.busy_s
        self.passes += other.passes
        self.tokens += other.tokens
        self.read += other.read
        self.waiting += other.waiting


@dataclass
class SimEngine:
    """One engine. `passes` counts its passes since the start, as a real number."""

    cost: EngineCost
    overlap: Overlap
    version: int = 0
    counts: EngineCounts = field(default_factory=EngineCounts)
    _passes: float = 0.0
    _backlog_s: float = 0.0
    _at: float = 0.0
    _paused: bool = False
    _running: list[tuple[float, int, _Turn]] = field(default_factory=list)
    _waiting: deque[_Turn] = field(default_factory=deque)
    _marks: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])
    _order: count[int] = field(default_factory=count)
    _timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self.overlap.engines.append(self)

    async def generate(self, tokens: int, read: float = 0.0) -> list[Span]:
        """Sample so many tokens after reading; gives the versions that did, in order."""
        self.advance()
        turn = _Turn(tokens, read, asyncio.get_running_loop().create_future())
        self._waiting.append(turn)
        self._admit()
        self.plan()
        return await turn.done

    async def load_weights(self, version: int, seconds: float) -> None:
        """Stand still for the transfer; what is sampled after it is of `version`."""
        self.advance()
        self._paused = True
        self.plan()
        await asyncio.sleep(seconds)
        self.advance()
        self._paused, self.version = False, version
        self._marks.append((self._passes, version))
        oldest = min((turn.begun for _, _, turn in self._running), default=self._passes)
        while len(self._marks) > 1 and self._marks[1][0] <= oldest:
            del self._marks[0]
        self.plan()

    def advance(self) -> None:
        """Account for the time until now."""
        now = asyncio.get_running_loop().time()
        passed_s, self._at = now - self._at, now
        running = len(self._running)
        if not running or self._paused or not passed_s:
            return
        self.counts.busy_s += passed_s * self.overlap.duty
        work_s = passed_s * self.overlap.engine_speed
        read_s = min(self._backlog_s, work_s)
        self._backlog_s -= read_s
        passes = (work_s - read_s) / self.cost.seconds(running)
        self._passes += passes
        self.counts.passes += passes
        self.counts.tokens += passes * running
        self.counts.waiting += passes * len(self._waiting)

    def plan(self) -> None:
        """Wake up when the next sequence ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running and not self._paused:
            passes = max(0.0, self._running[0][0] - self._passes)
            seconds = self._backlog_s + passes * self.cost.seconds(len(self._running))
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(seconds / self.overlap.engine_speed, self._wake)

    def _admit(self) -> None:
        """Let waiting turns run where slots are free."""
        while self._waiting and len(self._running) < self.cost.slots:
            turn = self._waiting.popleft()
            turn.begun = self._passes
            self._backlog_s += turn.read * self.cost.read_s
            self.counts.read += turn.read
            heapq.heappush(self._running, (self._passes + turn.tokens, next(self._order), turn))
            if len(self._running) == 1:
                self.overlap.samples(1)

    def _wake(self) -> None:
        self.advance()
        while self._running and self._running[0][0] <= self._passes + _ALMOST:
            _, _, turn = heapq.heappop(self._running)
            if not turn.done.done():
                turn.done.set_result(self._spans(turn))
            if not self._running:
                self.overlap.samples(-1)
        self._admit()
        self.plan()

    def _spans(self, turn: _Turn) -> list[Span]:
        """The versions of a turn's tokens, of which each pass gave one."""
        spans: list[Span] = []
        left = turn.tokens
        for since, version in reversed(self._marks):
            tokens = left if since <= turn.begun else min(left, round(turn.begun + turn.tokens - since))
            if tokens > 0:
                spans.append((version, tokens))
                left -= tokens
            if since <= turn.begun:
                break
        return [*reversed(spans)]


@dataclass
class SimLearner:
    """Works off seconds. `busy_s` adds up the time that it took."""

    overlap: Overlap
    busy_s: float = 0.0
    _left_s: float = 0.0
    _at: float = 0.0
    _done: asyncio.Future[None] | None = None
    _timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self.overlap.learner = self

    async def work(self, seconds: float) -> None:
        """Work that takes so long with nothing beside it."""
        loop = asyncio.get_running_loop()
        self._left_s, self._at, self._done = seconds, loop.time(), loop.create_future()
        self.overlap.learns(True)
        self.plan()
        await self._done
        self.overlap.learns(False)

    def advance(self) -> None:
        """Account for the time until now."""
        now = asyncio.get_running_loop().time()
        passed_s, self._at = now - self._at, now
        if self._done is not None:
            self.busy_s += passed_s
            self._left_s -= passed_s * self.overlap.learner_speed

    def plan(self) -> None:
        """Wake up at the end."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._done is not None:
            seconds = max(0.0, self._left_s) / self.overlap.learner_speed
            self._timer = asyncio.get_running_loop().call_later(seconds, self._wake)

    def _wake(self) -> None:
        self.advance()
        if self._done is not None:
            self._done.set_result(None)
            self._done = None


@dataclass
class DevicePool:
    """Engines as one: an episode stays with the engine that had the fewest when it began."""

    engines: Sequence[SimEngine]
    _loads: list[int] = field(init=False)
    _order: list[Span] = field(init=False)

    def __post_init__(self) -> None:
        self._loads = [0] * len(self.engines)
        self._order = [(0, number) for number in range(len(self.engines))]

    def join(self) -> int:
        """The number of the engine for a new episode."""
        while True:
            load, number = heapq.heappop(self._order)
            if load == self._loads[number]:
                break
        self._move(number, 1)
        return number

    def leave(self, number: int) -> None:
        """An episode of this engine is over."""
        self._move(number, -1)

    async def load_weights(self, version: int, seconds: float) -> None:
        """All take new weights at once."""
        await asyncio.gather(*(engine.load_weights(version, seconds) for engine in self.engines))

    def counts(self) -> EngineCounts:
        """What all did since this was last asked."""
        total = EngineCounts()
        for engine in self.engines:
            engine.advance()
            total.add(engine.counts)
            engine.counts = EngineCounts()
        return total

    def _move(self, number: int, by: int) -> None:
        self._loads[number] += by
        heapq.heappush(self._order, (self._loads[number], number))
