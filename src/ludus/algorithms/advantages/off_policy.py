"""Advantages that correct for another behaviour policy: V-trace and Retrace, on action tokens.

`w = exp(old_logprobs - behavior_logprobs)`, its exponent clamped to +-20, without gradient. They contain the
behaviour ratio: another correction on top of them counts it twice. Arguments as in `returns`.
"""

from __future__ import annotations

from torch import Tensor

from ludus.algorithms.advantages.gae_tokens import values_and_next
from ludus.algorithms.advantages.reverse_scan import ActionTokens, action_tokens, scan_back, shifted
from ludus.algorithms.advantages.rows import check_group, float_dtype
from ludus.algorithms.advantages.token_rewards import token_rewards
from ludus.algorithms.masking import clamped_ratio, select


def vtrace(
    *,
    values: Tensor,
    old_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    rewards: Tensor | None = None,
    turn_rewards: Tensor | None = None,
    turn: Tensor | None = None,
    bootstrap_values: Tensor | None = None,
    group: Tensor | None = None,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    gamma: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> Tensor:
    """`A_t = rho_t (r_t + gamma v_next - V_t)`, arXiv:1802.01561 (IMPALA), [N, L].

    `rho = min(rho_bar, w)`, `c = min(c_bar, w)`; `v` are the `vtrace_targets`, and `v_next` behind the last
    action token is the bootstrap. Both bounds 1 as in the paper. Where `w = 1` it equals `gae(gamma, 1)`.
    """
    check_group(group, mask)
    placed = token_rewards(mask=mask, rewards=rewards, turn_rewards=turn_rewards, turn=turn, kl=kl, kl_coef=kl_coef)
    tokens = action_tokens(mask)
    weights = _weights(tokens, old_logprobs, behavior_logprobs)
    current, following = values_and_next(tokens, values, bootstrap_values)
    reward = tokens.take("rewards", placed)
    rho = weights.clamp(max=rho_bar)
    delta = rho * (reward + gamma * following - current)
    excess = scan_back(delta, gamma * weights.clamp(max=c_bar))
    ahead = following + select(shifted(excess, 0.0), tokens.present)
    return tokens.spread(rho * (reward + gamma * ahead - current), float_dtype(rewards, turn_rewards, values))


def vtrace_targets(
    *,
    values: Tensor,
    old_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    rewards: Tensor | None = None,
    turn_rewards: Tensor | None = None,
    turn: Tensor | None = None,
    bootstrap_values: Tensor | None = None,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    gamma: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> Tensor:
    """`v_t = V_t + delta_t + gamma c_t (v_next - V_next)`, arXiv:1802.01561: what V-trace's critic learns.

    `delta_t = rho_t (r_t + gamma V_next - V_t)`; `v_next = V_next` (the bootstrap) behind the last action
    token.
    """
    placed = token_rewards(mask=mask, rewards=rewards, turn_rewards=turn_rewards, turn=turn, kl=kl, kl_coef=kl_coef)
    tokens = action_tokens(mask)
    weights = _weights(tokens, old_logprobs, behavior_logprobs)
    current, following = values_and_next(tokens, values, bootstrap_values)
    delta = weights.clamp(max=rho_bar) * (tokens.take("rewards", placed) + gamma * following - current)
    excess = scan_back(delta, gamma * weights.clamp(max=c_bar))
    return tokens.spread(current + excess, float_dtype(rewards, turn_rewards, values))


def retrace(
    *,
    values: Tensor,
    old_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    rewards: Tensor | None = None,
    turn_rewards: Tensor | None = None,
    turn: Tensor | None = None,
    bootstrap_values: Tensor | None = None,
    group: Tensor | None = None,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> Tensor:
    """`A_t = sum_{s >= t} gamma^(s-t) (prod_{u=t+1..s} lam min(1, w_u)) delta_s`, arXiv:1606.02647 (Retrace).

    `delta_s = r_s + gamma V_next - V_s`; a token's own temporal difference has no weight. `lam` 1 as in the
    paper. Where `w >= 1` it equals `gae(gamma, lam)`.
    """
    check_group(group, mask)
    placed = token_rewards(mask=mask, rewards=rewards, turn_rewards=turn_rewards, turn=turn, kl=kl, kl_coef=kl_coef)
    tokens = action_tokens(mask)
    weights = _weights(tokens, old_logprobs, behavior_logprobs)
    current, following = values_and_next(tokens, values, bootstrap_values)
    delta = tokens.take("rewards", placed) + gamma * following - current
    found = scan_back(delta, gamma * lam * shifted(weights.clamp(max=1.0), 0.0))
    return tokens.spread(found, float_dtype(rewards, turn_rewards, values))


def _weights(tokens: ActionTokens, old_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """`w` at the action tokens, [N, T], 0 past the end of a row."""
    log_ratio = tokens.take("old_logprobs", old_logprobs) - tokens.take("behavior_logprobs", behavior_logprobs)
    return select(clamped_ratio(log_ratio), tokens.present)
