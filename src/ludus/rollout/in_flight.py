"""How many episodes are in flight: the fewest that keep learner and engine busy, found by measurement.

`next_in_flight` is the rule. `InFlight` applies it from step to step, and learns what larger batches are
worth to the engine: the seconds of a pass are about a straight line over the sequences in it, and what of
them does not depend on their number is what more sequences share. Neither knows a clock or an engine, so that
a simulation runs the same code as training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

IDLE = 0.05
"""Share of the time from which something counts as idle."""
QUEUED = 0.25
"""Requests that wait in the engine for each one that runs, from which there are too many."""
GAIN = 0.05
"""Growth of the engine's speed from which larger batches are worth it."""
MORE, FEWER = 1.3, 0.85
FIRST = 2.0
"""Growth from step to step until there are enough for the first time."""
FADE = 0.8
"""What a step's measurement weighs a step later."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a step measured: idle shares in [0, 1], requests waiting for each that ran, and whether a whole
    batch was ready when the learner came back.

    `gain` is by how much the engine would sample faster with `MORE` times the sequences. `limited` says
    whether it was this limit that kept more episodes from starting, and not the bound on staleness; `seconds`
    is what the step took.
    """

    learner_idle: float
    engine_idle: float
    engine_queue: float
    ahead: bool
    gain: float = 0.0
    limited: bool = True
    seconds: float = 1.0


def next_in_flight(now: int, load: Load, least: int, most: int, more: float = MORE) -> int:
    """The number for the next step, from `least` to `most`; `more` is the factor by which it grows.

    More where both wait: then it is tools that everyone waits for; and where the learner waits for an engine
    that gets faster by it. Fewer where episodes only grow old, in front of the learner or in the engine's
    queue. The same where the bound on staleness lets no more start.
    """
    wanted = float(now)
    if load.engine_queue > QUEUED or (load.learner_idle <= IDLE and load.ahead):
        wanted = min(now - 1, now * FEWER)
    elif load.learner_idle > IDLE and load.limited and (load.engine_idle > IDLE or load.gain > GAIN):
        wanted = max(now + 1, now * more)
    return max(least, min(most, round(wanted)))


def first_in_flight(episodes_per_step: int) -> int:
    """The number to begin with: two steps' episodes, as learner and stream each have a batch then."""
    return 2 * episodes_per_step


@dataclass(frozen=True, slots=True)
class Passes:
    """What the engine did in a step: sequences in a pass, and seconds of one, both on average."""

    running: float
    seconds: float


@dataclass
class PassLine:
    """The straight line through the passes of the last steps, older ones weighing less."""

    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    def add(self, passes: Passes) -> None:
        """Take a step in."""
        x, y = passes.running, passes.seconds
        self._sums = [
            FADE * old + new for old, new in zip(self._sums, (1.0, x, y, x * x, x * y), strict=True)
        ]

    def gain(self, running: float) -> float:
        """By how much the engine samples faster with `MORE` times as many sequences as `running`.

        Where all steps had the same number, nothing is known yet, and all of a pass may be shared.
        """
        count, x, y, xx, xy = self._sums
        spread = xx * count - x * x
        if count == 0 or spread < 1e-3 * x * x:
            return MORE - 1
        slope = max(0.0, (xy * count - x * y) / spread)
        shared = max(0.0, (y - slope * x) / count)
        seconds = shared + slope * running
        return MORE * seconds / (seconds + (MORE - 1) * slope * running) - 1 if seconds > 0 else 0.0


@dataclass
class Idle:
    """Idle shares over the last steps by their seconds, older ones weighing less.

    Groups come in bursts, and a step alone tells little.
    """

    _seconds: float = 0.0
    _learner_s: float = 0.0
    _engine_s: float = 0.0

    def add(self, load: Load) -> Load:
        """Take a step in; gives its load with the shares of all."""
        self._seconds = FADE * self._seconds + load.seconds
        self._learner_s = FADE * self._learner_s + load.seconds * load.learner_idle
        self._engine_s = FADE * self._engine_s + load.seconds * load.engine_idle
        whole = self._seconds or 1.0
        return replace(load, learner_idle=self._learner_s / whole, engine_idle=self._engine_s / whole)


@dataclass
class InFlight:
    """The limit on episodes in flight: `now`, from `least` to `most`.

    It grows by `FIRST` from step to step until it need not for the first time, and by `MORE` from then on.
    """

    now: int
    least: int
    most: int
    line: PassLine = field(default_factory=PassLine)
    idle: Idle = field(default_factory=Idle)
    _more: float = FIRST

    def __post_init__(self) -> None:
        self.now = max(self.least, min(self.most, self.now))

    def after_step(self, timings: Mapping[str, float], ahead: bool, limited: bool) -> int:
        """The limit after a step with these timings; the same where they say nothing of the engine.

        An idle share that is not known steers nothing: what larger batches gain decides then.
        """
        if "engine/requests_running" not in timings:
            return self.now
        running, speed = timings["engine/requests_running"], timings["engine/decode_tokens_per_s"]
        load = Load(
            learner_idle=timings.get("idle/learner", 0.0),
            engine_idle=timings.get("idle/engine", 0.0),
            engine_queue=timings["engine/requests_waiting"] / max(running, 1.0),
            ahead=ahead,
            limited=limited,
            seconds=timings.get("time/step_s", 0.0),
        )
        passes = Passes(running, running / speed) if speed else None  # each gives a token for each sequence
        return self.after(load, passes)

    def after(self, load: Load, passes: Passes | None) -> int:
        """The limit after a step; `passes` is None where the engine does not tell, else gives `load.gain`.

        Where learner and engine share cores a pass takes longer while the learner works, and that is no
        fault of larger batches: seconds of a pass are compared as if the learner cost the engine its half.
        """
        load = self.idle.add(load)
        if passes is not None:
            self.line.add(replace(passes, seconds=passes.seconds / (2 - load.learner_idle)))
            load = replace(load, gain=self.line.gain(passes.running))
        before, self.now = self.now, next_in_flight(self.now, load, self.least, self.most, self._more)
        if self.now <= before:
            self._more = MORE
        return self.now
