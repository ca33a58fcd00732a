"""Routing replay for mixtures of experts: record the experts of one pass and reuse them in later ones.

If an update reroutes a token, its old and new probability come from different sub-models and the ratio jumps.
Replaying the first pass's experts avoids this; the router still learns through the experts' weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ludus.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROUTERS = ("Qwen3MoeTopKRouter", "Qwen2MoeTopKRouter", "OlmoeTopKRouter", "MixtralTopKRouter")
"""Supported routers of transformers: softmax over all experts, normalized or not."""

RouterOutput = tuple[Tensor, Tensor, Tensor]
"""Logits `[T, E]`, and weights `[T, k]` and indices `[T, k]` of the chosen experts."""


@dataclass
class RoutingReplay:
    """Routers of a model. A row's experts are `[R, n, k]`: routers, tokens, experts per token.

    A token shared by several rows (a common prefix) uses the experts of one of them.
    """

    routers: Sequence[nn.Module]
    normalised: Sequence[bool]
    _places: Sequence[Tensor] = field(default=(), init=False)
    _recorded: list[Tensor] | None = field(default=None, init=False)
    _rows: Sequence[Tensor] | None = field(default=None, init=False)
    _replayed: Tensor | None = field(default=None, init=False)

    @classmethod
    def of(cls, model: PreTrainedModel) -> RoutingReplay:
        """Build from a model. Raises UserError if it has no supported router."""
        routers = [module for module in model.modules() if type(module).__name__ in ROUTERS]
        if not routers:
            raise UserError(
                f"{type(model).__name__} has no router that supports routing replay.",
                f"Unset training.learner.replay_routing. Supported: {', '.join(ROUTERS)}.",
            )
        # Mixtral's router has no option: it always normalizes
        options = [type(router).__name__ == "MixtralTopKRouter" or bool(router.norm_topk_prob) for router in routers]
        return cls(routers, options)

    @property
    def records(self) -> bool:
        return self._recorded is not None

    def set_positions(self, places: Sequence[Tensor], num_tokens: int) -> None:
        """Set the index of each row's tokens in the next pass over `num_tokens` tokens."""
        self._places = places
        if self._rows is None:
            return
        first = next((row for row in self._rows if row.numel()), None)
        if first is None or not num_tokens:
            return
        layers, _, width = first.shape
        experts = torch.arange(width, device=places[0].device).repeat(layers, num_tokens, 1)
        for place, row in zip(places, self._rows, strict=True):
            length = min(len(place), row.shape[1])
            if length:
                experts[:, place[:length]] = row[:, :length].to(experts.device)  # gathered rows are on the CPU
        self._replayed = experts

    def recorded_experts(self) -> list[Tensor]:
        """Return the experts of each row in the last pass, `[R, n, k]`; empty for rows without tokens."""
        assert self._recorded is not None
        table = torch.stack(self._recorded)
        return [table[:, place] for place in self._places]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the experts of passes within the block; `recorded_experts` returns those of the last."""
        self._recorded = [torch.empty(0)] * len(self.routers)
        try:
            with self._hooked(self._record):
                yield
        finally:
            self._recorded = None

    @contextmanager
    def replay(self, rows: Sequence[Tensor]) -> Iterator[None]:
        """Replay the experts of these rows in one forward and backward pass."""
        self._rows = rows
        try:
            with self._hooked(self._replace):
                yield
        finally:
            self._rows = self._replayed = None

    @contextmanager
    def _hooked(self, hook: Callable[[int, RouterOutput], RouterOutput | None]) -> Iterator[None]:
        handles = [
            router.register_forward_hook(lambda _m, _given, output, at=at: hook(at, output))
            for at, router in enumerate(self.routers)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _record(self, at: int, output: RouterOutput) -> None:
        assert self._recorded is not None
        self._recorded[at] = output[2].detach()

    def _replace(self, at: int, output: RouterOutput) -> RouterOutput | None:
        if self._replayed is None:
            return None
        logits, weights, _ = output
        experts = self._replayed[at]
        shares = torch.softmax(logits, -1, dtype=torch.float).gather(-1, experts)
        if self.normalised[at]:
            shares = shares / shares.sum(-1, keepdim=True)
        return logits, shares.to(weights.dtype), experts
