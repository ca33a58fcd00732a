"""A reward is a list of named parts with weights, in which the outcome dominates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ludus.errors import ConfigError
from ludus.types import Task, Trajectory

RewardFunction = Callable[[Task, Trajectory], float]


@dataclass(frozen=True, slots=True)
class Reward:
    """One named part.

    `outcome` marks what the task is about (it decides success: a value of 1); all other parts only shape.
    A part of weight 0 is reported and does not train. Shaping values are clipped to [-1, 1].
    """

    name: str
    function: RewardFunction
    weight: float = 1.0
    outcome: bool = False


def check_rewards(rewards: Sequence[Reward]) -> None:
    """Refuse a list without an outcome, with a name used twice, or in which shaping could outweigh it."""
    names = [part.name for part in rewards]
    if len(set(names)) < len(names):
        raise ConfigError(f"Two rewards share a name: {names}.", "Give each part a name of its own.")
    outcome = sum(part.weight for part in rewards if part.outcome)
    shaping = sum(abs(part.weight) for part in rewards if not part.outcome)
    if outcome <= 0:
        raise ConfigError("No reward marks the outcome.", "Set outcome=True and a weight above 0 on one.")
    if shaping >= outcome:
        raise ConfigError(
            f"Shaping rewards weigh {shaping:g} together and the outcome {outcome:g}: a model could earn "
            "more by pleasing the shaping than by solving the task.",
            "Lower the shaping weights below the outcome's.",
        )


def score(rewards: Sequence[Reward], task: Task, trajectory: Trajectory) -> Trajectory:
    """The trajectory with its parts and weighted sum. A value that is not finite raises ValueError."""
    parts = {}
    total = 0.0
    for part in rewards:
        value = float(part.function(task, trajectory))
        if not math.isfinite(value):
            raise ValueError(f"reward {part.name!r} of task {task.id} is {value}")
        if not part.outcome:
            value = max(-1.0, min(1.0, value))
        parts[part.name] = value
        total += part.weight * value
    return replace(trajectory, rewards=parts, reward=total)


def success(rewards: Sequence[Reward], trajectory: Trajectory) -> bool:
    """Whether every outcome part has its full value, 1."""
    return all(trajectory.rewards.get(part.name, 0.0) >= 1.0 for part in rewards if part.outcome)
