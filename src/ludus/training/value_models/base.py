"""Base of value models: a transformer body with a scalar head instead of the output layer.

Also defines the checkpoint format of all models that train next to the policy.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ludus.errors import LearnerError
from ludus.training.batches.rows import Microbatch, Row
from ludus.training.distributed.collectives import ONE_PROCESS, Collectives
from ludus.training.distributed.fsdp import is_sharded, put
from ludus.training.learner.data_parallel import DataParallelSplitter
from ludus.training.learner.optimizer import Optimizer, OptimizerSettings
from ludus.training.value_models.scalar_head import HeadModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class StateSettings:
    """Settings of a value model: `microbatch_tokens` per pass; `recompute` is activation checkpointing.

    `on_policy`: the states are those of the current policy, and only the head is trained.
    """

    microbatch_tokens: int = 4096
    recompute: bool = False
    on_policy: bool = False


class StateModel:
    """Body, zero-initialized head with `outputs` values, and optimizer.

    The body is a trained copy of the policy's, or the policy's own, left unchanged.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        outputs: int,
        optimiser: OptimizerSettings,
        settings: StateSettings = StateSettings(),
        ranks: Collectives = ONE_PROCESS,
    ) -> None:
        """Raise UserError if the model's hidden states are unavailable."""
        hint, again = "Use an algorithm without a critic.", settings.recompute
        body = policy if settings.on_policy else copy.deepcopy(policy)
        self._states = HeadModel(body.eval(), "critic", hint, outputs, recompute=again)
        self.head = self._states.head
        self.model: nn.Module = self._states.model
        if settings.on_policy:
            self.model = nn.ModuleDict({"head": self.head})
        else:
            self.model.requires_grad_(True)
            ranks.split(self.model)
        self.ranks = ranks
        self.optimiser = Optimizer(self.model, optimiser, ranks=ranks)
        self._on_policy = settings.on_policy
        self._dealer = DataParallelSplitter(ranks, self.model, settings.microbatch_tokens)

    def parts(self, rows: Sequence[Row]) -> list[Microbatch]:
        """Return this rank's microbatches; `index` refers to all rows."""
        return self._dealer.parts(rows)

    def read(self, part: Microbatch, *, after: bool = False) -> Tensor:
        """Return values `[B, L, outputs]` of states before (or after) the training tokens, 0 elsewhere.

        The first token of a row is never scored.
        """
        rows, columns = torch.nonzero(part.trains[:, 1:], as_tuple=True)
        if not rows.numel():
            nothing = torch.zeros(*part.tokens.shape, self.head.out_features, device=part.tokens.device)
            return nothing + self._states.idle() if is_sharded(self.model) else nothing
        wide = self._states.read(part.tokens, (rows, columns + after), frozen=self._on_policy)
        empty = torch.zeros(*part.tokens.shape, wide.shape[1], dtype=wide.dtype, device=wide.device)
        return empty.index_put((rows, columns + 1), wide)


def batches(num_rows: int, epochs: int, minibatches: int, seed: int) -> Iterator[list[int]]:
    """Yield the row indices of each gradient step: `epochs` times `minibatches`, shuffled by `seed`.

    A single minibatch keeps the order. With fewer rows than `minibatches` each row is one.
    """
    shuffled, order = random.Random(seed), list(range(num_rows))
    for _ in range(epochs):
        if minibatches > 1:
            shuffled.shuffle(order)
        for part in range(min(minibatches, num_rows)):
            yield order[part::minibatches]


def scored(part: Microbatch) -> Tensor:
    """Return the training tokens `[B, L]` that have a preceding position."""
    mask = part.trains.clone()
    mask[:, 0] = False
    return mask


def padded(values: Sequence[Tensor], part: Microbatch, like: Tensor) -> Tensor:
    """Pad the rows' values `[T]` to `[B, L]`, without gradient."""
    table = torch.zeros_like(like)
    for place, i in enumerate(part.index):
        table[place, : len(values[i])] = values[i].to(table)
    return table.detach()


def state_of(model: nn.Module, optimiser: Optimizer) -> dict[str, Tensor]:
    """Return the trained weights and their moments for a checkpoint."""
    weights = {f"model/{name}": p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return weights | {f"optimiser/{name}": tensor for name, tensor in optimiser.state().items()}


def blank_state_of(model: nn.Module, optimiser: Optimizer) -> dict[str, Tensor]:
    """Return zeros in the shapes, types and sharding of `state_of` after a step."""
    weights = {f"model/{name}": torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad}
    return weights | {f"optimiser/{name}": tensor for name, tensor in optimiser.blank_state().items()}


def load_state_of(
    model: nn.Module, optimiser: Optimizer, state: Mapping[str, Tensor], num_steps: int, name: str
) -> None:
    """Restore `state_of`. Raises LearnerError if the model differs; `name` is used in the message."""
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            stored = state.get(f"model/{key}")
            if stored is None or stored.shape != parameter.shape:
                raise LearnerError(f"The checkpoint's {name} does not match: {key}.")
            put(parameter, stored)
    prefix = "optimiser/"
    moments = {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}
    optimiser.load_state(moments, num_steps)
