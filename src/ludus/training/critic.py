"""The critic: one number per state in place of the output layer.

`values[t]` is V of the state before token `t`: read from the hidden state at `t - 1`. It begins as a copy of
the policy's body with a head of zeros, so that its first values are 0, and learns by the clipped value loss.
Or it is a head alone, on the hidden states of the policy as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ludus.algorithms.losses import value_loss
from ludus.training.batch import Row
from ludus.training.optimiser import OptimiserSettings
from ludus.training.ranks import ONE_PROCESS, Ranks, merged
from ludus.training.state_model import (
    StateModel,
    StateSettings,
    blank_state_of,
    load_state_of,
    padded,
    scored,
    state_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class CriticSettings:
    """How the critic learns. `clip` bounds how far a value moves in one step (None: not bounded).

    With `turns` it learns at the first action token of each turn alone: a step is a turn then, and the other
    tokens have no value of their own.
    """

    epochs: int = 1
    clip: float | None = 0.2
    states: StateSettings = field(default_factory=StateSettings)
    turns: bool = False


class Critic:
    """Values of states, and their training."""

    def __init__(
        self,
        policy: PreTrainedModel,
        optimiser: OptimiserSettings,
        settings: CriticSettings = CriticSettings(),
        ranks: Ranks = ONE_PROCESS,
    ) -> None:
        """Raises UserError for a model whose hidden states cannot be read row by row."""
        self.settings = settings
        self.states = StateModel(policy, 1, optimiser, settings.states, ranks)
        self.model, self.optimiser = self.states.model, self.states.optimiser

    @torch.no_grad()
    def values(self, rows: Sequence[Row], *, after: bool = False) -> list[Tensor]:
        """V before (or after) each training token, `[T]` a row, 0 elsewhere."""
        found: dict[int, Tensor] = {}
        for part in self.states.parts(rows):
            values = self.states.read(part, after=after)[:, :, 0]
            found |= {i: values[place, : len(rows[i].tokens)] for place, i in enumerate(part.index)}
        found = merged(found, self.states.ranks)
        return [found[i] for i in range(len(rows))]

    def train(
        self, rows: Sequence[Row], targets: Sequence[Tensor], old: Sequence[Tensor]
    ) -> dict[str, float]:
        """Take `epochs` steps towards `targets` `[T]` a row; `old` are the values before.

        Gives the loss of the first step and the share of the targets' variance that the old values explain.
        Raises LearnerError where the loss is not finite.
        """
        tokens = sum(sum(row.trains[1:]) for row in rows)
        losses = (
            [self._step(rows, targets, old, tokens) for _ in range(self.settings.epochs)] if tokens else [0.0]
        )
        return {
            "critic/loss": losses[0],
            "critic/explained_variance": _explained(rows, targets, old),
            "critic/value_mean": _mean([v[torch.tensor(r.trains)] for v, r in zip(old, rows, strict=True)]),
        }

    def state(self) -> dict[str, Tensor]:
        """Weights and moments, for a checkpoint."""
        return state_of(self.model, self.optimiser)

    def blank_state(self) -> dict[str, Tensor]:
        """What `state` gives after a step, all zeros."""
        return blank_state_of(self.model, self.optimiser)

    def load_state(self, state: Mapping[str, Tensor], num_steps: int) -> None:
        """Put back what `state` gave. Raises LearnerError for another critic."""
        load_state_of(self.model, self.optimiser, state, num_steps, "critic")

    def _step(
        self, rows: Sequence[Row], targets: Sequence[Tensor], old: Sequence[Tensor], tokens: int
    ) -> float:
        total, fault = 0.0, ""
        for part in self.states.parts(rows):
            values = self.states.read(part)[:, :, 0]
            loss = value_loss(
                values=values,
                old_values=padded(old, part, values),
                returns=padded(targets, part, values),
                mask=scored(part),
                eps=self.settings.clip,
            )
            scaled = loss.sum() / tokens
            if not torch.isfinite(scaled):
                fault = "The critic's loss is not a number."
            torch.autograd.backward(scaled)
            total += float(scaled.detach())
        self.optimiser.step_together(fault, "Lower critic.learning_rate.")
        return sum(self.states.ranks.gather(total))


def _explained(rows: Sequence[Row], targets: Sequence[Tensor], old: Sequence[Tensor]) -> float:
    """`1 - var(target - value) / var(target)` over the training tokens; 0 where the targets do not vary."""
    masks = [torch.tensor((False, *row.trains[1:])) for row in rows]
    wanted = torch.cat([t.double().cpu()[m] for t, m in zip(targets, masks, strict=True)])
    given = torch.cat([v.double().cpu()[m] for v, m in zip(old, masks, strict=True)])
    spread = float(wanted.var(correction=0)) if wanted.numel() else 0.0
    return 1 - float((wanted - given).var(correction=0)) / spread if spread > 0 else 0.0


def _mean(values: Sequence[Tensor]) -> float:
    joined = torch.cat([v.double().cpu() for v in values])
    return float(joined.mean()) if joined.numel() else 0.0
