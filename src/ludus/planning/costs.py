"""What work costs, and how much of it there is: the numbers that a plan is made of.

Seconds, tokens and counts throughout. `fit` finds them in a run's files, or they are given; `simulate` plays
them, and `estimate` bounds what they allow, in closed form.
"""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass

from ludus.errors import UserError


def _check(record: object, numbers: dict[str, float], *, above: tuple[str, ...] = ()) -> None:
    """Raise UserError for a number that is not finite, below 0, or 0 where it may not be."""
    for name, value in numbers.items():
        least = "above 0" if name in above else "0 or more"
        if not math.isfinite(value) or value < 0 or (name in above and value == 0):
            what = type(record).__name__
            raise UserError(f"{what}.{name} is {value:g}.", f"Give a finite number, {least}.")


@dataclass(frozen=True, slots=True)
class EngineCost:
    """Seconds of a forward pass: `pass_s`, and `sequence_s` for each sequence that decodes in it.

    Reading a token of context costs `read_s`. At most `slots` sequences run, the others wait.
    """

    pass_s: float
    sequence_s: float
    read_s: float = 0.0
    slots: int = 128

    def __post_init__(self) -> None:
        _check(self, asdict(self), above=("slots",))
        if not self.pass_s + self.sequence_s:
            raise UserError("A forward pass takes no time.", "Give pass_s or sequence_s above 0.")

    def seconds(self, running: float) -> float:
        """Of one pass with so many sequences."""
        return self.pass_s + self.sequence_s * running

    def speed(self, running: float) -> float:
        """Tokens sampled a second with so many sequences, reading left out."""
        return running / self.seconds(running)


@dataclass(frozen=True, slots=True)
class LearnerCost:
    """Seconds of a step: `step_s`, and `token_s` for each token of its batch, context included."""

    step_s: float
    token_s: float

    def __post_init__(self) -> None:
        _check(self, asdict(self))

    def seconds(self, tokens: float, learners: int = 1) -> float:
        """Of a step on so many tokens, which the learners share evenly."""
        return self.step_s + self.token_s * tokens / learners


@dataclass(frozen=True, slots=True)
class ToolCost:
    """Seconds of a call: log-normal around `median_s` with `spread` (of its logarithm).

    A share `stragglers` of the calls takes `slow` medians.
    """

    median_s: float = 0.0
    spread: float = 0.0
    stragglers: float = 0.0
    slow: float = 1.0

    def __post_init__(self) -> None:
        _check(self, asdict(self))
        if self.stragglers > 1:
            raise UserError(f"ToolCost.stragglers is {self.stragglers:g}.", "It is a share: 0 to 1.")

    @property
    def mean_s(self) -> float:
        """Of all calls."""
        plain = self.median_s * math.exp(self.spread**2 / 2)
        return (1 - self.stragglers) * plain + self.stragglers * self.slow * self.median_s

    def draw(self, source: random.Random) -> float:
        """One call's seconds."""
        if self.stragglers and source.random() < self.stragglers:
            return self.median_s * self.slow
        return self.median_s * math.exp(source.gauss(0.0, self.spread)) if self.spread else self.median_s


@dataclass(frozen=True, slots=True)
class EpisodeShape:
    """Means of an episode: `turns`, the last of which calls no tool, with `action` tokens each.

    An action's length is geometric up to `most`, or always `action` where `most` is 0. The engine reads
    `read` tokens before a turn, what its cache serves left out. `context` are the tokens of prompt and
    observations in a whole episode, which the learner computes beside the actions.
    """

    turns: float
    action: float
    read: float = 0.0
    context: float = 0.0
    most: int = 0

    def __post_init__(self) -> None:
        _check(self, asdict(self), above=("action",))
        if self.turns < 1 or self.action < 1:
            raise UserError(f"Episodes have {self.turns:g} turns of {self.action:g} tokens.", "Give 1 or more of both.")

    @property
    def tokens(self) -> float:
        """Of a whole episode, as the learner computes it."""
        return self.turns * self.action + self.context

    def draw_turns(self, source: random.Random) -> int:
        """A whole number around the mean."""
        whole = math.floor(self.turns)
        return whole + (source.random() < self.turns - whole)

    def draw_action(self, source: random.Random) -> int:
        """Tokens of one action."""
        if not self.most:
            return max(1, round(self.action))
        if self.action == 1:
            return 1
        drawn = 1 + math.floor(math.log(1 - source.random()) / math.log(1 - 1 / self.action))
        return min(self.most, drawn)


@dataclass(frozen=True, slots=True)
class Costs:
    """All of a run. `sync_s` is a transfer of weights, during which engines stand still.

    Where weights go to engines of other processes, an asynchronous learner waits for a copy of them alone:
    then that is `sync_s`, and the transfer, `transfer_s`, goes on beside its next step.

    `overlap` is how fast learner and engine each go while both work: 1 on devices of their own, 0.5 on one
    core that they share.
    """

    engine: EngineCost
    learner: LearnerCost
    tool: ToolCost
    episode: EpisodeShape
    sync_s: float = 0.0
    overlap: float = 1.0
    transfer_s: float = 0.0

    def __post_init__(self) -> None:
        numbers = {"sync_s": self.sync_s, "overlap": self.overlap, "transfer_s": self.transfer_s}
        _check(self, numbers, above=("overlap",))
        if self.overlap > 1:
            raise UserError(f"Costs.overlap is {self.overlap:g}.", "It is at most 1: devices of their own.")


MODES = ("sync", "one_step", "async")


@dataclass(frozen=True, slots=True)
class RunLayout:
    """How a run is laid out: `groups` of `members` train in a step, on `learners` equal ranks.

    `in_flight` 0 lets the run find it by measurement, up to `concurrency` (0: as many as the bound on
    staleness lets be on their way).
    """

    mode: str = "async"
    engines: int = 1
    learners: int = 1
    groups: int = 4
    members: int = 8
    steps: int = 20
    max_staleness: int = 2
    in_flight: int = 0
    concurrency: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(f"There is no mode {self.mode!r}.", f"Modes: {', '.join(MODES)}.")
        counts = {name: value for name, value in asdict(self).items() if name not in ("mode", "seed")}
        for name, value in counts.items():
            least = 0 if name in ("max_staleness", "in_flight", "concurrency") else 1
            if value < least:
                raise UserError(f"{name} is {value}.", f"Give {least} or more.")

    @property
    def episodes(self) -> int:
        """Of a step."""
        return self.groups * self.members

    @property
    def most(self) -> int:
        """Episodes that may be in flight."""
        if self.mode != "async":
            return self.concurrency or self.episodes
        return self.concurrency or self.episodes * (self.max_staleness + 1)
