"""Combine reward parts into the training reward: weight schedules, gates, ranks, normalization.

Episodes get a new `reward` (and `turn_rewards` if there is a process model); parts are still recorded by name.
Default settings need no mixer. Evaluations are not affected.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ludus.algorithms.advantages.running_baselines import DomainMoments, domain_normalised
from ludus.algorithms.algorithm import Algorithm, Need
from ludus.algorithms.shaping import (
    LagrangeMultiplier,
    dominance_violations,
    gated,
    gdpo,
    gdpo_batch,
    pareto,
    weighted_sum,
)
from ludus.config.schema import Config
from ludus.config.sections.rewards import RewardsConfig
from ludus.envs.base import World
from ludus.errors import LearnerError, WorldError
from ludus.rewards.registry import MODEL_PART, has_extra_rewards, training_parts
from ludus.rollouts.reward_executor import ProcessRewardExecutor, add_seconds
from ludus.rollouts.scheduler import Episode
from ludus.rollouts.trees import map_paths, merge_paths
from ludus.training.collection.rewards.reward_plan import (
    RANKED,
    CostConstraint,
    RewardPart,
    has_stage_weights,
    plan_parts,
    plan_stages,
)
from ludus.training.collection.rewards.unsupervised_rewards import majority_metrics, with_unsupervised_part
from ludus.training.credit.turn_rewards import with_length, with_turn_rewards
from ludus.training.run.session import TrainingSession
from ludus.training.value_models.reward_model import (
    RewardEnsemble,
    RewardPrediction,
    check_reward_vocabulary,
    load_ensemble,
)
from ludus.types import Failure, Group, StopReason, Trajectory

COMBINED_PART = "combined"
"""Reward part: the combined reward before normalization."""
MODEL_STD = f"{MODEL_PART}_std"
"""Reward part: the standard deviation of a reward model ensemble."""
FULL = 1 - 1e-9
"""Values above this open a gate."""


def make_reward_mixer(session: TrainingSession, algorithm: Algorithm) -> RewardMixer | None:
    """Build the reward mixer, None for default settings. Raises UserError for a reward model of another vocabulary."""
    config = session.config
    settings = config.rewards
    if settings.is_default and not has_stage_weights(config):
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
        success=world.rewards[0].name,
        adds=has_extra_rewards(settings),
        microbatch_tokens=config.training.microbatch_tokens,
        takes_turns=takes_turns,
        model=load_ensemble(models, settings.model_std_coef, config) if models else None,
    )


@dataclass
class RewardMixer:
    """Combine the reward parts of a step's episodes. Its state are `moments`, per domain, and `constraint`.

    `adds`: the settings have extra parts, which episodes must already have. `takes_turns`: the algorithm
    uses turn rewards, so a process model's values become turn rewards instead of entering the sum. `success` names the
    part of the verifier, for metrics.
    """

    settings: RewardsConfig
    parts: tuple[RewardPart, ...]
    microbatch_tokens: int = 4096
    takes_turns: bool = False
    model: RewardEnsemble | None = None
    adds: bool = False
    stage_parts: Sequence[tuple[RewardPart, ...]] = ()
    """The parts in each stage of the curriculum; empty without stages."""
    success: str = ""
    moments: DomainMoments = field(default_factory=DomainMoments)
    constraint: CostConstraint | None = field(init=False)

    def __post_init__(self) -> None:
        self.constraint = CostConstraint.of(self.settings.constraint)

    @property
    def state(self) -> str:
        """The state as JSON text."""
        if self.constraint is None:
            return self.moments.to_json()
        return json.dumps({"moments": self.moments.to_json(), "log_lambda": self.constraint.multiplier.log_value})

    def restore(self, state: str) -> None:
        """Restore `state`; does nothing for an empty text."""
        saved = json.loads(state) if state else []
        if isinstance(saved, dict) and self.constraint is not None:
            self.constraint.multiplier = LagrangeMultiplier(saved["log_lambda"])
        if saved:
            self.moments = DomainMoments.from_json(saved["moments"] if isinstance(saved, dict) else state)

    def combine(self, step: int, groups: Sequence[Sequence[Episode]], stage: int | None = None) -> list[list[Episode]]:
        """Return the episodes of `step` (from 1) with combined rewards; failed ones are unchanged.

        `stage` sets the weights of a stage of the curriculum, which stay for later calls; None keeps the weights.
        Paths of a tree are combined as separate episodes. Raises LearnerError for a tree whose leaves have
        rewards but no parts.
        """
        if stage is not None and self.stage_parts:
            self.parts = self.stage_parts[: stage + 1][-1]
        split = [[one.trajectory.attempts() for one in group] for group in groups]
        by_path = [
            [replace(one, trajectory=path) for one, own in zip(group, members, strict=True) for path in own]
            for group, members in zip(groups, split, strict=True)
        ]
        merged = []
        by_path = with_unsupervised_part(by_path, self.settings.unsupervised)
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
        if self.normalizes_batch or self.settings.normalise_by is not None or self.constraint is not None:
            trajectories = [
                replace(t, rewards={**t.rewards, COMBINED_PART: reward})
                for t, reward in zip(trajectories, rewards.tolist(), strict=True)
            ]
            if self.constraint is not None:
                rewards = self.constraint.penalise(step, rewards, trajectories)
            if self.settings.normalise_by is not None and self.settings.normalise_over == "run":
                domains = [episode.task.tags.get(self.settings.normalise_by, "") for episode in episodes]
                self.moments = self.moments.updated(domains, rewards)
                rewards = domain_normalised(rewards=rewards, domains=domains, moments=self.moments)
        for (g, i), trajectory, reward in zip(positions, trajectories, rewards.tolist(), strict=True):
            combined[g][i] = replace(groups[g][i], trajectory=replace(trajectory, reward=reward))
        return combined

    @property
    def normalizes_batch(self) -> bool:
        """Whether rewards are normalized over the batch."""
        return self.settings.normalise_over == "batch" or self.settings.aggregation == "gdpo"

    def normalize_batch(self, episodes: Sequence[Episode]) -> list[Episode]:
        """Normalize combined rewards over the batch if `normalizes_batch`; failed ones are unchanged.

        Ends a step: the multiplier of `constraint` is updated with the mean cost.
        """
        scored = [episode for episode in episodes if episode.trajectory.failure is None]
        if self.constraint is not None:
            self.constraint.update([path for episode in scored for path in episode.trajectory.attempts()])
        if not self.normalizes_batch:
            return list(episodes)
        combined = [episode.trajectory.rewards[COMBINED_PART] for episode in scored]
        rewards = torch.tensor(combined, dtype=torch.float64)
        if self.settings.aggregation == "gdpo":
            rewards = gdpo_batch(rewards)
        else:
            domains = [episode.task.tags.get(self.settings.normalise_by or "", "") for episode in scored]
            moments = DomainMoments().updated(domains, rewards)
            rewards = domain_normalised(rewards=rewards, domains=domains, moments=moments)
        normalized = iter(rewards.tolist())
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
        weights |= majority_metrics(groups, self.success)
        if self.constraint is not None:
            weights |= self.constraint.metrics(step, trajectories)
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
        return is_process and self.takes_turns and self.settings.aggregation not in RANKED

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
        if self.settings.aggregation == "gdpo":
            return gdpo(parts=values, weights=weights, group=group)
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
