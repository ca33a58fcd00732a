"""Forward passes of any causal language model over the cache class of the model itself.

For models that `RaggedForward` rejects: linear attention, state spaces, convolutions, sinks, latent attention. A cache
(`State`) covers sequences of equal length, one in each batch row. A trial at start compares several ways to use it with
a plain pass, and the first that agrees is used: some models cannot extend a cache by several tokens at once, some
caches cannot be split and merged by rows, and some models have none.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from ludus.engines.base import DEFAULT
from ludus.engines.embedded.model_runner import agreement, check_positions, restore_linear, use_onednn
from ludus.engines.models.lora import AdapterBank, is_peft
from ludus.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

State = Any
"""A cache as returned by a model: an object of transformers, or tensors in lists; None before the first token."""

_CACHE_NAMES = ("past_key_values", "cache_params", "state")
_NODES = (Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin)
_TRIAL_TOKENS, _TRIAL_PROMPT = 40, 17
_STRICT = 0.2
"""Fraction of the usual tolerance: some models compute single tokens differently, for which only no cache is exact."""
_HINT = "Serve it with an inference server."


@dataclass(frozen=True, slots=True)
class CacheMode:
    """How a model's cache is used; `description` is part of a warning."""

    has_cache: bool
    extends: bool
    """Whether several tokens at once extend a cache."""
    merges: bool
    """Whether caches of equal length are merged into one batch."""
    description: str


_MODES = (
    CacheMode(True, True, True, "one cache per episode, batches of equal length"),
    CacheMode(True, False, True, "one cache per episode, extended token by token, batches of equal length"),
    CacheMode(True, True, False, "one cache per episode, one sequence per pass"),
    CacheMode(True, False, False, "one cache per episode, extended token by token, one sequence per pass"),
    CacheMode(False, True, True, "no cache, the whole history is computed for each token"),
)


class GenericForward:
    """Forward passes of a causal language model over its own cache. Raises UserError if no way of caching agrees with a
    plain pass, and restores the model."""

    def __init__(self, model: PreTrainedModel, max_tokens: int) -> None:
        self.model = model
        first = next(model.parameters())
        self.device: torch.device = first.device
        self.vocab_size: int = model.get_input_embeddings().weight.shape[0]
        inner = model.get_base_model() if is_peft(model) else model
        parameters = inspect.signature(inner.forward).parameters
        self._selects_logits = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters
        self._cache_name = next((name for name in _CACHE_NAMES if name in parameters), "")
        check_positions(model, max_tokens)
        with ExitStack() as undo:
            undo.callback(restore_linear, use_onednn(model))
            rows = torch.arange(_TRIAL_TOKENS, device=self.device) * 7 % self.vocab_size
            ids = torch.stack([rows, rows.flip(0)])
            try:
                with torch.inference_mode():
                    expected = model(input_ids=ids, use_cache=False).logits.double().log_softmax(-1)
                self.adapters = AdapterBank(model)
            except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as error:
                raise UserError(f"The local engine cannot run {type(model).__name__}: {error}.", _HINT) from error
            undo.callback(self.adapters.close)
            self.mode = self._choose_mode(ids, expected, first.dtype)
            self._undo = undo.pop_all()

    @property
    def description(self) -> str:
        """How the model's cache is used."""
        return self.mode.description

    def logits(
        self, ids: Tensor, start: int, state: State, adapter: str, *, all_rows: bool = False
    ) -> tuple[Tensor, State]:
        """Extend `state` in place by the tokens `ids` `[B, T]`, the first at position `start`. Return logits
        `[B, 1, V]`, or `[B, T, V]` for `all_rows`, and the new state."""
        self.adapters.select([adapter], [1], 1, self.device)
        arguments: dict[str, object] = {"use_cache": self.mode.has_cache}
        if self._selects_logits and not all_rows:
            arguments["logits_to_keep"] = 1
        if self._takes_positions:  # not every model derives them from its cache
            arguments["position_ids"] = torch.arange(start, start + ids.shape[1], device=self.device).expand(ids.shape)
        if self.mode.has_cache and state is not None:
            arguments[self._cache_name] = state
        output = self.model(input_ids=ids, **arguments)
        logits: Tensor = output.logits
        return (logits if all_rows else logits[:, -1:]), output.get(self._cache_name) if self.mode.has_cache else None

    def close(self) -> None:
        """Restore the model."""
        self._undo.close()

    def _choose_mode(self, ids: Tensor, expected: Tensor, dtype: torch.dtype) -> CacheMode:
        """Return the first way of caching whose log-probabilities are those of a plain pass."""
        reason = ""
        for mode in _MODES:
            self.mode = mode
            try:
                difference = float((self._run_trial(ids) - expected).abs().max())
            except Exception as error:  # boundary: a model's code may raise anything
                reason = f": {error}"
                continue
            if difference < _STRICT * agreement(expected, dtype):
                return mode
            reason = f": cached and plain passes differ by {difference:.2g} in log-probability"
        raise UserError(f"The local engine cannot run {type(self.model).__name__}{reason}.", _HINT)

    @torch.inference_mode()
    def _run_trial(self, ids: Tensor) -> Tensor:
        """Return log-probabilities `[2, T, V]`: two prompts apart, some tokens in one batch if merged, then apart again
        with copies of their states."""
        adapter = DEFAULT if DEFAULT in self.adapters.names else ""
        if not self.mode.has_cache:
            return self.logits(ids, 0, None, adapter, all_rows=True)[0].double().log_softmax(-1)
        states: list[State] = [None, None]

        def extend(row: int, begin: int, end: int) -> list[Tensor]:
            step, found = (end - begin if self.mode.extends or not begin else 1), []
            for at in range(begin, end, step):
                part = ids[row : row + 1, at : at + step]
                logits, states[row] = self.logits(part, at, states[row], adapter, all_rows=True)
                found.append(logits)
            return found

        parts = [extend(row, 0, _TRIAL_PROMPT) for row in range(2)]
        begin = _TRIAL_PROMPT + 2
        merged = merge(states) if self.mode.merges else None
        for at in range(_TRIAL_PROMPT, begin):
            if self.mode.merges:
                logits, merged = self.logits(ids[:, at : at + 1], at, merged, adapter)
            for row in range(2):
                parts[row] += [logits[row : row + 1]] if self.mode.merges else extend(row, at, at + 1)
        if self.mode.merges:
            states = [select(merged, [row], 2) for row in range(2)]
        copies = [fork(state) for state in states]
        for row in range(2):  # the copies must not change with the originals
            extend(row, begin, _TRIAL_TOKENS)
        states = copies
        for row in range(2):
            parts[row] += extend(row, begin, _TRIAL_TOKENS)
        return torch.cat([torch.cat(row, dim=1) for row in parts]).double().log_softmax(-1)


def merge(states: Sequence[State]) -> State:
    """Return one state with the rows of all."""

    def cat(*tensors: Tensor) -> Tensor:
        return torch.cat(tensors) if tensors[0].dim() else tensors[0].clone()

    return _map(cat, *states)


def select(state: State, rows: Sequence[int], num_rows: int) -> State:
    """Return a copy of some rows of a state."""

    def take(tensor: Tensor) -> Tensor:
        if tensor.dim() and tensor.shape[0] == num_rows:
            return tensor[list(rows)]
        return tensor.clone()

    return fork(state) if list(rows) == list(range(num_rows)) else _map(take, state)


def fork(state: State) -> State:
    """Return an independent copy of a state."""
    return _map(torch.clone, state)


def _map(function: Callable[..., Tensor], *states: State) -> State:
    """Return a copy of the first state with each tensor replaced by the function of that tensor of all states."""
    first = states[0]
    if isinstance(first, Tensor):
        return function(*states)
    if isinstance(first, Mapping):
        return {name: _map(function, *(state[name] for state in states)) for name in first}
    if isinstance(first, list | tuple):
        return type(first)(_map(function, *parts) for parts in zip(*states, strict=True))
    if not isinstance(first, _NODES):
        return first
    made = copy.copy(first)
    vars(made).update({name: _map(function, *(vars(state)[name] for state in states)) for name in vars(first)})
    return made
