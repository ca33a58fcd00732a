"""Targets of the turns of a process reward model, as means over the rollouts that share a prefix.

Two rollouts share a prefix if their tokens are equal: the tokens are the task, the history, the observation and the
action, as the model reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from ludus.rewards.base import Reward, success
from ludus.rollouts.rollout_files import RolloutRecord
from ludus.training.value_models.reward_model import RewardExample, ScoredSequence, action_ends
from ludus.types import Trajectory

Prefix = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TurnLabels:
    """A kind of targets (`reward_model.labels`) of the turns `t = 0 .. T-1` of rollouts with success `s`, 0 or 1.

    `return`: mean of `discount^(T-1-t) s` over the rollouts through the turn. `agent_prm` (arXiv:2502.10325):
    `(1 + Q)/2` with Q the mean of `discount^(T-1-t) (2s - 1)`; the authors' code has the exponent t, by which an early
    turn of a success is worth more than the last one. `counterfactual`: `(1 + V_after - V_before)/2` with V the success
    rate of the rollouts through the turn, and of those through the state before it: the gain that `ludus probe
    counterfactuals` measures (Monte Carlo values, as in VinePPO, arXiv:2410.01679).
    """

    kind: Literal["return", "agent_prm", "counterfactual"] = "return"
    discount: float = 1.0

    def pool(self, attempts: Iterable[tuple[Trajectory, float]]) -> PooledLabels:
        """Return the targets from linear rollouts and their successes."""
        found: dict[Prefix, list[float]] = {}
        for attempt, solved in attempts:
            ends = action_ends(attempt)
            for turn, (start, end) in enumerate(zip(_action_starts(attempt), ends, strict=True)):
                found.setdefault(attempt.token_ids[: end + 1], []).append(self._value(solved, len(ends) - 1 - turn))
                if self.kind == "counterfactual":
                    found.setdefault(attempt.token_ids[:start], []).append(solved)
        return PooledLabels(self, {prefix: fmean(values) for prefix, values in found.items()})

    def _value(self, solved: float, turns_left: int) -> float:
        if self.kind == "counterfactual":
            return solved
        scale = self.discount**turns_left
        return scale * solved if self.kind == "return" else (1 + scale * (2 * solved - 1)) / 2


@dataclass(frozen=True)
class PooledLabels:
    """Mean values of the prefixes of rollouts."""

    labels: TurnLabels
    means: Mapping[Prefix, float]

    def targets(self, attempt: Trajectory) -> tuple[float, ...]:
        """Return the target of each turn of one of the pooled rollouts."""
        tokens, ends = attempt.token_ids, action_ends(attempt)
        after = [self.means[tokens[: end + 1]] for end in ends]
        if self.labels.kind != "counterfactual":
            return tuple(after)
        before = [self.means[tokens[:start]] for start in _action_starts(attempt)]
        return tuple((1 + later - earlier) / 2 for later, earlier in zip(after, before, strict=True))


def _action_starts(attempt: Trajectory) -> tuple[int, ...]:
    """Return the position of the first action token of each turn of a linear trajectory."""
    starts: dict[int, int] = {}
    for place, (turn, action) in enumerate(zip(attempt.turn_index, attempt.action_mask, strict=True)):
        if action:
            starts.setdefault(turn, place)
    return tuple(starts.values())


def examples_of_rollouts(
    records: Sequence[tuple[str, RolloutRecord]],
    rewards: Sequence[Reward],
    labels: TurnLabels | None,
    further: Sequence[Trajectory] = (),
) -> list[RewardExample]:
    """Return one example per named rollout.

    Without `labels` the target of the last action is the success, 1 or 0. With them every turn has a target.
    `further` rollouts only contribute to the means of the targets.
    """
    attempts = [record.trajectory for _, record in records]
    values = None if labels is None else labels.pool([(t, float(success(rewards, t))) for t in (*attempts, *further)])
    examples = []
    for (source, _), attempt in zip(records, attempts, strict=True):
        at, targets = action_ends(attempt), () if values is None else values.targets(attempt)
        if values is None:
            at, targets = at[-1:], (float(success(rewards, attempt)),)
        examples.append(turn_example(source, attempt, at, targets))
    return examples


def turn_example(source: str, attempt: Trajectory, at: tuple[int, ...], targets: tuple[float, ...]) -> RewardExample:
    """Return an example of a linear attempt with targets at some positions."""
    sequence = ScoredSequence(attempt.token_ids, at, targets)
    return RewardExample(source, attempt.action_mask.index(True), (sequence,))
