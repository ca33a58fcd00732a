"""Rewards by comparison group, and the checks of rows that advantages, filters and reward shaping share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ludus.algorithms.tensors import Tensor, select, torch


@dataclass(frozen=True, slots=True)
class GroupedRewards:
    """Rewards with their groups. `K` groups are numbered by ascending id.

    `rewards` [N] float64; `index` [N] the group number of each row; `member` [K, N] bool; `equal` [K] bool,
    set if the rewards of a group differ by rounding at most (a group with one member is equal).
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
        """Return sum of `values` [N] over each group, [K]."""
        return torch.where(self.member, values, 0.0).sum(1)

    def mean(self) -> Tensor:
        """Return mean reward of each group, [K]."""
        return self.sum(self.rewards) / self.sizes

    def std(self, ddof: int) -> Tensor:
        """Return standard deviation of each group's rewards, [K]; 0 for a group of one."""
        squares = self.sum((self.rewards - self.mean()[self.index]) ** 2)
        return (squares / (self.sizes - ddof).clamp(min=1)).sqrt()

    def minus(self, baseline: Tensor) -> Tensor:
        """Return `rewards` minus their group's `baseline` [K], [N]; exactly 0 in groups of equal rewards."""
        return torch.where(self.equal[self.index], 0.0, self.rewards - baseline[self.index])


def group_rewards(rewards: Tensor | Sequence[float], group: Tensor | Sequence[int]) -> GroupedRewards:
    """Group `rewards` [N] by the ids `group` [N] (any integers, in any order).

    Raises ValueError if a reward is not finite (naming the row) or the shapes do not fit.
    """
    given = torch.as_tensor(rewards, dtype=None if isinstance(rewards, torch.Tensor) else torch.float64).detach()
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
    """Return the relative difference that rounding may leave between rewards of `dtype` that are meant as equal.

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


def groups_to_compare(rewards: Tensor, group: Tensor, mask: Tensor) -> GroupedRewards:
    """Return `rewards` [N] by `group` [N]. Raises ValueError if a row is alone in its group, or does not fit `mask`."""
    grouped = group_rewards(rewards, group)
    check_rows(len(grouped.rewards), mask)
    alone = (grouped.sizes == 1)[grouped.index].nonzero()
    if alone.numel():
        row = int(alone[0])
        raise ValueError(f"row {row} is alone in its group {int(group[row])}: nothing to compare it with")
    return grouped


def check_rows(num_rows: int, mask: Tensor) -> None:
    """Raise ValueError unless `mask` is [num_rows, L]."""
    if mask.ndim != 2 or mask.shape[0] != num_rows:
        raise ValueError(f"mask must be [{num_rows}, L], not {list(mask.shape)}")


def check_group(group: Tensor | None, mask: Tensor) -> None:
    """Raise ValueError unless `group` is None or [N] integers: for the advantages that do not compare."""
    if group is None:
        return
    if group.shape != mask.shape[:1]:
        raise ValueError(f"group must be [{mask.shape[0]}], not {list(group.shape)}")
    if group.is_floating_point():
        raise ValueError("group must hold integers")


def numbers(name: str, values: Tensor, mask: Tensor) -> Tensor:
    """Return `values` [N] in float64, on the device of `mask`, without gradient.

    Raises ValueError if they are not [N], or not finite (naming the row).
    """
    if values.shape != mask.shape[:1]:
        raise ValueError(f"{name} must be [{mask.shape[0]}], not {list(values.shape)}")
    found = values.detach().to(mask.device).double()
    bad = (~found.isfinite()).nonzero()
    if bad.numel():
        row = int(bad[0])
        raise ValueError(f"{name}[{row}] is {float(found[row])}; {name} must be finite")
    return found


def cells(name: str, values: Tensor, where: Tensor) -> Tensor:
    """Return `values` [N, X] in float64 where `where` [N, X] is set, 0 elsewhere, without gradient.

    Raises ValueError if the shapes differ, or a set position is not finite (naming the row).
    """
    if values.shape != where.shape:
        raise ValueError(f"{name} must be {list(where.shape)}, not {list(values.shape)}")
    found = select(values.detach().to(where.device).double(), where)
    bad = (~found.isfinite()).nonzero()
    if bad.numel():
        row, column = bad[0].tolist()
        raise ValueError(f"{name}[{row}, {column}] is {float(found[row, column])}; {name} must be finite")
    return found


def on_actions(scores: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `scores` [N] on every action token of its row, in `dtype`, [N, L]."""
    return select(scores.to(mask.device, dtype)[:, None].expand(mask.shape), mask)


def float_dtype(*tensors: Tensor | None) -> torch.dtype:
    """Return the widest float type among the tensors; float32 if none is a float."""
    found = [t.dtype for t in tensors if t is not None and t.is_floating_point()]
    widest = found[0] if found else torch.float32
    for dtype in found[1:]:
        widest = torch.promote_types(widest, dtype)
    return widest
