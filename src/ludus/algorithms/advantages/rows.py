"""What every advantage does with its rows: check them, compare within groups, lay scores on action tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ludus.algorithms.grouping import GroupedRewards, group_rewards
from ludus.algorithms.masking import select


def groups_to_compare(rewards: Tensor, group: Tensor, mask: Tensor) -> GroupedRewards:
    """`rewards` [N] by `group` [N]. ValueError where a row is alone in its group, or does not fit `mask`."""
    grouped = group_rewards(rewards, group)
    check_rows(len(grouped.rewards), mask)
    alone = (grouped.sizes == 1)[grouped.index].nonzero()
    if alone.numel():
        row = int(alone[0])
        raise ValueError(f"row {row} is alone in its group {int(group[row])}: nothing to compare it with")
    return grouped


def check_rows(num_rows: int, mask: Tensor) -> None:
    """ValueError unless `mask` is [num_rows, L]."""
    if mask.ndim != 2 or mask.shape[0] != num_rows:
        raise ValueError(f"mask must be [{num_rows}, L], not {list(mask.shape)}")


def check_group(group: Tensor | None, mask: Tensor) -> None:
    """ValueError unless `group` is None or [N] integers: for the advantages that do not compare."""
    if group is None:
        return
    if group.shape != mask.shape[:1]:
        raise ValueError(f"group must be [{mask.shape[0]}], not {list(group.shape)}")
    if group.is_floating_point():
        raise ValueError("group must hold integers")


def numbers(name: str, values: Tensor, mask: Tensor) -> Tensor:
    """`values` [N] in float64, on the device of `mask`, without gradient.

    ValueError where they are not [N], or not finite (naming the row).
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
    """`values` [N, X] in float64 where `where` [N, X] is set, 0 elsewhere, without gradient.

    ValueError where the shapes differ, or a set position is not finite (naming the row).
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
    """`scores` [N] on every action token of its row, in `dtype`, [N, L]."""
    return select(scores.to(mask.device, dtype)[:, None].expand(mask.shape), mask)


def float_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The widest float type among the tensors; float32 where none is a float."""
    found = [t.dtype for t in tensors if t is not None and t.is_floating_point()]
    widest = found[0] if found else torch.float32
    for dtype in found[1:]:
        widest = torch.promote_types(widest, dtype)
    return widest
