"""Curricula: pure functions that weigh categories and tasks by what the policy learns from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


def sec_update(q: Mapping[str, float], rewards: Mapping[str, float], alpha: float = 0.5) -> dict[str, float]:
    """Return SEC's action values after a step: `(1 - alpha) Q + alpha r` for each category of `q`.

    arXiv:2505.14970. `rewards` is the mean absolute advantage of each sampled category; 0 for the others, so that their
    Q decays.
    """
    return {name: (1 - alpha) * value + alpha * rewards.get(name, 0.0) for name, value in q.items()}


def sec_probabilities(q: Mapping[str, float], tau: float = 1.0) -> dict[str, float]:
    """Return the probabilities of the categories, proportional to `exp(Q / tau)`."""
    highest = max(q.values())
    weights = {name: math.exp((value - highest) / tau) for name, value in q.items()}
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def target_weight(success: float, target: float = 0.5, floor: float = 0.05) -> float:
    """Return the weight of a task, 1 at the target and falling linearly to `floor` at the farther end of [0, 1].

    The form is ours; the target of 0.5 is that of arXiv:2504.05520 and arXiv:2504.03380.
    """
    return max(floor, 1 - abs(success - target) / max(target, 1 - target))


def learnability(success: float, floor: float = 0.05) -> float:
    """Return the weight `4 p (1 - p)` of a task, at least `floor` (arXiv:2502.12272, which takes the largest)."""
    return max(floor, 4 * success * (1 - success))


@dataclass(frozen=True, slots=True)
class CurriculumState:
    """State of a curriculum between steps. `dataclasses.asdict` saves it.

    `stage` counts from 0 and began with step `since`; `recent` is the mean success of its last groups. `q` is SEC's Q
    by category. `success` is the moving average of each visited task, `by_category` that of each category. `positions`
    is the place in the order of each category, `draws` the number of random draws. `made` are the identifiers of new
    tasks, the next one first, and `failed` the tasks that failed in this phase.
    """

    stage: int = 0
    since: int = 1
    recent: tuple[float, ...] = ()
    q: Mapping[str, float] = field(default_factory=dict)
    success: Mapping[str, float] = field(default_factory=dict)
    by_category: Mapping[str, float] = field(default_factory=dict)
    positions: Mapping[str, int] = field(default_factory=dict)
    draws: int = 0
    made: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
