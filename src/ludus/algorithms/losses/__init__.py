"""Policy losses per token or per trajectory, to be aggregated, and the terms that are added to them.

Every function takes padded tensors [N, L] by keyword and returns [N, L], 0 where `mask` is 0, or [N] where
its docstring says so. The gradient flows through `logprobs` alone; all else is constant. What stands at
masked positions never matters, NaN and infinity included. What needs the whole batch (a choice of tokens,
weights, a count) is an argument, computed once for the batch, so that microbatches add up to the same
gradient.

Those on pairs (`dpo` and its kin) are in `algorithms.preference` and have its shapes.

To add one: write the function, and its line in `LOSSES`, which says where its arguments come from; where it
clips, one in `cuts.CUTS` says what, for the statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from ludus.algorithms.batch import TokenBatch
from ludus.algorithms.losses.clip_cov import (
    CovarianceMeans,
    choose_between,
    choose_highest,
    clip_cov,
    kl_cov,
    token_covariance,
)
from ludus.algorithms.losses.clipped import (
    ClipOptions,
    ClipRange,
    ClipStats,
    Cut,
    cispo,
    clip_stats,
    ppo_clip,
    ppo_cut,
    sapo,
    token_ratio,
)
from ludus.algorithms.losses.clipping import cut_off
from ludus.algorithms.losses.dppo import binary_kl, binary_tv, dppo, mixed_policy
from ludus.algorithms.losses.gtpo_weights import conflict_weights, gtpo
from ludus.algorithms.losses.reinforce import (
    distill,
    distill_full,
    echo,
    positive_nll,
    reinforce,
    sft,
    value_loss,
)
from ludus.algorithms.losses.sequence import gmpo, gspo, gspo_token, ppo_sequence, trajectory_mean
from ludus.algorithms.masking import select
from ludus.algorithms.preference import (
    apo_down,
    apo_zero,
    bco,
    bco_pair,
    discopop,
    dpo,
    exo,
    hinge,
    ipo,
    kto,
    nca,
    simpo,
    sppo,
)
from ludus.algorithms.spec.algorithm import DIVERGENCES, Algorithm, number, word

__all__ = [
    "LOSSES",
    "ClipOptions",
    "ClipRange",
    "ClipStats",
    "CovarianceMeans",
    "Cut",
    "LossFn",
    "apo_down",
    "apo_zero",
    "bco",
    "bco_pair",
    "binary_kl",
    "binary_tv",
    "choose_between",
    "choose_highest",
    "cispo",
    "clip_cov",
    "clip_stats",
    "conflict_weights",
    "cut_off",
    "discopop",
    "distill",
    "distill_full",
    "dpo",
    "dppo",
    "echo",
    "exo",
    "gmpo",
    "gspo",
    "gspo_token",
    "gtpo",
    "hinge",
    "ipo",
    "kl_cov",
    "kto",
    "mixed_policy",
    "nca",
    "positive_nll",
    "ppo_clip",
    "ppo_cut",
    "ppo_sequence",
    "reinforce",
    "sapo",
    "sft",
    "simpo",
    "sppo",
    "token_covariance",
    "token_ratio",
    "trajectory_mean",
    "value_loss",
]

LossFn = Callable[[TokenBatch, Algorithm], Tensor]


def _chosen(batch: TokenBatch) -> Tensor:
    """The tokens that were chosen over the whole batch. Raises ValueError where none were."""
    if batch.chosen is None:
        raise ValueError("this loss needs a choice of tokens over the whole batch, and the batch has none")
    return batch.chosen


def _sapo(b: TokenBatch, a: Algorithm) -> Tensor:
    return sapo(
        logprobs=b.logprobs,
        old_logprobs=b.old_logprobs,
        advantages=b.advantages,
        mask=b.mask,
        tau_pos=number(a.options.loss, "tau_pos", 1.0),
        tau_neg=number(a.options.loss, "tau_neg", 1.05),
    )


def _dppo(b: TokenBatch, a: Algorithm) -> Tensor:
    return dppo(
        logprobs=b.logprobs,
        behavior_logprobs=b.behavior_logprobs,
        advantages=b.advantages,
        mask=b.mask,
        bound=number(a.options.loss, "bound", 0.2),
        divergence=word(a.options.loss, "divergence", DIVERGENCES),
    )


def _distill(b: TokenBatch, a: Algorithm) -> Tensor:
    if b.teacher_logprobs is None:
        raise ValueError("distill needs the log-probabilities of a teacher, and the batch has none")
    return distill(
        logprobs=b.logprobs,
        teacher_logprobs=b.teacher_logprobs,
        mask=b.mask,
        old_logprobs=b.old_logprobs,
    )


def _distill_full(b: TokenBatch, a: Algorithm) -> Tensor:
    del a
    if b.teacher_kl is None:
        raise ValueError("distill_full needs the divergence from a teacher, and the batch has none")
    return select(b.teacher_kl, b.mask)


def _mixed_policy(b: TokenBatch, a: Algorithm) -> Tensor:
    if b.expert is None:
        raise ValueError("mixed_policy needs to know the experts, and the batch does not say")
    return mixed_policy(
        logprobs=b.logprobs,
        old_logprobs=b.old_logprobs,
        advantages=b.advantages,
        mask=b.mask,
        expert=b.expert,
        gamma=number(a.options.loss, "gamma", 0.1),
        eps_low=a.eps_low,
        eps_high=a.eps_high,
        dual_clip=a.dual_clip,
    )


def _clip_cov(b: TokenBatch, a: Algorithm) -> Tensor:
    return clip_cov(
        logprobs=b.logprobs,
        old_logprobs=b.old_logprobs,
        advantages=b.advantages,
        mask=b.mask,
        chosen=_chosen(b),
        eps_low=a.eps_low,
        eps_high=a.eps_high,
        dual_clip=a.dual_clip,
    )


def _kl_cov(b: TokenBatch, a: Algorithm) -> Tensor:
    return kl_cov(
        logprobs=b.logprobs,
        old_logprobs=b.old_logprobs,
        advantages=b.advantages,
        mask=b.mask,
        chosen=_chosen(b),
        coef=number(a.options.loss, "coef", 1.0),
    )


class _ClippingLoss(Protocol):
    def __call__(
        self,
        *,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        eps_low: float,
        eps_high: float,
    ) -> Tensor: ...


def _clipping(loss: _ClippingLoss) -> LossFn:
    return lambda b, a: loss(
        logprobs=b.logprobs,
        old_logprobs=b.old_logprobs,
        advantages=b.advantages,
        mask=b.mask,
        eps_low=a.eps_low,
        eps_high=a.eps_high,
    )


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
    "ppo_sequence": _clipping(ppo_sequence),
    "gspo": _clipping(gspo),
    "gspo_token": _clipping(gspo_token),
    "cispo": _clipping(cispo),
    "gmpo": _clipping(gmpo),
    "sapo": _sapo,
    "dppo": _dppo,
    # The conflict weights are in the advantages already (`training.credit.advantages`).
    "gtpo": lambda b, a: gtpo(
        logprobs=b.logprobs,
        old_logprobs=b.old_logprobs,
        advantages=b.advantages,
        mask=b.mask,
        weights=b.mask.to(b.advantages.dtype),
    ),
    "clip_cov": _clip_cov,
    "kl_cov": _kl_cov,
    "distill": _distill,
    "distill_full": _distill_full,
    "mixed_policy": _mixed_policy,
}
