"""The cost model of a run: seconds of engine, learner and tools, and the shape of episodes.

Times are in seconds, lengths in tokens. `fit` derives the costs from the files of a run; `simulate` runs them, and
`estimate` bounds the step time in closed form.
"""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass

from ludus.errors import UserError


def _check(record: object, numbers: dict[str, float], *, above: tuple[str, ...] = ()) -> None:
    """Raise UserError for a number that is not finite, negative, or 0 although listed in `above`."""
    for name, value in numbers.items():
        if not math.isfinite(value) or value < 0 or (name in above and value == 0):
            minimum = "above 0" if name in above else "0 or more"
            raise UserError(f"{type(record).__name__}.{name} is {value:g}.", f"Give a finite number, {minimum}.")


@dataclass(frozen=True, slots=True)
class EngineCost:
    """Seconds of a forward pass: `pass_s` plus `sequence_s` for each sequence that decodes in it.

    Prefilling a token costs `read_s`. At most `slots` sequences run at once; the others wait.
    """

    pass_s: float
    sequence_s: float
    read_s: float = 0.0
    slots: int = 128

    def __post_init__(self) -> None:
        _check(self, asdict(self), above=("slots",))
        if not self.pass_s + self.sequence_s:
            raise UserError("A forward pass takes no time.", "Set pass_s or sequence_s above 0.")

    def seconds(self, running: float) -> float:
        """Return the seconds of one pass with `running` sequences."""
        return self.pass_s + self.sequence_s * running

    def speed(self, running: float) -> float:
        """Return the tokens sampled per second with `running` sequences, without prefill."""
        return running / self.seconds(running)


@dataclass(frozen=True, slots=True)
class LearnerCost:
    """Seconds of a training step: `step_s` plus `token_s` for each token of its batch, context included."""

    step_s: float
    token_s: float

    def __post_init__(self) -> None:
        _check(self, asdict(self))

    def seconds(self, tokens: float, learners: int = 1) -> float:
        """Return the seconds of a step on `tokens` tokens, split evenly among the learners."""
        return self.step_s + self.token_s * tokens / learners


@dataclass(frozen=True, slots=True)
class ToolCost:
    """Seconds of a tool call: log-normal with the median `median_s` and the standard deviation `spread` of its log.

    A share `stragglers` of the calls takes `slow` medians.
    """

    median_s: float = 0.0
    spread: float = 0.0
    stragglers: float = 0.0
    slow: float = 1.0

    def __post_init__(self) -> None:
        _check(self, asdict(self))
        if self.stragglers > 1:
            raise UserError(f"ToolCost.stragglers is {self.stragglers:g}.", "It is a share between 0 and 1.")

    @property
    def mean_s(self) -> float:
        """Mean seconds of all calls."""
        plain = self.median_s * math.exp(self.spread**2 / 2)
        return (1 - self.stragglers) * plain + self.stragglers * self.slow * self.median_s

    def draw(self, source: random.Random) -> float:
        """Draw the seconds of one call."""
        if self.stragglers and source.random() < self.stragglers:
            return self.median_s * self.slow
        return self.median_s * math.exp(source.gauss(0.0, self.spread)) if self.spread else self.median_s


@dataclass(frozen=True, slots=True)
class EpisodeShape:
    """Means of an episode: `turns`, the last of which calls no tool, with `action` tokens each.

    The length of an action is geometric up to `most`, or always `action` if `most` is 0. The engine prefills `read`
    tokens before a turn, cache hits excluded. `context` counts the tokens of prompt and observations of an episode,
    which the learner processes together with the actions.
    """

    turns: float
    action: float
    read: float = 0.0
    context: float = 0.0
    most: int = 0

    def __post_init__(self) -> None:
        _check(self, asdict(self), above=("action",))
        if self.turns < 1 or self.action < 1:
            raise UserError(
                f"Episodes have {self.turns:g} turns of {self.action:g} tokens.", "Both must be at least 1."
            )

    @property
    def tokens(self) -> float:
        """Tokens of a whole episode."""
        return self.turns * self.action + self.context

    def draw_turns(self, source: random.Random) -> int:
        """Draw a whole number of turns with the mean `turns`."""
        whole = math.floor(self.turns)
        return whole + (source.random() < self.turns - whole)

    def draw_action(self, source: random.Random) -> int:
        """Draw the tokens of one action."""
        if not self.most:
            return max(1, round(self.action))
        if self.action == 1:
            return 1
        drawn = 1 + math.floor(math.log(1 - source.random()) / math.log(1 - 1 / self.action))
        return min(self.most, drawn)


@dataclass(frozen=True, slots=True)
class Costs:
    """All costs of a run. `sync_s` is a weight transfer, during which engines are paused.

    If engines are other processes, an asynchronous learner waits only for a copy of the weights, `sync_s`; the
    transfer, `transfer_s`, overlaps with its next step.

    `overlap` is the speed of learner and engine while both work: 1 on separate devices, 0.5 on one shared core.
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
            raise UserError(f"Costs.overlap is {self.overlap:g}.", "It is at most 1, for separate devices.")


MODES = ("sync", "one_step", "async")


@dataclass(frozen=True, slots=True)
class RunLayout:
    """The layout of a run: a step trains `groups` of `members` episodes on `learners` equal ranks.

    With `in_flight` 0 the run controls the number of concurrent episodes by measurement, up to `concurrency` (0: the
    limit that `max_staleness` implies).
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
            minimum = 0 if name in ("max_staleness", "in_flight", "concurrency") else 1
            if value < minimum:
                raise UserError(f"{name} is {value}.", f"It must be at least {minimum}.")

    @property
    def episodes(self) -> int:
        """Episodes of a step."""
        return self.groups * self.members

    @property
    def max_in_flight(self) -> int:
        """Maximum number of concurrent episodes."""
        if self.mode != "async":
            return self.concurrency or self.episodes
        return self.concurrency or self.episodes * (self.max_staleness + 1)
