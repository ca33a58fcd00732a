"""Policy losses per token or per trajectory, to be aggregated, and the terms that are added to them.

Every function takes padded tensors [N, L] by keyword and returns [N, L], 0 where `mask` is 0, or [N] where
its docstring says so. The gradient flows through `logprobs` alone; all else is constant. What stands at
masked positions never matters, NaN and infinity included. What needs the whole batch (a choice of tokens,
weights, a count) is an argument, computed once for the batch, so that microbatches add up to the same
gradient.

To add one: write the function, and its line in `LOSSES`, which says where its arguments come from.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ludus.algorithms.batch import TokenBatch
from ludus.algorithms.losses.behavior import binary_kl, binary_tv, dppo, mixed_policy
from ludus.algorithms.losses.clipped import (
    ClipOptions,
    ClipRange,
    ClipStats,
    cispo,
    clip_stats,
    ppo_clip,
    sapo,
    token_ratio,
)
from ludus.algorithms.losses.conflict import conflict_weights, gtpo
from ludus.algorithms.losses.covariance import (
    CovarianceMeans,
    choose_between,
    choose_highest,
    clip_cov,
    kl_cov,
    token_covariance,
)
from ludus.algorithms.losses.plain import (
    distill,
    distill_full,
    echo,
    positive_nll,
    reinforce,
    sft,
    value_loss,
)
from ludus.algorithms.losses.sequence import gmpo, gspo, gspo_token, trajectory_mean
from ludus.algorithms.presets import Algorithm

__all__ = [
    "LOSSES",
    "ClipOptions",
    "ClipRange",
    "ClipStats",
    "CovarianceMeans",
    "LossFn",
    "binary_kl",
    "binary_tv",
    "choose_between",
    "choose_highest",
    "cispo",
    "clip_cov",
    "clip_stats",
    "conflict_weights",
    "distill",
    "distill_full",
    "dppo",
    "echo",
    "gmpo",
    "gspo",
    "gspo_token",
    "gtpo",
    "kl_cov",
    "mixed_policy",
    "positive_nll",
    "ppo_clip",
    "reinforce",
    "sapo",
    "sft",
    "token_covariance",
    "token_ratio",
    "trajectory_mean",
    "value_loss",
]

LossFn = Callable[[TokenBatch, Algorithm], Tensor]

LOSSES: dict[str, LossFn] = {
    "ppo_clip": lambda b, a: ppo_clip(
        logprobs=b.logprobs,
        old_logprobs=b.old_logprobs,
        advantages=b.advantages,
        mask=b.mask,
        eps_low=a.eps_low,
        eps_high=a.eps_high,
        dual_clip=a.dual_clip,
    ),
    "reinforce": lambda b, a: reinforce(logprobs=b.logprobs, advantages=b.advantages, mask=b.mask),
}
