"""Transformer body with a scalar head instead of the output layer; used by critics and reward models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ludus.errors import LearnerError, UserError
from ludus.training.distributed.fsdp import within
from ludus.training.learner.logprobs import LogprobScorer

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
        """Raise UserError, naming the model type `what`, if hidden states are unavailable."""
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

    @property
    def dtype(self) -> torch.dtype:
        """The type of the result of `read`: float32, or float64 if the weights are."""
        return torch.float64 if self.head.weight.dtype == torch.float64 else torch.float32

    def read(self, tokens: Tensor, at: tuple[Tensor, Tensor], *, frozen: bool = False) -> Tensor:
        """Return values `[A, outputs]` after the positions `at` (rows, columns) of `tokens` `[B, L]`.

        `frozen`: no gradient reaches the body.
        """

        def numbers() -> Tensor:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
                states = self._scorer.states(tokens, at)
            values: Tensor = self.head(states)
            return values

        return within(self.model, numbers).to(self.dtype)

    def idle(self) -> Tensor:
        """Return 0 after a pass of one token: with sharded weights all ranks make every pass."""
        nowhere = torch.zeros(1, dtype=torch.int64, device=self.device)
        return 0.0 * self.read(nowhere[None], (nowhere, nowhere)).sum()

    def load_head(self, stored: Mapping[str, Tensor]) -> None:
        """Restore a head's `weight` and `bias`. Raises LearnerError if the shapes differ."""
        with torch.no_grad():
            for name, parameter in self.head.named_parameters():
                found = stored.get(name)
                if found is None or found.shape != parameter.shape:
                    raise LearnerError(f"The stored head does not match the model: {name}.")
                parameter.copy_(found)
