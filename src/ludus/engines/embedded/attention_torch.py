"""Ragged-batch attention in pure torch, for use without the compiled kernel.

Decoding tokens, one per sequence, attend together. On a CPU this is a product with a sparse matrix: the
tokens of all pages are the rows of the key and value matrices, and each query's row lists the tokens that it
attends to. Nothing is gathered or padded, and shared pages are read in place. On a GPU the pages are gathered
into one padded batch. Several tokens of one sequence use torch's dense attention, one sequence at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ludus.engines.embedded.kv_pool import PagePool
from ludus.engines.embedded.radix_cache import PAGE


class QuerySpan(NamedTuple):
    """Tokens `first` to `last` of a pass: one sequence's, ending at position `end` (exclusive).

    `pages` are those of the sequence.
    """

    first: int
    last: int
    end: int
    pages: NDArray[np.int32]

    @property
    def start(self) -> int:
        """Position of the first token."""
        return self.end - (self.last - self.first)

    @property
    def is_single(self) -> bool:
        """Whether the span is one token."""
        return self.last - self.first == 1

    def rows(self, begin: int, heads: int) -> NDArray[np.int64]:
        """Return the key-matrix rows of positions `begin` to `end`, for the first of `heads`."""
        positions = np.arange(begin, self.end)
        return self.pages[positions // PAGE].astype(np.int64) * (heads * PAGE) + positions % PAGE


class HeadShape(NamedTuple):
    """Shape parameters of a pattern: key heads, query heads, window (0: all)."""

    heads: int
    query_heads: int
    window: int


@dataclass(frozen=True, slots=True)
class Pattern:
    """The tokens that the queries of a pass attend to, as a sparse matrix `[queries, pages * heads * PAGE]`.

    A row is one head of one token. `blocks` are views of the values, `[heads, attended tokens]` per token.
    """

    matrix: Tensor
    blocks: tuple[Tensor, ...]

    @classmethod
    def of(cls, spans: Sequence[QuerySpan], shape: HeadShape, rows: int, dtype: torch.dtype) -> Pattern:
        """Build the pattern of single-token spans; `rows` is the height of the key matrix."""
        heads = np.arange(shape.heads).repeat(shape.query_heads // shape.heads)[:, None] * PAGE
        begins = [max(0, span.end - shape.window) if shape.window else 0 for span in spans]
        lengths = [span.end - begin for span, begin in zip(spans, begins, strict=True)]
        ends = np.cumsum([n * shape.query_heads for n in lengths]).tolist()
        columns = np.empty(ends[-1], dtype=np.int64)
        values = torch.zeros(ends[-1], dtype=dtype)
        blocks = []
        for span, begin, end in zip(spans, begins, ends, strict=True):
            length = span.end - begin
            places = span.rows(begin, shape.heads)
            start = end - length * shape.query_heads
            np.add(heads, places, out=columns[start:end].reshape(shape.query_heads, length))
            blocks.append(values[start:end].view(shape.query_heads, length))
        first = np.concatenate([[0], np.repeat(lengths, shape.query_heads).cumsum()])
        matrix = torch.sparse_csr_tensor(
            torch.from_numpy(first), torch.from_numpy(columns), values, (len(first) - 1, rows), check_invariants=False
        )
        return cls(matrix, tuple(blocks))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: ScoreRule) -> Tensor:
        """Attend from `query` to the rows of `key` and `value`; `[queries, width]`."""
        torch.sparse.sampled_addmm(self.matrix, query, key.t(), beta=0.0, alpha=scores.scale, out=self.matrix)
        if scores.softcap:
            self.matrix.values().div_(scores.softcap).tanh_().mul_(scores.softcap)
        for block in self.blocks:
            torch.softmax(block, -1, out=block)
        if torch._C.has_mkl:
            return torch.mm(self.matrix, value)
        summed: Tensor = torch.sparse.mm(self.matrix, value, "sum")
        return summed


@dataclass(frozen=True, slots=True)
class TorchPass:
    """One pass over several sequences, created once and used by every layer.

    Keys of `pool` are `[pages, heads, PAGE, width]`. The T new tokens go to `offsets` of `pages`, both `[T]`.
    Padding after the last span yields zeros.
    """

    pool: PagePool
    spans: tuple[QuerySpan, ...]
    pages: NDArray[np.int64]
    offsets: NDArray[np.int64]
    _patterns: dict[HeadShape, Pattern] = field(default_factory=dict)
    _masks: dict[MaskShape, Tensor] = field(default_factory=dict)
    _places: dict[int, Tensor] = field(default_factory=dict)
    _known: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    _gathers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def attend(self, layer: int, new: tuple[Tensor, Tensor, Tensor], scores: ScoreRule) -> Tensor:
        """Store new keys and values `[H, T, D]` and attend from queries `[Hq, T, D]`; `[T, Hq, D]`."""
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        query, key, value = (tensor.to(keys.dtype) for tensor in new)
        shape = HeadShape(key.shape[0], query.shape[0], scores.window)
        self._write(keys, key)
        self._write(values, value)
        out = query.new_zeros(query.shape[1], query.shape[0], values.shape[-1])
        singles = [span for span in self.spans if span.is_single]
        if singles:
            index = torch.tensor([span.first for span in singles], device=query.device)
            asked = query.index_select(1, index).transpose(0, 1)
            with_all = self._sparse if query.device.type == "cpu" else self._padded
            out.index_copy_(0, index, with_all(singles, asked, (keys, values), scores))
        for span in self.spans:
            if not span.is_single:
                out[span.first : span.last] = self._dense(span, query, (keys, values), scores, shape)
        return out.to(new[0].dtype)

    def _write(self, memory: Tensor, new: Tensor) -> None:
        """Write the real tokens of `[H, T, D]` to their pages."""
        heads, width = new.shape[0], new.shape[2]
        if heads not in self._places:
            rows = (self.pages[:, None] * heads + np.arange(heads)) * PAGE + self.offsets[:, None]
            self._places[heads] = torch.from_numpy(rows.ravel()).to(new.device)
        real = new[:, : len(self.pages)].transpose(0, 1).reshape(-1, width)
        memory.view(-1, width).index_copy_(0, self._places[heads], real)

    def _sparse(
        self, spans: Sequence[QuerySpan], query: Tensor, memory: tuple[Tensor, Tensor], scores: ScoreRule
    ) -> Tensor:
        """Attend from one token `[N, Hq, D]` of each of N sequences; `[N, Hq, D]`."""
        keys, values = (tensor.view(-1, tensor.shape[-1]) for tensor in memory)
        shape = HeadShape(memory[0].shape[1], query.shape[1], scores.window)
        if shape not in self._patterns:
            self._patterns[shape] = Pattern.of(spans, shape, len(keys), keys.dtype)
        got = self._patterns[shape].attend(query.reshape(-1, query.shape[-1]), keys, values, scores)
        return got.view(len(query), -1, got.shape[-1])

    def _padded(
        self, spans: Sequence[QuerySpan], query: Tensor, memory: tuple[Tensor, Tensor], scores: ScoreRule
    ) -> Tensor:
        """Attend as `_sparse` over gathered pages; the heads of a group are rows of queries."""
        if scores.window not in self._gathers:
            self._gathers[scores.window] = _gather(spans, scores.window, query.device)
        pages, mask = self._gathers[scores.window]
        key, value = (tensor[pages].transpose(1, 2).flatten(2, 3) for tensor in memory)
        asked = query.reshape(len(spans), key.shape[1], -1, query.shape[-1])
        return scores.attend(asked, key, value, mask[:, None, None]).flatten(1, 2)

    def _dense(
        self, span: QuerySpan, query: Tensor, memory: tuple[Tensor, Tensor], scores: ScoreRule, shape: HeadShape
    ) -> Tensor:
        """Attend from several tokens of one sequence, with a group's heads stacked; `[n, Hq, D]`."""
        rows = self._rows(span, shape.heads, query.device)
        key, value = (
            tensor.view(-1, tensor.shape[-1]).index_select(0, rows).view(1, shape.heads, span.end, -1)
            for tensor in memory
        )
        asked = query[:, span.first : span.last].reshape(1, shape.heads, -1, query.shape[-1])
        mask = MaskShape(span.last - span.first, span.end, shape.window, shape.query_heads // shape.heads)
        if mask not in self._masks:
            self._masks[mask] = added_mask(mask, query)
        got = scores.attend(asked, key, value, self._masks[mask])
        return got.view(shape.query_heads, -1, got.shape[-1]).transpose(0, 1)

    def _rows(self, span: QuerySpan, heads: int, device: torch.device) -> Tensor:
        """Return the rows of all heads of a sequence, head by head."""
        key = (span.first, heads)
        if key not in self._known:
            rows = np.arange(heads)[:, None] * PAGE + span.rows(0, heads)
            self._known[key] = torch.from_numpy(rows.ravel()).to(device)
        return self._known[key]


def _gather(spans: Sequence[QuerySpan], window: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the pages `[N, P]` of N tokens' sequences and the mask of attended positions."""
    ends = np.array([span.end for span in spans])
    num_pages = -(-int(ends.max()) // PAGE)
    pages = torch.from_numpy(np.stack([span.pages[:num_pages] for span in spans])).to(device)
    columns = torch.arange(num_pages * PAGE, device=device)[None]
    limit = torch.from_numpy(ends).to(device)[:, None]
    mask = columns < limit
    if window:
        mask &= columns >= limit - window
    return pages, mask


class MaskShape(NamedTuple):
    """The last `queries` of `columns` positions, with `window` (0: all) and `group` heads."""

    queries: int
    columns: int
    window: int
    group: int


def added_mask(shape: MaskShape, like: Tensor) -> Tensor:
    """Return the additive mask `[group * queries, columns]`: -inf at masked positions.

    The heads of a group are stacked. Dtype and device are those of `like`.
    """
    at = torch.arange(shape.columns - shape.queries, shape.columns, device=like.device)[:, None]
    seen = torch.arange(shape.columns, device=like.device)[None]
    mask = seen <= at
    if shape.window:
        mask &= seen > at - shape.window
    added = like.new_zeros(mask.shape).masked_fill_(~mask, -torch.inf)
    return added.repeat(shape.group, 1)


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """Scale, window (0: all) and soft cap (0: none) of the attention scores."""

    scale: float
    window: int
    softcap: float

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attend from `query` to `key` and `value` `[N, H, L, D]`; `[N, H, Q, D]`.

        `mask` is boolean or additive.
        """
        if not self.softcap:
            return scaled_dot_product_attention(query, key, value, mask, scale=self.scale)
        weights = self.softcap * torch.tanh(query @ key.transpose(-1, -2) * (self.scale / self.softcap))
        if mask is not None:
            weights = weights.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else weights + mask
        return weights.float().softmax(-1).to(value.dtype) @ value
