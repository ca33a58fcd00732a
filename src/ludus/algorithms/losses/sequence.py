"""Losses with a ratio per trajectory: the geometric mean of token ratios, or their product.

`A_i`, the advantage of a trajectory, is the mean of `advantages` over its action tokens: the advantage itself if it
is equal on all tokens, and 0 without action tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

from ludus.algorithms.algorithm import LossSpec, Need
from ludus.algorithms.losses.clipped import ClipRange, PolicyInputs, PolicyTokens, ppo_cut
from ludus.algorithms.tensors import Cut, Tensor, clamped_ratio, select, torch


def trajectory_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of `values` [N, L] over the action tokens of each trajectory, [N]; 0 without action tokens."""
    return select(values, mask).sum(1) / mask.bool().sum(1).clamp(min=1)


def sequence_ratio(tokens: PolicyTokens) -> Tensor:
    """Return `exp(mean_t (logprobs - old))` over the action tokens, the exponent clamped to +-20, [N]."""
    return clamped_ratio(trajectory_mean(tokens.gap, tokens.mask))


def product_ratio(tokens: PolicyTokens) -> Tensor:
    """Return `exp(sum_t (logprobs - old))` over the action tokens, the exponent clamped to +-20, [N]."""
    return clamped_ratio(tokens.gap.sum(1))


def _cut_by(ratio_of: Callable[[PolicyTokens], Tensor], by_token: bool = False) -> Callable[..., Cut]:
    """Return a function of the tokens clipped by the ratio and the mean advantage of their trajectory.

    `by_token`: by the advantage of each token instead of the mean.
    """

    def cut(*, eps_low: float, eps_high: float, **inputs: Unpack[PolicyInputs]) -> Cut:
        tokens = PolicyTokens.of(**inputs)
        shape = tokens.mask.shape
        mean = trajectory_mean(tokens.scores, tokens.mask)[:, None].expand(shape)
        return ppo_cut(
            ratio=ratio_of(tokens)[:, None].expand(shape),
            advantages=tokens.scores if by_token else mean,
            mask=tokens.mask,
            clip=ClipRange(eps_low, eps_high),
        )

    return cut


def _log_ratio_cut(*, eps_low: float, eps_high: float, **inputs: Unpack[PolicyInputs]) -> Cut:
    """Return the tokens clipped by their own log-ratio and advantage."""
    tokens = PolicyTokens.of(**inputs)
    low, high = (tokens.scores < 0) & (tokens.gap < -eps_low), (tokens.scores > 0) & (tokens.gap > eps_high)
    return Cut(low, high, torch.zeros_like(low))


@LossSpec(
    help="the geometric mean of the ratios, clipped",
    needs={Need.CLIP},
    ratio_part="The clip",
    per_trajectory=True,
    cut=_cut_by(sequence_ratio),
)
def gspo(*, eps_low: float = 3e-4, eps_high: float = 4e-4, **inputs: Unpack[PolicyInputs]) -> Tensor:
    """Return `-min(s A, clip(s, 1 - eps_low, 1 + eps_high) A)` with `s = exp(mean_t (logprobs - old))`, [N].

    arXiv:2507.18071 (clip range of its section 5.1). One term per trajectory; `aggregate` takes
    their mean over the trajectories. With one action token in each this is `ppo_clip`.
    """
    bounds, tokens = ClipRange(eps_low, eps_high), PolicyTokens.of(**inputs)
    return bounds.surrogate(sequence_ratio(tokens), trajectory_mean(tokens.scores, tokens.mask))


@LossSpec(
    help="PPO with the ratio of the whole trajectory",
    needs={Need.CLIP},
    ratio_part="The clip",
    per_trajectory=True,
    cut=_cut_by(product_ratio),
)
def ppo_sequence(*, eps_low: float = 0.2, eps_high: float = 0.2, **inputs: Unpack[PolicyInputs]) -> Tensor:
    """Return `-min(s A, clip(s, 1 - eps_low, 1 + eps_high) A)` with `s = exp(sum_t (logprobs - old))`, [N].

    PPO with a trajectory as the action, as in TRL's RLOO trainer (arXiv:2402.14740): the ratio is the
    product over the tokens, which exceeds the clip range on long trajectories.
    """
    bounds, tokens = ClipRange(eps_low, eps_high), PolicyTokens.of(**inputs)
    return bounds.surrogate(product_ratio(tokens), trajectory_mean(tokens.scores, tokens.mask))


@LossSpec(
    help="GSPO with the advantage of each token",
    needs={Need.CLIP},
    ratio_part="The clip",
    cut=_cut_by(sequence_ratio, by_token=True),
)
def gspo_token(*, eps_low: float = 3e-4, eps_high: float = 4e-4, **inputs: Unpack[PolicyInputs]) -> Tensor:
    """Return `gspo` with an advantage per token: the value of `s`, a gradient per token, [N, L].

    `s_t = stop_grad(s) exp(logprobs - stop_grad(logprobs))` (arXiv:2507.18071). With one advantage
    per trajectory and the aggregation `seq_mean_token_mean` value and gradient are those of `gspo`.
    """
    bounds, tokens = ClipRange(eps_low, eps_high), PolicyTokens.of(**inputs)
    ratio, own = sequence_ratio(tokens).detach(), tokens.logprobs
    token_ratios = ratio[:, None] * (own - own.detach()).exp()
    return select(bounds.surrogate(token_ratios, tokens.scores), tokens.mask)


@LossSpec(
    help="the geometric mean of clipped ratios",
    needs={Need.CLIP},
    ratio_part="The clip",
    per_trajectory=True,
    cut=_log_ratio_cut,
)
def gmpo(*, eps_low: float = 0.4, eps_high: float = 0.4, **inputs: Unpack[PolicyInputs]) -> Tensor:
    """Return `-A exp(mean_t g min(g d, g clip(d, -eps_low, eps_high)))`, `d = logprobs - old`, `g = sign(A)`, [N].

    Geometric-mean policy optimisation (arXiv:2507.20673, range (exp(-0.4), exp(0.4))); the bounds
    apply to the log-ratio. Each token is clipped before the mean, by the sign of the token's advantage; the
    leading `A` is the mean over the trajectory. verl uses its PPO clip range.
    """
    bounds, tokens = ClipRange(eps_low, eps_high), PolicyTokens.of(**inputs)
    sign, gap = tokens.scores.sign(), tokens.gap
    kept = sign * torch.minimum(sign * gap, sign * gap.clamp(-bounds.eps_low, bounds.eps_high))
    return -trajectory_mean(tokens.scores, tokens.mask) * clamped_ratio(trajectory_mean(kept, tokens.mask))
