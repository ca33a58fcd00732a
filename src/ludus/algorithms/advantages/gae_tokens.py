"""Advantages token by token: returns and temporal differences on the subsequence of action tokens.

`values` [N, L]: column `t` is V of the state before token `t`, read on action tokens alone.
`bootstrap_values` [N]: V of the state after a row's last action token; 0 (None: for every row) where the
episode ended by itself, so that only truncated ones bootstrap. Rewards are placed by `token_rewards`:
`rewards` [N] on the last action token, `turn_rewards` [N, K] on the last one of each turn of `turn` [N, L],
`-kl_coef kl` on all.

All compute in float64 and return [N, L] in the widest float type of rewards and values, 0 off the mask,
without gradient. They raise ValueError for a shape that does not fit and for a number that is not finite
(naming the row). `group` [N] is taken for the common call shape and only checked, except in `prime`, which
compares. The value target of a token is its advantage plus its value: `value_targets`, before any whitening.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ludus.algorithms.advantages.group_relative import rloo, whiten
from ludus.algorithms.advantages.reverse_scan import ActionTokens, action_tokens, scan_back
from ludus.algorithms.advantages.rows import check_group, float_dtype, groups_to_compare, numbers
from ludus.algorithms.advantages.token_rewards import token_rewards
from ludus.algorithms.grouping import rounding
from ludus.algorithms.masking import check_shapes, select


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
    """`R_t = r_t + gamma R_next` over the action tokens, whitened over the batch, arXiv:2501.03262
    (REINFORCE++).

    `gamma` 1 as in the paper, verl and OpenRLHF; `ddof` 1 as in verl, 0 as in OpenRLHF; `trains` as in
    `whiten`. An observation neither discounts nor resets the return. Where the returns that train are equal
    up to rounding, all are exactly 0.
    """
    check_group(group, mask)
    placed = token_rewards(mask=mask, rewards=rewards, turn_rewards=turn_rewards, turn=turn, kl=kl, kl_coef=kl_coef)
    tokens = action_tokens(mask)
    terms = tokens.take("rewards", placed)
    dtype = float_dtype(rewards, turn_rewards)
    returns = tokens.spread(scan_back(terms, torch.full_like(terms, gamma)), torch.float64)
    kept = returns[tokens.mask if trains is None else tokens.mask & trains.bool()]
    if kept.numel():
        scale = max(1.0, float(kept.abs().max()))
        if float(kept.max() - kept.min()) <= rounding(dtype) * scale:
            return torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return whiten(values=returns, mask=mask, trains=trains, ddof=ddof).to(dtype)


def gae(
    *,
    values: Tensor,
    mask: Tensor,
    rewards: Tensor | None = None,
    turn_rewards: Tensor | None = None,
    turn: Tensor | None = None,
    bootstrap_values: Tensor | None = None,
    group: Tensor | None = None,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    gamma: float = 1.0,
    lam: float | Tensor = 1.0,
) -> Tensor:
    """`A_t = delta_t + gamma lam A_next`, `delta_t = r_t + gamma V_next - V_t`, arXiv:1506.02438 (GAE).

    "Next" is the next action token: an observation is neither a step nor a discount. `gamma` and `lam` 1 as
    in verl and OpenRLHF; TRL takes `lam` 0.95. `lam` may be [N], one a row. With `turn_rewards` this is
    MT-PPO (arXiv:2505.11821).
    """
    check_group(group, mask)
    placed = token_rewards(mask=mask, rewards=rewards, turn_rewards=turn_rewards, turn=turn, kl=kl, kl_coef=kl_coef)
    tokens = action_tokens(mask)
    current, following = values_and_next(tokens, values, bootstrap_values)
    delta = tokens.take("rewards", placed) + gamma * following - current
    per_row = torch.as_tensor(lam, dtype=torch.float64, device=mask.device)
    decay = gamma * (numbers("lam", per_row, mask)[:, None] if per_row.ndim else per_row)
    found = scan_back(delta, decay.expand(delta.shape))
    return tokens.spread(found, float_dtype(rewards, turn_rewards, values))


def vapo(
    *,
    values: Tensor,
    mask: Tensor,
    rewards: Tensor | None = None,
    turn_rewards: Tensor | None = None,
    turn: Tensor | None = None,
    bootstrap_values: Tensor | None = None,
    group: Tensor | None = None,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    gamma: float = 1.0,
    alpha: float = 0.05,
) -> Tensor:
    """`gae` with `lam = 1 - 1 / (alpha n_i)` clamped to [0, 1], `n_i` the row's action tokens,
    arXiv:2504.05118.

    The clamp matters below `1 / alpha` tokens (20), where the paper's formula is negative. This is the
    policy's advantage; the critic learns from `lam = 1`: `value_targets` of `gae(lam=1.0)`.
    """
    lengths = mask.bool().sum(1).double()
    lam = (1 - 1 / (alpha * lengths.clamp(min=1))).clamp(0.0, 1.0)
    return gae(
        values=values,
        mask=mask,
        rewards=rewards,
        turn_rewards=turn_rewards,
        turn=turn,
        bootstrap_values=bootstrap_values,
        group=group,
        kl=kl,
        kl_coef=kl_coef,
        gamma=gamma,
        lam=lam,
    )


def value_targets(*, advantages: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """What a critic learns, [N, L]: `A_t + V_t` on action tokens, 0 elsewhere, without gradient.

    For the advantages of `gae`, `step_gae` and `turn_gae`, before whitening. (`step_gae` reads V at the first
    action token of each turn alone: train its critic there.) `vtrace_targets` is that of V-trace.
    """
    check_shapes(mask, advantages=advantages, values=values)
    tokens = action_tokens(mask)
    total = tokens.take("advantages", advantages) + tokens.take("values", values)
    return tokens.spread(total, float_dtype(advantages, values))


def prime(
    *,
    rewards: Tensor,
    group: Tensor,
    prm_logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    beta: float = 0.05,
    gamma: float = 1.0,
) -> Tensor:
    """Implicit process rewards with the outcome, arXiv:2502.01456 (PRIME).

    With `q_t = beta (prm_logprobs - ref_logprobs)_t` and `b_i` the mean, over the other members of the group,
    of their mean `q` over action tokens (a member without any is left out; 0 when none is left):
    `A_t = sum_{s >= t} gamma^(s - t) (q_s - b_i) + rloo(rewards)`. `beta` 0.05 and `gamma` 1 as in the paper.
    """
    grouped = groups_to_compare(rewards, group, mask)
    tokens = action_tokens(mask)
    ratio = tokens.take("prm_logprobs", prm_logprobs) - tokens.take("ref_logprobs", ref_logprobs)
    q = beta * ratio.to(grouped.rewards.device)
    lengths = tokens.present.sum(1).double().to(q.device)
    own = q.sum(1) / lengths.clamp(min=1)
    counts = (lengths > 0).double()
    others = grouped.sum(counts)[grouped.index] - counts
    baseline = (grouped.sum(own)[grouped.index] - own) / others.clamp(min=1)
    terms = select((q - baseline[:, None]).to(mask.device), tokens.present)
    dtype = float_dtype(rewards)
    dense = tokens.spread(scan_back(terms, torch.full_like(terms, gamma)), torch.float64)
    return (dense + rloo(rewards=grouped.rewards, group=group, mask=mask)).to(dtype)


def coderl(
    *, rewards: Tensor, greedy_rewards: Tensor, outcome_probs: Tensor, mask: Tensor, group: Tensor | None = None
) -> Tensor:
    """`q_t (r - r(greedy))`, arXiv:2207.01780 (CodeRL).

    `outcome_probs` [N, L]: at each token, the critic's probability of the outcome that the tests then had
    (compile error, runtime error, failed or passed). `greedy_rewards` [N] as in `remax`. ValueError for a
    probability outside [0, 1] (naming the row).
    """
    check_group(group, mask)
    tokens = action_tokens(mask)
    weights = tokens.take("outcome_probs", outcome_probs)
    bad = ((weights < 0) | (weights > 1)).nonzero()
    if bad.numel():
        row, index = bad[0].tolist()
        raise ValueError(f"outcome_probs of row {row} has {float(weights[row, index])}; they must be in [0, 1]")
    gain = numbers("rewards", rewards, mask) - numbers("greedy_rewards", greedy_rewards, mask)
    return tokens.spread(weights * gain[:, None], float_dtype(rewards, outcome_probs))


def values_and_next(tokens: ActionTokens, values: Tensor, bootstrap_values: Tensor | None) -> tuple[Tensor, Tensor]:
    """V before each action token, and before the next one, both [N, T]."""
    current = tokens.take("values", values)
    if bootstrap_values is None:
        after = current.new_zeros(current.shape[0])
    else:
        after = numbers("bootstrap_values", bootstrap_values, tokens.mask)
    return current, tokens.following(current, after)
