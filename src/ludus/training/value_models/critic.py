"""The models trained with the policy: critics of states or outcomes, and PRIME's process reward model.

`values[t]` of a `Critic` is V of the state before token `t`, read from the hidden state at `t - 1` of a copy of the
policy's body, or of the policy itself. Before its first gradient step the bias of its zero head is set to the mean
target, so that it does not have to learn the reward scale. `OutcomeCritic` follows CodeRL (arXiv:2207.01780), with two
classes instead of the four outcomes of a program: solved or not.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from ludus.algorithms.losses.likelihood import value_loss
from ludus.training.batches.rows import Microbatch, Row, scored_mask
from ludus.training.distributed.collectives import ONE_PROCESS, Collectives, copy_into, is_sharded
from ludus.training.learner.logprobs import LogprobScorer, pad_rows
from ludus.training.learner.optimizer import OptimizerSettings
from ludus.training.value_models.base import HeadModel, TrainedModel, ValueModelSettings, batches

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class StateModel(TrainedModel):
    """Body, zero-initialized head with `outputs` values, and optimizer.

    The body is a trained copy of the policy's, or the policy's own without gradient.
    """

    name = part = "critic"
    rate = "critic.learning_rate"
    outputs = 1

    def __init__(
        self,
        policy: PreTrainedModel,
        optimizer: OptimizerSettings,
        settings: ValueModelSettings,
        ranks: Collectives = ONE_PROCESS,
    ) -> None:
        """Raise UserError if the model's hidden states are unavailable."""
        hint = "Use an algorithm without a critic."
        body = policy if settings.on_policy else copy.deepcopy(policy)
        self._states = HeadModel(body.eval(), "critic", hint, self.outputs, recompute=settings.recompute)
        self.head = self._states.head
        model: nn.Module = nn.ModuleDict({"head": self.head})
        if not settings.on_policy:
            model = self._states.model.requires_grad_(True)
            ranks.shard_model(model)
        super().__init__(model, optimizer, settings, ranks)

    def read(self, part: Microbatch, *, after: bool = False) -> Tensor:
        """Return values `[B, L, outputs]` of states before (or after) the training tokens, 0 elsewhere.

        The first token of a row is never scored.
        """
        rows, columns = torch.nonzero(part.trains[:, 1:], as_tuple=True)
        if not rows.numel():
            zeros = torch.zeros(*part.tokens.shape, self.head.out_features, device=part.tokens.device)
            return zeros + self._states.dummy_pass() if is_sharded(self.model) else zeros
        table = self._states.read(part.tokens, (rows, columns + after), frozen=self.settings.on_policy)
        empty = torch.zeros(*part.tokens.shape, table.shape[1], dtype=table.dtype, device=table.device)
        return empty.index_put((rows, columns + 1), table)


class Critic(StateModel):
    """Value model of states, with its training."""

    def score(self, rows: Sequence[Row], solved: Sequence[bool] = (), after: bool = False) -> list[Tensor]:
        return self.score_rows(rows, lambda part: self.read(part, after=after)[:, :, 0])

    def train(
        self, rows: Sequence[Row], tables: Sequence[Sequence[Tensor]], solved: Sequence[bool] = ()
    ) -> dict[str, float]:
        """Train on the tables of targets and old values; return loss and explained variance of the old values."""
        targets, old = tables
        settings, num_steps = self.settings, self.optimizer.num_steps
        start = _mean(_trained(targets, rows)) if num_steps == 0 else 0.0
        if num_steps == 0:
            copy_into(self.head.bias, torch.tensor([start], dtype=torch.float64))
        old_values = [values + start for values in old]
        for index in batches(len(rows), settings.epochs, settings.minibatches, num_steps):
            minibatch = [rows[i] for i in index]
            if any(any(row.trains[1:]) for row in minibatch):
                self._step(minibatch, [targets[i] for i in index], [old_values[i] for i in index])
        errors = [t - v for t, v in zip(_trained(targets, rows), _trained(old, rows), strict=True)]
        return {
            "critic/loss": 0.5 * _mean([error.square() for error in errors]),
            "critic/explained_variance": _explained(rows, targets, old),
            "critic/value_mean": _mean(_trained(old, rows)),
        }

    def _step(self, rows: Sequence[Row], targets: Sequence[Tensor], old: Sequence[Tensor]) -> None:
        tokens = sum(sum(row.trains[1:]) for row in rows)

        def loss_of(part: Microbatch) -> tuple[Tensor, int]:
            values = self.read(part)[:, :, 0]
            loss = value_loss(
                values=values,
                old_values=pad_rows(old, part, values),
                returns=pad_rows(targets, part, values),
                mask=scored_mask(part.trains),
                eps=self.settings.clip,
            )
            return loss.sum() / tokens, 0

        self.gradient_step(rows, loss_of)


def _explained(rows: Sequence[Row], targets: Sequence[Tensor], old: Sequence[Tensor]) -> float:
    """Return `1 - var(target - value) / var(target)` over training tokens; 0 if the targets are constant."""
    target, value = torch.cat(_trained(targets, rows)), torch.cat(_trained(old, rows))
    variance = float(target.var(correction=0)) if target.numel() else 0.0
    return 1 - float((target - value).var(correction=0)) / variance if variance > 0 else 0.0


def _trained(values: Sequence[Tensor], rows: Sequence[Row]) -> list[Tensor]:
    """Return the values `[T]` of each row at its training tokens, float64 on the CPU."""
    masks = [torch.tensor((False, *row.trains[1:])) for row in rows]
    return [v.double().cpu()[m] for v, m in zip(values, masks, strict=True)]


def _mean(values: Sequence[Tensor]) -> float:
    joined = torch.cat(list(values))
    return float(joined.mean()) if joined.numel() else 0.0


CLASSES = 2
"""Not solved, solved."""


class OutcomeCritic(StateModel):
    """Outcome classifier at the states after action tokens, with its training."""

    outputs = CLASSES

    def score(self, rows: Sequence[Row], solved: Sequence[bool] = (), after: bool = False) -> list[Tensor]:
        """Return the probability of each row's outcome at each training token."""

        def score(part: Microbatch) -> Tensor:
            chances = torch.softmax(self.read(part, after=True), -1)
            own = [chances[place, :, int(solved[i])] for place, i in enumerate(part.index)]
            return torch.where(scored_mask(part.trains), torch.stack(own), 0.0) if own else chances[:, :, 0]

        return self.score_rows(rows, score)

    def train(
        self, rows: Sequence[Row], tables: Sequence[Sequence[Tensor]], solved: Sequence[bool] = ()
    ) -> dict[str, float]:
        """Train with cross-entropy, averaged over tokens.

        Return loss and accuracy (fraction of tokens that predict the row's outcome) in the first epoch, each
        minibatch before its gradient step.
        """
        settings = self.settings
        tokens = sum(sum(row.trains[1:]) for row in rows)
        if not tokens:
            return {}
        steps = [
            self._step([rows[i] for i in index], [solved[i] for i in index])
            for index in batches(len(rows), settings.epochs, settings.minibatches, self.optimizer.num_steps)
            if any(any(rows[i].trains[1:]) for i in index)
        ]
        first = steps[: len(steps) // settings.epochs]
        loss, correct = (sum(column) for column in zip(*first, strict=True))
        return {"critic/loss": loss / tokens, "critic/accuracy": correct / tokens}

    def _step(self, rows: Sequence[Row], solved: Sequence[bool]) -> tuple[float, int]:
        """Take one gradient step; return the sum of losses before it and the number of correct tokens."""
        tokens = sum(sum(row.trains[1:]) for row in rows)

        def loss_of(part: Microbatch) -> tuple[Tensor, int]:
            mask = scored_mask(part.trains)
            table = self.read(part, after=True)
            logits = table[mask]
            classes = torch.tensor([int(solved[i]) for i in part.index], device=logits.device)
            labels = classes[:, None].expand(mask.shape)[mask]
            loss = cross_entropy(logits, labels, reduction="sum") / tokens
            return loss if part.index else 0.0 * table.sum(), int((logits.argmax(1) == labels).sum())

        return self.gradient_step(rows, loss_of, tokens)


class ProcessReward(TrainedModel):
    """PRIME's implicit process reward model: a copy of the policy, trained on outcomes alone (arXiv:2502.01456).

    Its reward of token `t` is `q_t = beta (lp_prm - lp_ref)_t`, and `sum_t q_t` is the logit of success. Training it
    with cross-entropy on the outcome yields token rewards without labels (equations 2 to 5). Only adapters are trained
    if there are any.
    """

    name, part, rate = "process reward model", "process_reward", "critic.prime.learning_rate"

    def __init__(
        self,
        policy: PreTrainedModel,
        optimizer: OptimizerSettings,
        settings: ValueModelSettings,
        ranks: Collectives = ONE_PROCESS,
    ) -> None:
        model = copy.deepcopy(policy).eval()
        self._scorer = LogprobScorer(model, settings.temperature, recompute=settings.recompute)
        self.shares_prefixes = self._scorer.shares_prefixes
        ranks.shard_model(model)
        super().__init__(model, optimizer, settings, ranks)

    def score(self, rows: Sequence[Row], solved: Sequence[bool] = (), after: bool = False) -> list[Tensor]:
        return self.score_rows(rows, lambda part: self._scorer.score(part.tokens, part.trains).logprobs)

    def train(
        self, rows: Sequence[Row], tables: Sequence[Sequence[Tensor]], solved: Sequence[bool] = ()
    ) -> dict[str, float]:
        """Take `epochs` steps on the table of the reference's log-probabilities.

        Return loss and accuracy (fraction of rows whose logit has the outcome's sign) before the first step.
        """
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
