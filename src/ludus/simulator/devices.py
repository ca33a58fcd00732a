"""Virtual time, and simulated engines and learners that take virtual time without computing.

`run_virtual` runs unchanged asyncio code on an event loop whose clock jumps to the next timer whenever no task is
ready. Code on this loop must wait only on asyncio timers and futures, not on threads, sockets or processes.

A forward pass of an engine samples one token of each running sequence. Between two arrivals or completions its
progress is linear in time, so there is one event per arrival and completion, not per token. Prefill delays all
sequences of the engine, as chunked prefill does, and a weight update pauses it.
"""

from __future__ import annotations

import asyncio
import heapq
import selectors
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from itertools import count
from typing import TypeVar

from ludus.errors import LudusError
from ludus.simulator.costs import EngineCost

T = TypeVar("T")
Span = tuple[int, int]
"""A weight version and the number of consecutive tokens sampled with it."""
_ROUNDING = 1e-9
"""Tolerance for rounding errors, in passes."""


class _VirtualClock(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Advance the clock by `timeout` seconds. Raises LudusError if no timer is pending."""
        if timeout is None:
            raise LudusError("The simulation deadlocked: every task waits, and no timer is pending.")
        self.now += timeout
        return []


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__(clock := _VirtualClock())
        self._clock = clock

    def time(self) -> float:
        return self._clock.now


def run_virtual(main: Coroutine[object, None, T]) -> tuple[T, float]:
    """Run a coroutine in virtual time; return its result and the virtual seconds. Raises the errors of `main`."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        result = runner.run(main)
        return result, runner.get_loop().time()


def now() -> float:
    """Return the current virtual time in seconds."""
    return asyncio.get_running_loop().time()


@dataclass
class Overlap:
    """Mutual slowdown of learner and engines while both work."""

    factor: float
    duty: float = 1.0
    """Fraction of its busy time in which an engine computes; otherwise it yields to the learner."""
    engines: list[SimEngine | SimLearner] = field(default_factory=list)
    learner: list[SimEngine | SimLearner] = field(default_factory=list)
    _busy_engines: int = 0
    _learning: bool = False

    @property
    def engine_speed(self) -> float:
        """Current speed of the engines, 1 if undisturbed."""
        return self.duty * (self.factor if self._learning else 1.0)

    @property
    def learner_speed(self) -> float:
        """Current speed of the learner, 1 if undisturbed."""
        return 1 - (1 - self.factor) * self.duty if self._busy_engines else 1.0

    def throttle(self, times: float) -> None:
        """Make engines pause after each pass for `times` its duration."""
        with _changing_speed([*self.engines, *self.learner]):
            self.duty = 1 / (1 + times)

    def set_learning(self, learning: bool) -> None:
        with _changing_speed(self.engines if self.factor < 1 else ()):
            self._learning = learning

    def add_busy_engines(self, change: int) -> None:
        """Record that an engine starts (1) or stops (-1) sampling."""
        with _changing_speed(self.learner if self.factor < 1 else ()):
            self._busy_engines += change


@contextmanager
def _changing_speed(devices: Sequence[SimEngine | SimLearner]) -> Iterator[None]:
    """Advance devices at the old speed before the block, and reschedule them at the new speed after it."""
    for device in devices:
        device.advance()
    yield
    for device in devices:
        device.schedule()


@dataclass
class _Request:
    tokens: int
    prefill: float
    done: asyncio.Future[list[Span]]
    started_pass: float = 0.0


@dataclass
class EngineCounts:
    """Busy seconds, passes and sampled tokens of an engine, and its queue length summed over passes."""

    busy_s: float = 0.0
    passes: float = 0.0
    tokens: float = 0.0
    waiting: float = 0.0


@dataclass
class SimEngine:
    """Simulated engine. `_passes` is the fractional number of passes since its start."""

    cost: EngineCost
    overlap: Overlap
    version: int = 0
    counts: EngineCounts = field(default_factory=EngineCounts)
    _passes: float = 0.0
    _prefill_s: float = 0.0
    _at: float = 0.0
    _paused: bool = False
    _running: list[tuple[float, int, _Request]] = field(default_factory=list)
    _waiting: deque[_Request] = field(default_factory=deque)
    _updates: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])
    _order: count[int] = field(default_factory=count)
    _timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self.overlap.engines.append(self)

    async def generate(self, tokens: int, prefill: float = 0.0) -> list[Span]:
        """Prefill and sample tokens; return their weight versions in order."""
        self.advance()
        request = _Request(tokens, prefill, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._admit()
        self.schedule()
        return await request.done

    async def load_weights(self, version: int, seconds: float) -> None:
        """Pause for `seconds`; tokens sampled afterwards have the weight version `version`."""
        self.advance()
        self._paused = True
        self.schedule()
        await asyncio.sleep(seconds)
        self.advance()
        self._paused, self.version = False, version
        self._updates.append((self._passes, version))
        oldest = min((request.started_pass for _, _, request in self._running), default=self._passes)
        while len(self._updates) > 1 and self._updates[1][0] <= oldest:
            del self._updates[0]
        self.schedule()

    def advance(self) -> None:
        """Advance the state to the current time at the current speed."""
        elapsed_s, self._at = now() - self._at, now()
        running = len(self._running)
        if not running or self._paused or not elapsed_s:
            return
        self.counts.busy_s += elapsed_s * self.overlap.duty
        work_s = elapsed_s * self.overlap.engine_speed
        prefill_s = min(self._prefill_s, work_s)
        self._prefill_s -= prefill_s
        passes = (work_s - prefill_s) / self.cost.seconds(running)
        self._passes += passes
        self.counts.passes += passes
        self.counts.tokens += passes * running
        self.counts.waiting += passes * len(self._waiting)

    def schedule(self) -> None:
        """Set the timer to the next completion."""
        if self._timer is not None:
            self._timer.cancel()
        if self._running and not self._paused:
            passes = max(0.0, self._running[0][0] - self._passes)
            seconds = self._prefill_s + passes * self.cost.seconds(len(self._running))
            delay_s = seconds / self.overlap.engine_speed
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._complete)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.cost.slots:
            request = self._waiting.popleft()
            request.started_pass = self._passes
            self._prefill_s += request.prefill * self.cost.read_s
            heapq.heappush(self._running, (self._passes + request.tokens, next(self._order), request))
            if len(self._running) == 1:
                self.overlap.add_busy_engines(1)

    def _complete(self) -> None:
        self.advance()
        while self._running and self._running[0][0] <= self._passes + _ROUNDING:
            _, _, request = heapq.heappop(self._running)
            if not request.done.done():
                request.done.set_result(self._spans(request))
            if not self._running:
                self.overlap.add_busy_engines(-1)
        self._admit()
        self.schedule()

    def _spans(self, request: _Request) -> list[Span]:
        """Return the versions of a request's tokens, one token per pass."""
        spans, left = list[Span](), request.tokens
        for since, version in reversed(self._updates):
            is_oldest = since <= request.started_pass
            tokens = left if is_oldest else min(left, round(request.started_pass + request.tokens - since))
            if tokens > 0:
                spans.append((version, tokens))
                left -= tokens
            if is_oldest:
                break
        return [*reversed(spans)]


@dataclass
class SimLearner:
    """Simulated learner."""

    overlap: Overlap
    _left_s: float = 0.0
    _at: float = 0.0
    _done: asyncio.Future[None] | None = None
    _timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self.overlap.learner.append(self)

    async def work(self, seconds: float) -> None:
        """Work for a duration of `seconds` at full speed."""
        self._left_s, self._at = seconds, now()
        self._done = asyncio.get_running_loop().create_future()
        self.overlap.set_learning(True)
        self.schedule()
        await self._done
        self.overlap.set_learning(False)

    def advance(self) -> None:
        elapsed_s, self._at = now() - self._at, now()
        if self._done is not None:
            self._left_s -= elapsed_s * self.overlap.learner_speed

    def schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._done is not None:
            seconds = max(0.0, self._left_s) / self.overlap.learner_speed
            self._timer = asyncio.get_running_loop().call_later(seconds, self._complete)

    def _complete(self) -> None:
        self.advance()
        assert self._done is not None
        self._done.set_result(None)
        self._done = None


@dataclass
class DevicePool:
    """Pool of engines. An episode is pinned to the engine that had the fewest episodes at its start."""

    engines: Sequence[SimEngine]

    def __post_init__(self) -> None:
        self._loads = [0] * len(self.engines)

    def join(self) -> int:
        """Assign an episode to the least loaded engine; return the engine's number."""
        number = self._loads.index(min(self._loads))
        self._loads[number] += 1
        return number

    def leave(self, number: int) -> None:
        self._loads[number] -= 1

    async def load_weights(self, version: int, seconds: float) -> None:
        await asyncio.gather(*(engine.load_weights(version, seconds) for engine in self.engines))

    def drain_counts(self) -> EngineCounts:
        """Return the summed counts of all engines, and reset them."""
        found = []
        for engine in self.engines:
            engine.advance()
            found.append(astuple(engine.counts))
            engine.counts = EngineCounts()
        return EngineCounts(*map(sum, zip(*found, strict=True)))
