"""From a batch and an algorithm to the arguments of each loss: the functions of `spec.losses`."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ludus.algorithms.batch import TokenBatch
from ludus.algorithms.losses import clipped, gtpo_weights, likelihood, sequence, trust_region
from ludus.algorithms.losses import covariance as covariances
from ludus.algorithms.masking import select
from ludus.algorithms.spec.algorithm import Algorithm
from ludus.algorithms.spec.words import DIVERGENCES


def _chosen(batch: TokenBatch) -> Tensor:
    """The tokens that were chosen over the whole batch. Raises ValueError where none were."""
    if batch.chosen is None:
        raise ValueError("this loss needs a choice of tokens over the whole batch, and the batch has none")
    return batch.chosen


def sapo(b: TokenBatch, a: Algorithm) -> Tensor:
    """Call `clipped.sapo`."""
    return clipped.sapo(
        logprobs=b.logprobs,
        old_logprobs=b.old_logprobs,
        advantages=b.advantages,
        mask=b.mask,
        tau_pos=a.number("loss", "tau_pos"),
        tau_neg=a.number("loss", "tau_neg"),
    )


def dppo(b: TokenBatch, a: Algorithm) -> Tensor:
    """Call `dppo.dppo`."""
    return trust_region.dppo(
        logprobs=b.logprobs,
        behavior_logprobs=b.behavior_logprobs,
        advantages=b.advantages,
        mask=b.mask,
        bound=a.number("loss", "bound"),
        divergence=a.word("loss", "divergence", DIVERGENCES),
    )


def distill(b: TokenBatch, a: Algorithm) -> Tensor:
    """Call `reinforce.distill`."""
    if b.teacher_logprobs is None:
        raise ValueError("distill needs the log-probabilities of a teacher, and the batch has none")
    return likelihood.distill(
        logprobs=b.logprobs, teacher_logprobs=b.teacher_logprobs, mask=b.mask, old_logprobs=b.old_logprobs
    )


def distill_full(b: TokenBatch, a: Algorithm) -> Tensor:
    """Return the divergence from the teacher that the batch has."""
    del a
    if b.teacher_kl is None:
        raise ValueError("distill_full needs the divergence from a teacher, and the batch has none")
    return select(b.teacher_kl, b.mask)


def mixed_policy(b: TokenBatch, a: Algorithm) -> Tensor:
    """Call `dppo.mixed_policy`."""
    if b.expert is None:
        raise ValueError("mixed_policy needs to know the experts, and the batch does not say")
    return trust_region.mixed_policy(
        logprobs=b.logprobs,
        old_logprobs=b.old_logprobs,
        advantages=b.advantages,
        mask=b.mask,
        expert=b.expert,
        gamma=a.number("loss", "gamma"),
        eps_low=a.clip_low,
        eps_high=a.clip_high,
        dual_clip=a.dual_clip,
    )


def clip_cov(b: TokenBatch, a: Algorithm) -> Tensor:
    """Call `clip_cov.clip_cov`."""
    return covariances.clip_cov(
        logprobs=b.logprobs,
        old_logprobs=b.old_logprobs,
        advantages=b.advantages,
        mask=b.mask,
        chosen=_chosen(b),
        eps_low=a.clip_low,
        eps_high=a.clip_high,
        dual_clip=a.dual_clip,
    )


def kl_cov(b: TokenBatch, a: Algorithm) -> Tensor:
    """Call `clip_cov.kl_cov`."""
    return covariances.kl_cov(
        logprobs=b.logprobs,
        old_logprobs=b.old_logprobs,
        advantages=b.advantages,
        mask=b.mask,
        chosen=_chosen(b),
        coef=a.number("loss", "coef"),
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


def _clipped(loss: _ClippingLoss, b: TokenBatch, a: Algorithm) -> Tensor:
    return loss(
        logprobs=b.logprobs,
        old_logprobs=b.old_logprobs,
        advantages=b.advantages,
        mask=b.mask,
        eps_low=a.clip_low,
        eps_high=a.clip_high,
    )


def ppo_clip(b: TokenBatch, a: Algorithm) -> Tensor:
    """Call `clipped.ppo_clip`."""
    return clipped.ppo_clip(
        logprobs=b.logprobs,
        old_logprobs=b.old_logprobs,
        advantages=b.advantages,
        mask=b.mask,
        eps_low=a.clip_low,
        eps_high=a.clip_high,
        dual_clip=a.dual_clip,
    )


def reinforce(b: TokenBatch, a: Algorithm) -> Tensor:
    """Call `reinforce.reinforce`."""
    return likelihood.reinforce(logprobs=b.logprobs, advantages=b.advantages, mask=b.mask)


def gtpo(b: TokenBatch, a: Algorithm) -> Tensor:
    """Call `gtpo_weights.gtpo`."""
    return gtpo_weights.gtpo(
        logprobs=b.logprobs,
        old_logprobs=b.old_logprobs,
        advantages=b.advantages,
        mask=b.mask,
        weights=b.mask.to(b.advantages.dtype),
    )


def ppo_sequence(b: TokenBatch, a: Algorithm) -> Tensor:
    """Call `sequence.ppo_sequence`."""
    return _clipped(sequence.ppo_sequence, b, a)


def gspo(b: TokenBatch, a: Algorithm) -> Tensor:
    """Call `sequence.gspo`."""
    return _clipped(sequence.gspo, b, a)


def gspo_token(b: TokenBatch, a: Algorithm) -> Tensor:
    """Call `sequence.gspo_token`."""
    return _clipped(sequence.gspo_token, b, a)


def cispo(b: TokenBatch, a: Algorithm) -> Tensor:
    """Call `clipped.cispo`."""
    return _clipped(clipped.cispo, b, a)


def gmpo(b: TokenBatch, a: Algorithm) -> Tensor:
    """Call `sequence.gmpo`."""
    return _clipped(sequence.gmpo, b, a)


def choose_clipped(covariance: Tensor, mask: Tensor, seed: int, a: Algorithm) -> Tensor:
    """Return the tokens that `clip_cov` chooses, [N, L] bool."""
    return covariances.choose_between(
        covariance=covariance,
        mask=mask,
        seed=seed,
        share=a.number("loss", "share"),
        low=a.number("loss", "low"),
        high=a.number("loss", "high"),
    )


def choose_penalised(covariance: Tensor, mask: Tensor, seed: int, a: Algorithm) -> Tensor:
    """Return the tokens that `kl_cov` chooses, [N, L] bool."""
    del seed
    return covariances.choose_highest(covariance=covariance, mask=mask, share=a.number("loss", "share"))
