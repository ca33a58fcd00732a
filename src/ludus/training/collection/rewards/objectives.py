"""Several objectives: a constraint on the cost of episodes, and the validation of constraint and GDPO."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from ludus.algorithms.advantages.group_relative import SPREADS
from ludus.algorithms.algorithm import Algorithm, Need
from ludus.algorithms.shaping import LagrangeMultiplier
from ludus.config.schema import Config
from ludus.config.sections.parts.objectives import ConstraintConfig
from ludus.config.sections.rewards import RewardsConfig
from ludus.errors import ConfigError
from ludus.rewards.base import Reward
from ludus.types import Trajectory


@dataclass
class CostConstraint:
    """A limit on the mean cost of the part `part`, by a Lagrange multiplier; `multiplier` is its state."""

    part: str
    settings: ConstraintConfig
    multiplier: LagrangeMultiplier
    _of_steps: dict[int, float] = field(default_factory=dict, init=False)
    """The multiplier of each step whose metrics were not reported yet."""

    @classmethod
    def of(cls, settings: ConstraintConfig) -> Self | None:
        """Return the constraint with its initial multiplier, None if there is none."""
        if settings.part is None:
            return None
        return cls(settings.part, settings, LagrangeMultiplier(math.log(settings.lambda_init)))

    def penalise(self, step: int, rewards: Tensor, trajectories: Sequence[Trajectory]) -> Tensor:
        """Return the rewards [N] of `step` minus their costs."""
        self._of_steps[step] = self.multiplier.value
        return self.multiplier.penalise(rewards=rewards, costs=self._costs(trajectories))

    def update(self, trajectories: Sequence[Trajectory]) -> None:
        """Update the multiplier with the mean cost of a step, if it has a trajectory."""
        if trajectories:
            cost, settings = float(self._costs(trajectories).mean()), self.settings
            rates = {"learning_rate": settings.lambda_lr, "largest": settings.lambda_max}
            self.multiplier = self.multiplier.updated(cost=cost, limit=settings.limit, **rates)

    def metrics(self, step: int, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Return the multiplier of a step, whether it is the largest one, and the mean cost."""
        multiplier = self._of_steps.pop(step, self.multiplier.value)
        return {
            "constraint/lambda": multiplier,
            "constraint/saturated": float(math.isclose(multiplier, self.settings.lambda_max)),
            "constraint/cost": float(self._costs(trajectories).mean()),
        }

    def _costs(self, trajectories: Sequence[Trajectory]) -> Tensor:
        return torch.tensor([abs(one.rewards.get(self.part, 0.0)) for one in trajectories], dtype=torch.float64)


def check_constraint(settings: RewardsConfig, rewards: Sequence[Reward]) -> None:
    """Raise ConfigError unless the cost is a part of the reward that is not an outcome and has no weight."""
    name = settings.constraint.part
    if name is None:
        return
    shaping = {part.name for part in rewards if not part.outcome}
    if name not in shaping:
        message = f"rewards.constraint.part = {name} is not a part of the reward other than an outcome."
        raise ConfigError(message, f"Parts: {', '.join(sorted(shaping)) or 'none'}. Add one with rewards.extra.")
    if name in settings.weights or name in settings.weights_end:
        message = f"rewards.weights.{name} would have no effect: {name} is the cost of rewards.constraint."
        raise ConfigError(message, "Unset it; the weight of a cost is the multiplier.")


def check_gdpo(config: Config, algorithm: Algorithm) -> None:
    """Raise ConfigError if GDPO is set with an advantage that normalizes the groups again, or with trees."""
    if config.rewards.aggregation != "gdpo":
        return
    spec = algorithm.advantage_spec
    by_batch = spec.has(Need.BATCH_STATISTICS)
    if "std_over" in spec.options:
        by_batch = algorithm.choice("advantage", "std_over", SPREADS) == "batch"
    if spec.has(Need.STD) and not by_batch:
        raise ConfigError(
            f"rewards.aggregation = gdpo normalizes over the batch, and the advantage {algorithm.advantage} divides by "
            "the deviation of each group again.",
            "Set algorithm.advantage = 'dr_grpo'.",
        )
    if config.rollout.branch.branches:
        raise ConfigError("rewards.aggregation = gdpo does not support rollout.branch.", "Unset one of them.")
