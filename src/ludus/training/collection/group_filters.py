"""Filters and baselines that need all groups of a step at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ludus.algorithms.advantages.running_baselines import RoleBaselines
from ludus.algorithms.filters import variance_top, variance_top_p
from ludus.algorithms.spec.algorithm import Algorithm
from ludus.rollout.ledger import RolloutOutcome
from ludus.training.credit.advantages import TrainingSample, compared_rewards, with_estimates
from ludus.training.credit.estimates import Estimates
from ludus.training.credit.self_play_roles import role_of
from ludus.types import WORLD_TAG


def as_one_batch(credits: Sequence[TrainingSample], algorithm: Algorithm, max_length: int) -> list[TrainingSample]:
    """Return the samples after the variance filter, with advantages recomputed over the kept groups."""
    kept = keep_most_varied(credits, algorithm)
    if not any(credit.advantages is not None for credit in kept):
        return kept
    return with_estimates(kept, algorithm, max_length, Estimates())


def keep_most_varied(credits: Sequence[TrainingSample], algorithm: Algorithm) -> list[TrainingSample]:
    """Drop the groups of least variance: StarPO-S keeps a fraction of groups, RAGEN-2 of total deviation.

    Dropped groups are excluded from all comparisons, also over the batch; an earlier drop reason is kept.
    """
    compared = [credit for credit in credits if credit.advantages is not None]
    if not algorithm.filters_groups or not compared:
        return list(credits)
    rewards, groups = compared_rewards(compared, algorithm)
    keeps = variance_top_p if algorithm.variance_filter == "top_p" else variance_top
    keep = keeps(rewards=rewards, group=groups, p=algorithm.top_variance_fraction).tolist()
    doomed = {group for group, kept in zip(groups, keep, strict=True) if not kept}
    return [_dropped(c) if c.advantages is not None and c.group in doomed else c for c in credits]


EMPTY_BATCHES = 5
"""Consecutive steps without a group after which the filter top_p ends the run (RAGEN-2)."""


@dataclass
class EmptyBatchGuard:
    """Count consecutive steps in which the filter top_p kept no group; stop after five."""

    algorithm: Algorithm
    _empty: int = field(default=0, init=False)

    def verdict(self, metrics: Mapping[str, float]) -> str:
        """Return the reason to stop after a step, or an empty string."""
        if self.algorithm.variance_filter != "top_p":
            return ""
        self._empty = 0 if metrics.get("ledger/trained", 0.0) else self._empty + 1
        if self._empty < EMPTY_BATCHES:
            return ""
        return f"algorithm.variance_filter = top_p kept no group in {self._empty} steps in a row."

    def recall(self, history: Sequence[Mapping[str, float]]) -> None:
        """Restore the count from the steps before a resume; it restarts at 0 after a stop."""
        for metrics in history:
            if self.verdict(metrics):
                self._empty = 0


def with_role_baselines(
    credits: Sequence[TrainingSample], environment: str, averages: RoleBaselines
) -> tuple[list[TrainingSample], RoleBaselines]:
    """Return the samples with their role's average as baseline, and the updated averages.

    In order, each compared trajectory reads the average before its own reward is added.
    """
    compared = [credit for credit in credits if credit.advantages is not None]
    tasks = [credit.episode.task for credit in compared]
    roles = [(task.tags.get(WORLD_TAG, environment), role_of(task)) for task in tasks]
    rewards = torch.tensor([c.episode.trajectory.reward for c in compared], dtype=torch.float64)
    read = iter(averages.read(roles, rewards).tolist())
    found = [c if c.advantages is None else replace(c, baseline=next(read)) for c in credits]
    return found, averages.updated(roles, rewards)


def _dropped(credit: TrainingSample) -> TrainingSample:
    if credit.outcome is RolloutOutcome.DROPPED:
        return replace(credit, advantages=None)
    return replace(credit, outcome=RolloutOutcome.DROPPED, reason="variance_top", advantages=None)
