"""Calibrate event rewards so that their advantages have the intended sign, arXiv:2604.02869.

The sign of an event's reward and of its advantage can differ, since the advantage also depends on other
turns, the group and the outcome. `align` measures the mean advantage per event on recorded attempts
(`tier_advantages`), removes rewards with the wrong sign, and repeats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ludus.algorithms.advantages.calibration import tier_advantages
from ludus.algorithms.parts import Need
from ludus.algorithms.spec.algorithm import Algorithm
from ludus.algorithms.spec.presets import TURN_LEVEL
from ludus.rollout.scheduler import Episode
from ludus.training.credit.advantages import assign_credit, turns_of_actions
from ludus.training.credit.turn_rewards import events_of, with_turn_rewards


@dataclass(frozen=True, slots=True)
class Alignment:
    """Rewards of events and the mean advantage of their turns under these rewards."""

    rewards: Mapping[str, float]
    advantages: Mapping[str, float]

    @property
    def misaligned(self) -> list[str]:
        """The events whose advantage and reward have opposite signs."""
        return [e for e, reward in self.rewards.items() if reward * self.advantages.get(e, 0.0) < 0]


def measure(groups: Sequence[Sequence[Episode]], rewards: Mapping[str, float], algorithm: Algorithm) -> Alignment:
    """Measure the alignment of rewards on the groups; failed, greedy and branching attempts are ignored."""
    played = [
        [
            replace(one, trajectory=with_turn_rewards(one.trajectory, rewards))
            for one in group
            if one.trajectory.failure is None
            and not one.greedy
            and len(one.trajectory.rows) == 1
            and one.trajectory.num_action_tokens
        ]
        for group in groups
    ]
    credits = [credit for credit in assign_credit(played, algorithm) if credit.advantages]
    if not credits:
        return Alignment(rewards, {})
    trajectories = [credit.episode.trajectory for credit in credits]
    own = [events_of(trajectory) for trajectory in trajectories]
    names = sorted({event for events in own for event in events})
    advantages = _table([list(credit.advantages or ()) for credit in credits], 0.0)
    turn = _table([turns_of_actions(trajectory) for trajectory in trajectories], 0)
    lengths = torch.tensor([trajectory.num_action_tokens for trajectory in trajectories])
    found = tier_advantages(
        advantages=advantages,
        tiers=_table([[names.index(event) for event in events] for events in own], -1),
        turn=turn,
        mask=torch.arange(turn.shape[1])[None, :] < lengths[:, None],
        num_tiers=len(names),
    )
    return Alignment(rewards, dict(zip(names, found.tolist(), strict=True)))


def align(groups: Sequence[Sequence[Episode]], rewards: Mapping[str, float], algorithm: Algorithm) -> list[Alignment]:
    """Remove misaligned rewards repeatedly; return all rounds, the last of which is aligned."""
    rounds = [measure(groups, rewards, algorithm)]
    while rounds[-1].misaligned:
        kept = {e: reward for e, reward in rounds[-1].rewards.items() if e not in rounds[-1].misaligned}
        rounds.append(measure(groups, kept, algorithm))
    return rounds


def calibration_algorithm(algorithm: Algorithm) -> Algorithm:
    """Return the run's algorithm if its advantage compares turns, otherwise `turn_return_hybrid`."""
    return algorithm if algorithm.advantage_spec.has(Need.TURN_REWARDS) else TURN_LEVEL


def _table(rows: Sequence[Sequence[float]], fill: float) -> torch.Tensor:
    """Right-pad the rows to `[N, K]`: float64, or int64 for integers."""
    kind = torch.float64 if isinstance(fill, float) else torch.int64
    table = torch.full((len(rows), max(map(len, rows)) or 1), fill, dtype=kind)
    for i, row in enumerate(rows):
        table[i, : len(row)] = torch.tensor(row, dtype=kind)
    return table
