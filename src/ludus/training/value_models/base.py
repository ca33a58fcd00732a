"""Base of value models: a transformer body with a scalar head instead of the output layer.

Also defines the checkpoint format of all models trained with the policy.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ludus.errors import LearnerError, UserError
from ludus.training.batches.rows import Microbatch, Row, balance_rows, blank_microbatch, microbatches
from ludus.training.distributed.collectives import Collectives, copy_into, gather_rows, is_sharded, run_as_forward
from ludus.training.learner.logprobs import LogprobScorer, model_precision, score_dtype
from ludus.training.learner.optimizer import Optimizer, OptimizerSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Parts(nn.ModuleDict):
    """Container of named modules that can be sharded."""

    def forward(self) -> None:
        """Unused: the modules are called separately."""


class HeadModel:
    """The body of `policy`, not copied, with a zero-initialized linear head."""

    def __init__(
        self, policy: PreTrainedModel, what: str, hint: str, outputs: int = 1, *, recompute: bool = False
    ) -> None:
        """Raise UserError if hidden states are unavailable; the message names `what`, the model type."""
        self._scorer = LogprobScorer(policy, recompute=recompute)
        if not self._scorer.shares_prefixes:
            raise UserError(
                f"{type(policy).__name__} cannot be used for a {what}: its hidden states are unavailable.", hint
            )
        parameter = next(policy.parameters())
        self.head = nn.Linear(
            policy.config.get_text_config().hidden_size, outputs, device=parameter.device, dtype=parameter.dtype
        )
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.model = _Parts({"body": self._scorer.body, "head": self.head})

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.head.weight.device

    def read(self, tokens: Tensor, at: tuple[Tensor, Tensor], *, frozen: bool = False) -> Tensor:
        """Return values `[A, outputs]` after the positions `at` (rows, columns) of `tokens` `[B, L]`.

        `frozen`: no gradient reaches the body.
        """

        def numbers() -> Tensor:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
                states = self._scorer.states(tokens, at)
            values: Tensor = self.head(states)
            return values

        return run_as_forward(self.model, numbers).to(score_dtype(self.head))

    def dummy_pass(self) -> Tensor:
        """Return 0 after a pass of one token: sharded forward passes are collective."""
        first = torch.zeros(1, dtype=torch.int64, device=self.device)
        return 0.0 * self.read(first[None], (first, first)).sum()

    def load_head(self, stored: Mapping[str, Tensor]) -> None:
        """Restore a head's `weight` and `bias`. Raises LearnerError if the shapes differ."""
        with torch.no_grad():
            for name, parameter in self.head.named_parameters():
                found = stored.get(name)
                if found is None or found.shape != parameter.shape:
                    raise LearnerError(f"The stored head does not match the model: {name}.")
                parameter.copy_(found)


@dataclass(frozen=True, slots=True)
class ValueModelSettings:
    """Training of a value model: `epochs` passes over a step's rows, each in `minibatches` gradient steps.

    `success` is the reward part that defines task success (value 1) for an outcome predictor. `microbatch_tokens`
    limits a pass; `recompute` is activation checkpointing.

    Of a critic: `clip` bounds the change of a value in one training step (None: unbounded). With `turns` only the
    first action token of each turn is trained and has a value. `on_policy`: the head reads hidden states of the
    current policy and is trained alone. Of a process reward model: `beta` scales the rewards, and `temperature` is the
    sampling temperature.
    """

    epochs: int = 1
    minibatches: int = 1
    success: str = ""
    microbatch_tokens: int = 4096
    recompute: bool = False
    clip: float | None = 0.2
    turns: bool = False
    on_policy: bool = False
    beta: float = 0.05
    temperature: float = 1.0


class TrainedModel(ABC):
    """Model trained with the policy, on all `ranks`.

    `name` and `rate`, the setting of its learning rate, are used in messages; `part` is its name in a checkpoint.
    """

    name: str
    part: str
    rate: str
    shares_prefixes = True

    def __init__(
        self, model: nn.Module, optimizer: OptimizerSettings, settings: ValueModelSettings, ranks: Collectives
    ) -> None:
        self.model, self.settings, self.ranks = model, settings, ranks
        self.optimizer = Optimizer(model, optimizer, ranks=ranks)

    @abstractmethod
    def score(self, rows: Sequence[Row], solved: Sequence[bool] = (), after: bool = False) -> list[Tensor]:
        """Return the output at each training token, `[T]` per row, 0 elsewhere.

        `solved` are the rows' outcomes. A critic scores the states before the tokens, or `after` them.
        """

    @abstractmethod
    def train(
        self, rows: Sequence[Row], tables: Sequence[Sequence[Tensor]], solved: Sequence[bool] = ()
    ) -> dict[str, float]:
        """Train on `tables` of values, `[T]` per row, and on the outcomes; return metrics.

        Raises LearnerError if the loss is not finite.
        """

    def parts(self, rows: Sequence[Row]) -> list[Microbatch]:
        """Return this rank's microbatches; `index` refers to all rows. Every rank calls it with all rows.

        If weights are sharded, all ranks get equally many microbatches; some may be empty.
        """
        device, dtype, shared = next(self.model.parameters()).device, score_dtype(self.model), self.shares_prefixes
        indices: Sequence[int] = range(len(rows))
        limit = self.settings.microbatch_tokens
        if self.ranks.world_size > 1:
            indices = balance_rows(rows, self.ranks.world_size, shared=shared)[self.ranks.rank]
        found = [
            replace(part, index=tuple(indices[i] for i in part.index))
            for part in microbatches([rows[i] for i in indices], limit, device, dtype, shared=shared)
        ]
        if is_sharded(self.model):
            most = max(self.ranks.gather(len(found)))
            found += [blank_microbatch(device, dtype)] * (most - len(found))
        return found

    def gradient_step(
        self, rows: Sequence[Row], loss_of: Callable[[Microbatch], tuple[Tensor, int]], scale: float = 1
    ) -> tuple[float, int]:
        """Take one gradient step on the sum of the losses of all microbatches.

        `loss_of` returns the loss of a microbatch and a count. Return the sums over all ranks, of the losses times
        `scale` and of the counts. Raises LearnerError if a loss is not finite.
        """
        total, count, fault = 0.0, 0, ""
        with model_precision(self.model):
            for part in self.parts(rows):
                loss, counted = loss_of(part)
                if not torch.isfinite(loss):
                    fault = f"The {self.name}'s loss is not a number."
                torch.autograd.backward(loss)
                total += scale * float(loss.detach())
                count += counted
            self.optimizer.reduce_and_step(fault, f"Lower {self.rate}.")
        return sum(self.ranks.gather(total)), sum(self.ranks.gather(count))

    @torch.no_grad()
    def score_rows(self, rows: Sequence[Row], score: Callable[[Microbatch], Tensor]) -> list[Tensor]:
        """Return the scores of all rows, `[T]` each; `score` computes `[B, L]` of a microbatch."""
        scores: dict[int, Tensor] = {}
        with model_precision(self.model):
            for part in self.parts(rows):
                numbers = score(part)
                scores |= {i: numbers[place, : len(rows[i].tokens)] for place, i in enumerate(part.index)}
        scores = gather_rows(scores, self.ranks)
        return [scores[i] for i in range(len(rows))]

    def state(self, *, blank: bool = False) -> dict[str, Tensor]:
        """Return the trained weights and their moments for a checkpoint; `blank`: zeros like those after a step."""
        weights = {name: torch.zeros_like(p) if blank else p.detach() for name, p in self._trained()}
        moments = self.optimizer.zero_state_dict() if blank else self.optimizer.state_dict()
        return {f"model/{name}": t for name, t in weights.items()} | {
            f"optimizer/{name}": t for name, t in moments.items()
        }

    def load_state(self, state: Mapping[str, Tensor], num_steps: int) -> None:
        """Restore `state`. Raises LearnerError if the model differs."""
        with torch.no_grad():
            for key, parameter in self._trained():
                stored = state.get(f"model/{key}")
                if stored is None or stored.shape != parameter.shape:
                    raise LearnerError(f"The checkpoint's {self.name} does not match: {key}.")
                copy_into(parameter, stored)
        prefix = "optimizer/"
        moments = {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}
        self.optimizer.load_state_dict(moments, num_steps)

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]


def batches(num_rows: int, epochs: int, minibatches: int, seed: int) -> Iterator[list[int]]:
    """Yield the row indices of each gradient step: `epochs` times `minibatches`, shuffled by `seed`.

    A single minibatch is not shuffled. With fewer rows than `minibatches` each row is a minibatch.
    """
    shuffled, order = random.Random(seed), list(range(num_rows))
    for _ in range(epochs):
        if minibatches > 1:
            shuffled.shuffle(order)
        for part in range(min(minibatches, num_rows)):
            yield order[part::minibatches]
