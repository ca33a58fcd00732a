"""Rewards by comparison group: what advantages and filters share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class GroupedRewards:
    """Rewards with their groups. `K` groups are numbered by ascending id.

    `rewards` [N] float64; `index` [N] the group number of each row; `member` [K, N] bool; `equal` [K] bool,
    set where the rewards of a group differ by rounding at most (a group with one member is equal).
    """

    rewards: Tensor
    index: Tensor
    member: Tensor
    equal: Tensor

    @property
    def sizes(self) -> Tensor:
        """Members of each group, [K] float64."""
        return self.member.sum(1).double()

    def sum(self, values: Tensor) -> Tensor:
        """Sum of `values` [N] over each group, [K]."""
        return torch.where(self.member, values, 0.0).sum(1)

    def mean(self) -> Tensor:
        """Mean reward of each group, [K]."""
        return self.sum(self.rewards) / self.sizes

    def std(self, ddof: int) -> Tensor:
        """Standard deviation of each group's rewards, [K]; 0 for a group of one."""
        squares = self.sum((self.rewards - self.mean()[self.index]) ** 2)
        return (squares / (self.sizes - ddof).clamp(min=1)).sqrt()

    def minus(self, baseline: Tensor) -> Tensor:
        """`rewards` minus their group's `baseline` [K], [N]; exactly 0 in groups of equal rewards."""
        return torch.where(self.equal[self.index], 0.0, self.rewards - baseline[self.index])


def group_rewards(rewards: Tensor | Sequence[float], group: Tensor | Sequence[int]) -> GroupedRewards:
    """Group `rewards` [N] by the ids `group` [N] (any integers, in any order).

    Raises ValueError where a reward is not finite (naming the row) or the shapes do not fit.
    """
    given = torch.as_tensor(rewards, dtype=None if isinstance(rewards, Tensor) else torch.float64).detach()
    ids = torch.as_tensor(group, device=given.device)
    if given.ndim != 1 or ids.shape != given.shape:
        raise ValueError(f"rewards and group must be [N], not {list(given.shape)} and {list(ids.shape)}")
    if ids.is_floating_point():
        raise ValueError("group must hold integers")
    values = given.double()
    bad = (~values.isfinite()).nonzero()
    if bad.numel():
        row = int(bad[0])
        raise ValueError(f"rewards[{row}] is {float(values[row])}; rewards must be finite")
    unique, index = torch.unique(ids, return_inverse=True)
    member = index == torch.arange(len(unique), device=index.device)[:, None]
    return GroupedRewards(values, index, member, _equal(values, member, rounding(given.dtype)))


def rounding(dtype: torch.dtype) -> float:
    """The relative difference that rounding may leave between rewards of `dtype` that are meant as equal.

    64 units of float64, or 4 of float32. Neighbours among floats of 16 bits are far apart, and are meant as
    different: for them and for integers, whose sums are float64 here, float64's.
    """
    if dtype == torch.float32:
        return 4 * torch.finfo(torch.float32).eps
    return 64 * torch.finfo(torch.float64).eps


def _equal(rewards: Tensor, member: Tensor, noise: float) -> Tensor:
    if not rewards.numel():
        return member.new_zeros(member.shape[0])
    highest = torch.where(member, rewards, -torch.inf).amax(1)
    lowest = torch.where(member, rewards, torch.inf).amin(1)
    scale = torch.maximum(highest.abs(), lowest.abs()).clamp(min=1.0)
    return highest - lowest <= noise * scale
