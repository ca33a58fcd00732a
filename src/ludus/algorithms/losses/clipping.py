"""What the clip of each loss cuts off, by the ratio that this loss takes: for the statistics of a step.

Each is the `cut` of a spec of `spec.losses`; a loss without one clips nothing.
"""

from __future__ import annotations

from typing import cast

import torch

from ludus.algorithms.batch import TokenBatch
from ludus.algorithms.losses.clipped import ClipRange, Cut, ppo_cut, token_ratio
from ludus.algorithms.losses.sequence import product_ratio, sequence_ratio, trajectory_mean
from ludus.algorithms.losses.trust_region import dppo_blocked
from ludus.algorithms.masking import select
from ludus.algorithms.spec.algorithm import Algorithm
from ludus.algorithms.spec.parts import loaded
from ludus.algorithms.spec.words import DIVERGENCES


def cut_off(batch: TokenBatch, algorithm: Algorithm) -> Cut | None:
    """The tokens whose gradient the loss cuts off, None for one that cuts nothing off."""
    cut = algorithm.loss_spec.cut
    if not cut:
        return None
    with torch.no_grad():
        return cast(Cut, loaded(cut)(batch, algorithm))


def of_tokens(b: TokenBatch, a: Algorithm) -> Cut:
    """Token by token."""
    clip = ClipRange(a.clip_low, a.clip_high, a.dual_clip)
    ratio = token_ratio(b.logprobs, b.old_logprobs, b.mask)
    return ppo_cut(ratio=ratio, advantages=b.advantages, mask=b.mask, clip=clip)


def of_own_tokens(b: TokenBatch, a: Algorithm) -> Cut:
    """Those of experts are not clipped."""
    cut = of_tokens(b, a)
    if b.expert is None:
        return cut
    own = ~b.expert.bool()[:, None]
    return Cut(cut.low & own, cut.high & own, cut.dual & own)


def of_sequences(b: TokenBatch, a: Algorithm) -> Cut:
    """By one ratio and one advantage for all tokens of a trajectory."""
    ratio = sequence_ratio(b.logprobs, b.old_logprobs, b.mask)[:, None].expand(b.mask.shape)
    scores = trajectory_mean(b.advantages, b.mask)[:, None].expand(b.mask.shape)
    return ppo_cut(ratio=ratio, advantages=scores, mask=b.mask, clip=ClipRange(a.clip_low, a.clip_high))


def of_products(b: TokenBatch, a: Algorithm) -> Cut:
    """By the product of a trajectory's ratios, and one advantage."""
    ratio = product_ratio(b.logprobs, b.old_logprobs, b.mask)[:, None].expand(b.mask.shape)
    scores = trajectory_mean(b.advantages, b.mask)[:, None].expand(b.mask.shape)
    return ppo_cut(ratio=ratio, advantages=scores, mask=b.mask, clip=ClipRange(a.clip_low, a.clip_high))


def of_sequences_by_token(b: TokenBatch, a: Algorithm) -> Cut:
    """By one ratio for all tokens of a trajectory, and each token's own advantage."""
    ratio = sequence_ratio(b.logprobs, b.old_logprobs, b.mask)[:, None].expand(b.mask.shape)
    return ppo_cut(ratio=ratio, advantages=b.advantages, mask=b.mask, clip=ClipRange(a.clip_low, a.clip_high))


def of_weights(b: TokenBatch, a: Algorithm) -> Cut:
    """Where the weight is bounded, whatever the advantage; the gradient stays."""
    ratio, actions = token_ratio(b.logprobs, b.old_logprobs, b.mask), b.mask.bool()
    low, high = actions & (ratio < 1 - a.clip_low), actions & (ratio > 1 + a.clip_high)
    return Cut(low, high, torch.zeros_like(actions))


def of_log_ratios(b: TokenBatch, a: Algorithm) -> Cut:
    """Token by token, by the log-ratio and the token's advantage."""
    gap = select(b.logprobs, b.mask) - select(b.old_logprobs, b.mask)
    scores, actions = select(b.advantages, b.mask), b.mask.bool()
    low, high = actions & (scores < 0) & (gap < -a.clip_low), actions & (scores > 0) & (gap > a.clip_high)
    return Cut(low, high, torch.zeros_like(actions))


def of_trust_region(b: TokenBatch, a: Algorithm) -> Cut:
    """Token by token."""
    low, high = dppo_blocked(
        select(b.logprobs, b.mask),
        select(b.behavior_logprobs, b.mask),
        select(b.advantages, b.mask),
        a.number("loss", "bound"),
        a.word("loss", "divergence", DIVERGENCES),
    )
    return Cut(low, high, torch.zeros_like(low))
