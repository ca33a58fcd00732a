"""What the clip of each loss cuts off, by the ratio that this loss takes: for the statistics of a step.

To add one: its line in `CUTS`. A loss that is not there cuts nothing off.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ludus.algorithms.batch import TokenBatch
from ludus.algorithms.losses.clipped import ClipRange, Cut, ppo_cut, token_ratio
from ludus.algorithms.losses.dppo import dppo_blocked
from ludus.algorithms.losses.sequence import product_ratio, sequence_ratio, trajectory_mean
from ludus.algorithms.masking import select
from ludus.algorithms.spec.algorithm import DIVERGENCES, Algorithm, number, word


def cut_off(batch: TokenBatch, algorithm: Algorithm) -> Cut | None:
    """The tokens whose gradient the loss cuts off, None for one that cuts nothing off."""
    found = CUTS.get(algorithm.loss)
    with torch.no_grad():
        return None if found is None else found(batch, algorithm)


def _of_tokens(b: TokenBatch, a: Algorithm) -> Cut:
    clip = ClipRange(a.eps_low, a.eps_high, a.dual_clip)
    ratio = token_ratio(b.logprobs, b.old_logprobs, b.mask)
    return ppo_cut(ratio=ratio, advantages=b.advantages, mask=b.mask, clip=clip)


def _of_own_tokens(b: TokenBatch, a: Algorithm) -> Cut:
    """Those of experts are not clipped."""
    cut = _of_tokens(b, a)
    if b.expert is None:
        return cut
    own = ~b.expert.bool()[:, None]
    return Cut(cut.low & own, cut.high & own, cut.dual & own)


def _of_sequences(b: TokenBatch, a: Algorithm) -> Cut:
    """By one ratio and one advantage for all tokens of a trajectory."""
    ratio = sequence_ratio(b.logprobs, b.old_logprobs, b.mask)[:, None].expand(b.mask.shape)
    scores = trajectory_mean(b.advantages, b.mask)[:, None].expand(b.mask.shape)
    return ppo_cut(ratio=ratio, advantages=scores, mask=b.mask, clip=ClipRange(a.eps_low, a.eps_high))


def _of_products(b: TokenBatch, a: Algorithm) -> Cut:
    """By the product of a trajectory's ratios, and one advantage."""
    ratio = product_ratio(b.logprobs, b.old_logprobs, b.mask)[:, None].expand(b.mask.shape)
    scores = trajectory_mean(b.advantages, b.mask)[:, None].expand(b.mask.shape)
    return ppo_cut(ratio=ratio, advantages=scores, mask=b.mask, clip=ClipRange(a.eps_low, a.eps_high))


def _of_sequences_by_token(b: TokenBatch, a: Algorithm) -> Cut:
    """By one ratio for all tokens of a trajectory, and each token's own advantage."""
    ratio = sequence_ratio(b.logprobs, b.old_logprobs, b.mask)[:, None].expand(b.mask.shape)
    return ppo_cut(ratio=ratio, advantages=b.advantages, mask=b.mask, clip=ClipRange(a.eps_low, a.eps_high))


def _of_weights(b: TokenBatch, a: Algorithm) -> Cut:
    """Where the weight is bounded, whatever the advantage; the gradient stays."""
    ratio, actions = token_ratio(b.logprobs, b.old_logprobs, b.mask), b.mask.bool()
    low, high = actions & (ratio < 1 - a.eps_low), actions & (ratio > 1 + a.eps_high)
    return Cut(low, high, torch.zeros_like(actions))


def _of_log_ratios(b: TokenBatch, a: Algorithm) -> Cut:
    """Token by token, by the log-ratio and the token's advantage."""
    gap = select(b.logprobs, b.mask) - select(b.old_logprobs, b.mask)
    scores, actions = select(b.advantages, b.mask), b.mask.bool()
    low, high = actions & (scores < 0) & (gap < -a.eps_low), actions & (scores > 0) & (gap > a.eps_high)
    return Cut(low, high, torch.zeros_like(actions))


def _of_trust_region(b: TokenBatch, a: Algorithm) -> Cut:
    low, high = dppo_blocked(
        select(b.logprobs, b.mask),
        select(b.behavior_logprobs, b.mask),
        select(b.advantages, b.mask),
        number(a.options.loss, "bound", 0.2),
        word(a.options.loss, "divergence", DIVERGENCES),
    )
    return Cut(low, high, torch.zeros_like(low))


CUTS: dict[str, Callable[[TokenBatch, Algorithm], Cut]] = {
    "ppo_clip": _of_tokens,
    "clip_cov": _of_tokens,
    "mixed_policy": _of_own_tokens,
    "ppo_sequence": _of_products,
    "gspo": _of_sequences,
    "gspo_token": _of_sequences_by_token,
    "cispo": _of_weights,
    "gmpo": _of_log_ratios,
    "dppo": _of_trust_region,
}
