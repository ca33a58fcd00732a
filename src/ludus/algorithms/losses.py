"""Policy losses per token, to be aggregated.

Every function takes padded tensors [N, L] by keyword and returns [N, L], 0 where `mask` is 0. The gradient
flows through `logprobs` alone; `old_logprobs` and `advantages` are constants. What stands at masked
positions never matters, NaN and infinity included.

To add one: write the function, and its line in `LOSSES`, which says where its arguments come from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from ludus.algorithms.batch import TokenBatch
from ludus.algorithms.masking import check_shapes, clamped_ratio, select
from ludus.algorithms.presets import Algorithm


@dataclass(frozen=True, slots=True)
class ClipRange:
    """The interval `[1 - eps_low, 1 + eps_high]` of the ratio, and the bound `dual_clip` > 1 (None: none)."""

    eps_low: float = 0.2
    eps_high: float = 0.2
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        if self.eps_low < 0 or self.eps_high < 0:
            raise ValueError(f"eps_low and eps_high must not be negative: {self.eps_low}, {self.eps_high}")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip must be above 1, not {self.dual_clip}")


class ClipOptions(TypedDict, total=False):
    """The fields of `ClipRange` as keywords."""

    eps_low: float
    eps_high: float
    dual_clip: float | None


def ppo_clip(
    *, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, **clip: Unpack[ClipOptions]
) -> Tensor:
    """`-min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)`, `ratio = exp(logprobs - old_logprobs)`.

    Keywords `eps_low=0.2`, `eps_high=0.2`, `dual_clip=None`, as in `ClipRange`. arXiv:1707.06347 (eq. 7); two
    bounds as in DAPO (arXiv:2503.14476). With `dual_clip = c`, where `A < 0`: `min(that, -c A)`
    (arXiv:1912.09729).
    """
    bounds = ClipRange(**clip)
    check_shapes(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    ratio = _ratio(logprobs, old_logprobs, mask)
    scores = select(advantages, mask).detach()
    clipped = ratio.clamp(1 - bounds.eps_low, 1 + bounds.eps_high)
    loss = -torch.minimum(ratio * scores, clipped * scores)
    if bounds.dual_clip is not None:
        loss = torch.where(scores < 0, torch.minimum(loss, -bounds.dual_clip * scores), loss)
    return select(loss, mask)


def reinforce(*, logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """`-A logprobs` (Williams 1992)."""
    check_shapes(mask, logprobs=logprobs, advantages=advantages)
    return -select(advantages, mask).detach() * select(logprobs, mask)


def sft(*, logprobs: Tensor, mask: Tensor) -> Tensor:
    """`-logprobs`: the negative log-likelihood of the masked tokens, for supervised training."""
    check_shapes(mask, logprobs=logprobs)
    return -select(logprobs, mask)


@dataclass(frozen=True, slots=True)
class ClipStats:
    """Counts and sums over action tokens; `+` joins microbatches.

    A token is clipped where its policy gradient is cut off: `clipped_high` (A > 0 and the ratio above the
    interval), `clipped_low` (A < 0 and the ratio below it), `clipped_dual` (A < 0 and the ratio above
    `dual_clip`).
    """

    tokens: int
    clipped_low: int
    clipped_high: int
    clipped_dual: int
    ratio_sum: float
    ratio_max: float

    @property
    def fraction(self) -> float:
        """Share of action tokens that are clipped; 0 without tokens."""
        return (self.clipped_low + self.clipped_high + self.clipped_dual) / max(self.tokens, 1)

    @property
    def ratio_mean(self) -> float:
        """Mean ratio over action tokens; 0 without tokens."""
        return self.ratio_sum / max(self.tokens, 1)

    def __add__(self, other: ClipStats) -> ClipStats:
        return ClipStats(
            tokens=self.tokens + other.tokens,
            clipped_low=self.clipped_low + other.clipped_low,
            clipped_high=self.clipped_high + other.clipped_high,
            clipped_dual=self.clipped_dual + other.clipped_dual,
            ratio_sum=self.ratio_sum + other.ratio_sum,
            ratio_max=max(self.ratio_max, other.ratio_max),
        )


def clip_stats(
    *, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip: ClipRange | None
) -> ClipStats:
    """How far the policy moved from `old_logprobs` on action tokens; `clip` None counts none as clipped."""
    check_shapes(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    actions = mask.bool()
    ratio = select(_ratio(logprobs.detach(), old_logprobs, mask), mask).double()
    low, high, dual = torch.zeros_like(actions), torch.zeros_like(actions), torch.zeros_like(actions)
    if clip is not None:
        positive, negative = actions & (advantages > 0), actions & (advantages < 0)
        low = negative & (ratio < 1 - clip.eps_low)
        high = positive & (ratio > 1 + clip.eps_high)
        dual = negative & (ratio > clip.dual_clip) if clip.dual_clip is not None else dual
    largest = ratio.amax() if ratio.numel() else ratio.sum()
    sums = [actions.sum(), low.sum(), high.sum(), dual.sum(), ratio.sum(), largest]
    tokens, num_low, num_high, num_dual, ratio_sum, ratio_max = torch.stack(
        [s.double() for s in sums]
    ).tolist()
    return ClipStats(int(tokens), int(num_low), int(num_high), int(num_dual), ratio_sum, ratio_max)


def _ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    return clamped_ratio(select(logprobs, mask) - select(old_logprobs, mask).detach())


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
