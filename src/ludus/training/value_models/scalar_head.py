"""A body with a few numbers per state in place of the output layer: what critics and reward models are."""

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
    """Named parts that can be split between processes."""

    def forward(self) -> None:
        """They are used one by one."""


class HeadModel:
    """The body of `policy`, used as it is and not copied, below a linear head that begins at zero."""

    def __init__(
        self, policy: PreTrainedModel, what: str, hint: str, outputs: int = 1, *, recompute: bool = False
    ) -> None:
        """Raises UserError, naming `what` it was to be, for a model whose states cannot be read by row."""
        self._scorer = LogprobScorer(policy, recompute=recompute)
        if not self._scorer.shares_prefixes:
            raise UserError(
                f"No {what} can be made of {type(policy).__name__}: its hidden states are not to be had.",
                hint,
            )
        parameter = next(policy.parameters())
        self.head = nn.Linear(
            policy.config.get_text_config().hidden_size,
            outputs,
            device=parameter.device,
            dtype=parameter.dtype,
        )
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.model = _Parts({"body": self._scorer.body, "head": self.head})

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The format of what `read` gives: float32, or float64 where the weights are."""
        return torch.float64 if self.head.weight.dtype == torch.float64 else torch.float32

    def read(self, tokens: Tensor, at: tuple[Tensor, Tensor], *, frozen: bool = False) -> Tensor:
        """The numbers `[A, outputs]` after the positions `at` (rows, columns) of `tokens` `[B, L]`.

        `frozen`: no gradient reaches the body.
        """

        def numbers() -> Tensor:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
                states = self._scorer.states(tokens, at)
            values: Tensor = self.head(states)
            return values

        return within(self.model, numbers).to(self.dtype)

    def idle(self) -> Tensor:
        """0, after a pass of one token, which processes that share the weights make together."""
        nowhere = torch.zeros(1, dtype=torch.int64, device=self.device)
        return 0.0 * self.read(nowhere[None], (nowhere, nowhere)).sum()

    def load_head(self, stored: Mapping[str, Tensor]) -> None:
        """Put a head's `weight` and `bias` back. Raises LearnerError for one of another shape."""
        with torch.no_grad():
            for name, parameter in self.head.named_parameters():
                found = stored.get(name)
                if found is None or found.shape != parameter.shape:
                    raise LearnerError(f"The stored head does not fit the model: {name}.")
                parameter.copy_(found)
