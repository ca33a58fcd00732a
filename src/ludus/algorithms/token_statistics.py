"""Concentration of the policy gradient on few tokens, mismatch by token probability, and statistics of logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from ludus.algorithms.tensors import Tensor, TokenBatch, check_shapes, clamped_ratio, select, torch

TOP_SHARE: Final = 0.01
PROBABILITY_BOUNDS: Final = (0.01, 0.1, 0.5, 0.9)
"""Upper bounds of the bins of the engine's probability; an additional last bin holds the rest."""


def sum_pi_squared(logits: Tensor) -> Tensor:
    """Return the sum of squared probabilities, [A] from tempered logits [A, V]."""
    return torch.softmax(logits, -1).square().sum(-1)


def self_certainty(logits: Tensor) -> Tensor:
    """Return `logsumexp(logits) - mean(logits)`, [A] nats from tempered logits [A, V].

    The forward KL from the uniform distribution plus `log V` (INTUITOR, arXiv:2505.19590, in the form of the authors'
    code). Infinite if a token is masked.
    """
    return torch.logsumexp(logits, -1) - logits.mean(-1)


SUM_PI_SQUARED, SELF_CERTAINTY = "sum_pi_squared", "self_certainty"
LOGIT_STATISTICS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    SUM_PI_SQUARED: sum_pi_squared,
    SELF_CERTAINTY: self_certainty,
}
"""Statistics of a token's distribution that the learner computes by name."""


@dataclass(frozen=True, slots=True)
class TokenStatistics:
    """Sums over action tokens; `+` joins microbatches of one batch.

    `weight_sum` is the sum of the tokens' gradient weights, and `largest` holds the `num_top` largest weights above 0,
    in descending order. `tokens` and `gaps` are the count and the sum of `|old - behavior|` (nats) by bin of the
    probability that the engine reported.
    """

    num_top: int
    weight_sum: float
    largest: tuple[float, ...]
    tokens: tuple[float, ...]
    gaps: tuple[float, ...]

    def __add__(self, other: TokenStatistics) -> TokenStatistics:
        num = max(self.num_top, other.num_top)
        return TokenStatistics(
            num,
            self.weight_sum + other.weight_sum,
            tuple(sorted(self.largest + other.largest, reverse=True)[:num]),
            tuple(a + b for a, b in zip(self.tokens, other.tokens, strict=True)),
            tuple(a + b for a, b in zip(self.gaps, other.gaps, strict=True)),
        )

    @property
    def top_share(self) -> float:
        """Share of `weight_sum` on the `num_top` tokens with the largest weights; 0 without any weight."""
        return math.fsum(self.largest) / self.weight_sum if self.weight_sum else 0.0

    @property
    def gap_means(self) -> dict[str, float]:
        """Mean of `|old - behavior|` by bin (`<=0.01`, ..., `<=1`), of bins with tokens."""
        labels = [f"<={bound:g}" for bound in (*PROBABILITY_BOUNDS, 1.0)]
        bins = zip(labels, self.tokens, self.gaps, strict=True)
        return {label: gap / tokens for label, tokens, gap in bins if tokens}


def token_statistics(batch: TokenBatch, weights: Tensor, num_tokens: int) -> TokenStatistics:
    """Return the sums of one microbatch. The weight of a token is `|advantage ratio weights|`.

    `weights` [N, L] are the importance weights of the correction. `num_tokens` is the number of action tokens of the
    whole batch; `num_top` is 1 % of it, at least 1. Aggregation weights of trajectories are not included. Raises
    ValueError for wrong shapes.
    """
    mask, logprobs = batch.mask, (batch.logprobs, batch.old_logprobs, batch.behavior_logprobs)
    check_shapes(mask, weights=weights)
    new, old, behavior = (select(one, mask).detach().double() for one in logprobs)
    token_weights = select((batch.advantages * weights).detach().double() * clamped_ratio(new - old), mask).abs()
    num_top = max(1, math.ceil(TOP_SHARE * num_tokens))
    largest = token_weights.flatten().topk(min(num_top, token_weights.numel())).values
    edges = [-math.inf, *map(math.log, PROBABILITY_BOUNDS), math.inf]
    bins = [batch.own.bool() & (behavior > low) & (behavior <= high) for low, high in pairwise(edges)]
    gap = (old - behavior).abs()
    sums = [token_weights.sum(), *(one.sum() for one in bins), *(select(gap, one).sum() for one in bins)]
    read = torch.cat([torch.stack([one.double() for one in sums]), largest]).tolist()
    end = 1 + len(bins)
    top = tuple(value for value in read[end + len(bins) :] if value > 0)
    return TokenStatistics(num_top, read[0], top, tuple(read[1:end]), tuple(read[end : end + len(bins)]))
