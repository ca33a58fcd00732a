"""Cost model of a run: seconds of engine, learner and tools, and the shape of episodes.

Times are in seconds, lengths in tokens. `fit` derives the costs from the files of a run, and `simulate` simulates a
run with them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ludus.errors import UserError

_AT_LEAST_1 = (1.0, math.inf)


@dataclass(frozen=True)
class _Numbers:
    """Finite numbers within `LIMITS`, or else of at least 0. Raises UserError for others."""

    LIMITS: ClassVar[Mapping[str, tuple[float, float]]] = {}
    NAMES_CLASS: ClassVar[bool] = True
    """Whether the error names the class of the number."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            low, high = self.LIMITS.get(name, (0.0, math.inf))
            if isinstance(value, int | float) and not (math.isfinite(value) and low <= value <= high):
                most = f" and at most {high:g}" if math.isfinite(high) else ""
                owner = f"{type(self).__name__}." if self.NAMES_CLASS else ""
                raise UserError(f"{owner}{name} is {value:g}.", f"It must be at least {low:g}{most}.")


@dataclass(frozen=True)
class EngineCost(_Numbers):
    """Seconds of a forward pass: `pass_s` plus `sequence_s` per decoding sequence.

    `read_s` is the time to prefill a token. At most `slots` sequences run at once; others are queued.
    """

    pass_s: float
    sequence_s: float
    read_s: float = 0.0
    slots: int = 128
    LIMITS: ClassVar = {"slots": _AT_LEAST_1}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.pass_s + self.sequence_s:
            raise UserError("A forward pass takes no time.", "Set pass_s or sequence_s above 0.")

    def seconds(self, running: float) -> float:
        return self.pass_s + self.sequence_s * running


@dataclass(frozen=True)
class LearnerCost(_Numbers):
    """Seconds of a training step: `step_s` plus `token_s` per token of its batch, including context."""

    step_s: float
    token_s: float

    def seconds(self, tokens: float, learners: int = 1) -> float:
        """Return the seconds of a step on `tokens` tokens, split evenly among the learners."""
        return self.step_s + self.token_s * tokens / learners


@dataclass(frozen=True)
class ToolCost(_Numbers):
    """Seconds of a tool call: log-normal with the median `median_s` and the standard deviation `spread` of its log.

    A fraction `stragglers` of the calls takes `slow` times the median.
    """

    median_s: float = 0.0
    spread: float = 0.0
    stragglers: float = 0.0
    slow: float = 1.0
    LIMITS: ClassVar = {"stragglers": (0.0, 1.0)}

    @property
    def mean_s(self) -> float:
        plain = self.median_s * math.exp(self.spread**2 / 2)
        return (1 - self.stragglers) * plain + self.stragglers * self.slow * self.median_s

    def draw(self, source: random.Random) -> float:
        if self.stragglers and source.random() < self.stragglers:
            return self.median_s * self.slow
        return self.median_s * math.exp(source.gauss(0.0, self.spread)) if self.spread else self.median_s


@dataclass(frozen=True)
class EpisodeShape(_Numbers):
    """Means of an episode: `turns`, each with `action` tokens; the last turn calls no tool.

    The length of an action is geometric up to `most`, or always `action` if `most` is 0. The engine prefills `read`
    tokens before a turn, excluding cache hits. `context` is the number of prompt and observation tokens of an episode,
    which the learner processes together with the actions.
    """

    turns: float
    action: float
    read: float = 0.0
    context: float = 0.0
    most: int = 0
    LIMITS: ClassVar = {"turns": _AT_LEAST_1, "action": _AT_LEAST_1}

    @property
    def tokens(self) -> float:
        """Mean number of tokens of an episode."""
        return self.turns * self.action + self.context

    def draw_turns(self, source: random.Random) -> int:
        """Draw the number of turns of one episode, with mean `turns`."""
        minimum = math.floor(self.turns)
        return minimum + (source.random() < self.turns - minimum)

    def draw_action(self, source: random.Random) -> int:
        if not self.most or self.action == 1:
            return max(1, round(self.action))
        drawn = 1 + math.floor(math.log(1 - source.random()) / math.log(1 - 1 / self.action))
        return min(self.most, drawn)


@dataclass(frozen=True)
class Costs(_Numbers):
    """Costs of a run. `sync_s` is the duration of a weight transfer, during which engines are paused.

    If engines run in other processes, an asynchronous learner waits only `sync_s` for a copy of the weights; the
    transfer takes `transfer_s` and overlaps with its next step.

    `overlap` is the relative speed of learner and engine while both work: 1 on separate devices, 0.5 on one core.
    """

    engine: EngineCost
    learner: LearnerCost
    tool: ToolCost
    episode: EpisodeShape
    sync_s: float = 0.0
    overlap: float = 1.0
    transfer_s: float = 0.0
    LIMITS: ClassVar = {"overlap": (0.01, 1.0)}


MODES = ("sync", "one_step", "async")


@dataclass(frozen=True)
class RunLayout(_Numbers):
    """Layout of a run: a step trains `groups` of `members` episodes on `learners` equal ranks.

    If `in_flight` is 0, the number of concurrent episodes is adapted to the measured load, up to `concurrency` (if 0,
    up to the limit implied by `max_staleness`).
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
    LIMITS: ClassVar = dict.fromkeys(("engines", "learners", "groups", "members", "steps"), _AT_LEAST_1) | {
        "seed": (-math.inf, math.inf)
    }
    NAMES_CLASS = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode not in MODES:
            raise UserError(f"Unknown mode {self.mode!r}.", f"Modes: {', '.join(MODES)}.")

    @property
    def episodes(self) -> int:
        return self.groups * self.members

    @property
    def max_in_flight(self) -> int:
        return self.concurrency or self.episodes * (self.max_staleness + 1 if self.mode == "async" else 1)
