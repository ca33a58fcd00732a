"""How far engine and learner are apart, as sums that add over microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ludus.algorithms.kl import k3
from ludus.algorithms.masking import check_shapes, clamped_ratio, select

LENGTH_BOUNDS = tuple(2**exponent for exponent in range(9, 18))
"""Tokens from the start of the sequence at which the buckets of `mismatch_by_length` end: 512 to 131072."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Sums over action tokens; `+` joins microbatches.

    `w` is the ratio `exp(old - behavior)` over what the correction takes it (each token, unless it says
    otherwise), before truncation; `truncated` and `dropped` count tokens by what the correction did to it.
    """

    tokens: int
    gap_sum: float
    gap_max: float
    weight_sum: float
    weight_square_sum: float
    k3_sum: float
    truncated: int
    dropped: int

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
        """Share of action tokens whose weight is smaller than `w`, and not 0; 0 without tokens."""
        return self.truncated / max(self.tokens, 1)

    @property
    def dropped_share(self) -> float:
        """Share of action tokens whose weight is 0; 0 without tokens."""
        return self.dropped / max(self.tokens, 1)

    def __add__(self, other: Mismatch) -> Mismatch:
        return Mismatch(
            tokens=self.tokens + other.tokens,
            gap_sum=self.gap_sum + other.gap_sum,
            gap_max=max(self.gap_max, other.gap_max),
            weight_sum=self.weight_sum + other.weight_sum,
            weight_square_sum=self.weight_square_sum + other.weight_square_sum,
            k3_sum=self.k3_sum + other.k3_sum,
            truncated=self.truncated + other.truncated,
            dropped=self.dropped + other.dropped,
        )


@dataclass(frozen=True, slots=True)
class MismatchByLength:
    """`Mismatch` by how far into the sequence a token stands; `+` joins microbatches of the same `bounds`.

    Bucket `j` holds the tokens with `bounds[j-1] < number <= bounds[j]`, the first token of a sequence having
    number 1; the last bucket, one more than there are bounds, holds the rest.
    """

    bounds: tuple[int, ...]
    buckets: tuple[Mismatch, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """A name for each bucket: `<=512`, ..., `>131072`."""
        return (*(f"<={bound}" for bound in self.bounds), f">{self.bounds[-1]}" if self.bounds else "all")

    def __add__(self, other: MismatchByLength) -> MismatchByLength:
        if self.bounds != other.bounds:
            raise ValueError(f"buckets that end at {self.bounds} and {other.bounds} do not add up")
        return MismatchByLength(self.bounds, tuple(a + b for a, b in zip(self.buckets, other.buckets, strict=True)))


def mismatch(
    *,
    old_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    ratios: Tensor | None = None,
    weights: Tensor | None = None,
) -> Mismatch:
    """How far learner and engine are apart on the action tokens, and what a correction does about it.

    `ratios` and `weights` [N, L] are the correction's before and after its limits. None: the ratios of
    tokens, and no limits.
    """
    check_shapes(mask, old_logprobs=old_logprobs, behavior_logprobs=behavior_logprobs)
    if ratios is None:
        ratios = clamped_ratio(select(old_logprobs, mask) - select(behavior_logprobs, mask))
    weights = ratios if weights is None else weights
    check_shapes(mask, ratios=ratios, weights=weights)
    return _record(_sums(old_logprobs, behavior_logprobs, mask, ratios, weights).tolist())


def mismatch_by_length(
    *,
    old_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    positions: Tensor | None = None,
    bounds: Sequence[int] = LENGTH_BOUNDS,
) -> MismatchByLength:
    """`mismatch` by the token's place in its sequence, counted with prompt and observations.

    `positions` [N, L] integers from 0 (a packed batch gives its own); None: the column. Masked positions do
    not matter. `bounds` ascend. Raises ValueError for bounds that do not and for unfit shapes.
    """
    ends = tuple(bounds)
    if any(low >= high for low, high in pairwise(ends)):
        raise ValueError(f"bounds must ascend: {ends}")
    places = torch.arange(mask.shape[-1], device=mask.device).expand(mask.shape) if positions is None else positions
    check_shapes(mask, positions=places)
    # Token number p + 1 <= bound is place p < bound.
    bucket = torch.bucketize(places.contiguous(), torch.tensor(ends, device=mask.device, dtype=torch.long), right=True)
    check_shapes(mask, old_logprobs=old_logprobs, behavior_logprobs=behavior_logprobs)
    ratios = clamped_ratio(select(old_logprobs, mask) - select(behavior_logprobs, mask))
    rows = [
        _sums(old_logprobs, behavior_logprobs, mask.bool() & (bucket == j), ratios, ratios)
        for j in range(len(ends) + 1)
    ]
    return MismatchByLength(ends, tuple(_record(row) for row in torch.stack(rows).tolist()))


def _sums(old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, ratios: Tensor, weights: Tensor) -> Tensor:
    """The fields of `Mismatch` in their order, [8] float64."""
    old = select(old_logprobs, mask).detach().double()
    behavior = select(behavior_logprobs, mask).detach().double()
    before, after = select(ratios, mask).detach().double(), select(weights, mask).detach().double()
    gap = (old - behavior).abs()
    sums = [
        mask.bool().sum(),
        gap.sum(),
        gap.amax() if gap.numel() else gap.sum(),
        before.sum(),
        before.square().sum(),
        select(k3(logprobs=behavior, ref_logprobs=old), mask).sum(),
        ((after > 0) & (after < before)).sum(),
        ((after == 0) & mask.bool()).sum(),
    ]
    return torch.stack([s.double() for s in sums])


def _record(sums: list[float]) -> Mismatch:
    tokens, gap_sum, gap_max, weight_sum, weight_square_sum, k3_sum, truncated, dropped = sums
    return Mismatch(
        tokens=int(tokens),
        gap_sum=gap_sum,
        gap_max=gap_max,
        weight_sum=weight_sum,
        weight_square_sum=weight_square_sum,
        k3_sum=k3_sum,
        truncated=int(truncated),
        dropped=int(dropped),
    )
