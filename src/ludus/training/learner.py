"""The learner: from rows with advantages to new weights. It knows no environment and no tokenizer.

The gradient is that of the whole batch, whatever the microbatches: each divides by the counts of the batch,
once. Other models speak through named scorers (`reference`), so that the algorithm sees tensors only.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ludus.algorithms.aggregate import Normaliser
from ludus.algorithms.batch import TokenBatch
from ludus.algorithms.objective import Statistics, objective
from ludus.algorithms.presets import Algorithm
from ludus.diagnostics.metrics import ENTROPY, LOGPROB_GAP
from ludus.errors import LearnerError
from ludus.training.batch import Microbatch, Row, microbatches
from ludus.training.head import Entropy
from ludus.training.optimiser import Optimiser
from ludus.training.scoring import Scorer, Scores


class TokenScorer(Protocol):
    """Anything that gives log-probabilities `[B, L]` of given tokens: a reference, a teacher."""

    def score(self, tokens: Tensor, asked: Tensor, entropy: Entropy = "none") -> Scores: ...


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """How a batch is worked through.

    `microbatch_tokens` bounds the padded tokens of one forward pass. `trajectory_tokens` is the C of the
    `constant` aggregation.
    """

    microbatch_tokens: int = 8192
    epochs: int = 1
    minibatches: int = 1
    trajectory_tokens: int = 768


@dataclass
class Learner:
    """Takes optimiser steps on `scorer.model` by one algorithm."""

    scorer: Scorer
    optimiser: Optimiser
    algorithm: Algorithm
    settings: LearnerSettings = field(default_factory=LearnerSettings)
    scorers: Mapping[str, TokenScorer] = field(default_factory=dict)

    def train(self, rows: Sequence[Row], seed: int) -> dict[str, float]:
        """Work through one batch of rows; gives the metrics, averaged over its optimiser steps.

        `seed` orders the rows where there are several minibatches. Without a row nothing changes. Raises
        LearnerError where loss or gradient is not finite; the weights are then those of the last good step.
        """
        if not rows:
            return {}
        settings = self.settings
        num_updates = settings.epochs * settings.minibatches
        proximal = self._score_all(rows) if num_updates > 1 else None
        shuffled = random.Random(seed)
        reports = []
        for _ in range(settings.epochs):
            order = list(range(len(rows)))
            if settings.minibatches > 1:
                shuffled.shuffle(order)
            for part in range(settings.minibatches):
                chosen = order[part :: settings.minibatches]
                if chosen:
                    reports.append(self._update(rows, chosen, proximal))
        return _mean_metrics(reports)

    def gradient(
        self, rows: Sequence[Row], proximal: Sequence[Tensor] | None = None
    ) -> tuple[Statistics, int]:
        """Add the gradient of one batch to the parameters' `.grad`; gives statistics and the tokens trained.

        `proximal` holds, per row, the log-probabilities `[T]` of the weights at the start of the step; None
        means that these are those weights, so that the ratio is exactly 1.
        """
        dtype = next(self.scorer.model.parameters()).dtype
        device = next(self.scorer.model.parameters()).device
        parts = microbatches(
            rows,
            self.settings.microbatch_tokens,
            device,
            dtype if dtype == torch.float64 else torch.float32,
            shared=self.scorer.shares_prefixes,
        )
        tokens = sum(sum(row.trains[1:]) for row in rows)
        normaliser = Normaliser(
            tokens, sum(any(row.trains[1:]) for row in rows), self.settings.trajectory_tokens
        )
        total: Statistics | None = None
        for part in parts:
            statistics = self._backward(part, normaliser, proximal)
            total = statistics if total is None else total + statistics
        if total is None:
            raise ValueError("a batch needs at least one row")
        return total, tokens

    def _update(
        self, rows: Sequence[Row], chosen: Sequence[int], proximal: Sequence[Tensor] | None
    ) -> dict[str, float]:
        batch = [rows[i] for i in chosen]
        old = None if proximal is None else [proximal[i] for i in chosen]
        statistics, tokens = self.gradient(batch, old)
        rate = self.optimiser.settings.rate(self.optimiser.num_steps)
        norm = self.optimiser.step()
        return _metrics(statistics) | {
            "optim/grad_norm": norm,
            "optim/learning_rate": rate,
            "batch/trained_tokens": float(tokens),
            "batch/trained_rows": float(len(batch)),
        }

    def _backward(
        self, part: Microbatch, normaliser: Normaliser, proximal: Sequence[Tensor] | None
    ) -> Statistics:
        entropy: Entropy = "gradient" if self.algorithm.entropy_coef > 0 else "value"
        scores = self.scorer.score(part.tokens, part.trains, entropy)
        old = scores.logprobs.detach() if proximal is None else _gathered(proximal, part, scores.logprobs)
        batch = TokenBatch(
            logprobs=scores.logprobs,
            old_logprobs=old,
            behavior_logprobs=torch.where(part.sampled, part.behavior, old),
            advantages=part.advantages,
            mask=_scored(part.trains),
            ref_logprobs=self._reference(part),
            entropy=scores.entropy,
        )
        loss, statistics = objective(batch, self.algorithm, normaliser)
        if not torch.isfinite(loss):
            raise LearnerError(
                f"The loss is {float(loss.detach())}.",
                "Look for extreme rewards or log-probabilities in this step.",
            )
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        return statistics

    def _reference(self, part: Microbatch) -> Tensor | None:
        if "reference" not in self.scorers:
            return None
        with torch.no_grad():
            return self.scorers["reference"].score(part.tokens, part.trains).logprobs

    @torch.no_grad()
    def _score_all(self, rows: Sequence[Row]) -> list[Tensor]:
        """Log-probabilities `[T]` of each row under the present weights."""
        device = next(self.scorer.model.parameters()).device
        found: dict[int, Tensor] = {}
        limit, shared = self.settings.microbatch_tokens, self.scorer.shares_prefixes
        for part in microbatches(rows, limit, device, torch.float32, shared=shared):
            scores = self.scorer.score(part.tokens, part.trains)
            found |= {i: scores.logprobs[place, : len(rows[i].tokens)] for place, i in enumerate(part.index)}
        return [found[i] for i in range(len(rows))]


def _scored(trains: Tensor) -> Tensor:
    """`trains` without the first column: the first token of a row has no position that predicts it."""
    scored = trains.clone()
    scored[:, 0] = False
    return scored


def _gathered(proximal: Sequence[Tensor], part: Microbatch, like: Tensor) -> Tensor:
    padded = torch.zeros_like(like)
    for place, i in enumerate(part.index):
        padded[place, : len(proximal[i])] = proximal[i]
    return padded.detach()


def _metrics(statistics: Statistics) -> dict[str, float]:
    """The statistics of one update under their public names."""
    clip, mismatch = statistics.clip, statistics.mismatch
    metrics = {
        "loss/total": statistics.loss,
        "loss/policy": statistics.policy_loss,
        "policy/clip_fraction": clip.fraction,
        "policy/ratio_mean": clip.ratio_mean,
        "policy/ratio_max": clip.ratio_max,
        LOGPROB_GAP: mismatch.gap_mean,
        "policy/logprob_gap_max": mismatch.gap_max,
        "policy/effective_sample_share": mismatch.effective_share,
        "policy/kl_engine": mismatch.k3,
        "policy/truncated_share": mismatch.truncated_share,
    }
    if statistics.entropy_mean is not None:
        metrics[ENTROPY] = statistics.entropy_mean
    if statistics.kl_mean is not None:
        metrics["policy/kl_reference"] = statistics.kl_mean
    return metrics


def _mean_metrics(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(report[name] for report in reports) / len(reports) for name in reports[0]}
