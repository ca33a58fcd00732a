"""Reward shaping: length penalties, caps, and aggregation of several rewards.

All tensors are [N] unless a docstring names another shape; no function has a gradient. Lengths are numbers of action
tokens. Non-finite rewards and lengths propagate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ludus.algorithms.tensors import Tensor, group_rewards, torch
from ludus.errors import ConfigError

_FITS = 0.9
"""Share of the outcome gap that shaping may reach with the proposed settings of an error message."""


def soft_overlong(*, lengths: Tensor, max_length: int, cache: int) -> Tensor:
    """Return 0 up to `max_length - cache` tokens, then linear to -1 at `max_length`, -1 beyond, float64.

    DAPO's soft overlong punishment (arXiv:2503.14476; 20480 and 4096 there), added to the reward.
    """
    if not 0 < cache <= max_length:
        raise ValueError(f"cache must be above 0 and at most max_length = {max_length}, not {cache}")
    return ((max_length - cache - lengths.double()) / cache).clamp(-1.0, 0.0)


def length_linear(*, lengths: Tensor, target: float, lam: float, cap: float | None = None) -> Tensor:
    """Return `-lam max(0, T - target)`, bounded below by `-cap` if set, float64; added to the reward."""
    if lam < 0 or (cap is not None and cap < 0):
        raise ValueError(f"lam and cap must not be negative: {lam}, {cap}")
    penalty = -lam * (lengths.double() - target).clamp(min=0.0)
    return penalty if cap is None else penalty.clamp(min=-cap)


def length_sigmoid(*, rewards: Tensor, lengths: Tensor, target: float, tau: float, floor: float = 0.0) -> Tensor:
    """Return `r (floor + (1 - floor) sigmoid(-(T - target) / tau))`: the reward decays with length.

    After arXiv:2502.04463 (Arora and Zanette), which uses the length normalised within the group and has no
    floor. Negative rewards decay too, so use it on non-negative rewards.
    """
    if tau <= 0 or not 0 <= floor <= 1:
        raise ValueError(f"tau must be above 0 and floor from 0 to 1: {tau}, {floor}")
    _check_rows(rewards, lengths=lengths)
    faded = torch.sigmoid(-(lengths.double() - target) / tau)
    return rewards * (floor + (1 - floor) * faded).to(rewards.dtype)


@dataclass(frozen=True, slots=True)
class ShapingRange:
    """Range of the weighted contribution of one shaping term to a reward, from `low` to `high`.

    `floor`: the minimum factor of a term that multiplies the reward.
    """

    name: str
    low: float
    high: float
    floor: float | None = None


def check_shaping(*, outcome_gap: float, terms: Sequence[ShapingRange]) -> None:
    """Raise ConfigError if shaping could raise the reward of a failure to that of a success.

    `outcome_gap` is the smallest weighted difference of the outcome reward between a success and a failure. All
    terms together must change a reward by less than that: `sum (high - low) < outcome_gap`.
    """
    for term in terms:
        if not term.low <= term.high:
            raise ConfigError(
                f"The shaping {term.name} runs from {term.low} to {term.high}.", "Set low <= high, both finite."
            )
    spread = sum(term.high - term.low for term in terms)
    if not spread < outcome_gap:
        raise ConfigError(
            f"Shaping ({', '.join(term.name for term in terms)}) can move a reward by {spread:g}, the outcome"
            f" by {outcome_gap:g}: a failure could earn as much as a success.",
            _numbers_that_fit(_FITS * outcome_gap, terms),
        )


def _numbers_that_fit(room: float, terms: Sequence[ShapingRange]) -> str:
    """Return a hint with settings that reduce the spread of all terms to `room`: by floors only if that suffices, else
    by weights, caps and floors together.
    """
    scale = room / sum(term.high - term.low for term in terms)
    fading = sum(term.high - term.low for term in terms if term.floor is not None)
    left = room - sum(term.high - term.low for term in terms if term.floor is None)
    shrink = left / fading if fading and left > 0 else scale
    floors = [
        f"{term.name}.floor = {math.ceil(1000 * (1 - (1 - term.floor) * shrink)) / 1000:g}"
        for term in terms
        if term.floor is not None
    ]
    if floors and left > 0:
        return f"Set {' and '.join(floors)}."
    advice = f"Multiply the weights or caps of the shaping by {scale:.2g}"
    if floors:
        return f"{advice} and set {' and '.join(floors)}."
    return f"{advice}, or the weight of the outcome by {1 / scale:.2g}."


def weighted_sum(*, parts: Tensor, weights: Sequence[float]) -> Tensor:
    """Return `sum_k w_k parts[:, k]`, [N] from `parts` [N, K]; parts of weight 0 are ignored, also if NaN."""
    _check_parts(parts, len(weights))
    total = torch.zeros_like(parts[:, 0])
    for k, weight in enumerate(weights):
        if weight != 0:
            total = total + weight * parts[:, k]
    return total


def gated(*, gate: Tensor, rewards: Tensor, threshold: float = 0.0, closed: float = 0.0) -> Tensor:
    """Return `rewards` where `gate > threshold`, else `closed`."""
    _check_rows(gate, rewards=rewards)
    return torch.where(gate > threshold, rewards, torch.full_like(rewards, closed))


def pareto_ranks(*, parts: Tensor, group: Tensor) -> Tensor:
    """Return the Pareto front of each member within its group, [N] int64: 0 for non-dominated members.

    One member dominates another if it is at least as good in every part and better in one. Front `f` holds
    the non-dominated members after removal of the previous fronts (non-dominated sorting, NSGA-II, Deb et al.
    2002). `parts` [N, K], larger is better. Raises ValueError for non-finite values.
    """
    beats = _domination(parts, group)
    ranks = torch.full(group.shape, -1, dtype=torch.long, device=parts.device)
    front = 0
    while bool((left := ranks < 0).any()):
        ranks = torch.where(left & ~(beats & left[:, None]).any(0), front, ranks)
        front += 1
    return ranks


def pareto(*, parts: Tensor, group: Tensor) -> Tensor:
    """Return `1 - rank / (number of fronts in the group)`, [N] float64: 1 for the first front, above 0 for the last.

    A member scores higher than all members that it dominates; parts have no weights. A group with one front has
    equal rewards. `parts` [N, K], `group` [N] integers.
    """
    ranks = pareto_ranks(parts=parts, group=group)
    index = torch.unique(group, return_inverse=True)[1]
    fronts = torch.zeros(int(index.max()) + 1 if index.numel() else 0, dtype=torch.long, device=ranks.device)
    fronts = fronts.scatter_reduce(0, index, ranks + 1, "amax")
    return 1 - ranks.double() / fronts[index]


GDPO_EPS = 1e-4
"""Added to the standard deviations of `gdpo`, as in TRL."""


def gdpo(*, parts: Tensor, weights: Sequence[float], group: Tensor) -> Tensor:
    """Return `sum_k w_k (x_k - mean_g(x_k)) / (std_g(x_k) + 1e-4)`, [N] float64: the group stage of GDPO.

    arXiv:2601.05242, as TRL's `multi_objective_aggregation="normalize_then_sum"` (`ddof` 1). Parts of weight 0 are
    ignored; a part that is equal within a group adds exactly 0. `parts` [N, K], `group` [N] integers. `gdpo_batch` is
    the second stage.
    """
    _check_parts(parts, len(weights))
    total = torch.zeros(len(parts), dtype=torch.float64, device=parts.device)
    for k, weight in enumerate(weights):
        if weight != 0:
            grouped = group_rewards(parts[:, k], group)
            scale = (grouped.std(1) + GDPO_EPS)[grouped.index]
            total = total + weight * grouped.subtract(grouped.mean()) / scale
    return total


def gdpo_batch(rewards: Tensor) -> Tensor:
    """Return `(r - mean) / (std + 1e-4)` over all rows of a batch, [N] float64 (`ddof` 1): the batch stage of GDPO.

    Exactly 0 for equal rewards, and for a single row.
    """
    grouped = group_rewards(rewards, torch.zeros(len(rewards), dtype=torch.long))
    return grouped.subtract(grouped.mean()) / (grouped.std(1) + GDPO_EPS)[grouped.index]


@dataclass(frozen=True, slots=True)
class LagrangeMultiplier:
    """Multiplier `lambda` of a constraint on the mean cost, updated by dual ascent on its logarithm.

    As in Safe-RLHF's PPO-Lag (arXiv:2310.12773 and the authors' code): the gradient of `lambda (cost -
    limit)` with respect to `log(lambda)` has the factor `lambda`.
    """

    log_value: float

    @property
    def value(self) -> float:
        return math.exp(self.log_value)

    def updated(self, *, cost: float, limit: float, learning_rate: float, largest: float) -> LagrangeMultiplier:
        """Return the multiplier after a step with this mean cost, at most `largest`."""
        raised = self.log_value + learning_rate * self.value * (cost - limit)
        return LagrangeMultiplier(min(raised, math.log(largest)))

    def penalise(self, *, rewards: Tensor, costs: Tensor) -> Tensor:
        """Return `(rewards - lambda costs) / (1 + lambda)`, [N]."""
        _check_rows(rewards, costs=costs)
        return (rewards - self.value * costs) / (1 + self.value)


def dominance_violations(*, parts: Tensor, rewards: Tensor, group: Tensor) -> list[tuple[int, int]]:
    """Return pairs `(better, worse)` of rows in which the better dominates the worse without a higher reward.

    Checks a composite reward: empty if `rewards` [N] respect `parts` [N, K] within each group.
    """
    _check_rows(rewards, group=group)
    bad = _domination(parts, group) & ~(rewards[:, None] > rewards[None, :])
    return [(int(i), int(j)) for i, j in bad.nonzero().tolist()]


def _domination(parts: Tensor, group: Tensor) -> Tensor:
    """Return [N, N] bool, True if row i dominates row j of the same group."""
    _check_parts(parts, None)
    for k in range(parts.shape[1]):
        group_rewards(parts[:, k], group)  # raises for non-finite values and wrong shapes
    first, second = parts[:, None, :], parts[None, :, :]
    same = group[:, None] == group[None, :]
    return same & (first >= second).all(2) & (first > second).any(2)


def _check_parts(parts: Tensor, num: int | None) -> None:
    if parts.ndim != 2 or parts.shape[1] < 1 or (num is not None and parts.shape[1] != num):
        raise ValueError(f"parts must be [N, {'K' if num is None else num}], not {list(parts.shape)}")


def _check_rows(reference: Tensor, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if reference.ndim != 1 or tensor.shape != reference.shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, not {list(reference.shape)}")
