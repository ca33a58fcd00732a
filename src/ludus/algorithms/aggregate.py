"""Aggregation: from a loss per token to one number, with the normaliser of the whole batch.

A microbatch divides by the counts of the global batch, so that the values and gradients of all microbatches
add up to those of the whole batch, however it is split.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

from ludus.algorithms.tensors import Tensor, check_shapes, select


@dataclass(frozen=True, slots=True)
class Normalizer:
    """Counts over the global batch of one optimizer step (all microbatches, all ranks).

    `tokens` (M) action tokens that train; `trajectories` (N) those with at least one of them; `constant` (C)
    the fixed number of tokens that `constant` divides by, as a rule the token budget of a trajectory.
    `observed` observation tokens and `positive` action tokens of positive trajectories, for the terms that
    are means over those.
    """

    tokens: int
    trajectories: int
    constant: int | None = None
    observed: int = 0
    positive: int = 0

    @classmethod
    def of(cls, mask: Tensor, constant: int | None = None) -> Normalizer:
        """Return the counts of `mask` [N, L]."""
        actions = mask.bool()
        return cls(int(actions.sum()), int(actions.any(1).sum()), constant)

    def __add__(self, other: Normalizer) -> Normalizer:
        """Return the counts of two parts of one batch together."""
        if self.constant != other.constant:
            raise ValueError(f"parts of one batch have one constant, not {self.constant} and {other.constant}")
        return Normalizer(
            self.tokens + other.tokens,
            self.trajectories + other.trajectories,
            self.constant,
            self.observed + other.observed,
            self.positive + other.positive,
        )


def aggregate(
    *,
    loss: Tensor,
    mask: Tensor,
    how: str = "token_mean",
    normaliser: Normalizer | None = None,
    constant: int | None = None,
) -> Tensor:
    """Return the aggregated loss, [].

    `loss` [N, L] per token. `how` is `token_mean` (`sum m l / M`, DAPO), `seq_mean_token_mean`
    (`(1/N) sum_i (sum_t m l / n_i)`, GRPO's paper, GSPO), `seq_mean_token_sum` (`(1/N) sum_i sum_t m l`) or
    `constant` (`sum m l / (N C)`, Dr. GRPO). A loss [N] with one term per trajectory is always
    `(1/N) sum_i l_i` over the trajectories with action tokens.

    `normaliser` holds the counts of the global batch; None takes those of `mask`. `constant` is C if the
    normaliser has none; if both have none, C is the padded length L. 0 for an empty mask. Raises ValueError
    for an unknown `how` and unfit shapes.
    """
    if how not in AGGREGATIONS:
        raise ValueError(f"how = {how!r} is none of {', '.join(AGGREGATIONS)}")
    counts = normaliser or Normalizer.of(mask)
    if loss.ndim == 1:
        return _sequence_mean(loss, mask, counts)
    check_shapes(mask, loss=loss)
    if how == "constant" and counts.constant is None:
        if normaliser is not None and constant is None:
            raise ValueError("how = 'constant' needs normaliser.constant (a padded length varies by microbatch)")
        counts = replace(counts, constant=mask.shape[1] if constant is None else constant)
    return AGGREGATIONS[how](select(loss, mask), mask, counts)


def _sequence_mean(loss: Tensor, mask: Tensor, counts: Normalizer) -> Tensor:
    if mask.ndim != 2 or loss.shape[0] != mask.shape[0]:
        raise ValueError(f"loss has shape {list(loss.shape)}, mask {list(mask.shape)}")
    return select(loss, mask.bool().any(1)).sum() / max(counts.trajectories, 1)


def _token_mean(loss: Tensor, mask: Tensor, counts: Normalizer) -> Tensor:
    return loss.sum() / max(counts.tokens, 1)


def _seq_mean_token_mean(loss: Tensor, mask: Tensor, counts: Normalizer) -> Tensor:
    return (loss.sum(1) / mask.bool().sum(1).clamp(min=1)).sum() / max(counts.trajectories, 1)


def _seq_mean_token_sum(loss: Tensor, mask: Tensor, counts: Normalizer) -> Tensor:
    return loss.sum() / max(counts.trajectories, 1)


def _constant(loss: Tensor, mask: Tensor, counts: Normalizer) -> Tensor:
    return loss.sum() / (max(counts.trajectories, 1) * (counts.constant or 1))


AggregationFn = Callable[[Tensor, Tensor, Normalizer], Tensor]

AGGREGATIONS: dict[str, AggregationFn] = {
    "token_mean": _token_mean,
    "seq_mean_token_mean": _seq_mean_token_mean,
    "seq_mean_token_sum": _seq_mean_token_sum,
    "constant": _constant,
}


class _Module(ModuleType):
    """This module, which may be called as its function: `ludus.algorithms.aggregate(loss=..., mask=...)`."""

    __call__ = staticmethod(aggregate)


sys.modules[__name__].__class__ = _Module
