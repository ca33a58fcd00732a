"""Attention of ragged batches by torch on a CPU: running sequences have their keys and values in one piece.

Pages are where prefixes are shared and kept. A sequence that runs also has a copy in the memory of its slot,
which torch's attention reads in place: one call a sequence, no padding, nothing gathered again at each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludus.engines.memory import LayerShape, PagePool, lazy_zeros
from ludus.engines.pages import PAGE
from ludus.engines.scores import Scores

_EXACT_BYTES = 4
"""Of a number; products of smaller ones lose digits, which torch's attention keeps inside."""


class SlotMemory:
    """Per layer keys `[slots, heads, width, tokens]`, values `[slots, heads, tokens, width]`.

    Of each slot `filled` tokens. It takes memory where it has been written. `of_slot` has views of both, by
    layer and slot. Keys stand as both products of a single query read them fastest.
    """

    def __init__(self, layers: list[LayerShape], num_slots: int, num_tokens: int, dtype: torch.dtype) -> None:
        cpu = torch.device("cpu")
        self.keys = [lazy_zeros((num_slots, s.heads, s.key_width, num_tokens), dtype, cpu) for s in layers]
        self.values = [
            lazy_zeros((num_slots, s.heads, num_tokens, s.value_width), dtype, cpu) for s in layers
        ]
        self.of_slot = [
            list(zip(keys.unbind(), values.unbind(), strict=True))
            for keys, values in zip(self.keys, self.values, strict=True)
        ]
        self.filled = [0] * num_slots

    def keep(self, slot: int, num_tokens: int) -> None:
        """Forget what a slot has behind its first tokens."""
        self.filled[slot] = min(self.filled[slot], num_tokens)

    def load(self, pool: PagePool, slot: int, pages: NDArray[np.int32], until: int) -> None:
        """Copy what is missing of the first `until` tokens from their pages."""
        first = self.filled[slot] // PAGE
        index = torch.from_numpy(pages[first : -(-until // PAGE)].astype(np.int64))
        begin, length = first * PAGE, until - first * PAGE
        for layer, (keys, values) in enumerate(zip(pool.keys, pool.values, strict=True)):
            key = keys[index].permute(1, 2, 0, 3).flatten(2, 3)
            value = values[index].transpose(0, 1).flatten(1, 2)
            self.keys[layer][slot, :, :, begin:until] = key[:, :, :length]
            self.values[layer][slot, :, begin:until] = value[:, :length]


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens `first` to `last` of a pass: those of the sequence in `slot` that end at position `end`."""

    first: int
    last: int
    slot: int
    end: int


@dataclass(frozen=True, slots=True)
class SlotPass:
    """One pass over some slots: made once, used by every layer."""

    memory: SlotMemory
    spans: tuple[Span, ...]
    slots: Tensor
    positions: Tensor
    masks: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)

    @classmethod
    def begin(
        cls, memory: SlotMemory, pool: PagePool, spans: Sequence[Span], table: NDArray[np.int32]
    ) -> SlotPass:
        """Bring the slots up to where their new tokens start."""
        for span in spans:
            start = span.end - (span.last - span.first)
            if memory.filled[span.slot] < start:
                memory.load(pool, span.slot, table[span.slot], start)
            memory.filled[span.slot] = span.end
        counts = [span.last - span.first for span in spans]
        slots = torch.repeat_interleave(torch.tensor([span.slot for span in spans]), torch.tensor(counts))
        positions = torch.cat([torch.arange(s.end - n, s.end) for s, n in zip(spans, counts, strict=True)])
        return cls(memory, tuple(spans), slots, positions)

    def attend(self, layer: int, new: tuple[Tensor, Tensor, Tensor], scores: Scores) -> Tensor:
        """Take the new keys and values `[H, T, D]`, and attend the queries `[Hq, T, D]`: `[T, Hq, D]`.

        What a pass is padded with gives zeros.
        """
        query, key, value = new
        keys, values = self.memory.keys[layer], self.memory.values[layer]
        real = len(self.slots)
        keys[self.slots, :, :, self.positions] = key[:, :real].transpose(0, 1)
        values[self.slots, :, self.positions] = value[:, :real].transpose(0, 1)
        heads, width = values.shape[1], values.shape[3]
        grouped = query.reshape(heads, -1, *query.shape[1:])
        by_token = (grouped * scores.scale).permute(2, 0, 1, 3).unbind()
        out = query.new_empty(query.shape[1], heads, grouped.shape[1], width)
        rows = out.unbind()
        known = self.memory.of_slot[layer]
        coarse = query.dtype.itemsize < _EXACT_BYTES
        for span in self.spans:
            key, value = known[span.slot]
            if span.last - span.first > 1 or coarse:
                out[span.first : span.last] = self._chunk(span, grouped, (key, value), scores)
                continue
            begin = max(0, span.end - scores.window) if scores.window else 0
            length = span.end - begin
            weights = scores.weigh(torch.bmm(by_token[span.first], key.narrow(2, begin, length)))
            torch.bmm(weights, value.narrow(1, begin, length), out=rows[span.first])
        out[real:] = 0
        return out.flatten(1, 2)

    def _chunk(self, span: Span, grouped: Tensor, known: tuple[Tensor, Tensor], scores: Scores) -> Tensor:
        """`[n, H, G, D]` of several tokens of one sequence; the heads of a group stand below each other."""
        length = span.last - span.first
        asked = grouped[:, :, span.first : span.last].flatten(1, 2)[None]
        key = known[0].narrow(2, 0, span.end).transpose(1, 2).contiguous()
        value = known[1].narrow(1, 0, span.end)
        mask = self._mask(span, grouped.shape[1], scores.window, grouped.dtype)
        got = scores.attend(asked, key[None], value[None], mask)
        heads, _, width = got[0].shape
        return got[0].reshape(heads, -1, length, width).permute(2, 0, 1, 3)

    def _mask(self, span: Span, group: int, window: int, dtype: torch.dtype) -> Tensor:
        """What is added to a span's scores, `[group * n, end]`: -inf where its tokens may not look."""
        key = (span.slot, group, window)
        if key not in self.masks:
            rows = torch.arange(span.end - (span.last - span.first), span.end)[:, None]
            columns = torch.arange(span.end)[None]
            mask = columns <= rows
            if window:
                mask &= columns > rows - window
            added = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf)
            self.masks[key] = added.repeat(group, 1)
        return self.masks[key]
