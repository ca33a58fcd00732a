"""A reward is a list of named parts with weights, in which the outcome dominates."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ludus.errors import ConfigError
from ludus.types import WORLD_TAG, Task, Trajectory

RewardFunction = Callable[[Task, Trajectory], float]
AbstainingFunction = Callable[[Task, Trajectory], float | None]
"""A reward that returns None if it cannot decide (`Reward.may_abstain`)."""

Truth = TypeVar("Truth")

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Reward:
    """One named reward part.

    `outcome` marks the objective of the task: it decides success (a value of 1) and lies between `low` and 1.
    All other parts only shape. A part of weight 0 is reported but not trained on. Shaping values are clipped to
    [-1, 1]. In a mixture, `world` names the world whose tasks the part scores; it is not recorded for others. With
    `may_abstain` the function may return None: the part is then not recorded and counts as 0, unless a judge decides it
    (`rewards.judge.rule`).
    """

    name: str
    function: AbstainingFunction
    weight: float = 1.0
    outcome: bool = False
    world: str = ""
    low: float = 0.0
    may_abstain: bool = False


def check_rewards(rewards: Sequence[Reward]) -> None:
    """Raise ConfigError unless solving the task always earns more than anything else.

    Rejects duplicate names, weights that are not finite, a list without an outcome, negative outcome weights,
    and shaping that could outweigh an outcome.
    """
    names = [part.name for part in rewards]
    if len(set(names)) < len(names):
        raise ConfigError(f"Two rewards share a name: {names}.", "Give each part a unique name.")
    if invalid := [part.name for part in rewards if not math.isfinite(part.weight)]:
        raise ConfigError(f"The weight of {invalid[0]!r} is not a finite number.", "Set a finite weight.")
    outcomes = [part.weight for part in rewards if part.outcome]
    if min(outcomes, default=0.0) < 0 or sum(outcomes) <= 0:
        text = "The rewards need an outcome with a weight above 0, and no outcome with a negative weight."
        raise ConfigError(text, "Set outcome=True and a weight above 0 on one of them.")
    least = min(weight for weight in outcomes if weight > 0)
    shaping = sum(abs(part.weight) for part in rewards if not part.outcome)
    if 2 * shaping >= least:
        why = "a failure with all shaping at 1 would earn no less than a success with all of it at -1"
        message = f"Shaping rewards weigh {shaping:g} together and the outcome {least:g}: {why}."
        raise ConfigError(message, "Lower the shaping weights below half of the outcome's.")


def value_of(part: Reward, task: Task, trajectory: Trajectory) -> float | None:
    """Return the value of a part; None if it abstains. Raises TypeError for a value that is not a number."""
    value = part.function(task, trajectory)
    if value is None and part.may_abstain:
        return None
    try:
        return float("" if value is None else value)
    except (TypeError, ValueError):
        raise TypeError(f"reward {part.name!r} of task {task.id} is {value!r}, not a number") from None


def score(rewards: Sequence[Reward], task: Task, trajectory: Trajectory) -> Trajectory:
    """Return the trajectory with its reward parts and their weighted sum.

    Raises TypeError for a value that is not a number, ValueError for one that is not finite and for an outcome out of
    its bounds.
    """
    parts: dict[str, float] = {}
    total = 0.0
    for part in rewards:
        if part.world and part.world != task.tags.get(WORLD_TAG):
            continue
        if (value := value_of(part, task, trajectory)) is None:
            continue
        if not math.isfinite(value):
            raise ValueError(f"reward {part.name!r} of task {task.id} is {value}")
        if part.outcome and not part.low - _ROUNDING <= value <= 1 + _ROUNDING:
            raise ValueError(f"the outcome {part.name!r} of task {task.id} is {value:g}, not from {part.low:g} to 1")
        if not part.outcome:
            value = max(-1.0, min(1.0, value))
        parts[part.name] = value
        total += part.weight * value
    return replace(trajectory, rewards=parts, reward=total)


def check_scored_elsewhere(world: Sequence[Reward], own: Sequence[Reward], environment: object) -> None:
    """Raise ConfigError unless an environment's `own` rewards are its world's and none is a method of it.

    A reward process receives the world, the task and the trajectory, but not the environment.
    """
    ours, theirs = ([(p.name, p.weight, p.outcome, p.world) for p in parts] for parts in (world, own))
    bound = [p.name for p in own if inspect.ismethod(p.function) and p.function.__self__ is environment]
    if ours == theirs and not bound:
        return
    why = f"The reward {bound[0]!r} is a method of the environment" if bound else "Its episodes have other rewards"
    hint = "Use rewards that read only the trajectory (such as its outcomes), or set cluster.reward_workers = 0."
    raise ConfigError(f"The episodes of this world cannot be scored by its rewards alone. {why}.", hint)


def success(rewards: Sequence[Reward], trajectory: Trajectory) -> bool:
    """Return whether every outcome part has its full value, 1."""
    return all(trajectory.rewards.get(part.name, 0.0) >= 1.0 for part in rewards if part.outcome)


def truth_of(task: Task, kind: type[Truth]) -> Truth:
    """Return the truth of a task. Raises TypeError if its type differs: an error of the world, not of the model."""
    if not isinstance(task.truth, kind):
        raise TypeError(f"task {task.id}: the truth is {type(task.truth).__name__}, expected {kind.__name__}")
    return task.truth
