"""The loss of one microbatch: policy loss, KL term and entropy bonus, with the statistics of the step.

A loss per token is aggregated with the counts of the global batch, so that the values, gradients and statistics of
all microbatches add up to those of the whole batch for any split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ludus.algorithms.algorithm import GRANULARITIES, IMPORTANCES, TERM_OPTIONS, Algorithm, Need, inputs_of
from ludus.algorithms.corrections import (
    LEVELS,
    Mismatch,
    MismatchByLength,
    importance_ratios,
    mismatch,
    mismatch_by_length,
    none,
    opsm,
)
from ludus.algorithms.kl import FULL_KL_NAMES, KLS, importance_weighted, trajectory_kl
from ludus.algorithms.losses.clipped import ClipStats, clip_stats
from ludus.algorithms.losses.likelihood import echo, positive_nll
from ludus.algorithms.losses.sequence import trajectory_mean
from ludus.algorithms.tensors import Cut, SummedFields, Tensor, TokenBatch, check_shapes, select, torch
from ludus.algorithms.token_statistics import TokenStatistics, token_statistics


@dataclass(frozen=True, slots=True)
class Normalizer:
    """Counts over the global batch of one optimizer step (all microbatches, all ranks).

    `tokens` (M): trained action tokens; `trajectories` (N): trajectories with at least one; `constant` (C): the divisor
    of the aggregation `constant`, usually the token budget of a trajectory. `observed`: observation tokens, and
    `positive`: action tokens of positive trajectories, for the auxiliary losses.
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
        """Return the sum of the counts of two parts of one batch."""
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

    `loss` [N, L] per token. `how` is `token_mean` (`sum m l / M`, DAPO), `seq_mean_token_mean` (`(1/N) sum_i (sum_t m l
    / n_i)`, GRPO's paper, GSPO), `seq_mean_token_sum` (`(1/N) sum_i sum_t m l`) or `constant` (`sum m l / (N C)`, Dr.
    GRPO). A loss [N] with one term per trajectory is always `(1/N) sum_i l_i` over the trajectories with action tokens.

    `normaliser` holds the counts of the global batch; None takes those of `mask`. `constant` is C if the
    normaliser has none; if both have none, C is the padded length L. 0 for an empty mask. Raises ValueError
    for an unknown `how` and unfit shapes.
    """
    if how not in AGGREGATIONS:
        raise ValueError(f"how = {how!r} is not one of {', '.join(AGGREGATIONS)}")
    counts = normaliser or Normalizer.of(mask)
    if loss.ndim == 1:
        if mask.ndim != 2 or loss.shape[0] != mask.shape[0]:
            raise ValueError(f"loss has shape {list(loss.shape)}, mask {list(mask.shape)}")
        return select(loss, mask.bool().any(1)).sum() / max(counts.trajectories, 1)
    check_shapes(mask, loss=loss)
    if how == "constant" and counts.constant is None:
        if normaliser is not None and constant is None:
            raise ValueError("how = 'constant' needs normaliser.constant (a padded length varies by microbatch)")
        counts = replace(counts, constant=mask.shape[1] if constant is None else constant)
    return AGGREGATIONS[how](select(loss, mask), mask, counts)


AGGREGATIONS: dict[str, Callable[[Tensor, Tensor, Normalizer], Tensor]] = {
    "token_mean": lambda loss, mask, counts: loss.sum() / max(counts.tokens, 1),
    "seq_mean_token_mean": lambda loss, mask, counts: (
        (loss.sum(1) / mask.bool().sum(1).clamp(min=1)).sum() / max(counts.trajectories, 1)
    ),
    "seq_mean_token_sum": lambda loss, mask, counts: loss.sum() / max(counts.trajectories, 1),
    "constant": lambda loss, mask, counts: loss.sum() / (max(counts.trajectories, 1) * (counts.constant or 1)),
}


@dataclass(frozen=True, slots=True)
class Statistics(SummedFields):
    """Sums of one microbatch; `+` joins microbatches. `clip.tokens` is the number of action tokens.

    `loss` and its part `policy_loss` are divided by the size of the whole batch already. `by_length` is `mismatch` by
    token position. `kl_sum` and `entropy_sum` are sums over action tokens, None if the batch has no reference or
    entropy; `teacher_sum` is the sum of `logprobs - teacher`.
    `chosen_sum` counts the tokens selected by a covariance loss. `terms` are the auxiliary losses, times their
    coefficients and divided by the size of the whole batch.
    """

    loss: float
    policy_loss: float
    clip: ClipStats
    mismatch: Mismatch
    by_length: MismatchByLength
    token_statistics: TokenStatistics
    kl_sum: float | None
    entropy_sum: float | None
    teacher_sum: float | None = None
    chosen_sum: float | None = None
    terms: Mapping[str, float] = field(default_factory=dict)


def objective(batch: TokenBatch, algorithm: Algorithm, normaliser: Normalizer) -> tuple[Tensor, Statistics]:
    """Return the loss [] to call `backward` on, and its statistics.

    `normaliser` holds the counts of the whole batch. The correction weights apply to the policy loss only. A KL in the
    reward or the advantage is not added here (`batch.advantages` contains it) but still reported. Raises ValueError if
    the algorithm needs `ref_logprobs` or `entropy` and the batch has none.
    """
    if batch.chosen is None and algorithm.loss_spec.has(Need.TOKEN_CHOICE):
        raise ValueError(f"the loss {algorithm.loss} needs a token selection over the whole batch (batch.chosen)")
    weights = _weights(batch, algorithm)
    policy = _policy_loss(batch, weights, algorithm, normaliser)
    total = policy
    kl = _kl(batch, algorithm)
    if algorithm.kl_coef > 0 and algorithm.kl_placement == "loss":
        term = _needed(kl, "full_kl" if algorithm.kl in FULL_KL_NAMES else "ref_logprobs", "kl_coef")
        if algorithm.choice("kl", "importance", IMPORTANCES) == "ratio":
            term = importance_weighted(
                kl=term, logprobs=batch.logprobs, old_logprobs=batch.old_logprobs, mask=batch.mask
            )
        if algorithm.choice("kl", "granularity", GRANULARITIES) == "trajectory":
            term = trajectory_kl(kl=term, mask=batch.mask)
        total = total + algorithm.kl_coef * _aggregated(term, batch, algorithm, normaliser)
    if algorithm.entropy_coef > 0:
        term = _needed(batch.entropy, "entropy", "entropy_coef")
        total = total - algorithm.entropy_coef * _aggregated(term, batch, algorithm, normaliser)
    terms = aux_losses(batch, algorithm, normaliser)
    for value in terms.values():
        total = total + value
    teacher = batch.teacher_kl
    if teacher is None and batch.teacher_logprobs is not None:
        teacher = batch.logprobs - batch.teacher_logprobs
    read = _read(
        {
            "loss": total,
            "policy": policy,
            "kl": _sum(kl, batch.mask),
            "entropy": _sum(batch.entropy, batch.mask),
            "teacher": _sum(teacher, batch.mask),
            "chosen": None if batch.chosen is None else (batch.chosen.bool() & batch.mask.bool()).sum(),
        }
        | {f"term {name}": value for name, value in terms.items()}
    )
    statistics = Statistics(
        loss=read["loss"],
        policy_loss=read["policy"],
        clip=clip_stats(
            logprobs=batch.logprobs, old_logprobs=batch.old_logprobs, mask=batch.mask, cut=clip_masks(batch, algorithm)
        ),
        mismatch=_mismatch(batch, weights, algorithm),
        by_length=mismatch_by_length(
            old_logprobs=batch.old_logprobs, behavior_logprobs=batch.behavior_logprobs, mask=batch.own
        ),
        token_statistics=token_statistics(batch, weights, normaliser.tokens),
        kl_sum=read.get("kl"),
        entropy_sum=read.get("entropy"),
        teacher_sum=read.get("teacher"),
        chosen_sum=read.get("chosen"),
        terms={name: read[f"term {name}"] for name in terms},
    )
    return total, statistics


def aux_losses(batch: TokenBatch, algorithm: Algorithm, normaliser: Normalizer) -> dict[str, Tensor]:
    """Return the auxiliary losses [] of one microbatch by name, times their coefficients.

    Raises ValueError if the batch lacks an input of a term.
    """
    coef = {name: algorithm.number("terms", name) for name in TERM_OPTIONS}
    found = {}
    if coef["echo"] > 0:
        observed = _needed(batch.observed, "observed", "echo")
        found["echo"] = echo(
            logprobs=batch.logprobs, observations=observed, coef=coef["echo"], num_tokens=normaliser.observed
        )
    if coef["positive_nll"] > 0:
        found["positive_nll"] = positive_nll(
            logprobs=batch.logprobs,
            positive=_needed(batch.positive, "positive", "positive_nll"),
            mask=batch.mask,
            coef=coef["positive_nll"],
            num_tokens=normaliser.positive,
        )
    return found


def _weights(batch: TokenBatch, algorithm: Algorithm) -> Tensor:
    """Return the weights of the correction; all 1 for a rejection, which is applied before the step."""
    if algorithm.correction_spec.has(Need.REJECTION):
        return none(old_logprobs=batch.old_logprobs, behavior_logprobs=batch.behavior_logprobs, mask=batch.mask)
    return algorithm.compute("correction", batch)


def _policy_loss(batch: TokenBatch, weights: Tensor, algorithm: Algorithm, normaliser: Normalizer) -> Tensor:
    loss = algorithm.compute("loss", batch)
    scores = batch.advantages
    if loss.ndim == 1:  # one term per trajectory; `resolve` checks that weights are per trajectory too
        scores = trajectory_mean(scores, batch.mask)[:, None].expand(batch.mask.shape)
    if algorithm.opsm_delta is not None:
        weights = weights * opsm(
            logprobs=batch.logprobs,
            old_logprobs=batch.behavior_logprobs,
            advantages=scores,
            mask=batch.mask,
            delta=algorithm.opsm_delta,
        )
    if loss.ndim == 1:
        weights = weights.amax(1)
    return _aggregated(loss * weights, batch, algorithm, normaliser)


def _aggregated(loss: Tensor, batch: TokenBatch, algorithm: Algorithm, normaliser: Normalizer) -> Tensor:
    return aggregate(loss=loss, mask=batch.mask, how=algorithm.aggregation, normaliser=normaliser)


def _kl(batch: TokenBatch, algorithm: Algorithm) -> Tensor | None:
    if algorithm.kl in FULL_KL_NAMES:
        return None if batch.full_kl is None else select(batch.full_kl, batch.mask)
    if batch.ref_logprobs is None:
        return None
    return KLS[algorithm.kl](
        logprobs=select(batch.logprobs, batch.mask), ref_logprobs=select(batch.ref_logprobs, batch.mask).detach()
    )


def _mismatch(batch: TokenBatch, weights: Tensor, algorithm: Algorithm) -> Mismatch:
    before, after = _limited(batch, algorithm, weights) or (None, None)
    return mismatch(
        old_logprobs=batch.old_logprobs,
        behavior_logprobs=batch.behavior_logprobs,
        mask=batch.own,
        ratios=before,
        weights=after,
    )


def _limited(batch: TokenBatch, algorithm: Algorithm, weights: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the ratios [N, L] before and after their limits, or None without limits.

    A correction limits the ratios of its level and returns `weights`; V-trace and Retrace limit token ratios by the
    smaller of their bounds.
    """
    if algorithm.correction_spec.has(Need.LIMITED_RATIO):
        has_level = "level" in algorithm.correction_spec.options
        level = algorithm.choice("correction", "level", LEVELS) if has_level else "token"
        return importance_ratios(batch.old_logprobs, batch.behavior_logprobs, batch.mask, level), weights
    if algorithm.advantage_spec.has(Need.BEHAVIOR_RATIO):
        ratios = importance_ratios(batch.old_logprobs, batch.behavior_logprobs, batch.mask, "token")
        names = [name for name in ("rho_bar", "c_bar") if name in algorithm.advantage_spec.options]
        bound = min((algorithm.number("advantage", name) for name in names), default=1.0)
        return ratios, ratios.clamp(max=bound)
    return None


def clip_masks(batch: TokenBatch, algorithm: Algorithm) -> Cut | None:
    """Return the tokens clipped by the loss, or None if the loss has no clip."""
    cut = algorithm.loss_spec.cut
    if cut is None:
        return None
    with torch.no_grad():
        return algorithm.call(cut, "loss", inputs_of(batch))


def _needed(term: Tensor | None, name: str, coefficient: str) -> Tensor:
    if term is None:
        raise ValueError(f"{coefficient} is above 0 and the batch has no {name}")
    return term


def _sum(values: Tensor | None, mask: Tensor) -> Tensor | None:
    return None if values is None else select(values.detach(), mask).sum(dtype=torch.float64)


def _read(numbers: Mapping[str, Tensor | None]) -> dict[str, float]:
    """Return the numbers that are not None, in a single transfer from the device."""
    present = {name: value.detach().double() for name, value in numbers.items() if value is not None}
    return dict(zip(present, torch.stack(list(present.values())).tolist(), strict=True))
