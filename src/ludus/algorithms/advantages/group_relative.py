"""Advantages relative to a group, a batch or a greedy attempt, without a critic.

Most are constant over the action tokens of a trajectory. They compute in float64 and return the dtype of the
rewards. All raise ValueError for a reward that is not finite (naming the row), and for a group with one member if
they compare within groups. The advantage of a group of equal rewards (up to rounding) is exactly 0.
"""

from __future__ import annotations

from math import comb
from typing import Literal

from ludus.algorithms.advantages.action_tokens import ActionTokens, action_tokens, reverse_scan, token_rewards
from ludus.algorithms.algorithm import FRACTION, NOT_NEGATIVE, SWITCH, AdvantageSpec, Need, Option, OptionBounds
from ludus.algorithms.tensors import (
    Tensor,
    check_group,
    check_per_row,
    check_rows,
    check_shapes,
    float_dtype,
    group_rewards,
    groups_to_compare,
    numbers,
    per_action,
    reward_rtol,
    select,
    torch,
)

SPREADS = ("group", "batch")
COUNTS = ("varying", "nonzero")
WHITEN_EPS = 1e-8
MIN_WEIGHT_SUM = 1e-8
"""The optimal baseline is 0 for sums of weights up to this value."""


@AdvantageSpec(
    help="rewards minus the mean of the group, over its deviation",
    needs={Need.GROUP, Need.STD},
    options={
        "std_floor": Option("lower bound of the standard deviation of a group", NOT_NEGATIVE),
        "std_over": Option("standard deviation of each group, or of the batch", choices=SPREADS),
    },
)
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
    """Return `(r - mean_g) / (std_g + eps)`, arXiv:2402.03300 (section 4.1.2).

    `std_over` `batch` divides by the deviation of all rewards instead (arXiv:2508.08221; TRL's
    `scale_rewards="batch"`, with `eps` 1e-4), so that small differences within a group are not amplified.

    `ddof` 1 as in verl and TRL, 0 as in the paper and several tutorials. `std_floor` bounds `std_g` from
    below, so that nearly equal rewards are not amplified.
    """
    grouped = groups_to_compare(rewards, group, mask)
    if std_over not in SPREADS:
        raise ValueError(f"std_over = {std_over!r} is neither 'group' nor 'batch'")
    spread = grouped if std_over == "group" else group_rewards(rewards, torch.zeros_like(group))
    scale = spread.std(ddof).clamp(min=std_floor) + eps
    return per_action(grouped.subtract(grouped.mean()) / scale[spread.index], mask, float_dtype(rewards))


@AdvantageSpec(help="rewards minus the mean of the group", needs={Need.GROUP})
def dr_grpo(*, rewards: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    """Return `r - mean_g`, arXiv:2503.20783 (Dr. GRPO)."""
    grouped = groups_to_compare(rewards, group, mask)
    return per_action(grouped.subtract(grouped.mean()), mask, float_dtype(rewards))


@AdvantageSpec(
    help="dr_grpo, scaled by the share of groups that vary",
    needs={Need.GROUP},
    options={"counted": Option("count attempts of groups that vary, or rewards that are not 0", choices=COUNTS)},
)
def gpg(*, rewards: Tensor, group: Tensor, mask: Tensor, counted: Literal["varying", "nonzero"] = "varying") -> Tensor:
    """Return `N / M (r - mean_g)`, arXiv:2504.02546 (GPG), its `F_norm` 1.

    `M` counts the rows of groups with different rewards, so that groups of equal rewards do not
    shrink the gradient of the batch; with `nonzero`, as in verl, the rows with nonzero reward. At least 1.
    """
    if counted not in COUNTS:
        raise ValueError(f"counted = {counted!r} is neither 'varying' nor 'nonzero'")
    grouped = groups_to_compare(rewards, group, mask)
    rows = ~grouped.equal[grouped.index] if counted == "varying" else grouped.rewards != 0
    factor = len(grouped.rewards) / max(int(rows.sum()), 1)
    return per_action(factor * grouped.subtract(grouped.mean()), mask, float_dtype(rewards))


@AdvantageSpec(help="rewards minus the mean of the other attempts", needs={Need.GROUP})
def rloo(*, rewards: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    """Return `r - mean of the others in the group` = `G/(G-1) (r - mean_g)`, arXiv:2402.14740."""
    grouped = groups_to_compare(rewards, group, mask)
    factor = grouped.sizes / (grouped.sizes - 1)
    return per_action(grouped.subtract(grouped.mean()) * factor[grouped.index], mask, float_dtype(rewards))


@AdvantageSpec(help="rewards minus the length-weighted mean of the group", needs={Need.GROUP})
def opo(*, rewards: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    """Return `r - sum_j n_j r_j / sum_j n_j` over the group, `n` the action tokens, arXiv:2505.23585."""
    grouped = groups_to_compare(rewards, group, mask)
    lengths = mask.bool().sum(1).double().to(grouped.rewards.device)
    baseline = grouped.sum(lengths * grouped.rewards) / grouped.sum(lengths).clamp(min=1)
    return per_action(grouped.subtract(baseline), mask, float_dtype(rewards))


@AdvantageSpec(help="rewards minus the mean of the group, over the mean", needs={Need.GROUP})
def maxrl(*, rewards: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    """Return `(r - mean_g) / mean_g`, 0 if the mean is not positive, arXiv:2602.02710 (MaxRL).

    With rewards 0 and 1 hard tasks have a larger weight: `1/p - 1` for a success, `-1` for a failure. A mean that
    is positive only by rounding counts as 0.
    """
    grouped = groups_to_compare(rewards, group, mask)
    mean = grouped.mean()
    largest = torch.where(grouped.member, grouped.rewards.abs(), 0.0).amax(1) if mean.numel() else mean
    positive = mean > reward_rtol(rewards.dtype) * largest
    scale = torch.where(positive, 1 / torch.where(positive, mean, 1.0), 0.0)
    return per_action(grouped.subtract(mean) * scale[grouped.index], mask, float_dtype(rewards))


@AdvantageSpec(help="the best attempt of a group alone", needs={Need.GROUP, Need.NON_NEGATIVE})
def best_of_group(*, rewards: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    """Return `max - second max` for the best member, 0 for the others, arXiv:2503.19595 (best-of-k objective).

    If two members share the maximum, all advantages are 0.
    """
    grouped = groups_to_compare(rewards, group, mask)
    if not grouped.rewards.numel():
        return per_action(grouped.rewards, mask, float_dtype(rewards))
    first, second = torch.where(grouped.member, grouped.rewards, -torch.inf).topk(2, dim=1).values.unbind(1)
    gain = torch.where(grouped.equal, 0.0, first - second)[grouped.index]
    best = grouped.rewards == first[grouped.index]
    return per_action(torch.where(best, gain, 0.0), mask, float_dtype(rewards))


@AdvantageSpec(
    help="the analytic advantage of pass@k",
    needs={Need.GROUP, Need.BINARY_REWARDS},
    options={"k": Option("attempts that pass@k counts", OptionBounds(1, is_integer=True), default=4)},
)
def pass_at_k(*, rewards: Tensor, group: Tensor, mask: Tensor, k: int) -> Tensor:
    """Return the analytic advantage of pass@k for rewards 0 and 1, arXiv:2508.10751 (Pass@k Training).

    With `R = 1 - C(G_neg, k) / C(G, k)`, `s = sqrt(R (1 - R))`: successes have `(1 - R) / s`, failures
    `(1 - R - C(G_neg - 1, k - 1) / C(G - 1, k - 1)) / s`, all 0 if `s = 0`. `k` 1 is `grpo` with `ddof` 0
    and no eps. Raises ValueError for other rewards (naming the row), and for `k` outside [1, G].
    """
    grouped = groups_to_compare(rewards, group, mask)
    invalid = ((grouped.rewards != 0) & (grouped.rewards != 1)).nonzero()
    if invalid.numel():
        row = int(invalid[0])
        raise ValueError(f"rewards[{row}] is {float(grouped.rewards[row])}; pass_at_k needs 0 or 1")
    sizes = [int(size) for size in grouped.sizes.tolist()]
    if sizes and not 1 <= k <= min(sizes):
        raise ValueError(f"k must be in [1, {min(sizes)}], the size of the smallest group, not {k}")
    failures = [int(size - won) for size, won in zip(sizes, grouped.sum(grouped.rewards).tolist(), strict=True)]
    pairs = [_pass_at_k_pair(size, failed, k) for size, failed in zip(sizes, failures, strict=True)]
    table = torch.tensor(pairs, dtype=torch.float64, device=grouped.rewards.device).reshape(-1, 2)
    won = grouped.rewards == 1
    scores = torch.where(won, table[:, 0][grouped.index], table[:, 1][grouped.index])
    return per_action(scores, mask, float_dtype(rewards))


def _pass_at_k_pair(size: int, failed: int, k: int) -> tuple[float, float]:
    """Return the advantage of a success and of a failure, in a group of `size` with `failed` failures."""
    lost = comb(failed, k) / comb(size, k)
    scale = (lost * (1 - lost)) ** 0.5
    if scale == 0:
        return 0.0, 0.0
    return lost / scale, (lost - comb(failed - 1, k - 1) / comb(size - 1, k - 1)) / scale


def role_groups(*, group: Tensor, proposer: Tensor, proposer_group: Tensor | None = None) -> Tensor:
    """Return comparison groups [N] for self-play with proposed tasks: solvers and proposers never share one.

    `group` [N]: the proposed task of a solver; `proposer` [N] bool. Solvers are compared within
    one proposed task, proposers across proposals: over the whole batch, or by `proposer_group` [N]
    (used on proposers only). The new ids can be passed as the `group` of any advantage.
    """
    check_group(group, proposer[:, None])
    check_group(proposer_group, proposer[:, None])
    is_proposer = proposer.bool()
    across = torch.zeros_like(group) if proposer_group is None else proposer_group.to(group.device)
    pairs = torch.stack([is_proposer.to(group.dtype), torch.where(is_proposer, across, group)], 1)
    ids: Tensor = torch.unique(pairs, dim=0, return_inverse=True)[1]
    return ids.reshape(group.shape)


@AdvantageSpec(
    help="proposers and solvers, each compared in their own groups",
    needs={Need.GROUP, Need.STD, Need.PROPOSALS, Need.ADVANTAGE_OF_EQUAL_REWARDS},
    reads={"group": "proposals"},
)
def hierarchical(
    *,
    rewards: Tensor,
    group: Tensor,
    proposer: Tensor,
    mask: Tensor,
    proposer_group: Tensor | None = None,
    ddof: int = 1,
) -> Tensor:
    """Return `grpo` within the groups of `role_groups`: solvers within a proposed task, proposers across proposals.

    Proposer and solver as in arXiv:2505.03335 (Absolute Zero), whose baselines are per task and role. For an
    advantage other than `grpo`, pass it the ids of `role_groups`.
    """
    check_per_row(mask, proposer=proposer)
    groups = role_groups(group=group, proposer=proposer, proposer_group=proposer_group)
    return grpo(rewards=rewards, group=groups, mask=mask, ddof=ddof)


# Relative to a greedy attempt, or without a baseline


@AdvantageSpec(
    help="rewards minus that of a greedy episode",
    needs={Need.GREEDY_ROLLOUT, Need.ADVANTAGE_OF_EQUAL_REWARDS},
    reads={"greedy_rewards": "baselines"},
)
def remax(*, rewards: Tensor, greedy_rewards: Tensor, mask: Tensor, group: Tensor | None = None) -> Tensor:
    """Return `r - r(greedy)`, arXiv:2310.10505 (ReMax).

    `greedy_rewards` [N]: the reward of the greedy trajectory of each row's task. `group` is ignored.
    """
    check_group(group, mask)
    scores = numbers("rewards", rewards, mask) - numbers("greedy_rewards", greedy_rewards, mask)
    return per_action(scores, mask, float_dtype(rewards))


@AdvantageSpec(help="the reward itself")
def raw(*, rewards: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    """Return `r` without a baseline (Williams 1992). Groups are not compared: equal rewards do not become 0."""
    grouped = group_rewards(rewards, group)
    check_rows(len(grouped.rewards), mask)
    return per_action(grouped.rewards, mask, float_dtype(rewards))


# Relative to the batch


def whiten(*, values: Tensor, mask: Tensor, trains: Tensor | None = None, ddof: int = 1) -> Tensor:
    """Return `(x - mean) / sqrt(var + 1e-8)` on the masked positions of `values` [N, L], 0 elsewhere.

    Mean and variance are over those masked positions that are set in `trains` [N, L] as well (None: all):
    filtered tokens are excluded. The variance of at most `ddof` positions is 0.
    """
    trains = mask if trains is None else trains
    check_shapes(mask, values=values, trains=trains)
    counted = mask.bool() & trains.bool()
    count = counted.sum()
    kept = select(values, mask)
    centred = select(kept - select(kept, counted).sum() / count.clamp(min=1), mask)
    variance = select(centred, counted).square().sum() / (count - ddof).clamp(min=1)
    return centred / (variance + WHITEN_EPS).sqrt()


@AdvantageSpec(
    help="discounted returns, whitened over the batch",
    needs={Need.STD, Need.BATCH_STATISTICS, Need.TOKEN_KL},
    options={"gamma": Option("discount", FRACTION)},
)
def reinforce_pp(
    *,
    mask: Tensor,
    rewards: Tensor | None = None,
    turn_rewards: Tensor | None = None,
    turn: Tensor | None = None,
    group: Tensor | None = None,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    gamma: float = 1.0,
    trains: Tensor | None = None,
    ddof: int = 1,
) -> Tensor:
    """Return `R_t = r_t + gamma R_next` over action tokens, whitened over the batch (REINFORCE++, arXiv:2501.03262).

    `gamma` 1 as in the paper, verl and OpenRLHF; `ddof` 1 as in verl, 0 as in OpenRLHF; `trains` as in
    `whiten`. An observation neither discounts nor resets the return. If the trained returns are equal up to
    rounding, the advantages are exactly 0.
    """
    check_group(group, mask)
    placed = token_rewards(mask=mask, rewards=rewards, turn_rewards=turn_rewards, turn=turn, kl=kl, kl_coef=kl_coef)
    tokens = action_tokens(mask)
    terms = tokens.take("rewards", placed)
    dtype = float_dtype(rewards, turn_rewards)
    returns = tokens.spread(reverse_scan(terms, torch.full_like(terms, gamma)), torch.float64)
    kept = returns[tokens.mask if trains is None else tokens.mask & trains.bool()]
    if kept.numel():
        scale = max(1.0, float(kept.abs().max()))
        if float(kept.max() - kept.min()) <= reward_rtol(dtype) * scale:
            return torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return whiten(values=returns, mask=mask, trains=trains, ddof=ddof).to(dtype)


@AdvantageSpec(
    help="rewards minus the mean of the group, whitened over the batch",
    needs={Need.GROUP, Need.STD, Need.BATCH_STATISTICS},
)
def reinforce_pp_baseline(
    *, rewards: Tensor, group: Tensor, mask: Tensor, trains: Tensor | None = None, ddof: int = 1
) -> Tensor:
    """Return `r - mean_g`, whitened over the action tokens of the batch, arXiv:2501.03262 (REINFORCE++-baseline).

    `ddof` 1 as in verl, 0 as in OpenRLHF. `trains` as in `whiten`; the mean is over all members of a group.
    """
    grouped = groups_to_compare(rewards, group, mask)
    centred = grouped.subtract(grouped.mean()).to(mask.device)[:, None].expand(mask.shape)
    return whiten(values=centred, mask=mask, trains=trains, ddof=ddof).to(float_dtype(rewards))


# Token by token


@AdvantageSpec(
    help="returns minus the variance-optimal baseline of each token",
    needs={Need.GROUP, Need.OPTIONAL_TURN_REWARDS, Need.DISTRIBUTIONS, Need.ADVANTAGE_OF_EQUAL_REWARDS},
    options={"zero_tail": Option("1: tokens that only the longest attempt has are without a baseline", SWITCH)},
)
def optimal_token_baseline(
    *,
    rewards: Tensor,
    group: Tensor,
    mask: Tensor,
    old_logprobs: Tensor | None = None,
    sum_pi_squared: Tensor | None = None,
    weights: Tensor | None = None,
    turn_rewards: Tensor | None = None,
    turn: Tensor | None = None,
    zero_tail: bool = True,
) -> Tensor:
    """Return `R_t - sum_j W_jt R_jt / sum_j W_jt` over the group, [N, L]; `R_t` the return from token `t` on.

    `W_t = sum_{s <= t} (1 - 2 exp(old_s) + sum_pi_squared_s)` is the variance of the scores of the tokens so far;
    tokens are compared by their index among the action tokens of a row. `sum_pi_squared` [N, L] is the sum of squared
    probabilities over the vocabulary before each token; without it, or without `old_logprobs`, each token adds 1.
    `weights` [N, L], truncated importance weights, enter squared. With `zero_tail` the tokens of a row past the end of
    all others have no baseline; otherwise their advantage is 0.

    verl's `optimal_token_baseline`, in the form of its `tir_optimal_token_baseline`, which excludes
    observations. verl adds 1e-8 to `sum_j W_jt`; here the baseline is 0 for sums up to 1e-8.
    """
    grouped = groups_to_compare(rewards, group, mask)
    tokens = action_tokens(mask)
    placed = token_rewards(mask=mask, rewards=rewards, turn_rewards=turn_rewards, turn=turn)
    terms = tokens.take("rewards", placed)
    returns = reverse_scan(terms, torch.ones_like(terms))
    energy = _energy(tokens, old_logprobs, sum_pi_squared, weights)
    found = torch.zeros_like(returns)
    for member in grouped.member:
        rows = member.nonzero()[:, 0].to(mask.device)
        found[rows] = _above_baseline(returns[rows], energy[rows], tokens.present[rows], zero_tail)
    return tokens.spread(found, float_dtype(rewards, turn_rewards))


def _energy(tokens: ActionTokens, old: Tensor | None, sum_pi_squared: Tensor | None, weights: Tensor | None) -> Tensor:
    """Return `W` of `optimal_token_baseline`, [N, T]."""
    added = tokens.present.double()
    if old is not None and sum_pi_squared is not None:
        chances = tokens.take("old_logprobs", old).exp()
        added = added * (1 - 2 * chances + tokens.take("sum_pi_squared", sum_pi_squared))
    if weights is not None:
        added = added * tokens.take("weights", weights).square()
    return added.cumsum(1).clamp(min=0)


def _above_baseline(returns: Tensor, energy: Tensor, present: Tensor, zero_tail: bool) -> Tensor:
    """Return `returns` of one group minus their baseline, all [G, T]; equal returns leave exactly 0."""
    lowest = torch.where(present, returns, torch.inf).amin(0)
    above = torch.where(present, returns - lowest, 0.0)
    weights = torch.where(present, energy, 0.0)
    total = weights.sum(0)
    compared = total > MIN_WEIGHT_SUM
    baseline = (weights * above).sum(0) / torch.where(compared, total, 1.0)
    found = torch.where(compared, above - baseline, returns)
    if zero_tail:
        second, longest = present.sum(1).sort().values[-2:].tolist()
        past = (torch.arange(returns.shape[1], device=returns.device) >= second) & (longest > second)
        found = torch.where(past, returns, found)
    return torch.where(present, found, 0.0)
