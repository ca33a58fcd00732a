"""Losses with a ratio per trajectory: the geometric mean of token ratios, or their product.

`A_i`, the advantage of a trajectory, is the mean of `advantages` over its action tokens: the advantage itself if it
is equal on all tokens, and 0 without action tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ludus.algorithms.algorithm import LossSpec, Need
from ludus.algorithms.losses.clipped import ClipRange, ppo_cut
from ludus.algorithms.tensors import Cut, Tensor, check_shapes, clamped_ratio, select, torch


def trajectory_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of `values` [N, L] over the action tokens of each trajectory, [N]; 0 without action tokens."""
    return select(values, mask).sum(1) / mask.bool().sum(1).clamp(min=1)


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return `exp(mean_t (logprobs - old))` over the action tokens, the exponent clamped to +-20, [N]."""
    return clamped_ratio(trajectory_mean(select(logprobs, mask) - select(old_logprobs, mask).detach(), mask))


def product_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return `exp(sum_t (logprobs - old))` over the action tokens, the exponent clamped to +-20, [N]."""
    return clamped_ratio((select(logprobs, mask) - select(old_logprobs, mask).detach()).sum(1))


def _trajectory_cut(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    eps_low: float,
    eps_high: float,
    ratio_of: Callable[[Tensor, Tensor, Tensor], Tensor] = sequence_ratio,
    by_token: bool = False,
) -> Cut:
    """Return the tokens clipped by the ratio and the mean advantage of their trajectory.

    `by_token`: by the advantage of each token instead of the mean.
    """
    ratio = ratio_of(logprobs, old_logprobs, mask)[:, None].expand(mask.shape)
    scores = advantages if by_token else trajectory_mean(advantages, mask)[:, None].expand(mask.shape)
    return ppo_cut(ratio=ratio, advantages=scores, mask=mask, clip=ClipRange(eps_low, eps_high))


def _log_ratio_cut(
    *, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, eps_low: float, eps_high: float
) -> Cut:
    """Return the tokens clipped by their own log-ratio and advantage."""
    gap = select(logprobs, mask) - select(old_logprobs, mask)
    scores, actions = select(advantages, mask), mask.bool()
    low, high = actions & (scores < 0) & (gap < -eps_low), actions & (scores > 0) & (gap > eps_high)
    return Cut(low, high, torch.zeros_like(actions))


@LossSpec(
    help="the geometric mean of the ratios, clipped",
    needs={Need.CLIP},
    ratio_part="The clip",
    per_trajectory=True,
    cut=_trajectory_cut,
)
def gspo(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    eps_low: float = 3e-4,
    eps_high: float = 4e-4,
) -> Tensor:
    """Return `-min(s A, clip(s, 1 - eps_low, 1 + eps_high) A)` with `s = exp(mean_t (logprobs - old))`, [N].

    arXiv:2507.18071 (clip range of its section 5.1). One term per trajectory; `aggregate` takes
    their mean over the trajectories. With one action token in each this is `ppo_clip`.
    """
    bounds = ClipRange(eps_low, eps_high)
    check_shapes(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    ratio = sequence_ratio(logprobs, old_logprobs, mask)
    return bounds.surrogate(ratio, trajectory_mean(advantages, mask).detach())


@LossSpec(
    help="PPO with the ratio of the whole trajectory",
    needs={Need.CLIP},
    ratio_part="The clip",
    per_trajectory=True,
    cut=partial(_trajectory_cut, ratio_of=product_ratio),
)
def ppo_sequence(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Tensor:
    """Return `-min(s A, clip(s, 1 - eps_low, 1 + eps_high) A)` with `s = exp(sum_t (logprobs - old))`, [N].

    PPO with a trajectory as the action, as in TRL's RLOO trainer (arXiv:2402.14740): the ratio is the
    product over the tokens, which exceeds the clip range on long trajectories.
    """
    bounds = ClipRange(eps_low, eps_high)
    check_shapes(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    ratio = product_ratio(logprobs, old_logprobs, mask)
    return bounds.surrogate(ratio, trajectory_mean(advantages, mask).detach())


@LossSpec(
    help="GSPO with the advantage of each token",
    needs={Need.CLIP},
    ratio_part="The clip",
    cut=partial(_trajectory_cut, by_token=True),
)
def gspo_token(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    eps_low: float = 3e-4,
    eps_high: float = 4e-4,
) -> Tensor:
    """Return `gspo` with an advantage per token: the value of `s`, a gradient per token, [N, L].

    `s_t = stop_grad(s) exp(logprobs - stop_grad(logprobs))` (arXiv:2507.18071). With one advantage
    per trajectory and the aggregation `seq_mean_token_mean` value and gradient are those of `gspo`.
    """
    bounds = ClipRange(eps_low, eps_high)
    check_shapes(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    ratio = sequence_ratio(logprobs, old_logprobs, mask).detach()
    own = select(logprobs, mask)
    token_ratios = ratio[:, None] * (own - own.detach()).exp()
    return select(bounds.surrogate(token_ratios, select(advantages, mask).detach()), mask)


@LossSpec(
    help="the geometric mean of clipped ratios",
    needs={Need.CLIP},
    ratio_part="The clip",
    per_trajectory=True,
    cut=_log_ratio_cut,
)
def gmpo(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    eps_low: float = 0.4,
    eps_high: float = 0.4,
) -> Tensor:
    """Return `-A exp(mean_t g min(g d, g clip(d, -eps_low, eps_high)))`, `d = logprobs - old`, `g = sign(A)`, [N].

    Geometric-mean policy optimisation (arXiv:2507.20673, range (exp(-0.4), exp(0.4))); the bounds
    apply to the log-ratio. Each token is clipped before the mean, by the sign of the token's advantage; the
    leading `A` is the mean over the trajectory. verl uses its PPO clip range.
    """
    if eps_low < 0 or eps_high < 0:
        raise ValueError(f"eps_low and eps_high must not be negative: {eps_low}, {eps_high}")
    check_shapes(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    scores = trajectory_mean(advantages, mask).detach()
    sign = select(advantages, mask).detach().sign()
    log_ratio = select(logprobs, mask) - select(old_logprobs, mask).detach()
    kept = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-eps_low, eps_high))
    return -scores * clamped_ratio(trajectory_mean(kept, mask))
