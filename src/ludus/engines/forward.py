"""One forward pass of any Hugging Face causal language model over right-aligned rows.

Works with models of standard attention (full, or sliding windows): they take `position_ids`, a 4D
additive mask and a cache object with `update`. `CausalForward` tries that out on a few tokens before it is
used, and refuses a model whose batched, cached pass does not agree with a plain one.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache

from ludus.engines.kv import KvBatch, KvLayout, Shape
from ludus.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_AGREEMENT = {torch.float64: 1e-6, torch.float32: 1e-3}
_COARSE_AGREEMENT = 0.5
"""Largest difference of log-probabilities in the trial; 16-bit types round far more than the others."""


@dataclass(frozen=True, slots=True)
class Pass:
    """What one forward pass reads besides the cache.

    `ids` and `positions` `[B, N]` int64, right-aligned; `starts` `[B]` is the column of each row's first
    token; the pass sees the columns from `low`, and its new tokens begin at column `at`.
    """

    ids: Tensor
    positions: Tensor
    starts: Tensor
    low: int
    at: int


class CausalForward:
    """The logits of a model's last position, batched over a `KvBatch`.

    Raises `UserError` for a model that does not work this way.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        first = next(model.parameters())
        self.device: torch.device = first.device
        self.dtype: torch.dtype = first.dtype
        self.vocab_size: int = model.get_input_embeddings().weight.shape[0]
        self._windows = _attention_windows(model)
        forward = inspect.signature(model.forward).parameters
        wide = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in forward.values())
        self._extra: dict[str, Any] = {"logits_to_keep": 1} if wide or "logits_to_keep" in forward else {}
        self.layout = self._try_out()

    def logits(self, cache: KvBatch, step: Pass) -> Tensor:
        """Logits `[B, V]` at the last of the new tokens, whose keys and values go into `cache`."""
        output = self.model(
            input_ids=step.ids,
            position_ids=step.positions,
            attention_mask=self._masks(step),
            past_key_values=cache,
            use_cache=True,
            **self._extra,
        )
        last: Tensor = output.logits[:, -1]
        return last

    def plain_logits(self, ids: Tensor) -> Tensor:
        """Logits `[B, T, V]` of a forward pass without cache or mask."""
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits

    def _masks(self, step: Pass) -> Tensor | dict[str, Tensor]:
        """Additive masks `[B, 1, N, columns]`, one per kind of attention if the model mixes several."""
        queries = torch.arange(step.at, step.at + step.ids.shape[1], device=self.device)[:, None]
        columns = torch.arange(step.low, step.at + step.ids.shape[1], device=self.device)[None, :]
        visible = (columns >= step.starts[:, None, None]) & (columns <= queries)
        masks = {
            kind: self._additive(visible, queries - columns, window) for kind, window in self._windows.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _additive(self, visible: Tensor, distance: Tensor, window: int | None) -> Tensor:
        if window is not None:
            visible = visible & (distance < window)
        # Finite, so that the softmax of padding, which sees nothing, is finite too; nothing reads it.
        hidden = torch.finfo(self.dtype).min
        zeros = torch.zeros((), dtype=self.dtype, device=self.device)
        return torch.where(visible, zeros, hidden)[:, None]

    @torch.inference_mode()
    def _try_out(self) -> KvLayout:
        """Find the shapes of keys and values; compare a ragged, cached pass with a plain one."""
        name = type(self.model).__name__
        try:
            layout = self._probe_layout()
            difference = self._trial_difference(layout)
        except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as error:
            raise UserError(
                f"The local engine cannot run {name}: {error}.",
                "It needs a causal language model with standard attention and key-value cache.",
            ) from error
        if not difference < _AGREEMENT.get(self.dtype, _COARSE_AGREEMENT):
            raise UserError(
                f"The local engine cannot run {name}: batched and plain forward passes differ by "
                f"{difference:.2g} in log-probability.",
                "Its attention is not standard; serve it with an inference server.",
            )
        return layout

    def _probe_layout(self) -> KvLayout:
        recorder = _ShapeRecorder()
        ids = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
        self.model(input_ids=ids, past_key_values=recorder, use_cache=True)
        if not recorder.planes:
            raise ValueError("it does not use the key-value cache it is given")
        return KvLayout.of(recorder.planes, recorder.dtype, self.device)

    def _trial_difference(self, layout: KvLayout) -> float:
        """Largest difference in log-probability over two rows of unlike length, in two passes each."""
        lengths, new = (7, 4), 3
        ids = torch.arange(max(lengths), device=self.device) * 7 % self.vocab_size
        rows = torch.stack([ids.roll(-row)[: max(lengths)] for row in range(2)])
        starts = torch.tensor([max(lengths) - n for n in lengths], device=self.device)
        rows = torch.stack([row.roll(int(start)) for row, start in zip(rows, starts, strict=True)])
        columns = torch.arange(max(lengths), device=self.device)
        positions = (columns - starts[:, None]).clamp(min=0)
        cache = KvBatch(layout)
        cache.begin(rows=2, end=max(lengths), spare=0)
        at = max(lengths) - new
        cache.focus(slice(0, 2), 0, 0, (columns[:at] >= starts[:, None])[:, None, :, None])
        self.logits(cache, Pass(rows[:, :at], positions[:, :at], starts, 0, 0))
        cache.focus(slice(0, 2), 0, at)
        batched = self.logits(cache, Pass(rows[:, at:], positions[:, at:], starts, 0, at))
        plain = [self.plain_logits(row[int(s) :][None])[0, -1] for row, s in zip(rows, starts, strict=True)]
        gap = batched.double().log_softmax(-1) - torch.stack(plain).double().log_softmax(-1)
        return float(gap.abs().max())


class _ShapeRecorder(Cache):  # type: ignore[misc]
    """Stores nothing; notes the shape of each layer's keys and values."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.planes: list[Shape] = []
        self.dtype = torch.float32

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        if 2 * layer_idx != len(self.planes):
            raise ValueError("its layers do not fill the key-value cache in order")
        self.planes += [(states.shape[1], states.shape[3]) for states in (key_states, value_states)]
        self.dtype = key_states.dtype
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


def _attention_windows(model: PreTrainedModel) -> dict[str, int | None]:
    """The kinds of attention in the model, each with its window in tokens (None: all)."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or [
        "full_attention" if window is None else "sliding_attention"
    ]
    known = {"full_attention": None, "sliding_attention": window}
    unknown = sorted(set(kinds) - set(known))
    if unknown:
        raise UserError(
            f"The local engine cannot run {type(model).__name__}: it has {', '.join(unknown)} layers.",
            "It runs models of full or sliding-window attention; serve others with an inference server.",
        )
    return {kind: known[kind] for kind in dict.fromkeys(kinds)}
