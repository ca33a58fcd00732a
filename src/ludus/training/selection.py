"""What is decided over all groups of a step at once, however many rounds sampled them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ludus.algorithms.advantages import RoleBaselines
from ludus.algorithms.algorithm import Algorithm
from ludus.algorithms.filters import variance_top
from ludus.rollout.ledger import Outcome
from ludus.training.credit import Credit, Estimates, compared_rewards, with_estimates
from ludus.training.roles import role_of
from ludus.types import WORLD_TAG


def as_one_batch(credits: Sequence[Credit], algorithm: Algorithm, max_action_tokens: int) -> list[Credit]:
    """The credits of a step without the groups that vary least, their advantages taken anew over the rest."""
    kept = keep_most_varied(credits, algorithm.variance_top)
    if not any(credit.advantages is not None for credit in kept):
        return kept
    return with_estimates(kept, algorithm, max_action_tokens, Estimates())


def keep_most_varied(credits: Sequence[Credit], share: float) -> list[Credit]:
    """Drop all but this share of the groups, those with the highest deviation of rewards (StarPO-S).

    At least one group stays. What is dropped takes part in no comparison, also not over the batch; a group
    that another filter has dropped keeps that filter's word.
    """
    compared = [credit for credit in credits if credit.advantages is not None]
    if share == 1 or not compared:
        return list(credits)
    rewards, groups = compared_rewards(compared)
    keep = variance_top(rewards=rewards, group=groups, p=share).tolist()
    doomed = {group for group, kept in zip(groups, keep, strict=True) if not kept}
    return [_dropped(c) if c.advantages is not None and c.group in doomed else c for c in credits]


def with_role_baselines(
    credits: Sequence[Credit], environment: str, averages: RoleBaselines
) -> tuple[list[Credit], RoleBaselines]:
    """The credits with the average of their role as baseline, and the averages after them.

    Each trajectory that was compared reads the average before its own reward enters, in their order.
    """
    compared = [credit for credit in credits if credit.advantages is not None]
    tasks = [credit.episode.task for credit in compared]
    roles = [(task.tags.get(WORLD_TAG, environment), role_of(task)) for task in tasks]
    rewards = torch.tensor([c.episode.trajectory.reward for c in compared], dtype=torch.float64)
    read = iter(averages.read(roles, rewards).tolist())
    found = [c if c.advantages is None else replace(c, baseline=next(read)) for c in credits]
    return found, averages.updated(roles, rewards)


def _dropped(credit: Credit) -> Credit:
    if credit.outcome is Outcome.DROPPED:
        return replace(credit, advantages=None)
    return replace(credit, outcome=Outcome.DROPPED, reason="variance_top", advantages=None)
