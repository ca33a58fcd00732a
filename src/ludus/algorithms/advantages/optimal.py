"""The baseline of least variance for each action token, from the returns of a group."""

from __future__ import annotations

import torch
from torch import Tensor

from ludus.algorithms.advantages.reverse_scan import ActionTokens, action_tokens, scan_back
from ludus.algorithms.advantages.rows import float_dtype, groups_to_compare
from ludus.algorithms.advantages.token_rewards import token_rewards

NO_ENERGY = 1e-8
"""A sum of weights up to which there is no baseline."""


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
    """`R_t - sum_j W_jt R_jt / sum_j W_jt` over the group, [N, L]; `R_t` the return from token `t` on.

    `W_t = sum_{s <= t} (1 - 2 exp(old_s) + sum_pi_squared_s)` is what the scores of the tokens so far add to
    the variance; tokens are compared by their place among the action tokens of a row. `sum_pi_squared`
    [N, L] is the sum of squared probabilities over the vocabulary before each token; without it, or without
    `old_logprobs`, each token adds 1. `weights` [N, L], truncated importance weights, enter squared. With
    `zero_tail` a row's tokens past the end of all others have no baseline, and 0 as advantage without.

    verl's `optimal_token_baseline`, in the form of its `tir_optimal_token_baseline`, which leaves out
    observations; there `sum_j W_jt` has 1e-8 added. Up to that sum there is no baseline here.
    """
    grouped = groups_to_compare(rewards, group, mask)
    tokens = action_tokens(mask)
    placed = token_rewards(mask=mask, rewards=rewards, turn_rewards=turn_rewards, turn=turn)
    terms = tokens.take("rewards", placed)
    returns = scan_back(terms, torch.ones_like(terms))
    energy = _energy(tokens, old_logprobs, sum_pi_squared, weights)
    found = torch.zeros_like(returns)
    for member in grouped.member:
        rows = member.nonzero()[:, 0].to(mask.device)
        found[rows] = _above_baseline(returns[rows], energy[rows], tokens.present[rows], zero_tail)
    return tokens.spread(found, float_dtype(rewards, turn_rewards))


def _energy(tokens: ActionTokens, old: Tensor | None, sum_pi_squared: Tensor | None, weights: Tensor | None) -> Tensor:
    """`W` [N, T]."""
    added = tokens.present.double()
    if old is not None and sum_pi_squared is not None:
        chances = tokens.take("old_logprobs", old).exp()
        added = added * (1 - 2 * chances + tokens.take("sum_pi_squared", sum_pi_squared))
    if weights is not None:
        added = added * tokens.take("weights", weights).square()
    return added.cumsum(1).clamp(min=0)


def _above_baseline(returns: Tensor, energy: Tensor, present: Tensor, zero_tail: bool) -> Tensor:
    """`returns` of one group minus their baseline, all [G, T]; equal returns leave exactly 0."""
    lowest = torch.where(present, returns, torch.inf).amin(0)
    above = torch.where(present, returns - lowest, 0.0)
    weights = torch.where(present, energy, 0.0)
    total = weights.sum(0)
    compared = total > NO_ENERGY
    baseline = (weights * above).sum(0) / torch.where(compared, total, 1.0)
    found = torch.where(compared, above - baseline, returns)
    if zero_tail:
        second, longest = present.sum(1).sort().values[-2:].tolist()
        past = (torch.arange(returns.shape[1], device=returns.device) >= second) & (longest > second)
        found = torch.where(past, returns, found)
    return torch.where(present, found, 0.0)
