"""PRIME: implicit process reward model, a copy of the policy trained on outcomes alone.

Its reward of token `t` is `q_t = beta (lp_prm - lp_ref)_t`, and `sum_t q_t` is the logit of success. Training
it with cross-entropy on the outcome yields token rewards without labels (arXiv:2502.01456, equations 2 to 5).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from ludus.training.batches.rows import Microbatch, Row, scored_mask
from ludus.training.distributed.collectives import ONE_PROCESS, Collectives
from ludus.training.learner.logprobs import LogprobScorer, pad_rows
from ludus.training.learner.optimizer import Optimizer, OptimizerSettings
from ludus.training.value_models.base import TrainedModel, ValueModelSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ProcessReward(TrainedModel):
    """Process reward model with its training; only adapters are trained if there are any."""

    name, part, rate = "process reward model", "process_reward", "critic.prime.learning_rate"

    def __init__(
        self,
        policy: PreTrainedModel,
        optimizer: OptimizerSettings,
        settings: ValueModelSettings,
        ranks: Collectives = ONE_PROCESS,
    ) -> None:
        self.settings = settings
        self.model = copy.deepcopy(policy).eval()
        self._scorer = LogprobScorer(self.model, settings.temperature, recompute=settings.recompute)
        ranks.shard_model(self.model)
        self.ranks = ranks
        self.optimizer = Optimizer(self.model, optimizer, ranks=ranks)
        self.shares_prefixes = self._scorer.shares_prefixes

    def _score(self, rows: Sequence[Row], solved: Sequence[bool], after: bool) -> list[Tensor]:
        return self.score_rows(rows, lambda part: self._scorer.score(part.tokens, part.trains).logprobs)

    def _train(
        self, rows: Sequence[Row], tables: Sequence[Sequence[Tensor]], solved: Sequence[bool]
    ) -> dict[str, float]:
        """Take `epochs` steps on the table of the reference's log-probabilities.

        Return loss and accuracy (fraction of rows whose logit has the outcome's sign) before the first step.
        """
        if not rows:
            return {}
        (references,) = tables
        loss, correct = self._step(rows, references, solved)
        for _ in range(1, self.settings.epochs):
            self._step(rows, references, solved)
        return {"prime/loss": loss, "prime/accuracy": correct / len(rows)}

    def _step(self, rows: Sequence[Row], references: Sequence[Tensor], solved: Sequence[bool]) -> tuple[float, int]:
        def loss_of(part: Microbatch) -> tuple[Tensor, int]:
            scores = self._scorer.score(part.tokens, part.trains).logprobs
            if not part.index:
                return 0.0 * scores.sum(), 0
            ratio = scores - pad_rows(references, part, scores)
            logits = self.settings.beta * torch.where(scored_mask(part.trains), ratio, 0.0).sum(1)
            labels = torch.tensor([float(solved[i]) for i in part.index]).to(logits)
            loss = binary_cross_entropy_with_logits(logits, labels, reduction="sum") / len(rows)
            return loss, int(((logits > 0) == (labels > 0.5)).sum())

        return self.gradient_step(rows, loss_of)
