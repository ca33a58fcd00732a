"""What is added to a combined reward: the length of the episode, and rewards of turns by what happened there.

A turn's event is the way in which the first failed call of it failed (`raised`, `malformed`, ...), else the
tools that it called, joined by `+` in the order of their names, else `answer`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ludus.algorithms.advantages import TierCalibration, calibrate_tiers
from ludus.algorithms.shaping import ShapingRange, length_linear, length_sigmoid
from ludus.config.rewards import LengthConfig, RewardsConfig
from ludus.types import ToolOutcome, ToolStatus, Trajectory

LENGTH_PART = "length"
"""On record as a part: what the length took off, or by how much it multiplied."""
NO_CALL = "answer"
_SAFE = 0.9
"""Share of the outcome that calibrated rewards of turns may come to."""
_CALL = re.compile(r"call_(\d+)_\d+")


def events_of(trajectory: Trajectory) -> list[str]:
    """The event of each turn."""
    by_turn: list[list[ToolOutcome]] = [[] for _ in range(trajectory.num_turns)]
    for outcome in trajectory.outcomes:
        numbered = _CALL.fullmatch(outcome.call_id)
        if numbered is not None and int(numbered[1]) < len(by_turn):
            by_turn[int(numbered[1])].append(outcome)
    return [_event(outcomes) for outcomes in by_turn]


def _event(outcomes: Sequence[ToolOutcome]) -> str:
    failed = [outcome.status.value for outcome in outcomes if outcome.status is not ToolStatus.OK]
    return failed[0] if failed else "+".join(sorted({o.tool for o in outcomes})) or NO_CALL


def with_turn_rewards(trajectory: Trajectory, rewards: Mapping[str, float]) -> Trajectory:
    """The trajectory whose `turn_rewards` have those of its events as well."""
    own = [rewards.get(event, 0.0) for event in events_of(trajectory)]
    before = [*trajectory.turn_rewards, *[0.0] * (len(own) - len(trajectory.turn_rewards))]
    own += [0.0] * (len(before) - len(own))
    return replace(trajectory, turn_rewards=tuple(a + b for a, b in zip(before, own, strict=True)))


def with_length(
    trajectories: Sequence[Trajectory], rewards: Tensor, settings: LengthConfig
) -> tuple[list[Trajectory], Tensor]:
    """The rewards `[N]` as the lengths shape them, and the trajectories with that on record."""
    if settings.kind == "none":
        return list(trajectories), rewards
    lengths = torch.tensor([t.num_action_tokens for t in trajectories])
    if settings.kind == "linear":
        part = length_linear(lengths=lengths, target=settings.target, lam=settings.lam, cap=settings.cap)
        found = rewards + part
    else:
        ones = torch.ones_like(rewards)
        part = length_sigmoid(
            rewards=ones, lengths=lengths, target=settings.target, tau=settings.tau, floor=settings.floor
        )
        found = torch.where(rewards > 0, rewards * part, rewards)
    named = [
        replace(t, rewards={**t.rewards, LENGTH_PART: value})
        for t, value in zip(trajectories, part.tolist(), strict=True)
    ]
    return named, found


def shaping_ranges(settings: RewardsConfig, max_turns: int, outcome: float) -> list[ShapingRange]:
    """What both can add to a reward whose outcomes are worth `outcome` together."""
    found = []
    if settings.length.kind == "linear":
        found.append(ShapingRange(LENGTH_PART, -settings.length.cap, 0.0))
    values = [0.0, *settings.turns.values()]
    if settings.turns:
        found.append(ShapingRange("turns", max_turns * min(values), max_turns * max(values)))
    if settings.length.kind == "sigmoid":
        floor = settings.length.floor
        found.append(ShapingRange(f"rewards.{LENGTH_PART}", (floor - 1) * outcome, 0.0, floor))
    return found


@dataclass(frozen=True, slots=True)
class EventRewards:
    """Rewards of turns from recorded attempts: for each event its number of turns, and what was found of it.

    `scale` is what the correlations were multiplied by, so that all turns of an attempt together cannot
    outweigh the outcome.
    """

    counts: Mapping[str, int]
    found: TierCalibration
    scale: float

    @property
    def rewards(self) -> dict[str, float]:
        """The reward of each event that tells success from failure."""
        named = zip(self.counts, self.found.reward.tolist(), strict=True)
        return {name: reward for name, reward in named if reward != 0}


def calibrate(
    attempts: Sequence[tuple[Trajectory, bool]], max_turns: int, outcome: float, threshold: float
) -> EventRewards:
    """Rewards of events from attempts and their success, arXiv:2604.02869 (`calibrate_tiers`).

    `outcome` is what a success is worth. There has to be an attempt.
    """
    events = [events_of(trajectory) for trajectory, _ in attempts]
    counts = dict(sorted(Counter(event for own in events for event in own).items()))
    numbers = {event: number for number, event in enumerate(counts)}
    tiers = torch.full((len(events), max(map(len, events)) or 1), -1)
    for i, own in enumerate(events):
        tiers[i, : len(own)] = torch.tensor([numbers[event] for event in own], dtype=torch.int64)
    won = torch.tensor([float(success) for _, success in attempts])
    whole = calibrate_tiers(tiers=tiers, success=won, num_tiers=len(counts), threshold=threshold)
    values = [0.0, *whole.reward.tolist()]
    spread = max_turns * (max(values) - min(values))
    scale = min(1.0, _SAFE * outcome / spread) if spread else 1.0
    return EventRewards(counts, replace(whole, reward=whole.reward * scale), scale)
