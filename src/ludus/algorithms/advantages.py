"""Advantages: from the rewards of a whole batch to one number per action token.

Every function takes `rewards` [N], `group` [N] integers, `mask` [N, L] by keyword and returns [N, L] in the
dtype of the rewards: the trajectory's advantage on its action tokens, 0 elsewhere. They compute in float64.
All raise ValueError for a reward that is not finite (naming the row), and for a group with one member where
they compare within groups. A group of equal rewards gets exactly 0, rounding noise notwithstanding.

To add one: write the function, and its line in `ADVANTAGES`, which says where its arguments come from.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ludus.algorithms.batch import Outcomes
from ludus.algorithms.grouping import GroupedRewards, group_rewards
from ludus.algorithms.masking import check_shapes, select
from ludus.algorithms.presets import Algorithm

WHITEN_EPS = 1e-8


def grpo(
    *,
    rewards: Tensor,
    group: Tensor,
    mask: Tensor,
    ddof: int = 1,
    eps: float = 1e-6,
    std_floor: float = 0.0,
) -> Tensor:
    """`(r - mean_g) / (std_g + eps)`, arXiv:2402.03300 (section 4.1.2).

    `ddof` 1 as in verl and TRL, 0 as in the paper and several tutorials. `std_floor` bounds `std_g` from
    below, so that a group of nearly equal rewards is not blown up.
    """
    grouped = _groups_to_compare(rewards, group, mask)
    scale = grouped.std(ddof).clamp(min=std_floor) + eps
    return _on_actions(grouped.minus(grouped.mean()) / scale[grouped.index], rewards, mask)


def dr_grpo(*, rewards: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    """`r - mean_g`, arXiv:2503.20783 (Dr. GRPO)."""
    grouped = _groups_to_compare(rewards, group, mask)
    return _on_actions(grouped.minus(grouped.mean()), rewards, mask)


def rloo(*, rewards: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    """`r - mean of the others in the group` = `G/(G-1) (r - mean_g)`, arXiv:2402.14740."""
    grouped = _groups_to_compare(rewards, group, mask)
    factor = grouped.sizes / (grouped.sizes - 1)
    return _on_actions(grouped.minus(grouped.mean()) * factor[grouped.index], rewards, mask)


def opo(*, rewards: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    """`r - sum_j n_j r_j / sum_j n_j` over the group, `n` the action tokens, arXiv:2505.23585."""
    grouped = _groups_to_compare(rewards, group, mask)
    lengths = mask.bool().sum(1).double().to(grouped.rewards.device)
    baseline = grouped.sum(lengths * grouped.rewards) / grouped.sum(lengths).clamp(min=1)
    return _on_actions(grouped.minus(baseline), rewards, mask)


def reinforce_pp_baseline(*, rewards: Tensor, group: Tensor, mask: Tensor, ddof: int = 1) -> Tensor:
    """`r - mean_g`, whitened over the action tokens of the batch, arXiv:2501.03262 (REINFORCE++-baseline).

    `ddof` 1 as in verl, 0 as in OpenRLHF.
    """
    grouped = _groups_to_compare(rewards, group, mask)
    centred = grouped.minus(grouped.mean()).to(mask.device)
    return whiten(values=centred[:, None].expand(mask.shape), mask=mask, ddof=ddof).to(_float_dtype(rewards))


def raw(*, rewards: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    """`r` itself, no baseline (Williams 1992). The groups do not matter; equal rewards are not 0 here."""
    grouped = group_rewards(rewards, group)
    _check_rows(grouped, mask)
    return _on_actions(grouped.rewards, rewards, mask)


def whiten(*, values: Tensor, mask: Tensor, ddof: int = 1) -> Tensor:
    """`(x - mean) / sqrt(var + 1e-8)` over the masked positions of `values` [N, L] alone, 0 elsewhere.

    With no more than `ddof` positions set the variance counts as 0.
    """
    check_shapes(mask, values=values)
    count = mask.bool().sum()
    kept = select(values, mask)
    centred = select(kept - kept.sum() / count.clamp(min=1), mask)
    variance = centred.square().sum() / (count - ddof).clamp(min=1)
    return centred / (variance + WHITEN_EPS).sqrt()


def _groups_to_compare(rewards: Tensor, group: Tensor, mask: Tensor) -> GroupedRewards:
    grouped = group_rewards(rewards, group)
    _check_rows(grouped, mask)
    alone = (grouped.sizes == 1)[grouped.index].nonzero()
    if alone.numel():
        row = int(alone[0])
        raise ValueError(f"row {row} is alone in its group {int(group[row])}: nothing to compare it with")
    return grouped


def _check_rows(grouped: GroupedRewards, mask: Tensor) -> None:
    if mask.ndim != 2 or mask.shape[0] != grouped.rewards.shape[0]:
        raise ValueError(f"mask must be [{grouped.rewards.shape[0]}, L], not {list(mask.shape)}")


def _on_actions(scores: Tensor, rewards: Tensor, mask: Tensor) -> Tensor:
    """`scores` [N] on every action token of its row, in the dtype of the rewards."""
    return select(scores.to(mask.device, _float_dtype(rewards))[:, None].expand(mask.shape), mask)


def _float_dtype(rewards: Tensor) -> torch.dtype:
    return rewards.dtype if rewards.is_floating_point() else torch.float32


AdvantageFn = Callable[[Outcomes, Algorithm], Tensor]

ADVANTAGES: dict[str, AdvantageFn] = {
    "grpo": lambda o, a: grpo(rewards=o.rewards, group=o.group, mask=o.mask, ddof=a.std_ddof),
    "dr_grpo": lambda o, a: dr_grpo(rewards=o.rewards, group=o.group, mask=o.mask),
    "rloo": lambda o, a: rloo(rewards=o.rewards, group=o.group, mask=o.mask),
    "opo": lambda o, a: opo(rewards=o.rewards, group=o.group, mask=o.mask),
    "reinforce_pp_baseline": lambda o, a: reinforce_pp_baseline(
        rewards=o.rewards, group=o.group, mask=o.mask, ddof=a.std_ddof
    ),
    "raw": lambda o, a: raw(rewards=o.rewards, group=o.group, mask=o.mask),
}
