"""Advantages of whole trajectories: one number for all action tokens, from the rewards of its group.

They compute in float64 and return the dtype of the rewards. All raise ValueError for a reward that is not
finite (naming the row), and for a group with one member where they compare within groups. A group of equal
rewards gets exactly 0, rounding noise notwithstanding.
"""

from __future__ import annotations

from math import comb
from typing import Literal

import torch
from torch import Tensor

from ludus.algorithms.advantages.rows import (
    check_group,
    check_rows,
    float_dtype,
    groups_to_compare,
    numbers,
    on_actions,
)
from ludus.algorithms.grouping import group_rewards, rounding
from ludus.algorithms.masking import check_shapes, select
from ludus.algorithms.spec.words import COUNTS, SPREADS

WHITEN_EPS = 1e-8


def grpo(
    *,
    rewards: Tensor,
    group: Tensor,
    mask: Tensor,
    ddof: int = 1,
    eps: float = 1e-6,
    std_floor: float = 0.0,
    std_over: Literal["group", "batch"] = "group",
) -> Tensor:
    """`(r - mean_g) / (std_g + eps)`, arXiv:2402.03300 (section 4.1.2).

    `std_over` `batch` divides by the deviation of all rewards given instead (arXiv:2508.08221; TRL's
    `scale_rewards="batch"`, with `eps` 1e-4), so that a group of small differences is not blown up.

    `ddof` 1 as in verl and TRL, 0 as in the paper and several tutorials. `std_floor` bounds `std_g` from
    below, so that a group of nearly equal rewards is not blown up.
    """
    grouped = groups_to_compare(rewards, group, mask)
    if std_over not in SPREADS:
        raise ValueError(f"std_over = {std_over!r} is neither 'group' nor 'batch'")
    spread = grouped if std_over == "group" else group_rewards(rewards, torch.zeros_like(group))
    scale = spread.std(ddof).clamp(min=std_floor) + eps
    return on_actions(grouped.minus(grouped.mean()) / scale[spread.index], mask, float_dtype(rewards))


def dr_grpo(*, rewards: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    """`r - mean_g`, arXiv:2503.20783 (Dr. GRPO)."""
    grouped = groups_to_compare(rewards, group, mask)
    return on_actions(grouped.minus(grouped.mean()), mask, float_dtype(rewards))


def gpg(*, rewards: Tensor, group: Tensor, mask: Tensor, counted: Literal["varying", "nonzero"] = "varying") -> Tensor:
    """`N / M (r - mean_g)`, arXiv:2504.02546 (GPG), its `F_norm` 1.

    `M` counts the rows whose group has rewards that differ, so that the groups which teach nothing do not
    shrink the batch's gradient; with `nonzero`, as verl has it, the rows whose reward is not 0. At least 1.
    """
    if counted not in COUNTS:
        raise ValueError(f"counted = {counted!r} is neither 'varying' nor 'nonzero'")
    grouped = groups_to_compare(rewards, group, mask)
    rows = ~grouped.equal[grouped.index] if counted == "varying" else grouped.rewards != 0
    factor = len(grouped.rewards) / max(int(rows.sum()), 1)
    return on_actions(factor * grouped.minus(grouped.mean()), mask, float_dtype(rewards))


def rloo(*, rewards: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    """`r - mean of the others in the group` = `G/(G-1) (r - mean_g)`, arXiv:2402.14740."""
    grouped = groups_to_compare(rewards, group, mask)
    factor = grouped.sizes / (grouped.sizes - 1)
    return on_actions(grouped.minus(grouped.mean()) * factor[grouped.index], mask, float_dtype(rewards))


def opo(*, rewards: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    """`r - sum_j n_j r_j / sum_j n_j` over the group, `n` the action tokens, arXiv:2505.23585."""
    grouped = groups_to_compare(rewards, group, mask)
    lengths = mask.bool().sum(1).double().to(grouped.rewards.device)
    baseline = grouped.sum(lengths * grouped.rewards) / grouped.sum(lengths).clamp(min=1)
    return on_actions(grouped.minus(baseline), mask, float_dtype(rewards))


def reinforce_pp_baseline(
    *, rewards: Tensor, group: Tensor, mask: Tensor, trains: Tensor | None = None, ddof: int = 1
) -> Tensor:
    """`r - mean_g`, whitened over the action tokens of the batch, arXiv:2501.03262 (REINFORCE++-baseline).

    `ddof` 1 as in verl, 0 as in OpenRLHF. `trains` as in `whiten`; the mean is over all members of a group.
    """
    grouped = groups_to_compare(rewards, group, mask)
    centred = grouped.minus(grouped.mean()).to(mask.device)[:, None].expand(mask.shape)
    return whiten(values=centred, mask=mask, trains=trains, ddof=ddof).to(float_dtype(rewards))


def raw(*, rewards: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    """`r` itself, no baseline (Williams 1992). The groups do not matter; equal rewards are not 0 here."""
    grouped = group_rewards(rewards, group)
    check_rows(len(grouped.rewards), mask)
    return on_actions(grouped.rewards, mask, float_dtype(rewards))


def whiten(*, values: Tensor, mask: Tensor, trains: Tensor | None = None, ddof: int = 1) -> Tensor:
    """`(x - mean) / sqrt(var + 1e-8)` on the masked positions of `values` [N, L], 0 elsewhere.

    Mean and variance are over those masked positions that are set in `trains` [N, L] as well (None: all):
    what a filter keeps from training is in neither. With no more than `ddof` of them the variance is 0.
    """
    trains = mask if trains is None else trains
    check_shapes(mask, values=values, trains=trains)
    counted = mask.bool() & trains.bool()
    count = counted.sum()
    kept = select(values, mask)
    centred = select(kept - select(kept, counted).sum() / count.clamp(min=1), mask)
    variance = select(centred, counted).square().sum() / (count - ddof).clamp(min=1)
    return centred / (variance + WHITEN_EPS).sqrt()


def remax(*, rewards: Tensor, greedy_rewards: Tensor, mask: Tensor, group: Tensor | None = None) -> Tensor:
    """`r - r(greedy)`, arXiv:2310.10505 (ReMax).

    `greedy_rewards` [N]: the reward of the greedy trajectory of each row's task. `group` is not read.
    """
    check_group(group, mask)
    scores = numbers("rewards", rewards, mask) - numbers("greedy_rewards", greedy_rewards, mask)
    return on_actions(scores, mask, float_dtype(rewards))


def maxrl(*, rewards: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    """`(r - mean_g) / mean_g`, 0 where the mean is not positive, arXiv:2602.02710 (MaxRL).

    With rewards 0 and 1 this weighs hard tasks up: `1/p - 1` for a success, `-1` for a failure. A mean that
    is positive by rounding alone counts as not positive.
    """
    grouped = groups_to_compare(rewards, group, mask)
    mean = grouped.mean()
    largest = torch.where(grouped.member, grouped.rewards.abs(), 0.0).amax(1) if mean.numel() else mean
    positive = mean > rounding(rewards.dtype) * largest
    scale = torch.where(positive, 1 / torch.where(positive, mean, 1.0), 0.0)
    return on_actions(grouped.minus(mean) * scale[grouped.index], mask, float_dtype(rewards))


def best_of_group(*, rewards: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    """`max - second max` to the best of the group, 0 to the others, arXiv:2503.19595 (best-of-k objective).

    Two members that share the maximum leave nothing to give.
    """
    grouped = groups_to_compare(rewards, group, mask)
    if not grouped.rewards.numel():
        return on_actions(grouped.rewards, mask, float_dtype(rewards))
    first, second = torch.where(grouped.member, grouped.rewards, -torch.inf).topk(2, dim=1).values.unbind(1)
    gain = torch.where(grouped.equal, 0.0, first - second)[grouped.index]
    best = grouped.rewards == first[grouped.index]
    return on_actions(torch.where(best, gain, 0.0), mask, float_dtype(rewards))


def pass_at_k(*, rewards: Tensor, group: Tensor, mask: Tensor, k: int) -> Tensor:
    """The analytic advantage of pass@k for rewards 0 and 1, arXiv:2508.10751 (Pass@k Training).

    With `R = 1 - C(G_neg, k) / C(G, k)`, `s = sqrt(R (1 - R))`: successes get `(1 - R) / s`, failures
    `(1 - R - C(G_neg - 1, k - 1) / C(G - 1, k - 1)) / s`, all 0 where `s = 0`. `k` 1 is `grpo` with `ddof` 0
    and no eps. ValueError for another reward (naming the row), and for `k` outside [1, G].
    """
    grouped = groups_to_compare(rewards, group, mask)
    odd = ((grouped.rewards != 0) & (grouped.rewards != 1)).nonzero()
    if odd.numel():
        row = int(odd[0])
        raise ValueError(f"rewards[{row}] is {float(grouped.rewards[row])}; pass_at_k needs 0 or 1")
    sizes = [int(size) for size in grouped.sizes.tolist()]
    if sizes and not 1 <= k <= min(sizes):
        raise ValueError(f"k must be in [1, {min(sizes)}], the size of the smallest group, not {k}")
    failures = [int(size - won) for size, won in zip(sizes, grouped.sum(grouped.rewards).tolist(), strict=True)]
    pairs = [_pass_at_k_pair(size, failed, k) for size, failed in zip(sizes, failures, strict=True)]
    table = torch.tensor(pairs, dtype=torch.float64, device=grouped.rewards.device).reshape(-1, 2)
    won = grouped.rewards == 1
    scores = torch.where(won, table[:, 0][grouped.index], table[:, 1][grouped.index])
    return on_actions(scores, mask, float_dtype(rewards))


def _pass_at_k_pair(size: int, failed: int, k: int) -> tuple[float, float]:
    """The advantage of a success and of a failure, in a group of `size` with `failed` failures."""
    lost = comb(failed, k) / comb(size, k)
    scale = (lost * (1 - lost)) ** 0.5
    if scale == 0:
        return 0.0, 0.0
    return lost / scale, (lost - comb(failed - 1, k - 1) / comb(size - 1, k - 1)) / scale


def role_groups(*, group: Tensor, proposer: Tensor, proposer_group: Tensor | None = None) -> Tensor:
    """Comparison groups [N] for self-play with proposed tasks: solvers and proposers never share one.

    `group` [N]: the proposed task that a solver works on; `proposer` [N] bool. Solvers are compared within
    one proposed task, proposers across proposals: all of the batch together, or by `proposer_group` [N]
    (read on proposers alone). The ids that come back are fresh; any advantage that takes a `group` takes
    them.
    """
    check_group(group, proposer[:, None])
    check_group(proposer_group, proposer[:, None])
    is_proposer = proposer.bool()
    across = torch.zeros_like(group) if proposer_group is None else proposer_group.to(group.device)
    pairs = torch.stack([is_proposer.to(group.dtype), torch.where(is_proposer, across, group)], 1)
    ids: Tensor = torch.unique(pairs, dim=0, return_inverse=True)[1]
    return ids.reshape(group.shape)


def hierarchical(
    *,
    rewards: Tensor,
    group: Tensor,
    proposer: Tensor,
    mask: Tensor,
    proposer_group: Tensor | None = None,
    ddof: int = 1,
) -> Tensor:
    """`grpo` within the groups of `role_groups`: solvers within a proposed task, proposers across proposals.

    Proposer and solver as in arXiv:2505.03335 (Absolute Zero), whose baselines are per task and role. For
    another advantage than `grpo` pass it the ids of `role_groups`.
    """
    if proposer.shape != mask.shape[:1]:
        raise ValueError(f"proposer must be [{mask.shape[0]}], not {list(proposer.shape)}")
    groups = role_groups(group=group, proposer=proposer, proposer_group=proposer_group)
    return grpo(rewards=rewards, group=groups, mask=mask, ddof=ddof)
