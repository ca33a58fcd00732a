"""Unsupervised rewards that need the policy's logits: self-certainty and entropy of the sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from torch import Tensor

from ludus.algorithms.token_statistics import SELF_CERTAINTY
from ludus.config.sections.parts.unsupervised import LEARNER_KINDS, UnsupervisedConfig
from ludus.training.batches.rows import new_actions, row_of_trajectory
from ludus.training.credit.advantages import TrainingSample, recompute_samples
from ludus.training.learner.learner import Learner
from ludus.training.value_models.factory import at_actions
from ludus.types import Trajectory


def with_learner_rewards(
    samples: Sequence[TrainingSample], learner: Learner, settings: UnsupervisedConfig, max_length: int
) -> list[TrainingSample]:
    """Return the samples with the part of `rewards.unsupervised` added to their rewards, and new advantages.

    The part is computed under the weights at the start of the step, by one forward pass. An attempt without a sampled
    token has the lowest value of the batch. Samples of other kinds, failed ones, and those that have the part are
    unchanged.
    """
    kind, found = settings.kind, list(samples)
    if kind not in LEARNER_KINDS:
        return found
    trajectories = [sample.episode.trajectory for sample in found]
    missing = [i for i, one in enumerate(trajectories) if one.failure is None and kind not in one.rewards]
    scored = [i for i in missing if trajectories[i].num_action_tokens]
    if not scored:
        return found
    rows = [row_of_trajectory(trajectories[i], 0.0) for i in scored]
    if kind == SELF_CERTAINTY:
        tokens = [scores.logprobs for scores in learner.score_with(SELF_CERTAINTY, rows)]
    else:
        tokens = [-entropies for entropies in learner.entropies(rows)]
    means = [
        _span_mean(trajectories[i], one, settings) for i, one in zip(scored, at_actions(tokens, rows), strict=True)
    ]
    values = dict.fromkeys(missing, min(means)) | dict(zip(scored, means, strict=True))
    for i, value in values.items():
        one = trajectories[i]
        reward = one.reward + settings.weight * value
        episode = replace(
            found[i].episode, trajectory=replace(one, rewards={**one.rewards, kind: value}, reward=reward)
        )
        found[i] = replace(found[i], episode=episode)
    return recompute_samples(found, learner.algorithm, max_length)


def _span_mean(trajectory: Trajectory, values: Tensor, settings: UnsupervisedConfig) -> float:
    """Return the mean of the values of the action tokens over the span, in float64."""
    lengths = [len(segment.tokens) for segment in new_actions(trajectory) if segment.tokens]
    start = 0 if settings.span == "response" else sum(islice(lengths, len(lengths) - 1))
    return float(values[start:].double().mean())
