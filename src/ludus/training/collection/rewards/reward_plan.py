"""Validate the reward settings and plan the reward parts with their weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from ludus.algorithms.advantages import advantages_that_need
from ludus.algorithms.advantages.group_relative import SPREADS
from ludus.algorithms.algorithm import Algorithm, Need
from ludus.algorithms.kl import Schedule
from ludus.algorithms.shaping import LagrangeMultiplier, ShapingRange, check_shaping
from ludus.algorithms.spec.resolve import check_binary_rewards, resolve
from ludus.config.schema import Config
from ludus.config.sections.parts.terms import LEARNER_KINDS, ConstraintConfig
from ludus.config.sections.rewards import RewardsConfig
from ludus.envs.base import World
from ludus.errors import ConfigError
from ludus.rewards.base import Reward
from ludus.rewards.registry import JUDGE_PART, MODEL_PART, PUBLISHED, check_names, check_task_fits, training_parts
from ludus.rollouts.reward_process import turn_scorer
from ludus.training.collection.rewards.judging import check_judge
from ludus.training.collection.rewards.unsupervised_rewards import check_unsupervised
from ludus.training.credit.turn_rewards import LENGTH_PART, shaping_ranges
from ludus.training.value_models.reward_model import check_ensemble, find_reward_model
from ludus.types import WORLD_TAG, Task, Trajectory

RANKED = ("pareto", "gdpo")
"""Aggregations that compare parts within groups, so that nothing can be added to the result."""


@dataclass(frozen=True, slots=True)
class RewardPart:
    """One reward part with its weight schedule and value range; `world`: the name of its world in a mixture."""

    name: str
    outcome: bool
    weight: Schedule
    low: float
    high: float
    world: str = ""


def plan_parts(config: Config, rewards: Sequence[Reward]) -> tuple[RewardPart, ...]:
    """Return the parts of the world and of the reward model. Raises ConfigError if shaping could outweigh outcomes."""
    settings = config.rewards
    names = [part.name for part in rewards]
    has_model = settings.model is not None
    if has_model and MODEL_PART in names:
        raise ConfigError(f"The world already has a reward called {MODEL_PART}.", "Give it another name.")
    check_names(settings, rewards)
    _check_caps(settings)
    _check_terms(settings, names)
    check_constraint(settings, rewards)
    planned = [_plan_part(config, part) for part in rewards]
    if settings.judge.is_on and settings.judge.rule is None:
        high = min(1.0, settings.caps.get(JUDGE_PART, 1.0))
        planned.append(RewardPart(JUDGE_PART, False, _schedule(config, JUDGE_PART, settings.judge.weight), 0.0, high))
    if settings.unsupervised.kind != "none":
        planned = _with_unsupervised(config, planned)
    if has_model:
        high = min(1.0, settings.caps.get(MODEL_PART, 1.0))
        planned.append(RewardPart(MODEL_PART, False, _schedule(config, MODEL_PART, settings.model_weight), 0.0, high))
    parts = tuple(planned)
    if any(part.name in settings.caps for part in parts if part.outcome):
        raise ConfigError("rewards.caps must not cap an outcome.", "Cap the other parts.")
    if any(0 in (p.weight.start, p.weight.end) for p in parts if p.outcome and p.weight.kind != "constant"):
        raise ConfigError("The weight of an outcome starts or ends at 0.", "Keep it above 0 throughout.")
    for step in (0, settings.schedule_steps or config.training.steps):
        outcomes = [part.weight.at(step) for part in parts if part.outcome]
        if min(outcomes) < 0 or max(outcomes) == 0:
            raise ConfigError("No outcome has a weight above 0.", "See rewards.weights and weights_end.")
        if settings.aggregation not in RANKED and not settings.allow_outweigh:
            for world in {part.world for part in parts}:
                _check_outweigh([p for p in parts if p.world in ("", world)], config, step)
    return parts


def has_stage_weights(config: Config) -> bool:
    """Return whether a stage of the curriculum changes weights."""
    return any(stage.weights for stage in config.training.curriculum.stages.values())


def plan_stages(config: Config, rewards: Sequence[Reward]) -> tuple[tuple[RewardPart, ...], ...]:
    """Return the parts of each configured stage of the curriculum, with its weights. Raises as `plan_parts`."""
    planned = []
    for stage in config.training.curriculum.stages.values():
        own = config.rewards.model_copy(update={"weights": config.rewards.weights | stage.weights})
        planned.append(plan_parts(config.model_copy(update={"rewards": own}), rewards))
    return tuple(planned)


def check_reward_settings(config: Config, world: World) -> None:
    """Validate the reward settings before anything is written. Raises UserError."""
    settings, algorithm = config.rewards, resolve(config.algorithm)
    parts = training_parts(settings, world.rewards)
    check_binary_rewards(algorithm, settings, parts)
    if settings.is_default and not has_stage_weights(config):
        return
    check_unsupervised(config, algorithm, world)
    plan_parts(config, parts)
    plan_stages(config, parts)
    check_judge(config, world, parts)
    check_gdpo(config, algorithm)
    if settings.rewards_turns and not algorithm.advantage_spec.has(Need.OPTIONAL_TURN_REWARDS):
        name = "turns" if settings.turns else "turn_verifier_weight"
        raise ConfigError(
            f"rewards.{name} would have no effect: the advantage {algorithm.advantage} uses no turn rewards.",
            f"Use one of {', '.join(advantages_that_need(Need.OPTIONAL_TURN_REWARDS))}.",
        )
    if settings.verifies_turns:
        turn_scorer(settings, world)
    check_ensemble(settings.models)
    if settings.model_refresh.every and config.training.learner.shard:
        text = "rewards.model_refresh trains in one process, and training.learner.shard shards the checkpoints."
        raise ConfigError(text, "Unset one of them.")
    if settings.process.thresholds:
        _check_thresholds(settings, algorithm)
    by_world = {task.tags.get(WORLD_TAG): task for task in reversed(world.tasks("train"))}
    for task in by_world.values():
        _check_task(settings, task)
        if settings.extra:
            check_task_fits(settings.extra, task, len(world.environment(task).tools))


def _check_thresholds(settings: RewardsConfig, algorithm: Algorithm) -> None:
    if not algorithm.advantage_spec.has(Need.OPTIONAL_TURN_REWARDS) or settings.aggregation == "pareto":
        why = f"the advantage {algorithm.advantage}, or rewards.aggregation pareto, uses no turn rewards"
        hint = f"Use one of {', '.join(advantages_that_need(Need.OPTIONAL_TURN_REWARDS))}."
        raise ConfigError(f"rewards.process.thresholds would have no effect: {why}.", hint)
    if find_reward_model(Path(settings.models[0]))[1] != "process":
        text = f"rewards.process.thresholds needs a process model, and {settings.models[0]} scores whole attempts."
        raise ConfigError(text, "Train one with reward_model.kind = process.")


def _check_task(settings: RewardsConfig, task: Task) -> None:
    if settings.preset is not None and not isinstance(task.truth, PUBLISHED[settings.preset].truth):
        wanted, actual = PUBLISHED[settings.preset].truth.__name__, type(task.truth).__name__
        raise ConfigError(
            f"rewards.preset = {settings.preset} needs tasks whose truth is {wanted}; here it is {actual}.",
            "Use another preset, or a world with such tasks (docs/use/rewards.md).",
        )
    if settings.normalise_by is not None and settings.normalise_by not in task.tags:
        tags = ", ".join(sorted(task.tags)) or "none"
        raise ConfigError(
            f"The tasks have no tag {settings.normalise_by!r} (rewards.normalise_by).", f"They have: {tags}."
        )


def reward_warnings(config: Config) -> list[str]:
    """Return warnings for reward settings that are valid but probably unintended."""
    settings, warnings = config.rewards, []
    if settings.aggregation == "pareto":
        warnings.append(
            "rewards.aggregation = pareto ignores weights: a failure that is best in another part "
            "can earn as much as a success."
        )
    if settings.aggregation == "gdpo":
        warnings.append(
            "rewards.aggregation = gdpo normalizes each part in its group: weights are relative to these deviations, "
            "and a failure that is best in other parts can earn more than a success."
        )
    if settings.allow_outweigh:
        warnings.append("rewards.allow_outweigh is on: a failure can earn more than a success.")
    if (
        settings.normalise_by is not None
        and "std_over" in (algorithm := resolve(config.algorithm)).advantage_spec.options
    ):
        warnings.append(
            f"rewards.normalise_by has little effect with the advantage {algorithm.advantage}, which "
            "divides by the standard deviation of each group."
        )
    return warnings


def _check_caps(settings: RewardsConfig) -> None:
    for name, setting in ((MODEL_PART, "rewards.model_weight"), (JUDGE_PART, "rewards.judge.weight")):
        if name in settings.weights:
            raise ConfigError(f"rewards.weights names {name!r}.", f"Its weight is {setting}.")
    if invalid := [name for name, cap in settings.caps.items() if not 0 <= cap <= 1]:
        message = f"rewards.caps.{invalid[0]} is {settings.caps[invalid[0]]:g}."
        raise ConfigError(message, "Use a number from 0 to 1; no part exceeds 1.")


def _check_terms(settings: RewardsConfig, names: Sequence[str]) -> None:
    shapes_length = settings.length.kind != "none"
    if shapes_length and LENGTH_PART in names:
        raise ConfigError(f"The world already has a reward called {LENGTH_PART}.", "Give it another name.")
    if settings.aggregation in RANKED and (shapes_length or settings.rewards_turns):
        raise ConfigError(
            f"rewards.aggregation = {settings.aggregation} compares parts within groups; length and turn rewards "
            "cannot be added to the result.",
            "Unset rewards.length, rewards.turns and rewards.turn_verifier_weight.",
        )


def _with_unsupervised(config: Config, parts: Sequence[RewardPart]) -> list[RewardPart]:
    """Return the parts and that of `rewards.unsupervised`, which may replace the outcomes."""
    settings = config.rewards.unsupervised
    name, replaced = settings.kind, settings.replaces_outcome
    if name in (part.name for part in parts):
        raise ConfigError(f"The world already has a reward called {name}.", "Give it another name.")
    zero = Schedule("constant", 0.0)
    weights = config.rewards.weights | config.rewards.weights_end
    if replaced and (given := [part.name for part in parts if part.outcome and part.name in weights]):
        message = f"rewards.weights.{given[0]} would have no effect: rewards.unsupervised replaces the outcome."
        raise ConfigError(message, "Unset it, or set rewards.unsupervised.replaces_outcome = false.")
    low, high = (-torch.inf, torch.inf) if replaced or name in LEARNER_KINDS else (-float(name == "confidence"), 1.0)
    others = [replace(p, outcome=False, weight=zero) if replaced and p.outcome else p for p in parts]
    return [*others, RewardPart(name, replaced, Schedule("constant", settings.weight), low, high)]


def _plan_part(config: Config, part: Reward) -> RewardPart:
    if part.name == config.rewards.constraint.part:
        return RewardPart(part.name, False, Schedule("constant", 0.0), -1.0, 1.0, part.world)
    weight = config.rewards.weights.get(part.name, part.weight)
    schedule = _schedule(config, part.name, weight)
    if part.outcome:
        return RewardPart(part.name, True, schedule, -torch.inf, torch.inf)
    cap = config.rewards.caps.get(part.name, 1.0)
    return RewardPart(part.name, False, schedule, -cap, cap, part.world)


def _schedule(config: Config, name: str, weight: float) -> Schedule:
    settings = config.rewards
    if name not in settings.weights_end:
        return Schedule("constant", weight)
    steps = settings.schedule_steps or config.training.steps
    return Schedule(settings.schedule, weight, settings.weights_end[name], steps)


def _check_outweigh(parts: Sequence[RewardPart], config: Config, step: int) -> None:
    """Raise ConfigError if shaping could outweigh the outcome at `step`.

    All weights follow one curve, so a condition that holds at both ends holds in between. Behind a gate
    opened by the outcome, shaping only affects successes, so only its penalty counts.
    """
    settings = config.rewards
    outcomes = [part.weight.at(step) for part in parts if part.outcome]
    behind_gate = settings.aggregation == "gated" and settings.gate == "outcome"
    terms = []
    for part in parts:
        weight = part.weight.at(step)
        if not part.outcome and weight != 0:
            ends = sorted((weight * part.low, weight * part.high))
            terms.append(ShapingRange(part.name, min(ends[0], 0.0), 0.0 if behind_gate else max(ends[1], 0.0)))
    gap = min(weight for weight in outcomes if weight > 0)
    terms += shaping_ranges(settings, config.rollout.max_turns, sum(outcomes))
    if terms:
        check_shaping(outcome_gap=gap, terms=terms)


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
