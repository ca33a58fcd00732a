"""Credit: which episodes of a step train, with what advantage, and what becomes of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ludus.algorithms.advantages import ADVANTAGES
from ludus.algorithms.batch import Outcomes
from ludus.algorithms.filters import overlong_mask, zero_variance
from ludus.algorithms.presets import Algorithm
from ludus.rollout.ledger import Ledger, Outcome
from ludus.rollout.scheduler import Episode
from ludus.rollout.store import RolloutRecord
from ludus.training.batch import Row, row_of_trajectory
from ludus.types import StopReason

CUT_OFF = frozenset({StopReason.TRUNCATED, StopReason.MAX_TOKENS})
"""Stop reasons of a trajectory that a token limit ended: what the overlong filter masks."""


@dataclass(frozen=True)
class Credit:
    """What becomes of one episode. `advantage` is None unless it took part in its group's comparison."""

    episode: Episode
    outcome: Outcome
    reason: str
    advantage: float | None = None

    @property
    def record(self) -> RolloutRecord:
        """The line that the run keeps of it."""
        key = self.episode.key
        return RolloutRecord(
            step=key.step,
            group=self.episode.task.id,
            outcome=self.outcome,
            reason=self.reason,
            trajectory=self.episode.trajectory,
            advantage=self.advantage,
            attempt=key.attempt,
        )


def assign_credit(groups: Sequence[Sequence[Episode]], algorithm: Algorithm) -> list[Credit]:
    """One credit for each episode of the groups, in order.

    A group with a failed member is dropped whole: a partial group is never trained. Statistics of a group
    run over all its members; those that a filter takes out keep their advantage on record and do not train.
    """
    credits: list[Credit] = []
    compared: list[Sequence[Episode]] = []
    for group in groups:
        if any(episode.trajectory.failure for episode in group):
            credits += [_of_partial_group(episode) for episode in group]
        else:
            compared.append(group)
    return credits + _compare(compared, algorithm)


def _of_partial_group(episode: Episode) -> Credit:
    failure = episode.trajectory.failure
    if failure is not None:
        return Credit(episode, Outcome.FAILED, failure.part)
    return Credit(episode, Outcome.DROPPED, "partial_group")


def _compare(groups: Sequence[Sequence[Episode]], algorithm: Algorithm) -> list[Credit]:
    episodes = [episode for group in groups for episode in group]
    if not episodes:
        return []
    rewards = torch.tensor([e.trajectory.reward for e in episodes], dtype=torch.float64)
    index = torch.tensor([i for i, group in enumerate(groups) for _ in group])
    varied = zero_variance(rewards=rewards, group=index)
    whole = overlong_mask(truncated=[e.trajectory.stop_reason in CUT_OFF for e in episodes])
    fates = [_fate(episode, bool(varied[i]), bool(whole[i]), algorithm) for i, episode in enumerate(episodes)]
    advantages = _advantages(episodes, rewards, index, algorithm)
    return [
        Credit(episode, outcome, reason, advantage)
        for episode, (outcome, reason), advantage in zip(episodes, fates, advantages, strict=True)
    ]


def _fate(episode: Episode, varied: bool, whole: bool, algorithm: Algorithm) -> tuple[Outcome, str]:
    if algorithm.zero_variance and not varied:
        return Outcome.DROPPED, "zero_variance"
    if algorithm.overlong_mask and not whole:
        return Outcome.MASKED, "overlong"
    if episode.trajectory.num_action_tokens == 0:
        return Outcome.MASKED, "no_action_tokens"
    return Outcome.TRAINED, "trained"


def _advantages(
    episodes: Sequence[Episode], rewards: torch.Tensor, index: torch.Tensor, algorithm: Algorithm
) -> list[float]:
    """The advantage of each trajectory: the same on all its action tokens."""
    lengths = [max(1, episode.trajectory.num_action_tokens) for episode in episodes]
    mask = torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]
    per_token = ADVANTAGES[algorithm.advantage](Outcomes(rewards, index, mask), algorithm)
    found: list[float] = per_token[:, 0].tolist()
    return found


def settle(ledger: Ledger, credits: Sequence[Credit]) -> None:
    """Write the fates into the ledger. Failed attempts are there already."""
    for credit in credits:
        if credit.outcome is not Outcome.FAILED:
            ledger.finish(credit.episode.key, credit.outcome, credit.reason)


def training_rows(credits: Sequence[Credit], *, mask_observations: bool) -> list[Row]:
    """The rows of those that train."""
    return [
        row_of_trajectory(
            credit.episode.trajectory, credit.advantage or 0.0, mask_observations=mask_observations
        )
        for credit in credits
        if credit.outcome is Outcome.TRAINED
    ]
