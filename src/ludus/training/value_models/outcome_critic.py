"""A critic of outcomes: at each action token, how likely success and failure are (CodeRL, arXiv:2207.01780).

The paper tells four outcomes of a program apart: it does not compile, raises, fails a test, passes all.
A world gives one number for the outcome, so that two classes are left: solved or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ludus.training.batches.rows import Row
from ludus.training.distributed.collectives import ONE_PROCESS, Collectives, merged
from ludus.training.learner.optimizer import OptimizerSettings
from ludus.training.value_models.base import (
    StateModel,
    StateSettings,
    batches,
    blank_state_of,
    load_state_of,
    scored,
    state_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CLASSES = 2
"""Not solved, solved."""


@dataclass(frozen=True, slots=True)
class OutcomeCriticSettings:
    """How it learns: `epochs` passes over the rows of a step, each in `minibatches` gradient steps.

    `success` is the reward part that says whether a task was solved: 1 is.
    """

    epochs: int = 1
    minibatches: int = 1
    success: str = ""
    states: StateSettings = field(default_factory=StateSettings)


class OutcomeCritic:
    """Classes of outcomes at the states after action tokens, and their training."""

    def __init__(
        self,
        policy: PreTrainedModel,
        optimiser: OptimizerSettings,
        settings: OutcomeCriticSettings = OutcomeCriticSettings(),
        ranks: Collectives = ONE_PROCESS,
    ) -> None:
        """Raises UserError for a model whose hidden states cannot be read row by row."""
        self.settings = settings
        self.states = StateModel(policy, CLASSES, optimiser, settings.states, ranks)
        self.model, self.optimiser = self.states.model, self.states.optimiser

    @torch.no_grad()
    def probabilities(self, rows: Sequence[Row], solved: Sequence[bool]) -> list[Tensor]:
        """The probability of each row's own outcome at each training token, `[T]`, 0 elsewhere."""
        found: dict[int, Tensor] = {}
        for part in self.states.parts(rows):
            chances = torch.softmax(self.states.read(part, after=True), -1)
            for place, i in enumerate(part.index):
                own = torch.where(scored(part)[place], chances[place, :, int(solved[i])], 0.0)
                found[i] = own[: len(rows[i].tokens)]
        found = merged(found, self.states.ranks)
        return [found[i] for i in range(len(rows))]

    def train(self, rows: Sequence[Row], solved: Sequence[bool]) -> dict[str, float]:
        """Learn the cross-entropy, a mean over tokens.

        Return loss and accuracy (the share of tokens at which the row's outcome is the likelier one) of the
        first pass, each minibatch before its gradient step. Raises LearnerError where the loss is not finite.
        """
        settings = self.settings
        tokens = sum(sum(row.trains[1:]) for row in rows)
        if not tokens:
            return {}
        steps = [
            self._step([rows[i] for i in index], [solved[i] for i in index])
            for index in batches(len(rows), settings.epochs, settings.minibatches, self.optimiser.num_steps)
            if any(any(rows[i].trains[1:]) for i in index)
        ]
        first = steps[: len(steps) // settings.epochs]
        loss, right = (sum(column) for column in zip(*first, strict=True))
        return {"critic/loss": loss / tokens, "critic/accuracy": right / tokens}

    def state(self) -> dict[str, Tensor]:
        """Weights and moments, for a checkpoint."""
        return state_of(self.model, self.optimiser)

    def blank_state(self) -> dict[str, Tensor]:
        """What `state` gives after a step, all zeros."""
        return blank_state_of(self.model, self.optimiser)

    def load_state(self, state: Mapping[str, Tensor], num_steps: int) -> None:
        """Put back what `state` gave. Raises LearnerError for another critic."""
        load_state_of(self.model, self.optimiser, state, num_steps, "critic")

    def _step(self, rows: Sequence[Row], solved: Sequence[bool]) -> tuple[float, int]:
        """Take one gradient step; return the sum of the losses before it and the number of right tokens."""
        tokens = sum(sum(row.trains[1:]) for row in rows)
        total, right, fault = 0.0, 0, ""
        for part in self.states.parts(rows):
            mask = scored(part)
            table = self.states.read(part, after=True)
            logits = table[mask]
            classes = torch.tensor([int(solved[i]) for i in part.index], device=logits.device)
            labels = classes[:, None].expand(mask.shape)[mask]
            loss = cross_entropy(logits, labels, reduction="sum") / tokens
            if not torch.isfinite(loss):
                fault = "The critic's loss is not a number."
            torch.autograd.backward(loss if part.index else 0.0 * table.sum())
            total += tokens * float(loss.detach())
            right += int((logits.argmax(1) == labels).sum())
        self.optimiser.step_together(fault, "Lower critic.learning_rate.")
        ranks = self.states.ranks
        return sum(ranks.gather(total)), sum(ranks.gather(right))
