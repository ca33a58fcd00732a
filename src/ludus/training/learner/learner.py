"""Learner: update weights from rows with advantages. Independent of environment and tokenizer.

The gradient does not depend on the split into microbatches: they are normalized by batch counts, and
a pass that runs out of memory is restarted with smaller ones. Other models are used through
named scorers (`reference`), so that the algorithm only sees tensors.
"""

from __future__ import annotations

import functools
import logging
import math
import operator
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Final, Literal

import torch
from torch import Tensor

from ludus.algorithms.algorithm import Algorithm, Need
from ludus.algorithms.kl import FULL_KL_NAMES, KLS
from ludus.algorithms.losses.covariance import CovarianceMeans, token_covariance
from ludus.algorithms.objective import Normalizer, Statistics, clip_masks, objective
from ludus.algorithms.tensors import TokenBatch, select
from ludus.algorithms.token_statistics import LOGIT_STATISTICS
from ludus.diagnostics.alarms import ENTROPY, GAP_BY_PROBABILITY, LOGPROB_GAP
from ludus.errors import LearnerError
from ludus.training.batches.chunked_lm_head import DivergenceTarget, Entropy, TokenScores
from ludus.training.batches.rows import (
    FiniteChecks,
    Microbatch,
    Row,
    balance_rows,
    blank_microbatch,
    find_row_fault,
    microbatches,
    pad_table,
    scored_mask,
)
from ludus.training.distributed.collectives import (
    ONE_PROCESS,
    Collectives,
    current_ranks,
    gather_rows,
    is_sharded,
    raise_on_all_ranks,
    sum_gradients,
)
from ludus.training.learner.ema_teacher import update_ema
from ludus.training.learner.logprobs import (
    AuxScorers,
    LogprobScorer,
    ScoreFunction,
    TokenScorer,
    full_kl,
    model_precision,
    pad_rows,
    score_dtype,
)
from ludus.training.learner.optimizer import Optimizer
from ludus.training.learner.token_values import TokenValues

log = logging.getLogger(__name__)
REMEDY = "Set model.activation_checkpointing, lower rollout.max_seq_len, or train adapters (model.lora)."


def out_of_memory(error: RuntimeError) -> bool:
    """Return whether a torch error means out of memory, on GPU or CPU."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


@contextmanager
def explain_out_of_memory() -> Iterator[None]:
    """Convert an out-of-memory error of a whole stage into an error with a hint."""
    try:
        yield
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise LearnerError(
            f"Out of memory: {str(error).splitlines()[0]}",
            f"Lower microbatch_tokens in the section of the stage. {REMEDY}",
        ) from error


@dataclass
class TokenBudget:
    """Token budget of a forward pass, halved on out-of-memory errors if `halve` is set."""

    tokens: int
    halve: bool = True

    def each(
        self,
        split: Callable[[int], Sequence[Microbatch]],
        work: Callable[[Microbatch], None],
        undo: Callable[[], None],
        ranks: Collectives = ONE_PROCESS,
    ) -> None:
        """Run `work` on each part of `split(tokens)`; on lack of memory, `undo` and start over. Raises LearnerError."""
        fault, hint = "", ""
        try:
            while (failed := self._first_failure(split(self.tokens), work)) is not None:
                undo()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                self.tokens = max(1, min(self.tokens, failed) // 2)
                log.warning(
                    "Out of memory over %d tokens: retrying the pass with at most %d. "
                    "Set training.microbatch_tokens = %d, or model.activation_checkpointing.",
                    *(failed, self.tokens, self.tokens),
                )
        except LearnerError as error:
            fault, hint = error.message, error.hint
        raise_on_all_ranks(fault, hint, ranks)

    def _first_failure(self, parts: Sequence[Microbatch], work: Callable[[Microbatch], None]) -> int | None:
        """Return the token count, with padding, of the part that ran out of memory, or None."""
        for part in parts:
            try:
                work(part)
            except RuntimeError as error:
                if not (self.halve and out_of_memory(error)):
                    raise
                if len(part.index) == 1:
                    raise LearnerError(
                        f"One row of {part.tokens.shape[1]} tokens does not fit into memory.", REMEDY
                    ) from error
                return part.tokens.numel()
        return None


_MAX_KEPT = 8
"""Maximum number of kept scores; a step needs fewer."""

OLD_FROM_ENGINE: Final = "policy/old_from_engine"
"""Metric: 1 if ratios divide by the engine's log-probabilities, 0 if the learner recomputed them."""


FULL_KL = "full_kl"


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """Settings of a learner.

    `microbatch_tokens` bounds the tokens of a forward pass. `trajectory_tokens` is the C of the `constant`
    aggregation. If `old_logprobs` is "engine", ratios divide by the engine's log-probabilities. If
    `halve_on_oom` is set, a pass that runs out of memory is retried with smaller microbatches.
    """

    microbatch_tokens: int = 4096
    epochs: int = 1
    minibatches: int = 1
    trajectory_tokens: int = 768
    old_logprobs: Literal["recomputed", "engine"] = "recomputed"
    halve_on_oom: bool = True


def set_temperature(learner: Learner, temperature: float) -> None:
    """Score with this sampling temperature, under the policy and all other models, on all ranks."""
    with learner.ranks.call_on_ranks("set_temperature", temperature):
        for scorer in (learner.scorer, *learner.scorers.values()):
            scorer.temperature = temperature


@dataclass(frozen=True, slots=True)
class CachedLogprobs:
    """Values of each row computed before its gradient, `[T]` each.

    `proximal` are log-probabilities under the weights at the start of the step; None means that the weights
    are unchanged, so the ratio is exactly 1. `chosen` marks tokens selected over the batch. `experts` are the
    routed experts recorded by `RoutingReplay`. `others` are log-probabilities of other scorers by name;
    missing ones are computed in every pass.
    """

    proximal: Sequence[Tensor] | None = None
    chosen: Sequence[Tensor] | None = None
    experts: Sequence[Tensor] | None = None
    others: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)

    def of(self, index: Sequence[int]) -> CachedLogprobs:

        def select(values: Sequence[Tensor] | None) -> Sequence[Tensor] | None:
            return None if values is None else [values[i] for i in index]

        others = {name: [scores[i] for i in index] for name, scores in self.others.items()}
        return CachedLogprobs(select(self.proximal), select(self.chosen), select(self.experts), others)


@dataclass
class Learner:
    """Take optimizer steps on `scorer.model` with one algorithm."""

    scorer: LogprobScorer
    optimizer: Optimizer
    algorithm: Algorithm
    settings: LearnerSettings = field(default_factory=LearnerSettings)
    scorers: Mapping[str, TokenScorer] = field(default_factory=dict)
    ranks: Collectives = field(default_factory=current_ranks)
    budget: TokenBudget = field(init=False)
    token_values: TokenValues | None = field(default=None, init=False)
    """Storage of the values of trained tokens; None stores none."""
    _kept: deque[tuple[str, Sequence[Row], list[Tensor]]] = field(
        default_factory=lambda: deque(maxlen=_MAX_KEPT), init=False
    )
    """Log-probabilities `[T]` of rows by scorer, until the weights change."""
    _finite: FiniteChecks = field(default_factory=FiniteChecks, init=False)

    def __post_init__(self) -> None:
        self._sharded = is_sharded(self.scorer.model)
        halve = self.settings.halve_on_oom and not self._sharded
        self.budget = TokenBudget(self.settings.microbatch_tokens, halve)

    def score(self, rows: Sequence[Row], *, keep: bool = False) -> list[Tensor]:
        """Return log-probabilities `[T]` of each row's training tokens under the current weights.

        With `keep` the next `train` on the same rows reuses them; weights must not change before it.
        """
        return [scores.logprobs for scores in self.score_with("", rows, keep=keep)]

    def entropies(self, rows: Sequence[Row]) -> list[Tensor]:
        """Return entropies `[T]` in nats at each row's training tokens under the current weights."""
        scored = self.score_with("", rows, "value")
        return [scores.logprobs if scores.entropy is None else scores.entropy for scores in scored]

    def score_with(
        self, name: str, rows: Sequence[Row], entropy: Entropy = "none", keep: bool = False
    ) -> list[TokenScores]:
        """Return the scores `[T]` of rows by the policy (""), another scorer, or a statistic; `keep` as in `score`."""
        with self.ranks.call_on_ranks("score", name, rows, entropy, keep):
            scored = self._score_all(rows, self._score_function(name), entropy)[0]
            if keep:
                self._kept.append((name, rows, [scores.logprobs for scores in scored]))
            return scored

    def _score_function(self, name: str) -> ScoreFunction:
        """Return the scores of a scorer or of `LOGIT_STATISTICS`. Raises LearnerError without a reference if needed."""
        if name in LOGIT_STATISTICS:
            return functools.partial(self.scorer.logit_statistic, name)
        if name in ("reference", FULL_KL) and "reference" not in self.scorers:
            raise LearnerError("The run has no reference model.")
        if name == FULL_KL:
            return functools.partial(full_kl, self.scorer, self._aux)
        return self.scorers[name].score if name else self.scorer.score

    def reference(self, rows: Sequence[Row]) -> list[Tensor]:
        """Return reference log-probabilities `[T]`, kept for `train`. Raises LearnerError without a reference."""
        return [scores.logprobs for scores in self.score_with("reference", rows, keep=True)]

    def penalties(self, rows: Sequence[Row], proximal: Sequence[Tensor]) -> list[Tensor]:
        """Return the KL estimate to the reference `[T]` of each row. Raises LearnerError without a reference."""
        if self.algorithm.kl in FULL_KL_NAMES:
            return [scores.logprobs for scores in self.score_with(FULL_KL, rows)]
        references = self.reference(rows)
        estimate = KLS[self.algorithm.kl]
        return [estimate(logprobs=own, ref_logprobs=ref) for own, ref in zip(proximal, references, strict=True)]

    def train(self, rows: Sequence[Row], seed: int) -> dict[str, float]:
        """Train on one batch of rows; return the metrics over the tokens of all its optimizer steps.

        Losses are averaged over these steps. `seed` shuffles the rows if there are several minibatches. Does
        nothing without rows. Raises LearnerError if loss or gradient is not finite; the weights are then
        those of the last good step. With several ranks `rows` are all rows or this rank's part (possibly
        empty), see `Collectives.whole`; metrics are global.
        """
        with self.ranks.call_on_ranks("train", rows, seed, self.algorithm, self.optimizer.learning_rate_factor):
            try:
                return self._train(rows, seed)
            finally:
                self._kept.clear()

    def _train(self, rows: Sequence[Row], seed: int) -> dict[str, float]:
        if not any(self.ranks.gather(len(rows))):
            return {}
        if not self.ranks.receives_all_rows and self.algorithm.loss_spec.has(Need.TOKEN_CHOICE):
            raise LearnerError(
                f"The loss {self.algorithm.loss} selects tokens over all rows, so every rank needs all rows."
            )
        settings = self.settings
        known = self._start(rows, seed)
        shuffled = random.Random(seed)
        updates = []
        for _ in range(settings.epochs):
            order = list(range(len(rows)))
            if settings.minibatches > 1:
                shuffled.shuffle(order)
            for part in range(settings.minibatches):
                indices = order[part :: settings.minibatches]
                if any(self.ranks.gather(len(indices))):
                    updates.append(self._update([rows[i] for i in indices], known.of(indices)))
        metrics = _token_metrics([statistics for statistics, _ in updates], rows, self.algorithm)
        reports = [report for _, report in updates]
        metrics |= {name: sum(report[name] for report in reports) / len(reports) for name in reports[0]}
        return metrics | {OLD_FROM_ENGINE: float(settings.old_logprobs == "engine")}

    def _start(self, rows: Sequence[Row], seed: int) -> CachedLogprobs:
        """Return the log-probabilities under the step's initial weights that the updates need."""
        settings, experts, others = self.settings, None, self._aux_logprobs(rows)
        if settings.old_logprobs == "engine":
            proximal = [torch.tensor(row.behavior, dtype=torch.float64) for row in rows]
        elif settings.epochs * settings.minibatches > 1 or self.algorithm.loss_spec.has(Need.TOKEN_CHOICE):
            cached = None if self.scorer.routing is not None else self._cached("", rows)
            if cached is None:
                with nullcontext() if self.scorer.routing is None else self.scorer.routing.recording():
                    scored, experts = self._score_all(rows, self.scorer.score)
                cached = [scores.logprobs for scores in scored]
            proximal = cached
        else:
            return CachedLogprobs(others=others)
        chosen = choose_tokens(rows, proximal, self.algorithm, seed) if proximal else None
        return CachedLogprobs(proximal, chosen, experts, others)

    @property
    def _aux(self) -> AuxScorers:
        return AuxScorers(self.algorithm, self.scorers)

    def _cached(self, name: str, rows: Sequence[Row]) -> list[Tensor] | None:
        """Return a scorer's kept values of the same rows, since batching changes rounding, if all ranks have them."""
        wanted = [(row.tokens, row.trains) for row in rows]
        same = (v for n, kept, v in self._kept if n == name and [(row.tokens, row.trains) for row in kept] == wanted)
        cached = next(same, None)
        return cached if all(self.ranks.gather(cached is not None)) else None

    def _aux_logprobs(self, rows: Sequence[Row]) -> dict[str, Sequence[Tensor]]:
        """Return the values of frozen scorers that are cached or used in several epochs."""
        logprobs: dict[str, Sequence[Tensor]] = {}
        for name in self._aux.per_token:
            cached = self._cached(name, rows)
            if cached is None and self.settings.epochs > 1:
                cached = [scores.logprobs for scores in self._score_all(rows, self.scorers[name].score)[0]]
            if cached is not None:
                logprobs[name] = cached
        return logprobs

    def gradient(self, rows: Sequence[Row], known: CachedLogprobs | None = None) -> tuple[Statistics, int]:
        """Write the gradient of a batch to `.grad`; return statistics and the number of trained tokens.

        With several ranks all of them are of the shared batch. Raises LearnerError if memory runs out on a
        single row, or a row has a non-finite number.
        """
        self.scorer.model.eval()  # with dropout the ratio of an unchanged policy would not be 1
        indices = self._local_indices(rows)
        rows, known = [rows[i] for i in indices], (known or CachedLogprobs()).of(indices)
        local = Normalizer(
            sum(sum(row.trains[1:]) for row in rows),
            sum(any(row.trains[1:]) for row in rows),
            self.settings.trajectory_tokens,
            observed=sum(sum(row.observed[1:]) for row in rows),
            positive=sum(sum(row.trains[1:]) for row in rows if row.positive),
        )
        normaliser = functools.reduce(operator.add, self.ranks.gather(local))
        collected: list[Statistics] = []

        def backward(part: Microbatch) -> None:
            statistics = self._backward(part, normaliser, known)
            if part.index:
                collected.append(statistics)

        def undo() -> None:
            collected.clear()
            self._finite.clear()
            self.optimizer.zero_grad()

        self._finite.clear()
        self._check_finite(find_row_fault(rows))
        with model_precision(self.scorer.model):
            self.budget.each(lambda limit: self._split(rows, limit), backward, undo, self.ranks)
        losses = [one.loss for one in collected]
        infinite = next((f"The loss is {loss}." for loss in losses if not math.isfinite(loss)), "")
        self._check_finite(self._finite.fault or infinite)
        self._finite.clear()
        sum_gradients(self.optimizer.parameters, self.ranks)
        gathered = [statistics for part in self.ranks.gather(collected) for statistics in part]
        if not gathered:
            raise ValueError("a batch needs at least one row")
        return functools.reduce(operator.add, gathered), normaliser.tokens

    def _local_indices(self, rows: Sequence[Row]) -> Sequence[int]:
        if not self.ranks.receives_all_rows or self.ranks.world_size == 1:
            return range(len(rows))
        return balance_rows(rows, self.ranks.world_size, shared=self.scorer.shares_prefixes)[self.ranks.rank]

    def _split(self, rows: Sequence[Row], limit: int) -> list[Microbatch]:
        """Split into microbatches; equally many on every rank if weights are sharded."""
        device, dtype = next(self.scorer.model.parameters()).device, score_dtype(self.scorer.model)
        parts = microbatches(rows, limit, device, dtype, shared=self.scorer.shares_prefixes)
        if not self._sharded:
            return parts
        most = max(self.ranks.gather(len(parts)))
        return parts + [blank_microbatch(device, dtype)] * (most - len(parts))

    def _check_finite(self, fault: str) -> None:
        """Raise LearnerError on all ranks if one has a fault; gradients are cleared."""
        try:
            raise_on_all_ranks(fault, "Look for extreme rewards or log-probabilities in this step.", self.ranks)
        except LearnerError:
            self.optimizer.zero_grad()
            raise

    def _update(self, batch: Sequence[Row], known: CachedLogprobs) -> tuple[Statistics, dict[str, float]]:
        statistics, tokens = self.gradient(batch, known)
        rate = self.optimizer.learning_rate
        norm = self.optimizer.step()
        update_ema(self.scorers, self.scorer.model)
        return statistics, {
            "optim/grad_norm": norm,
            "optim/learning_rate": rate,
            "batch/trained_tokens": float(tokens),
            "batch/trained_rows": float(sum(self.ranks.gather(len(self._local_indices(batch))))),
        }

    def _backward(self, part: Microbatch, normaliser: Normalizer, known: CachedLogprobs) -> Statistics:
        scored = _scored_tokens(part, self.algorithm)
        aux, against = self._aux.score(part, known.others), self._aux.against(part.tokens, scored, part.teacher)
        replay: AbstractContextManager[None] = nullcontext()
        if self.scorer.routing is not None and known.experts is not None:
            replay = self.scorer.routing.replay([known.experts[i] for i in part.index])
        with replay, self.scorer.using(part.policies):
            loss, statistics = self._loss(part, normaliser, known, aux, against)
            if loss.requires_grad:
                torch.autograd.backward(loss)
        return statistics

    def _loss(
        self,
        part: Microbatch,
        normaliser: Normalizer,
        known: CachedLogprobs,
        aux: Mapping[str, Tensor],
        against: Mapping[str, DivergenceTarget],
    ) -> tuple[Tensor, Statistics]:
        entropy: Entropy = "gradient" if self.algorithm.entropy_coef > 0 else "value"
        scored, divergences = _scored_tokens(part, self.algorithm), dict[str, Tensor]()
        if against:
            scores, divergences = self.scorer.compare(part.tokens, scored, entropy, against)
        else:
            scores = self.scorer.score(part.tokens, scored, entropy)
        old = scores.logprobs.detach()
        if known.proximal is not None:
            old = pad_rows(known.proximal, part, old)
        batch = TokenBatch(
            logprobs=scores.logprobs,
            old_logprobs=old,
            behavior_logprobs=torch.where(part.sampled, part.behavior, old),
            advantages=part.advantages,
            mask=scored_mask(part.trains),
            ref_logprobs=aux.get("reference"),
            teacher_logprobs=aux.get("teacher"),
            full_kl=divergences.get("reference"),
            teacher_kl=_taught(divergences.get("teacher"), part, scores.logprobs, self.algorithm),
            entropy=scores.entropy,
            chosen=None if known.chosen is None else pad_rows(known.chosen, part, part.trains),
            observed=scored_mask(part.observed),
            positive=part.positive,
            expert=part.expert,
        )
        self._finite.add_values(part, scored_mask(scored), _named_outputs(batch))
        loss, statistics = objective(batch, self.algorithm, normaliser)
        if self.token_values is not None:
            self.token_values.add(part, batch, clip_masks(batch, self.algorithm))
        if self._sharded and not (loss.requires_grad and part.index):
            loss = 0.0 * scores.logprobs.sum()
        return loss, statistics

    @torch.no_grad()
    def _score_all(
        self, rows: Sequence[Row], function: ScoreFunction, entropy: Entropy = "none"
    ) -> tuple[list[TokenScores], list[Tensor] | None]:
        """Return the scores of each row, `[T]`, and its routed experts if they are recorded."""
        scored: dict[int, TokenScores] = {}
        experts: dict[int, Tensor] = {}
        routing = self.scorer.routing
        self.scorer.model.eval()  # with dropout the ratio of an unchanged policy would not be 1
        indices = self._local_indices(rows)
        local = [rows[i] for i in indices]

        def score(part: Microbatch) -> None:
            with self.scorer.using(part.policies):
                scores = function(part.tokens, part.trains, entropy)
            for position, i in enumerate(part.index):
                length = len(local[i].tokens)
                entropies = None if scores.entropy is None else scores.entropy[position, :length]
                scored[indices[i]] = TokenScores(scores.logprobs[position, :length], entropies)
            if part.index and routing is not None and routing.records:
                experts.update(zip((indices[i] for i in part.index), routing.recorded_experts(), strict=True))

        with model_precision(self.scorer.model):
            self.budget.each(lambda limit: self._split(local, limit), score, scored.clear, self.ranks)
        scored, experts = gather_rows(scored, self.ranks), gather_rows(experts, self.ranks)
        return [scored[i] for i in range(len(rows))], [experts[i] for i in range(len(rows))] if experts else None


def _scored_tokens(part: Microbatch, algorithm: Algorithm) -> Tensor:
    """Return the mask of tokens that the policy scores, `[B, L]`."""
    return part.trains | part.observed if algorithm.number("terms", "echo") > 0 else part.trains


def _taught(found: Tensor | None, part: Microbatch, like: Tensor, algorithm: Algorithm) -> Tensor | None:
    """Return the divergences from a teacher; 0 on rows that a self-teacher is not shown anything for."""
    if not algorithm.loss_spec.has(Need.SELF_TEACHER):
        return found
    if found is None or part.teacher is None:
        return torch.zeros_like(like)
    return select(found, part.teacher.taught[:, None].expand(found.shape))


def _named_outputs(batch: TokenBatch) -> dict[str, Tensor | None]:
    """Return the model outputs of a batch, `[B, L]` each, by their names in messages."""
    return {
        "log-probability": batch.logprobs,
        "log-probability at the start of the step": batch.old_logprobs,
        "log-probability under the reference": batch.ref_logprobs,
        "log-probability under the teacher": batch.teacher_logprobs,
        "KL to the reference": batch.full_kl,
        "KL to the teacher": batch.teacher_kl,
        "entropy": batch.entropy,
    }


def choose_tokens(
    rows: Sequence[Row], proximal: Sequence[Tensor], algorithm: Algorithm, seed: int
) -> list[Tensor] | None:
    """Return the tokens `[T]` of each row that a covariance loss selects over all rows, in any order."""
    choose = algorithm.loss_spec.choose
    if choose is None:
        return None
    order = sorted(range(len(rows)), key=lambda i: (rows[i].name, rows[i].tokens, rows[i].advantages))
    old = pad_table([proximal[i] for i in order], torch.float64)
    advantages = pad_table([rows[i].advantages for i in order], torch.float64)
    mask = scored_mask(pad_table([rows[i].trains for i in order], torch.bool))
    means = CovarianceMeans.of(old_logprobs=old, advantages=advantages, mask=mask)
    covariance = token_covariance(old_logprobs=old, advantages=advantages, mask=mask, means=means)
    chosen = algorithm.call(choose, "loss", {"covariance": covariance, "mask": mask, "seed": seed})
    by_row = {i: chosen[position, : len(rows[i].tokens)] for position, i in enumerate(order)}
    return [by_row[i] for i in range(len(rows))]


def _token_metrics(updates: Sequence[Statistics], rows: Sequence[Row], algorithm: Algorithm) -> dict[str, float]:
    """Return the public metrics of a step's updates; losses are averaged over the updates."""
    divergence = "sdpo/divergence" if algorithm.loss_spec.has(Need.SELF_TEACHER) else "distill/reverse_kl"
    statistics = functools.reduce(operator.add, updates)
    clip, mismatch = statistics.clip, statistics.mismatch
    metrics = {
        "loss/total": statistics.loss / len(updates),
        "loss/policy": statistics.policy_loss / len(updates),
        "optim/top_token_share": sum(one.token_statistics.top_share for one in updates) / len(updates),
        "policy/clip_fraction": clip.fraction,
        "policy/ratio_mean": clip.ratio_mean,
        "policy/ratio_max": clip.ratio_max,
        LOGPROB_GAP: mismatch.gap_mean,
        "mismatch/logprob_diff_max": mismatch.gap_max,
        "is/ess": mismatch.effective_share,
        "mismatch/kl": mismatch.k3,
        "is/clip_frac": mismatch.truncated_share,
        "is/mask_frac": mismatch.dropped_share,
    }
    metrics |= {
        f"{LOGPROB_GAP}/{label}": bucket.gap_mean
        for label, bucket in zip(statistics.by_length.labels, statistics.by_length.buckets, strict=True)
        if bucket.tokens
    }
    metrics |= {f"{GAP_BY_PROBABILITY}{label}": gap for label, gap in statistics.token_statistics.gap_means.items()}
    optional = {
        ENTROPY: statistics.entropy_sum,
        "policy/kl_reference": statistics.kl_sum,
        "policy/chosen_share": statistics.chosen_sum,
        divergence: statistics.teacher_sum,
    }
    metrics |= {name: total / max(clip.tokens, 1) for name, total in optional.items() if total is not None}
    if algorithm.loss_spec.has(Need.SELF_TEACHER):
        metrics["sdpo/taught"] = sum(bool(row.teacher_tokens) for row in rows) / max(len(rows), 1)
    return metrics | {f"loss/{name}": value / len(updates) for name, value in statistics.terms.items()}
