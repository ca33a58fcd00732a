"""Combine reward parts into the training reward: weight schedules, gates, ranks, normalization.

Episodes get a new `reward` (and `turn_rewards` if there is a process model); parts are still recorded by name.
Default settings need no mixer. Evaluations are not affected.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from ludus.algorithms.advantages import advantages_that_need
from ludus.algorithms.advantages.running_baselines import DomainMoments, domain_normalised
from ludus.algorithms.algorithm import Algorithm, Need
from ludus.algorithms.kl import Schedule
from ludus.algorithms.shaping import ShapingRange, check_shaping, dominance_violations, gated, pareto, weighted_sum
from ludus.algorithms.spec.resolve import check_binary_rewards, resolve
from ludus.config.schema import Config
from ludus.config.sections.rewards import RewardsConfig
from ludus.envs.base import World
from ludus.errors import ConfigError, LearnerError, WorldError
from ludus.rewards.base import Reward
from ludus.rewards.registry import (
    JUDGE_PART,
    MODEL_PART,
    PUBLISHED,
    check_names,
    check_task_fits,
    has_extra_rewards,
    training_parts,
)
from ludus.rollouts.reward_executor import ProcessRewardExecutor, add_seconds
from ludus.rollouts.reward_process import turn_scorer
from ludus.rollouts.scheduler import Episode
from ludus.rollouts.trees import map_paths, merge_paths
from ludus.training.collection.judging import check_judge
from ludus.training.credit.turn_rewards import LENGTH_PART, shaping_ranges, with_length, with_turn_rewards
from ludus.training.run.session import TrainingSession
from ludus.training.value_models.reward_model import (
    RewardEnsemble,
    RewardPrediction,
    check_ensemble,
    check_reward_vocabulary,
    find_reward_model,
    load_ensemble,
)
from ludus.types import WORLD_TAG, Failure, Group, StopReason, Task, Trajectory

COMBINED_PART = "combined"
"""Reward part: the combined reward before normalization."""
MODEL_STD = f"{MODEL_PART}_std"
"""Reward part: the standard deviation of a reward model ensemble."""
FULL = 1 - 1e-9
"""Values above this open a gate."""


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
    planned = [_plan_part(config, part) for part in rewards]
    if settings.judge.is_on and settings.judge.rule is None:
        high = min(1.0, settings.caps.get(JUDGE_PART, 1.0))
        planned.append(RewardPart(JUDGE_PART, False, _schedule(config, JUDGE_PART, settings.judge.weight), 0.0, high))
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
        if settings.aggregation != "pareto" and not settings.allow_outweigh:
            for world in {part.world for part in parts}:
                _check_outweigh([p for p in parts if p.world in ("", world)], config, step)
    return parts


def _has_stage_weights(config: Config) -> bool:
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
    if settings.is_default and not _has_stage_weights(config):
        return
    plan_parts(config, parts)
    plan_stages(config, parts)
    check_judge(config, world, parts)
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


def make_reward_mixer(session: TrainingSession, algorithm: Algorithm) -> RewardMixer | None:
    """Build the reward mixer, None for default settings. Raises UserError for a reward model of another vocabulary."""
    config = session.config
    settings = config.rewards
    if settings.is_default and not _has_stage_weights(config):
        return None
    check_reward_vocabulary(settings.models, session.tokenizer)
    return build_reward_mixer(config, session.world, algorithm.advantage_spec.has(Need.OPTIONAL_TURN_REWARDS))


async def add_extra_parts(
    scoring: ProcessRewardExecutor, world: World, episode: Episode, on_error: Callable[[WorldError], None]
) -> Episode:
    """Return an episode with the extra reward parts; if they fail, a failed one, after a call of `on_error`."""
    if episode.trajectory.failure is not None:
        return episode
    begin = time.perf_counter()
    try:
        scored = await map_paths(episode.trajectory, lambda path: scoring.with_added(world, episode.task, path))
        return replace(episode, trajectory=add_seconds(scored, waiting=time.perf_counter() - begin))
    except WorldError as error:
        on_error(error)
        failure = Failure(error.part, str(error), episode.key.attempt + 1)
        failed = replace(episode.trajectory, stop_reason=StopReason.FAILED, failure=failure)
        return replace(episode, trajectory=failed)


def build_reward_mixer(config: Config, world: World, takes_turns: bool) -> RewardMixer:
    """Build the configured reward mixer; loads the reward model if there is one."""
    settings, models = config.rewards, config.rewards.models
    parts = training_parts(settings, world.rewards)
    return RewardMixer(
        settings=settings,
        parts=plan_parts(config, parts),
        stage_parts=plan_stages(config, parts),
        adds=has_extra_rewards(settings),
        microbatch_tokens=config.training.microbatch_tokens,
        takes_turns=takes_turns,
        model=load_ensemble(models, settings.model_std_coef, config) if models else None,
    )


@dataclass
class RewardMixer:
    """Combine the reward parts of a step's episodes. `moments`, per domain, are its only state.

    `adds`: the settings have extra parts, which episodes must already have. `takes_turns`: the algorithm
    uses turn rewards, so a process model's values become turn rewards instead of entering the sum.
    """

    settings: RewardsConfig
    parts: tuple[RewardPart, ...]
    microbatch_tokens: int = 4096
    takes_turns: bool = False
    model: RewardEnsemble | None = None
    adds: bool = False
    stage_parts: Sequence[tuple[RewardPart, ...]] = ()
    """The parts in each stage of the curriculum; empty without stages."""
    moments: DomainMoments = field(default_factory=DomainMoments)

    def in_stage(self, stage: int) -> RewardMixer:
        """Return this mixer with the weights of a stage of the curriculum."""
        self.parts = self.stage_parts[: stage + 1][-1] if self.stage_parts else self.parts
        return self

    def restore(self, moments: str) -> None:
        """Restore `moments.to_json()`; does nothing for an empty text."""
        if moments:
            self.moments = DomainMoments.from_json(moments)

    def combine(self, step: int, groups: Sequence[Sequence[Episode]]) -> list[list[Episode]]:
        """Return the episodes of `step` (from 1) with combined rewards; failed ones are unchanged.

        Paths of a tree are combined as separate episodes. Raises LearnerError for a tree whose leaves have
        rewards but no parts.
        """
        split = [[one.trajectory.attempts() for one in group] for group in groups]
        by_path = [
            [replace(one, trajectory=path) for one, own in zip(group, members, strict=True) for path in own]
            for group, members in zip(groups, split, strict=True)
        ]
        merged = []
        for group, members, combined in zip(groups, split, self._combine(step, by_path), strict=True):
            episodes = iter(combined)
            per_member = [[next(episodes).trajectory for _ in own] for own in members]
            pairs = zip(group, per_member, strict=True)
            merged.append([replace(one, trajectory=merge_paths(one.trajectory, own)) for one, own in pairs])
        return merged

    def _combine(self, step: int, groups: Sequence[Sequence[Episode]]) -> list[list[Episode]]:
        positions = [
            (g, i)
            for g, group in enumerate(groups)
            for i, episode in enumerate(group)
            if episode.trajectory.failure is None
        ]
        combined = [list(group) for group in groups]
        if not positions:
            return combined
        episodes = [groups[g][i] for g, i in positions]
        _check_leaves(episodes)
        trajectories = self._add_model_part([episode.trajectory for episode in episodes], step)
        rewards = self._combine_parts(trajectories, torch.tensor([g for g, _ in positions]), step)
        trajectories, rewards = with_length(trajectories, rewards, self.settings.length)
        if self.settings.rewards_turns:
            trajectories = [self._add_turn_rewards(trajectory) for trajectory in trajectories]
        if self.settings.normalise_by is not None:
            trajectories = [
                replace(t, rewards={**t.rewards, COMBINED_PART: reward})
                for t, reward in zip(trajectories, rewards.tolist(), strict=True)
            ]
            if self.settings.normalise_over == "run":
                domains = [episode.task.tags.get(self.settings.normalise_by, "") for episode in episodes]
                self.moments = self.moments.updated(domains, rewards)
                rewards = domain_normalised(rewards=rewards, domains=domains, moments=self.moments)
        for (g, i), trajectory, reward in zip(positions, trajectories, rewards.tolist(), strict=True):
            combined[g][i] = replace(groups[g][i], trajectory=replace(trajectory, reward=reward))
        return combined

    def normalize_batch(self, episodes: Sequence[Episode]) -> list[Episode]:
        """Normalize combined rewards over the batch if `normalise_over` is "batch"; failed ones are unchanged."""
        tag = self.settings.normalise_by
        if tag is None or self.settings.normalise_over != "batch":
            return list(episodes)
        scored = [episode for episode in episodes if episode.trajectory.failure is None]
        domains = [episode.task.tags.get(tag, "") for episode in scored]
        combined = [episode.trajectory.rewards[COMBINED_PART] for episode in scored]
        rewards = torch.tensor(combined, dtype=torch.float64)
        moments = DomainMoments().updated(domains, rewards)
        normalized = iter(domain_normalised(rewards=rewards, domains=domains, moments=moments).tolist())
        return [
            replace(one, trajectory=replace(one.trajectory, reward=next(normalized)))
            if one.trajectory.failure is None
            else one
            for one in episodes
        ]

    def can_differ(self, trajectories: Sequence[Trajectory]) -> bool:
        """Return whether equal rewards may differ after combination: by parts, lengths, or reward model."""
        trajectories = [path for t in trajectories for path in t.attempts()]
        parts = {tuple(sorted(t.rewards.items())) for t in trajectories}
        texts = {tuple(segment.tokens for segment in t.segments) for t in trajectories}
        reads_texts = self.model is not None or self.settings.judge.is_on
        if len(parts) > 1 or (reads_texts and len(texts) > 1):
            return True
        turns = {self._add_turn_rewards(t).turn_rewards for t in trajectories}
        if self.settings.rewards_turns and len(turns) > 1:
            return True
        rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
        return len(set(with_length(trajectories, rewards, self.settings.length)[1].tolist())) > 1

    def _add_turn_rewards(self, trajectory: Trajectory) -> Trajectory:
        return with_turn_rewards(trajectory, self.settings.turns, self.settings.turn_verifier_weight)

    def metrics(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Return the step's weights and the number of inverted pairs.

        A pair in a group is inverted if one member is at least as good in every part and better in one, but does not
        earn more.
        """
        scored = [(g, t) for g, group in enumerate(groups) for t in group.trajectories if t.failure is None]
        rows = [(g, path) for g, one in scored for path in one.attempts()]
        trajectories = [trajectory for _, trajectory in rows]
        weights = {
            f"reward/weight/{part.name}": part.weight.at(step - 1)
            for part in self.parts
            if part.weight.kind != "constant"
        }
        if not rows:
            return weights
        earned = [t.rewards.get(COMBINED_PART, t.reward) for t in trajectories]
        inverted = dominance_violations(
            parts=self._signed_parts(trajectories, step),
            rewards=torch.tensor(earned, dtype=torch.float64),
            group=torch.tensor([g for g, _ in rows]),
        )
        return weights | {"reward/dominance_violations": float(len(inverted))}

    def _add_model_part(self, trajectories: Sequence[Trajectory], step: int) -> list[Trajectory]:
        """Add the reward model's part, and the turn rewards of a process model."""
        model = self.model
        if model is None:
            return list(trajectories)
        found = model.predict_trajectories(trajectories, self.microbatch_tokens)
        return [self._set_model_part(t, one, step) for t, one in zip(trajectories, found, strict=True)]

    def _set_model_part(self, trajectory: Trajectory, judgement: RewardPrediction, step: int) -> Trajectory:
        """Set the part to the mean value; turn rewards sum to the weight times that mean, or times `crossed_shares`."""
        part, values = self.parts[-1], judgement.values
        threshold = self.settings.model_threshold
        rewards = {MODEL_PART: judgement.mean if threshold is None else float(judgement.mean >= threshold)}
        if len(self.settings.models) > 1:
            rewards[MODEL_STD] = judgement.std
        updated = replace(trajectory, rewards={**trajectory.rewards, **rewards})
        is_closed = self.settings.aggregation == "gated" and self._gate_values([updated])[0] <= FULL
        if not self._sets_turn_rewards or is_closed:
            return updated
        weight = part.weight.at(step - 1)
        if thresholds := self.settings.process.thresholds:
            turn_rewards = [weight * min(share, part.high) for share in crossed_shares(values, thresholds)]
        else:
            turn_rewards = [weight * min(value, part.high) / len(values) for value in values]
        previous = list(trajectory.turn_rewards) + [0.0] * (len(turn_rewards) - len(trajectory.turn_rewards))
        turn_rewards += [0.0] * (len(previous) - len(turn_rewards))
        return replace(updated, turn_rewards=tuple(a + b for a, b in zip(previous, turn_rewards, strict=True)))

    @property
    def _sets_turn_rewards(self) -> bool:
        is_process = self.model is not None and self.model.kind == "process"
        return is_process and self.takes_turns and self.settings.aggregation != "pareto"

    def _gate_values(self, trajectories: Sequence[Trajectory]) -> Tensor:
        gate = self.settings.gate
        gate_parts = [part for part in self.parts if part.name == gate or (part.outcome and gate == "outcome")]
        names = [part.name for part in gate_parts]
        table = [[t.rewards.get(name, 0.0) for name in names] for t in trajectories]
        return torch.tensor(table, dtype=torch.float64).amin(1)

    def _part_values(self, trajectories: Sequence[Trajectory]) -> Tensor:
        """Return the value of each part, clamped to its range, `[N, K]` float64."""
        table = torch.tensor(
            [[t.rewards.get(part.name, 0.0) for part in self.parts] for t in trajectories], dtype=torch.float64
        )
        low = torch.tensor([part.low for part in self.parts], dtype=torch.float64)
        high = torch.tensor([part.high for part in self.parts], dtype=torch.float64)
        return table.clamp(low, high)

    def _weights(self, step: int) -> list[float]:
        """Return the weights at `step`; 0 for a model whose values become turn rewards."""
        return [
            0.0 if part.name == MODEL_PART and self._sets_turn_rewards else part.weight.at(step - 1)
            for part in self.parts
        ]

    def _signed_parts(self, trajectories: Sequence[Trajectory], step: int) -> Tensor:
        """Return the active parts, negated if their weight is negative, `[N, K]`."""
        weights = torch.tensor(self._weights(step), dtype=torch.float64)
        return (self._part_values(trajectories) * weights.sign())[:, weights != 0]

    def _combine_parts(self, trajectories: Sequence[Trajectory], group: Tensor, step: int) -> Tensor:
        if self.settings.aggregation == "pareto":
            return pareto(parts=self._signed_parts(trajectories, step), group=group)
        values, weights = self._part_values(trajectories), self._weights(step)
        if self.settings.aggregation == "weighted_sum":
            return weighted_sum(parts=values, weights=weights)
        pairs = list(zip(self.parts, weights, strict=True))
        outcome = weighted_sum(parts=values, weights=[w if part.outcome else 0.0 for part, w in pairs])
        shaping = weighted_sum(parts=values, weights=[0.0 if part.outcome else w for part, w in pairs])
        return outcome + gated(gate=self._gate_values(trajectories), rewards=shaping, threshold=FULL)


def crossed_shares(values: Sequence[float], thresholds: Sequence[float]) -> list[float]:
    """Return for each turn the share of the thresholds that its value is the first to exceed; they sum to at most 1."""
    best, shares = -1.0, []
    for value in values:
        shares.append(sum(best <= one < value for one in thresholds) / len(thresholds))
        best = max(best, value)
    return shares


def _check_leaves(episodes: Sequence[Episode]) -> None:
    for one in (episode.trajectory for episode in episodes):
        if one.leaf_rewards:
            raise LearnerError(
                f"{one.name[0].upper()}{one.name[1:]} has leaf_rewards, which have no parts to combine.",
                "Keep the section rewards at its defaults, or do not set leaf_rewards.",
            )


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
    if settings.aggregation == "pareto" and (shapes_length or settings.rewards_turns):
        raise ConfigError(
            "rewards.aggregation = pareto ranks parts; length and turn rewards cannot be added to ranks.",
            "Unset rewards.length, rewards.turns and rewards.turn_verifier_weight.",
        )


def _plan_part(config: Config, part: Reward) -> RewardPart:
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
