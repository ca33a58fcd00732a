"""Control of streamed groups: bounded staleness by admission, and automatic concurrency.

With the staleness bound `k`, a group whose episodes start on version `v` or newer is due at step `v + k + 1`. Admission
ensures that for every step `d`, no more groups are due until `d` than the steps until `d` take; `take` waits for a
group that would violate this. Nothing here depends on a clock, an engine or an event loop, for simulations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class StalenessSchedule:
    """`groups_per_step` groups train in each step, up to `last_step`.

    With `hold`, the learner waits for due groups, so that tokens have `max_staleness`; else older ones must be masked.
    """

    groups_per_step: int
    max_staleness: int
    last_step: int
    hold: bool = True


@dataclass(slots=True)
class GroupTicket:
    """Admitted group. `version` is the oldest weight version on which its episodes started."""

    number: int
    version: int
    ready: bool = False


@dataclass
class StalenessController:
    """Admission of groups. Weights have `version` after the last step; episodes start on `start_version` or newer."""

    schedule: StalenessSchedule
    version: int = 0
    start_version: int = field(init=False)
    is_training: bool = field(default=False, init=False)
    _tickets: dict[int, GroupTicket] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.start_version = self.version

    @property
    def next_step(self) -> int:
        return self.version + 1 + self.is_training

    @property
    def in_progress(self) -> tuple[GroupTicket, ...]:
        return tuple(self._tickets.values())

    @property
    def num_ready(self) -> int:
        return sum(ticket.ready for ticket in self._tickets.values())

    @property
    def capacity(self) -> int:
        steps = self._due(self.start_version) - self.next_step + 1
        return max(0, self.schedule.groups_per_step * steps - len(self._tickets))

    def admit(self, number: int) -> GroupTicket:
        """Admit a group. Raises ValueError if `capacity` is 0 or the number is in use."""
        if number in self._tickets:
            raise ValueError(f"group {number} was already admitted")
        if not self.capacity:
            raise ValueError(f"group {number} exceeds the capacity")
        ticket = self._tickets[number] = GroupTicket(number, self.start_version)
        return ticket

    def readmit(self, number: int, version: int) -> bool:
        """Return whether a restored group is admitted; with `hold`, not if it can no longer train in time."""
        self._tickets[number] = GroupTicket(number, version)
        if not self.schedule.hold or self._feasible(self._tickets.values(), self.next_step):
            return True
        del self._tickets[number]
        return False

    def ready(self, number: int) -> None:
        self._tickets[number].ready = True

    def discard(self, number: int) -> None:
        """Remove a group that will not train."""
        del self._tickets[number]

    def take(self) -> list[int] | None:
        """Return the groups of the next step, which now trains, oldest first; None if a group is missing or due."""
        numbers = None if self.is_training else self._next_batch()
        if numbers is not None:
            self.is_training = True
            for number in numbers:
                del self._tickets[number]
        return numbers

    @property
    def batches_ready(self) -> int:
        """The number of complete batches; 0 if the learner would wait for a group that is due."""
        return 0 if self._next_batch() is None else self.num_ready // self.schedule.groups_per_step

    @property
    def is_held(self) -> bool:
        """Whether a batch is complete but the learner waits for a group that is due."""
        return not self.is_training and self.num_ready >= self.schedule.groups_per_step

    def on_publish(self, version: int, *, everywhere: bool = True) -> None:
        """Record that the engine (or the first of several) has the weights of the last step."""
        if version != self.version + 1 or not self.is_training:
            raise ValueError(f"version {version} follows {self.version}, learning: {self.is_training}")
        self.version, self.is_training = version, False
        if everywhere:
            self.start_version = version

    @property
    def is_behind(self) -> bool:
        """Whether episodes may still start on a version older than the newest."""
        return self.start_version < self.version

    def on_serve(self, version: int) -> None:
        """Record the oldest version on which new episodes may start."""
        self.start_version = max(self.start_version, version)

    def _next_batch(self) -> list[int] | None:
        if self.num_ready < self.schedule.groups_per_step:
            return None
        ready = sorted((t for t in self._tickets.values() if t.ready), key=lambda t: (t.version, t.number))
        chosen = {ticket.number: ticket for ticket in ready[: self.schedule.groups_per_step]}
        others = [ticket for ticket in self._tickets.values() if ticket.number not in chosen]
        if self.schedule.hold and not self._feasible(others, self.next_step + 1):
            return None
        return list(chosen)

    def _due(self, version: int) -> int:
        return min(version + self.schedule.max_staleness + 1, self.schedule.last_step)

    def _feasible(self, tickets: Collection[GroupTicket], first: int) -> bool:
        due = sorted(self._due(ticket.version) for ticket in tickets)
        size = self.schedule.groups_per_step
        return all(number <= size * (step - first + 1) for number, step in enumerate(due, 1))


MIN_IDLE = 0.05  # minimum fraction of idle time at which learner or engine counts as idle
MAX_QUEUE_RATIO = 0.25  # maximum ratio of waiting to running requests; above it, concurrency shrinks
MIN_GAIN = 0.05  # minimum engine speedup at which concurrency grows
GROWTH, SHRINKAGE = 1.3, 0.85
MIN_FACTOR = 0.7  # largest reduction per step
TARGET_BATCHES = 1.5  # target number of batches waiting for the learner
CHANGE_PER_BATCH = 0.2  # relative change of concurrency per batch above or below `TARGET_BATCHES`
INITIAL_STEPS = 2  # initial concurrency, as a multiple of the episodes of a step
INITIAL_GROWTH = 2.0  # growth factor per step until concurrency suffices for the first time
DECAY = 0.8  # decay of a measurement's weight per step


@dataclass(frozen=True, slots=True)
class StreamThroughput:
    """Throughput of a step: episode-seconds in flight, and completed groups, in batches."""

    in_flight_s: float
    batches: float


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Measurements of a step: idle fractions in [0, 1], waiting requests per running one, and ready batches.

    `needed` is the concurrency that matches the learner's pace (None: unknown). `gain` is the engine's speedup
    with `GROWTH` times the sequences. `limited`: the concurrency limit, not the staleness bound, delayed episodes.
    `seconds` is the duration of the step.
    """

    learner_idle: float
    engine_idle: float
    engine_queue: float
    ready: float
    needed: float | None = None
    gain: float = 0.0
    limited: bool = True
    seconds: float = 1.0


def next_in_flight(now: int, load: EngineLoad, min_limit: int, max_limit: int, growth: float = GROWTH) -> int:
    """Return the concurrency of the next step, clamped to [`min_limit`, `max_limit`]; `growth` is the growth factor.

    It grows if learner and engine are both idle (tools are slow), or if the learner is idle and larger batches would
    speed up the engine. It shrinks if requests queue in the engine. If the learner is not idle, it follows `needed`,
    scaled down by the number of ready batches. It is unchanged if the learner waits for a group that is due, and
    does not grow if the staleness bound limits admission.
    """
    wanted = float(now)
    if load.engine_queue > MAX_QUEUE_RATIO:
        wanted = min(now - 1, now * SHRINKAGE)
    elif load.learner_idle > MIN_IDLE:
        if load.ready < 1 and load.limited and (load.engine_idle > MIN_IDLE or load.gain > MIN_GAIN):
            wanted = max(now + 1, now * growth)
    elif load.needed is not None:
        wanted = load.needed * (1 + CHANGE_PER_BATCH * (TARGET_BATCHES - load.ready))
        grown = max(now + 1, now * GROWTH) if load.limited else now
        wanted = max(now * MIN_FACTOR, min(grown, wanted))
    return max(min_limit, min(max_limit, round(wanted)))


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Mean batch size and duration (s) of the engine's forward passes in a step."""

    running: float
    seconds: float


def _add_step(sums: Iterable[float], step: Iterable[float]) -> tuple[float, ...]:
    """Return running sums over steps, with exponential decay."""
    return tuple(DECAY * old + new for old, new in zip(sums, step, strict=True))


@dataclass
class PassTimeModel:
    """Linear fit of pass duration to batch size over recent steps, with exponential decay."""

    _sums: tuple[float, ...] = (0.0,) * 5

    def add(self, passes: PassTimes) -> None:
        x, y = passes.running, passes.seconds
        self._sums = _add_step(self._sums, (1.0, x, y, x * x, x * y))

    def gain(self, running: float) -> float:
        """Return the engine's speedup with `GROWTH` times `running` sequences; `GROWTH - 1` if sizes do not differ."""
        count, x, y, xx, xy = self._sums
        spread = xx * count - x * x
        if count == 0 or spread <= 1e-3 * x * x:
            return GROWTH - 1
        slope = max(0.0, (xy * count - x * y) / spread)
        shared = max(0.0, (y - slope * x) / count)
        seconds = shared + slope * running
        return GROWTH * seconds / (seconds + (GROWTH - 1) * slope * running) - 1 if seconds > 0 else 0.0


@dataclass
class ConcurrencyController:
    """Search for the smallest `limit` on episodes in flight that saturates learner and engine, by `next_in_flight`.

    The speedup of larger batches follows from a linear fit of the duration of engine passes, the concurrency that the
    learner needs from Little's law. The growth factor per step is `INITIAL_GROWTH` until the limit suffices, then
    `GROWTH`.
    """

    limit: int
    min_limit: int
    max_limit: int
    pass_times: PassTimeModel = field(default_factory=PassTimeModel)
    _idle_sums: tuple[float, ...] = (0.0,) * 3
    _flow_sums: tuple[float, ...] = (0.0,) * 4
    _growth: float = INITIAL_GROWTH
    _is_first_step: bool = True
    """Whether this is the first step, in which the learner waits for the stream to fill."""

    def __post_init__(self) -> None:
        self.limit = max(self.min_limit, min(self.max_limit, self.limit))

    def after_step(self, timings: Mapping[str, float], ready: float, flow: StreamThroughput, limited: bool) -> int:
        """Return the limit after a step; unchanged without engine metrics. An unknown engine idle time counts as 0."""
        if "engine/requests_running" not in timings:
            return self.limit
        running, speed = timings["engine/requests_running"], timings["engine/decode_tokens_per_s"]
        load = EngineLoad(
            learner_idle=timings.get("idle/learner", 0.0),
            engine_idle=timings.get("idle/engine", 0.0),
            engine_queue=timings["engine/requests_waiting"] / max(running, 1.0),
            ready=ready,
            limited=limited,
            seconds=timings.get("time/step_s", 0.0),
        )
        passes = PassTimes(running, running / speed) if speed else None  # each pass samples a token per sequence
        return self.after(load, passes, flow)

    def after(self, load: EngineLoad, passes: PassTimes | None, flow: StreamThroughput | None = None) -> int:
        """Return the limit after a step. `passes` (None: unknown) determines `load.gain`.

        If learner and engine share cores, a pass takes longer while the learner computes, independently of the batch
        size, so durations are scaled as if the learner took half of the engine's time.
        """
        if flow is not None:
            step = (flow.in_flight_s, flow.batches, load.seconds * (1 - load.learner_idle), 1.0)
            flown_s, batches, learner_s, steps = self._flow_sums = _add_step(self._flow_sums, step)
            load = replace(load, needed=flown_s / batches / (learner_s / steps) if batches and learner_s else None)
        if not self._is_first_step:  # a single step is too noisy, since groups complete in bursts
            idle_s = (load.seconds, load.seconds * load.learner_idle, load.seconds * load.engine_idle)
            seconds, learner_s, engine_s = self._idle_sums = _add_step(self._idle_sums, idle_s)
            load = replace(load, learner_idle=learner_s / (seconds or 1.0), engine_idle=engine_s / (seconds or 1.0))
        self._is_first_step = False
        if passes is not None:
            self.pass_times.add(replace(passes, seconds=passes.seconds / (2 - load.learner_idle)))
            load = replace(load, gain=self.pass_times.gain(passes.running))
        before, self.limit = self.limit, next_in_flight(self.limit, load, self.min_limit, self.max_limit, self._growth)
        if self.limit <= before:
            self._growth = GROWTH
        return self.limit
