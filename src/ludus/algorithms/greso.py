"""GRESO: skip a task before its rollout where its last visits taught nothing (arXiv:2506.02177). No torch.

The state is explicit, made of plain numbers and names, and each draw depends on the seed, the step and the
task alone: a resumed run skips what the uninterrupted one would have.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class GresoSettings:
    """The shares of easy and of hard groups without variance to aim at, and how fast to get there.

    `target_easy`, `target_hard`: shares of the visited groups, 1/12 and 1/6 (a quarter together, as in the
    paper). `change` is added to or taken from `p` after each step. `floor` is the least probability with
    which any task is visited.
    """

    target_easy: float = 1 / 12
    target_hard: float = 1 / 6
    change: float = 0.01
    floor: float = 0.05

    def __post_init__(self) -> None:
        if not all(0 <= x <= 1 for x in (self.target_easy, self.target_hard, self.change, self.floor)):
            raise ValueError("target_easy, target_hard, change and floor must lie between 0 and 1")


@dataclass(frozen=True, slots=True)
class Visit:
    """What one group of a task came to: whether its rewards were all equal, and if so all high."""

    task: str
    zero_variance: bool
    easy: bool = False


@dataclass(frozen=True, slots=True)
class GresoState:
    """`p` for easy and hard tasks, and each task's streak `z` of visits without variance.

    A streak is positive where the last visit was easy, negative where it was hard; tasks with none are left
    out. `dataclasses.asdict` saves the state, `GresoState(**numbers)` brings it back.
    """

    p_easy: float = 0.5
    p_hard: float = 0.5
    streaks: Mapping[str, int] = field(default_factory=dict)

    def skip_probability(self, task: str, settings: GresoSettings) -> float:
        """`1 - max(p^z, floor)`; 0 for a task whose last visit had variance, or that was never visited."""
        streak = self.streaks.get(task, 0)
        p = self.p_easy if streak > 0 else self.p_hard
        return 1 - max(p ** abs(streak), settings.floor)

    def skips(self, task: str, settings: GresoSettings, *, seed: int, step: int) -> bool:
        """The draw for one task at one step."""
        draw = random.Random(f"greso/{seed}/{step}/{task}").random()
        return draw < self.skip_probability(task, settings)

    def update(self, visits: Sequence[Visit], settings: GresoSettings) -> GresoState:
        """The state after a step whose groups were `visits`; without visits it stays.

        `p_easy` falls by `change` where the share of easy groups without variance reaches its target, else it
        rises; so does `p_hard`. Both stay within [0, 1].
        """
        if not visits:
            return self
        streaks = dict(self.streaks)
        for visit in visits:
            length = abs(streaks.pop(visit.task, 0)) + 1
            if visit.zero_variance:
                streaks[visit.task] = length if visit.easy else -length
        easy = sum(v.zero_variance and v.easy for v in visits) / len(visits)
        hard = sum(v.zero_variance and not v.easy for v in visits) / len(visits)
        return replace(
            self,
            p_easy=_moved(self.p_easy, easy >= settings.target_easy, settings.change),
            p_hard=_moved(self.p_hard, hard >= settings.target_hard, settings.change),
            streaks=streaks,
        )


def _moved(p: float, too_many: bool, change: float) -> float:
    return max(p - change, 0.0) if too_many else min(p + change, 1.0)
