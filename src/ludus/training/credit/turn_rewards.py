"""Reward terms added to the combined reward, episode length and turn events, and their calibration.

A turn's event is the status of its first failed call (`raised`, `malformed`, ...), otherwise `progress` if the world's
turn verifier found a new milestone, otherwise the sorted names of the called tools, otherwise `answer`. The sign of an
event's reward and of its advantage can differ (arXiv:2604.02869): `align` removes rewards with the wrong sign.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ludus.algorithms.advantages.calibration import TierCalibration, calibrate_tiers, tier_advantages
from ludus.algorithms.algorithm import Algorithm, Need
from ludus.algorithms.shaping import ShapingRange, length_linear, length_sigmoid
from ludus.algorithms.spec.resolve import TURN_LEVEL
from ludus.config.sections.rewards import PROGRESS, LengthConfig, RewardsConfig
from ludus.rewards.code.turns import outcomes_by_turn
from ludus.rollouts.scheduler import Episode
from ludus.training.batches.rows import pad_table
from ludus.training.credit.advantages import assign_credit, turns_of_actions
from ludus.types import ToolOutcome, ToolStatus, Trajectory

LENGTH_PART = "length"
"""Reward part: the length penalty or factor."""
NO_CALL = "answer"
_SAFE = 0.9
"""Largest sum of calibrated turn rewards, as a fraction of the outcome."""


def events_of(trajectory: Trajectory) -> list[str]:
    """Return the event of each turn."""
    by_turn = outcomes_by_turn(trajectory)
    progress = _padded(trajectory.turn_progress, len(by_turn))
    return [_event(outcomes, share > 0) for outcomes, share in zip(by_turn, progress, strict=False)]


def _event(outcomes: Sequence[ToolOutcome], progress: bool) -> str:
    failed = [outcome.status.value for outcome in outcomes if outcome.status is not ToolStatus.OK]
    if failed or progress:
        return failed[0] if failed else PROGRESS
    return "+".join(sorted({o.tool for o in outcomes})) or NO_CALL


def _padded(values: Sequence[float], length: int) -> list[float]:
    return [*values, *[0.0] * (length - len(values))]


def with_turn_rewards(trajectory: Trajectory, rewards: Mapping[str, float], weight: float = 0.0) -> Trajectory:
    """Return the trajectory with event rewards and `weight` times progress added to `turn_rewards`."""
    events, before = events_of(trajectory), trajectory.turn_rewards
    width = max(len(events), len(before))
    event_rewards = _padded([rewards.get(event, 0.0) for event in events], width)
    progress = _padded(trajectory.turn_progress, width)
    rows = zip(_padded(before, width), event_rewards, progress, strict=False)
    return replace(trajectory, turn_rewards=tuple(a + b + weight * share for a, b, share in rows))


def with_length(
    trajectories: Sequence[Trajectory], rewards: Tensor, settings: LengthConfig
) -> tuple[list[Trajectory], Tensor]:
    """Return the length-shaped rewards `[N]`, and the trajectories with the length part recorded."""
    if settings.kind == "none":
        return list(trajectories), rewards
    lengths = torch.tensor([t.num_action_tokens for t in trajectories])
    if settings.kind == "linear":
        part = length_linear(lengths=lengths, target=settings.target, lam=settings.lam, cap=settings.cap)
        exempt = {"all": None, "failures": rewards > 0, "successes": rewards <= 0}[settings.applies_to]
        if exempt is not None:
            part = part.masked_fill(exempt, 0.0)
        shaped = rewards + part
    else:
        ones = torch.ones_like(rewards)
        part = length_sigmoid(
            rewards=ones, lengths=lengths, target=settings.target, tau=settings.tau, floor=settings.floor
        )
        shaped = torch.where(rewards > 0, rewards * part, rewards)
    recorded = [
        replace(t, rewards={**t.rewards, LENGTH_PART: value})
        for t, value in zip(trajectories, part.tolist(), strict=True)
    ]
    return recorded, shaped


def shaping_ranges(settings: RewardsConfig, max_turns: int, outcome: float) -> list[ShapingRange]:
    """Return the ranges of length penalty and turn rewards; `outcome` is the maximum total outcome."""
    ranges = []
    if settings.length.kind == "linear":
        ranges.append(ShapingRange(LENGTH_PART, -settings.length.cap, 0.0))
    values = [0.0, *settings.turns.values()]
    if settings.turns:
        ranges.append(ShapingRange("turns", max_turns * min(values), max_turns * max(values)))
    if settings.turn_verifier_weight:
        weight = settings.turn_verifier_weight
        low = -weight * max_turns if settings.process.source == "search_gain" else 0.0
        ranges.append(ShapingRange("rewards.turn_verifier_weight", low, weight))
    if settings.length.kind == "sigmoid":
        floor = settings.length.floor
        ranges.append(ShapingRange(f"rewards.{LENGTH_PART}", (floor - 1) * outcome, 0.0, floor))
    return ranges


@dataclass(frozen=True, slots=True)
class EventRewards:
    """Event rewards from recorded attempts: turn counts and statistics per event.

    `scale` multiplies the correlations so that all turns of an attempt cannot outweigh the outcome.
    """

    counts: Mapping[str, int]
    found: TierCalibration
    scale: float

    @property
    def rewards(self) -> dict[str, float]:
        """The reward of each event that correlates with success or failure."""
        named = zip(self.counts, self.found.reward.tolist(), strict=True)
        return {name: reward for name, reward in named if reward != 0}


def calibrate(
    attempts: Sequence[tuple[Trajectory, bool]], max_turns: int, outcome: float, threshold: float
) -> EventRewards:
    """Compute event rewards from attempts and their success, arXiv:2604.02869 (`calibrate_tiers`).

    `outcome` is the reward of a success; the reward of an event is 0 unless the absolute value of its
    correlation with success is above `threshold`. Raises ValueError without attempts.
    """
    events = [events_of(trajectory) for trajectory, _ in attempts]
    counts = dict(sorted(Counter(event for row in events for event in row).items()))
    numbers = {event: number for number, event in enumerate(counts)}
    width = max(map(len, events)) or 1
    tiers = pad_table([[numbers[event] for event in row] for row in events], torch.int64, width, fill=-1)
    successes = torch.tensor([float(success) for _, success in attempts])
    calibration = calibrate_tiers(tiers=tiers, success=successes, num_tiers=len(counts), threshold=threshold)
    values = [0.0, *calibration.reward.tolist()]
    spread = max_turns * (max(values) - min(values))
    scale = min(1.0, _SAFE * outcome / spread) if spread else 1.0
    return EventRewards(counts, replace(calibration, reward=calibration.reward * scale), scale)


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
    samples = [sample for sample in assign_credit(played, algorithm) if sample.advantages]
    if not samples:
        return Alignment(rewards, {})
    trajectories = [sample.episode.trajectory for sample in samples]
    sequences = [events_of(trajectory) for trajectory in trajectories]
    names = sorted({event for events in sequences for event in events})
    advantages = pad_table([sample.advantages or () for sample in samples], torch.float64)
    turn = pad_table([turns_of_actions(trajectory) for trajectory in trajectories], torch.int64)
    lengths = torch.tensor([trajectory.num_action_tokens for trajectory in trajectories])
    means = tier_advantages(
        advantages=advantages,
        tiers=pad_table([[names.index(event) for event in events] for events in sequences], torch.int64, fill=-1),
        turn=turn,
        mask=torch.arange(turn.shape[1])[None, :] < lengths[:, None],
        num_tiers=len(names),
    )
    return Alignment(rewards, dict(zip(names, means.tolist(), strict=True)))


def align(groups: Sequence[Sequence[Episode]], rewards: Mapping[str, float], algorithm: Algorithm) -> list[Alignment]:
    """Remove misaligned rewards repeatedly; return all rounds, the last of which is aligned."""
    rounds = [measure(groups, rewards, algorithm)]
    while rounds[-1].misaligned:
        remaining = {e: reward for e, reward in rounds[-1].rewards.items() if e not in rounds[-1].misaligned}
        rounds.append(measure(groups, remaining, algorithm))
    return rounds


def calibration_algorithm(algorithm: Algorithm) -> Algorithm:
    """Return the run's algorithm if its advantage compares turns, otherwise `turn_return_hybrid`."""
    return algorithm if algorithm.advantage_spec.has(Need.TURN_REWARDS) else TURN_LEVEL
