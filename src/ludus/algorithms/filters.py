"""Filters: pure functions that return a keep mask [N] bool over trajectories, and task skipping (GRESO).

A dropped trajectory leaves every normaliser (its mask is cleared), but not its group statistics. GRESO
(arXiv:2506.02177) skips a task before its rollout if the groups of its last visits had equal rewards; each draw depends
on the seed, the step and the task only, so that a resumed run skips the same tasks.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ludus.algorithms.tensors import GroupedRewards, Tensor, check_shapes, check_share, group_rewards, select, torch
from ludus.config.sections.curriculum import GresoConfig


def zero_variance(*, rewards: Tensor | Sequence[float], group: Tensor | Sequence[int]) -> Tensor:
    """Return False for the groups whose rewards are all equal up to rounding (DAPO, arXiv:2503.14476).

    `rewards` [N], or [N, C] for several numbers of each row, `group` [N] integers. A group with one member is
    dropped. Raises ValueError for a reward that is not finite.
    """
    columns = _columns(rewards, group)
    varies = torch.stack([~one.equal for one in columns]).any(0)
    return varies[columns[0].index]


def variance_top(*, rewards: Tensor | Sequence[float], group: Tensor | Sequence[int], p: float) -> Tensor:
    """Return True for the share `p` of groups with the highest reward deviation (StarPO-S, arXiv:2504.20073).

    `rewards` [N], or [N, C], whose variances add up. Keeps `floor(p K)` of `K` groups, at least one; ties go
    to the smaller id.
    """
    check_share("p", p)
    deviation, index = _deviations(rewards, group)
    best = torch.argsort(deviation, descending=True, stable=True)[: max(1, int(p * len(deviation) + 1e-9))]
    return torch.isin(index, best)


def variance_top_p(
    *, rewards: Tensor | Sequence[float], group: Tensor | Sequence[int], p: float = 0.9, slack: float = 0.01
) -> Tensor:
    """Return True for the groups of highest reward deviation that cover the share `p` of the sum of deviations.

    RAGEN-2's filter (arXiv:2604.06268, top-p, linear): groups of deviation 0 are dropped, the others are kept in
    descending order while the cumulative sum before them is below `p total - slack` (with `p` 1: all of
    them). The result may be empty. `rewards` as in `variance_top`.
    """
    check_share("p", p)
    deviation, index = _deviations(rewards, group)
    order = torch.argsort(deviation, descending=True, stable=True)
    before = deviation[order].cumsum(0) - deviation[order]
    limit = torch.inf if p == 1 else p * float(deviation.sum()) - slack
    return torch.isin(index, order[(before < limit) & (deviation[order] > _NO_DEVIATION)])


_NO_DEVIATION = 1e-10
AUTHORS_GRESO = GresoConfig()
"""The constants of the authors' code."""


def _columns(rewards: Tensor | Sequence[float], group: Tensor | Sequence[int]) -> list[GroupedRewards]:
    """Return each column of `rewards` by its groups; [N] is one column."""
    if isinstance(rewards, torch.Tensor) and rewards.ndim == 2:
        return [group_rewards(column, group) for column in rewards.unbind(1)]
    return [group_rewards(rewards, group)]


def _deviations(rewards: Tensor | Sequence[float], group: Tensor | Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the reward deviation of each group, [K], and the group of each row, [N]."""
    columns = _columns(rewards, group)
    variances = [torch.where(one.equal, 0.0, one.std(ddof=1) ** 2) for one in columns]
    return torch.stack(variances).sum(0).sqrt(), columns[0].index


def overlong_mask(*, truncated: Tensor | Sequence[bool]) -> Tensor:
    """Return False for truncated trajectories (DAPO's overlong filtering, arXiv:2503.14476); `truncated` [N]."""
    return ~torch.as_tensor(truncated, dtype=torch.bool)


def entropy_bound(*, entropy: Tensor, mask: Tensor, bound: float = math.log(2)) -> Tensor:
    """Return True for trajectories whose mean entropy over action tokens is at most `bound` nats, [N].

    GTPO's filter (arXiv:2508.03772: ln 2, below which one token has more than half of the
    probability; 0.7 in its code). `entropy` and `mask` [N, L]. True for rows without action tokens.
    """
    return mean_entropy(entropy=entropy, mask=mask) <= bound


def mean_entropy(*, entropy: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of `entropy` over each trajectory's action tokens, [N] from [N, L]; 0 without action tokens."""
    check_shapes(mask, entropy=entropy)
    return select(entropy.detach(), mask).sum(1) / mask.bool().sum(1).clamp(min=1)


def rft(*, rewards: Sequence[float], keys: Sequence[Hashable], threshold: float = 0.5) -> Tensor:
    """Return True for the trajectories that rejection-sampling fine-tuning trains on with `losses.sft`, [N].

    Rows with a reward above `threshold`, deduplicated by `keys` (for example the task and the token ids of all
    actions); the first row stays. arXiv:2308.01825 deduplicates by equations. ValueError for unequal lengths.
    """
    seen: set[Hashable] = set()
    keep = []
    for reward, key in zip(rewards, keys, strict=True):
        fresh = reward > threshold and key not in seen
        if fresh:
            seen.add(key)
        keep.append(fresh)
    return torch.tensor(keep, dtype=torch.bool)


@dataclass(frozen=True, slots=True)
class Visit:
    """A sampled group of a task: `zero_variance` if its rewards are equal; `success` is its mean success."""

    task: str
    zero_variance: bool
    success: float = 0.0


@dataclass(frozen=True, slots=True)
class GresoState:
    """`p` for easy and hard tasks, and each task's streak `z` of zero-variance visits.

    A streak is positive if the last visit was easy, otherwise negative, and `p_hard` applies; tasks without a streak
    are omitted. `rule` has the constants.
    """

    p_easy: float = 0.5
    p_hard: float = 0.5
    streaks: Mapping[str, int] = field(default_factory=dict)
    rule: GresoConfig = AUTHORS_GRESO

    def skip_probability(self, task: str) -> float:
        """Return `1 - max(p^z, rule.floor)`; 0 for a task without a streak."""
        streak = self.streaks.get(task, 0)
        p = self.p_easy if streak > 0 else self.p_hard
        return 1 - max(p ** abs(streak), self.rule.floor)

    def skips(self, task: str, *, seed: int, step: int) -> bool:
        """Return whether a task is skipped at a step, by a seeded draw."""
        draw = random.Random(f"greso/{seed}/{step}/{task}").random()
        return draw < self.skip_probability(task)

    def update(self, visits: Sequence[Visit], *, adapts: bool = True) -> GresoState:
        """Return the state after a step with the groups `visits`; unchanged if there are none.

        If `adapts` (after the first epoch), `p_easy` falls by `rule.change` if the share of easy groups without
        variance reaches its target, a third of `rule.target`, else it rises; likewise `p_hard`, with two thirds. Groups
        between `rule.hard` and `rule.easy` count in neither share.
        """
        if not visits:
            return self
        rule, streaks = self.rule, dict(self.streaks)
        for visit in visits:
            length = abs(streaks.pop(visit.task, 0)) + 1
            if visit.zero_variance:
                streaks[visit.task] = length if visit.success >= rule.easy else -length
        if not adapts:
            return replace(self, streaks=streaks)
        easy = sum(v.zero_variance and v.success >= rule.easy for v in visits) / len(visits)
        hard = sum(v.zero_variance and v.success <= rule.hard for v in visits) / len(visits)
        return replace(
            self,
            p_easy=_moved(self.p_easy, easy >= rule.target / 3, rule),
            p_hard=_moved(self.p_hard, hard >= rule.target * 2 / 3, rule),
            streaks=streaks,
        )


def _moved(p: float, too_many: bool, rule: GresoConfig) -> float:
    return max(p - rule.change, rule.min_p) if too_many else min(p + rule.change, rule.max_p)
