"""Which trajectories train: pure functions that return a keep mask [N] bool.

A dropped trajectory leaves every normaliser (its mask is cleared), but stays in the statistics of its group.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from ludus.algorithms.grouping import GroupedRewards, group_rewards
from ludus.algorithms.masking import check_shapes, select


def zero_variance(*, rewards: Tensor | Sequence[float], group: Tensor | Sequence[int]) -> Tensor:
    """False for the groups whose rewards are all equal up to rounding (DAPO, arXiv:2503.14476).

    `rewards` [N], or [N, C] for several numbers of each row, `group` [N] integers. A group with one member is
    dropped. Raises ValueError for a reward that is not finite.
    """
    columns = _columns(rewards, group)
    varies = torch.stack([~one.equal for one in columns]).any(0)
    return varies[columns[0].index]


def variance_top(*, rewards: Tensor | Sequence[float], group: Tensor | Sequence[int], p: float) -> Tensor:
    """True for the share `p` of groups with the highest reward deviation (StarPO-S, arXiv:2504.20073).

    `rewards` [N], or [N, C], whose variances add up. Keeps `floor(p K)` of `K` groups, at least one; among
    equals, those with the smaller id.
    """
    _check_share(p)
    deviation, index = _deviations(rewards, group)
    best = torch.argsort(deviation, descending=True, stable=True)[: max(1, int(p * len(deviation) + 1e-9))]
    return torch.isin(index, best)


def variance_top_p(
    *, rewards: Tensor | Sequence[float], group: Tensor | Sequence[int], p: float = 0.9, slack: float = 0.01
) -> Tensor:
    """True for the groups of highest reward deviation that hold the share `p` of the sum of deviations.

    RAGEN-2's filter (arXiv:2604.06268, top-p, linear): groups of deviation 0 are dropped, the others are kept
    in descending order as long as the sum of those before is below `p total - slack`; with `p` 1 all of them
    are. May keep none. `rewards` as in `variance_top`.
    """
    _check_share(p)
    deviation, index = _deviations(rewards, group)
    order = torch.argsort(deviation, descending=True, stable=True)
    before = deviation[order].cumsum(0) - deviation[order]
    limit = torch.inf if p == 1 else p * float(deviation.sum()) - slack
    return torch.isin(index, order[(before < limit) & (deviation[order] > _NO_DEVIATION)])


_NO_DEVIATION = 1e-10


def _check_share(p: float) -> None:
    if not 0 < p <= 1:
        raise ValueError(f"p must be above 0 and at most 1, not {p}")


def _columns(rewards: Tensor | Sequence[float], group: Tensor | Sequence[int]) -> list[GroupedRewards]:
    """Each column of `rewards` by its groups; [N] is one column."""
    if isinstance(rewards, Tensor) and rewards.ndim == 2:
        return [group_rewards(column, group) for column in rewards.unbind(1)]
    return [group_rewards(rewards, group)]


def _deviations(rewards: Tensor | Sequence[float], group: Tensor | Sequence[int]) -> tuple[Tensor, Tensor]:
    """The reward deviation of each group, [K], and the group of each row, [N]."""
    columns = _columns(rewards, group)
    variances = [torch.where(one.equal, 0.0, one.std(ddof=1) ** 2) for one in columns]
    return torch.stack(variances).sum(0).sqrt(), columns[0].index


def overlong_mask(*, truncated: Tensor | Sequence[bool]) -> Tensor:
    """False for truncated trajectories (DAPO's overlong filtering, arXiv:2503.14476); `truncated` [N]."""
    return ~torch.as_tensor(truncated, dtype=torch.bool)


def entropy_bound(*, entropy: Tensor, mask: Tensor, bound: float = math.log(2)) -> Tensor:
    """True for trajectories whose mean entropy over action tokens is at most `bound` nats, [N].

    GTPO's filter (arXiv:2508.03772: ln 2, below which one token holds more than half of the
    probability; its code has 0.7). `entropy` and `mask` [N, L]. Without action tokens True.
    """
    return mean_entropy(entropy=entropy, mask=mask) <= bound


def mean_entropy(*, entropy: Tensor, mask: Tensor) -> Tensor:
    """The mean of `entropy` over each trajectory's action tokens, [N] from [N, L]; 0 without any."""
    check_shapes(mask, entropy=entropy)
    return select(entropy.detach(), mask).sum(1) / mask.bool().sum(1).clamp(min=1)


def rft(*, rewards: Sequence[float], keys: Sequence[Hashable], threshold: float = 0.5) -> Tensor:
    """True for the trajectories that rejection-sampling fine-tuning trains on with `losses.sft`, [N].

    Those whose reward passes `threshold`, the first of each set with equal `keys` (for example the task and
    the token ids of all actions). arXiv:2308.01825, which compares by the equations used. ValueError for
    unequal lengths.
    """
    seen: set[Hashable] = set()
    keep = []
    for reward, key in zip(rewards, keys, strict=True):
        fresh = reward > threshold and key not in seen
        if fresh:
            seen.add(key)
        keep.append(fresh)
    return torch.tensor(keep, dtype=torch.bool)
