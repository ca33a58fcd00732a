"""Clip-Cov and KL-Cov: restrict the update of tokens with a high covariance of log-probability and advantage.

Means, covariances and the selection are those of the whole batch and computed once per step, so that they do not
depend on the split into microbatches (other frameworks compute them per microbatch).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from ludus.algorithms.algorithm import NOT_NEGATIVE, LossSpec, Need, Option, OptionBounds
from ludus.algorithms.losses.clipped import ClipInputs, PolicyInputs, PolicyTokens, ppo_clip, token_cut
from ludus.algorithms.tensors import SummedFields, Tensor, check_shapes, check_share, select, torch

_SHARE = OptionBounds(0, 1, above=True)


@dataclass(frozen=True, slots=True)
class CovarianceMeans(SummedFields):
    """Sums of `old_logprobs` and `advantages` over action tokens; `+` joins the parts of a batch."""

    tokens: int
    logprob_sum: float
    advantage_sum: float

    @classmethod
    def of(cls, *, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> CovarianceMeans:
        """Return the sums over the action tokens of one part; all [N, L]."""
        check_shapes(mask, old_logprobs=old_logprobs, advantages=advantages)
        sums = [select(x.detach(), mask).sum(dtype=torch.float64) for x in (old_logprobs, advantages)]
        tokens, logprob_sum, advantage_sum = torch.stack([mask.bool().sum().double(), *sums]).tolist()
        return cls(int(tokens), logprob_sum, advantage_sum)

    @property
    def logprob(self) -> float:
        """Mean of `old_logprobs`; 0 without tokens."""
        return self.logprob_sum / max(self.tokens, 1)

    @property
    def advantage(self) -> float:
        """Mean advantage; 0 without tokens."""
        return self.advantage_sum / max(self.tokens, 1)


def token_covariance(*, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, means: CovarianceMeans) -> Tensor:
    """Return `(old - mean old) (A - mean A)`, [N, L], 0 off the mask (arXiv:2505.22617).

    `means` are those of the whole batch. The paper and verl use the current log-probabilities of a
    microbatch, which equal `old` in the first pass over the batch.
    """
    check_shapes(mask, old_logprobs=old_logprobs, advantages=advantages)
    logprob = select(old_logprobs.detach(), mask) - means.logprob
    return select(logprob * (select(advantages.detach(), mask) - means.advantage), mask)


def select_clip_cov(
    *, covariance: Tensor, mask: Tensor, seed: int, share: float = 2e-4, low: float = 1.0, high: float = 5.0
) -> Tensor:
    """Return a random sample of `max(1, floor(share M))` action tokens with `low < covariance < high`, [N, L].

    For Clip-Cov (arXiv:2505.22617; numbers of the authors' code and verl), over the whole batch;
    all of them if fewer lie in the band. The sample depends on the seed and on the positions.
    """
    check_share("share", share)
    check_shapes(mask, covariance=covariance)
    eligible = mask.bool() & (covariance > low) & (covariance < high)
    rows, columns = (torch.arange(size, device=mask.device) for size in mask.shape)
    keys = _scrambled(_scrambled(rows + 1_000_003 * seed % 2**61)[:, None] + columns)
    return _smallest(keys, eligible, _count(share, mask))


def select_kl_cov(*, covariance: Tensor, mask: Tensor, share: float = 2e-4) -> Tensor:
    """Return the `max(1, floor(share M))` action tokens with the highest covariance, [N, L] bool; ties by position.

    For KL-Cov (arXiv:2505.22617), over the whole batch. `share` 2e-4 as in verl; the authors use
    2e-3 for 7B and 2e-4 for 32B models.
    """
    check_share("share", share)
    check_shapes(mask, covariance=covariance)
    return _smallest(-covariance, mask.bool(), _count(share, mask))


@LossSpec(
    help="PPO without the gradient of some tokens with a high covariance",
    needs={Need.CLIP, Need.DUAL_CLIP, Need.TOKEN_CHOICE},
    options={
        "share": Option("fraction of the tokens that is chosen", _SHARE, default=2e-4),
        "low": Option("lower bound of the covariance", default=1.0),
        "high": Option("upper bound of the covariance", default=5.0),
    },
    ratio_part="The clip",
    cut=token_cut,
    choose=select_clip_cov,
)
def clip_cov(*, chosen: Tensor | None = None, **inputs: Unpack[ClipInputs]) -> Tensor:
    """Return `ppo_clip`, and 0 with no gradient on the tokens of `chosen`, [N, L] (arXiv:2505.22617).

    `chosen` [N, L] bool comes from `select_clip_cov` over the whole batch; None: that of these rows, with its
    defaults and seed 0. The tokens stay in the normaliser.
    """
    mask = inputs["mask"]
    if chosen is None:
        covariance = _covariance(inputs["old_logprobs"], inputs["advantages"], mask)
        chosen = select_clip_cov(covariance=covariance, mask=mask, seed=0)
    check_shapes(mask, chosen=chosen)
    return select(ppo_clip(**inputs), ~chosen.bool())


@LossSpec(
    help="a KL penalty on the tokens with the highest covariance",
    needs={Need.TOKEN_CHOICE},
    options={
        "share": Option("fraction of the tokens that is chosen", _SHARE, default=2e-4),
        "coef": Option("coefficient of the KL of chosen tokens", NOT_NEGATIVE),
    },
    ratio_part="The KL of the chosen tokens",
    choose=select_kl_cov,
)
def kl_cov(*, chosen: Tensor | None = None, coef: float = 1.0, **inputs: Unpack[PolicyInputs]) -> Tensor:
    """Return `-ratio A`, plus `coef |logprobs - old|` on the tokens of `chosen`, [N, L] (arXiv:2505.22617).

    `chosen` [N, L] bool comes from `select_kl_cov` over the whole batch; None: that of these rows, with its
    defaults. `coef` 1 as in the paper and verl. No clip.
    """
    if chosen is None:
        covariance = _covariance(inputs["old_logprobs"], inputs["advantages"], inputs["mask"])
        chosen = select_kl_cov(covariance=covariance, mask=inputs["mask"])
    tokens = PolicyTokens.of(**inputs)
    check_shapes(tokens.mask, chosen=chosen)
    loss = -tokens.ratio * tokens.scores
    # Recomputed instead of `tokens.gap`, so that the gradients of ratio and penalty are summed in a fixed order.
    gap = select(inputs["logprobs"], tokens.mask) - select(inputs["old_logprobs"], tokens.mask).detach()
    return select(loss, tokens.mask) + coef * select(gap.abs(), tokens.mask & chosen.bool())


def _covariance(old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return `token_covariance` with the means of these rows."""
    means = CovarianceMeans.of(old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    return token_covariance(old_logprobs=old_logprobs, advantages=advantages, mask=mask, means=means)


def _count(share: float, mask: Tensor) -> int:
    return max(1, int(share * int(mask.bool().sum()) + 1e-9))


def _smallest(keys: Tensor, eligible: Tensor, count: int) -> Tensor:
    """Return up to `count` eligible positions with the smallest keys, [N, L] bool; ties by position."""
    positions = eligible.flatten().nonzero().squeeze(1)
    order = torch.argsort(keys.flatten()[positions], stable=True)[:count]
    chosen = torch.zeros(eligible.numel(), dtype=torch.bool, device=eligible.device)
    chosen[positions[order]] = True
    return chosen.reshape(eligible.shape)


def _scrambled(numbers: Tensor) -> Tensor:
    """Return a fixed pseudo-random int64 for each int64: the finaliser of SplitMix64 (Steele et al. 2014)."""
    mixed = numbers + -0x61C8864680B583EB
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)
