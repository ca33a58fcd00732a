"""Advantages with a critic in which a turn is a step. Arguments as in `returns`."""

from __future__ import annotations

import torch
from torch import Tensor

from ludus.algorithms.advantages.gae_tokens import values_and_next
from ludus.algorithms.advantages.reverse_scan import scan_back, shifted
from ludus.algorithms.advantages.rows import check_group, float_dtype, numbers
from ludus.algorithms.advantages.token_rewards import Turns, rewards_of_turns
from ludus.algorithms.masking import select


def step_gae(
    *,
    values: Tensor,
    mask: Tensor,
    turn: Tensor | None = None,
    rewards: Tensor | None = None,
    turn_rewards: Tensor | None = None,
    bootstrap_values: Tensor | None = None,
    group: Tensor | None = None,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> Tensor:
    """GAE whose step is a turn, one advantage for all its tokens, arXiv:2512.17008 (turn-PPO).

    With `V_k` the value at the first action token of turn `k`: `delta_k = r_k + gamma V_{k+1} - V_k`,
    `A_k = delta_k + gamma lam A_{k+1}`; a turn pays the KL penalty of all its tokens. `gamma` and `lam` 1;
    the paper's best are near 0.99 and 0.9.
    """
    check_group(group, mask)
    turns, reward = rewards_of_turns(mask, turn, turn_rewards, rewards)
    if kl is not None:
        reward = reward - kl_coef * turns.summed(turns.tokens.take("kl", kl))
    found = _over_turns(turns, reward, values, bootstrap_values, (gamma, lam))
    return turns.tokens.spread(turns.spread(found), float_dtype(rewards, turn_rewards, values))


def turn_gae(
    *,
    values: Tensor,
    mask: Tensor,
    turn: Tensor | None = None,
    rewards: Tensor | None = None,
    turn_rewards: Tensor | None = None,
    bootstrap_values: Tensor | None = None,
    group: Tensor | None = None,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    gamma_turn: float = 1.0,
    lam_turn: float = 1.0,
    gamma_token: float = 1.0,
    lam_token: float = 1.0,
) -> Tensor:
    """Bi-level GAE: over turns first, then back through the tokens of each, arXiv:2510.16907 (VAGEN).

    Turns as in `step_gae`, with `gamma_turn` and `lam_turn`. The last token of turn `k` gets `A_k`; an
    earlier one `gamma_token V_{t+1} - V_t + gamma_token lam_token A_{t+1}`. A turn's reward enters once, at
    the level of turns. The KL penalty of a turn's last token joins the turn's reward, that of an earlier one
    stays its own. All four numbers 1; VAGEN's example runs take `gamma_turn` 0.95.
    """
    check_group(group, mask)
    turns, reward = rewards_of_turns(mask, turn, turn_rewards, rewards)
    tokens = turns.tokens
    penalty = torch.zeros_like(turns.index, dtype=torch.float64)
    if kl is not None:
        penalty = kl_coef * tokens.take("kl", kl)
    reward = reward - turns.summed(select(penalty, turns.closes))
    of_turns = _over_turns(turns, reward, values, bootstrap_values, (gamma_turn, lam_turn))
    current, following = values_and_next(tokens, values, bootstrap_values)
    inside = gamma_token * following - current - penalty
    terms = torch.where(turns.closes, turns.spread(of_turns), select(inside, tokens.present))
    decay = select(torch.full_like(terms, gamma_token * lam_token), tokens.present & ~turns.closes)
    return tokens.spread(scan_back(terms, decay), float_dtype(rewards, turn_rewards, values))


def _over_turns(
    turns: Turns, reward: Tensor, values: Tensor, bootstrap_values: Tensor | None, gamma_and_lam: tuple[float, float]
) -> Tensor:
    """GAE with a turn as the step, [N, K]; 0 for turns not reached."""
    gamma, lam = gamma_and_lam
    current = turns.at_opening(turns.tokens.take("values", values))
    if bootstrap_values is None:
        after = current.new_zeros(current.shape[0])
    else:
        after = numbers("bootstrap_values", bootstrap_values, turns.tokens.mask)
    following = torch.where(turns.last, after[:, None], shifted(current, 0.0))
    delta = select(reward + gamma * following - current, turns.reached)
    return scan_back(delta, torch.full_like(delta, gamma * lam))
