"""Outcome critic: probability of success at each action token (CodeRL, arXiv:2207.01780).

The paper has four outcomes of a program: compile error, runtime error, failed test, passed. Worlds give one
outcome reward, so there are two classes: solved or not.
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
    """Critic training: `epochs` passes over a step's rows, each in `minibatches` gradient steps.

    `success` is the reward part that defines task success (value 1).
    """

    epochs: int = 1
    minibatches: int = 1
    success: str = ""
    states: StateSettings = field(default_factory=StateSettings)


class OutcomeCritic:
    """Outcome classifier at the states after action tokens, with its training."""

    def __init__(
        self,
        policy: PreTrainedModel,
        optimiser: OptimizerSettings,
        settings: OutcomeCriticSettings = OutcomeCriticSettings(),
        ranks: Collectives = ONE_PROCESS,
    ) -> None:
        """Raise UserError if the model's hidden states are unavailable."""
        self.settings = settings
        self.states = StateModel(policy, CLASSES, optimiser, settings.states, ranks)
        self.model, self.optimiser = self.states.model, self.states.optimiser

    @torch.no_grad()
    def probabilities(self, rows: Sequence[Row], solved: Sequence[bool]) -> list[Tensor]:
        """Return the probability of each row's outcome at each training token, `[T]`, 0 elsewhere."""
        found: dict[int, Tensor] = {}
        for part in self.states.parts(rows):
            chances = torch.softmax(self.states.read(part, after=True), -1)
            for place, i in enumerate(part.index):
                own = torch.where(scored(part)[place], chances[place, :, int(solved[i])], 0.0)
                found[i] = own[: len(rows[i].tokens)]
        found = merged(found, self.states.ranks)
        return [found[i] for i in range(len(rows))]

    def train(self, rows: Sequence[Row], solved: Sequence[bool]) -> dict[str, float]:
        """Train with cross-entropy, averaged over tokens.

        Return loss and accuracy (fraction of tokens that predict the row's outcome) of the first epoch, each
        minibatch before its gradient step. Raises LearnerError if the loss is not finite.
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
        """Return weights and moments for a checkpoint."""
        return state_of(self.model, self.optimiser)

    def blank_state(self) -> dict[str, Tensor]:
        """Return zeros in the shape of `state` after a step."""
        return blank_state_of(self.model, self.optimiser)

    def load_state(self, state: Mapping[str, Tensor], num_steps: int) -> None:
        """Restore `state`. Raises LearnerError if the critic differs."""
        load_state_of(self.model, self.optimiser, state, num_steps, "critic")

    def _step(self, rows: Sequence[Row], solved: Sequence[bool]) -> tuple[float, int]:
        """Take one gradient step; return the sum of losses before it and the number of correct tokens."""
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
