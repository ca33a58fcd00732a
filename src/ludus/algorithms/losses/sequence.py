"""Losses whose ratio belongs to the whole trajectory: the geometric mean of token ratios, or their product.

`A_i`, the advantage of a trajectory, is the mean of `advantages` over its action tokens: the advantage itself
where all tokens carry the same. A trajectory without action tokens gives 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ludus.algorithms.losses.clipped import ClipRange
from ludus.algorithms.masking import check_shapes, clamped_ratio, select


def gspo(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    eps_low: float = 3e-4,
    eps_high: float = 4e-4,
) -> Tensor:
    """`-min(s A, clip(s, 1 - eps_low, 1 + eps_high) A)` with `s = exp(mean_t (logprobs - old))`, [N].

    arXiv:2507.18071 (clip range of its section 5.1). One term per trajectory; `aggregate` takes
    their mean over the trajectories. With one action token in each this is `ppo_clip`.
    """
    bounds = ClipRange(eps_low, eps_high)
    check_shapes(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    ratio = sequence_ratio(logprobs, old_logprobs, mask)
    return bounds.surrogate(ratio, trajectory_mean(advantages, mask).detach())


def ppo_sequence(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Tensor:
    """`-min(s A, clip(s, 1 - eps_low, 1 + eps_high) A)` with `s = exp(sum_t (logprobs - old))`, [N].

    PPO with a trajectory as the action, as TRL's RLOO trainer has it (arXiv:2402.14740): the ratio is the
    product over the tokens, which leaves the range soon where trajectories are long.
    """
    bounds = ClipRange(eps_low, eps_high)
    check_shapes(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    ratio = product_ratio(logprobs, old_logprobs, mask)
    return bounds.surrogate(ratio, trajectory_mean(advantages, mask).detach())


def gspo_token(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    eps_low: float = 3e-4,
    eps_high: float = 4e-4,
) -> Tensor:
    """`gspo` with an advantage per token: the value of `s`, each token's own gradient, [N, L].

    `s_t = stop_grad(s) exp(logprobs - stop_grad(logprobs))` (arXiv:2507.18071). With one advantage
    per trajectory and the aggregation `seq_mean_token_mean` value and gradient are those of `gspo`.
    """
    bounds = ClipRange(eps_low, eps_high)
    check_shapes(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    ratio = sequence_ratio(logprobs, old_logprobs, mask).detach()
    own = select(logprobs, mask)
    carried = ratio[:, None] * (own - own.detach()).exp()
    return select(bounds.surrogate(carried, select(advantages, mask).detach()), mask)


def gmpo(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    eps_low: float = 0.4,
    eps_high: float = 0.4,
) -> Tensor:
    """`-A exp(mean_t g min(g d, g clip(d, -eps_low, eps_high)))`, `d = logprobs - old`, `g = sign(A)`, [N].

    Geometric-mean policy optimisation (arXiv:2507.20673, range (exp(-0.4), exp(0.4))); the bounds are
    those of the log-ratio, each token is clipped before the mean, by the sign of its own advantage; the `A`
    in front is the mean of the trajectory's. verl applies its PPO range here.
    """
    if eps_low < 0 or eps_high < 0:
        raise ValueError(f"eps_low and eps_high must not be negative: {eps_low}, {eps_high}")
    check_shapes(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    scores = trajectory_mean(advantages, mask).detach()
    sign = select(advantages, mask).detach().sign()
    log_ratio = select(logprobs, mask) - select(old_logprobs, mask).detach()
    kept = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-eps_low, eps_high))
    return -scores * clamped_ratio(trajectory_mean(kept, mask))


def trajectory_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of `values` [N, L] over the action tokens of each trajectory, [N]; 0 without action tokens."""
    return select(values, mask).sum(1) / mask.bool().sum(1).clamp(min=1)


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """`exp(mean_t (logprobs - old))` over the action tokens, the exponent clamped to +-20, [N]."""
    return clamped_ratio(trajectory_mean(select(logprobs, mask) - select(old_logprobs, mask).detach(), mask))


def product_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """`exp(sum_t (logprobs - old))` over the action tokens, the exponent clamped to +-20, [N]."""
    return clamped_ratio((select(logprobs, mask) - select(old_logprobs, mask).detach()).sum(1))
