"""Weights against the mismatch between the engine that sampled and the learner that trains.

Every correction returns weights [N, L] without gradient, 0 where `mask` is 0, which multiply the policy loss.
They do not change its normaliser. To add one: the function, and its line in `CORRECTIONS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ludus.algorithms.batch import TokenBatch
from ludus.algorithms.kl import k3
from ludus.algorithms.masking import check_shapes, clamped_ratio, select
from ludus.algorithms.presets import Algorithm


def none(*, old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> Tensor:
    """1 on every action token: sampler and learner are taken to agree."""
    check_shapes(mask, old_logprobs=old_logprobs, behavior_logprobs=behavior_logprobs)
    return mask.bool().to(old_logprobs.dtype)


def tis(*, old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, cap: float = 2.0) -> Tensor:
    """`min(exp(old - behavior), cap)` per token, truncated importance sampling.

    Source: https://fengyao.notion.site/off-policy-rl (cap 2).
    """
    return select(_weights(old_logprobs, behavior_logprobs, mask).clamp(max=cap), mask)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Sums over action tokens, with `w = exp(old - behavior)` before truncation; `+` joins microbatches."""

    tokens: int
    gap_sum: float
    gap_max: float
    weight_sum: float
    weight_square_sum: float
    k3_sum: float
    truncated: int

    @property
    def gap_mean(self) -> float:
        """Mean of `|old - behavior|`, nats; 0 without tokens."""
        return self.gap_sum / max(self.tokens, 1)

    @property
    def effective_share(self) -> float:
        """Effective sample size `(sum w)^2 / (n sum w^2)` in (0, 1]; 1 without tokens."""
        return self.weight_sum**2 / (self.tokens * self.weight_square_sum) if self.tokens else 1.0

    @property
    def k3(self) -> float:
        """Estimate of KL(engine || learner), nats per token; 0 without tokens."""
        return self.k3_sum / max(self.tokens, 1)

    @property
    def truncated_share(self) -> float:
        """Share of action tokens whose weight passes the cap; 0 without tokens."""
        return self.truncated / max(self.tokens, 1)

    def __add__(self, other: Mismatch) -> Mismatch:
        return Mismatch(
            tokens=self.tokens + other.tokens,
            gap_sum=self.gap_sum + other.gap_sum,
            gap_max=max(self.gap_max, other.gap_max),
            weight_sum=self.weight_sum + other.weight_sum,
            weight_square_sum=self.weight_square_sum + other.weight_square_sum,
            k3_sum=self.k3_sum + other.k3_sum,
            truncated=self.truncated + other.truncated,
        )


def mismatch(
    *, old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, cap: float | None = None
) -> Mismatch:
    """How far learner and engine are apart on the action tokens; `cap` None counts none as truncated."""
    weights = _weights(old_logprobs.double(), behavior_logprobs.double(), mask)
    old, behavior = select(old_logprobs, mask).double(), select(behavior_logprobs, mask).double()
    gap = (old - behavior).abs().detach()
    truncated = weights > (torch.inf if cap is None else cap)
    sums = [
        mask.bool().sum(),
        gap.sum(),
        gap.amax() if gap.numel() else gap.sum(),
        weights.sum(),
        weights.square().sum(),
        select(k3(logprobs=behavior, ref_logprobs=old).detach(), mask).sum(),
        truncated.sum(),
    ]
    tokens, gap_sum, gap_max, *moments, num_truncated = torch.stack([s.double() for s in sums]).tolist()
    weight_sum, weight_square_sum, k3_sum = moments
    return Mismatch(
        tokens=int(tokens),
        gap_sum=gap_sum,
        gap_max=gap_max,
        weight_sum=weight_sum,
        weight_square_sum=weight_square_sum,
        k3_sum=k3_sum,
        truncated=int(num_truncated),
    )


def _weights(old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> Tensor:
    check_shapes(mask, old_logprobs=old_logprobs, behavior_logprobs=behavior_logprobs)
    ratio = clamped_ratio(select(old_logprobs, mask) - select(behavior_logprobs, mask))
    return select(ratio, mask).detach()


CorrectionFn = Callable[[TokenBatch, Algorithm], Tensor]

CORRECTIONS: dict[str, CorrectionFn] = {
    "none": lambda b, a: none(
        old_logprobs=b.old_logprobs, behavior_logprobs=b.behavior_logprobs, mask=b.mask
    ),
    "tis": lambda b, a: tis(
        old_logprobs=b.old_logprobs, behavior_logprobs=b.behavior_logprobs, mask=b.mask, cap=a.tis_cap
    ),
}
