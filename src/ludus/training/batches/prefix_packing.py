"""Many sequences as one row of tokens, in which a prefix that several share stands once.

`plant` sorts sequences and cuts them where they part: a forest whose nodes are runs of tokens. In a forward
pass over it each node's tokens attend to those of the nodes above and, causally, to their own, so that every
token is computed once, forward and backward, and sequences never see each other. That is exact: under a
causal mask a token's state depends on what stands before it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ludus.engines.embedded.attention_torch import MaskShape, added_mask
from ludus.engines.embedded.radix_cache import common_prefix

NAME = "ludus_forest"
"""The attention implementation's name in transformers. Without a forest it is transformers' own `sdpa`."""

LEAST_SHARED = 8
"""Tokens that sequences have to share before a node of their own pays."""


@dataclass(frozen=True, slots=True)
class PrefixNode:
    """A run of tokens, [`start`, `end`) in the row; `above` are the nodes that it continues, root first."""

    start: int
    end: int
    above: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefixForest:
    """Sequences planted together.

    `tokens` and `positions` `[1, T]` int64, `T` the tokens that differ; `nodes` in the order of the row;
    `places[i]` int64 says where in the row each token of sequence `i` stands. `masks` keeps those of its
    attention for all layers.
    """

    tokens: Tensor
    positions: Tensor
    nodes: tuple[PrefixNode, ...]
    places: tuple[Tensor, ...]
    masks: dict[MaskShape, Tensor] = field(default_factory=dict, compare=False)

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return self.tokens.shape[1]

    @property
    def branches(self) -> bool:
        """Whether any token stands for several sequences."""
        return any(node.above for node in self.nodes)


def plant(sequences: Sequence[Sequence[int]], device: torch.device) -> PrefixForest:
    """The forest of `sequences`; empty ones take no place."""
    order = sorted((i for i, s in enumerate(sequences) if len(s)), key=lambda i: tuple(sequences[i]))
    common = [common_prefix(sequences[a], sequences[b]) for a, b in pairwise(order)]
    grower = _Grower([sequences[i] for i in order], common)
    grower.grow()
    places: list[Tensor] = [torch.empty(0, dtype=torch.int64, device=device)] * len(sequences)
    for i, runs in zip(order, grower.runs, strict=True):
        spans = [torch.arange(grower.nodes[n].start, grower.nodes[n].end) for n in runs]
        places[i] = torch.cat(spans)[: len(sequences[i])].to(device)
    return PrefixForest(
        tokens=torch.tensor([grower.tokens], dtype=torch.int64, device=device),
        positions=torch.tensor([grower.positions], dtype=torch.int64, device=device),
        nodes=tuple(grower.nodes),
        places=tuple(places),
    )


class _Grower:
    """Cuts sorted sequences into nodes; `common[i]` tokens are shared by sequences i and i + 1."""

    def __init__(self, sequences: Sequence[Sequence[int]], common: Sequence[int]) -> None:
        self._sequences = sequences
        self._common = common
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.nodes: list[PrefixNode] = []
        self.runs: list[tuple[int, ...]] = [()] * len(sequences)

    def grow(self) -> None:
        """Depth first, from what all share to what is each one's own."""
        pending: list[tuple[int, int, int, tuple[int, ...]]] = []
        if self._sequences:
            pending.append((0, len(self._sequences), 0, ()))
        while pending:
            first, last, depth, above = pending.pop()
            length = min(self._common[first : last - 1], default=len(self._sequences[first]))
            if last - first > 1 and length - depth < LEAST_SHARED:
                length = depth
            else:
                above = self._add(first, depth, length, above)
            if last - first == 1:
                self.runs[first] = above
                continue
            children = self._children(first, last, length)
            pending += [(a, b, length, above) for a, b in reversed(children)]

    def _children(self, first: int, last: int, length: int) -> list[tuple[int, int]]:
        """Ranges of sequences that share enough beyond `length` to stay together."""
        parted = (i + 1 for i in range(first, last - 1) if self._common[i] - length < LEAST_SHARED)
        starts = [first, *parted]
        return list(zip(starts, [*starts[1:], last], strict=True))

    def _add(self, sequence: int, start: int, end: int, above: tuple[int, ...]) -> tuple[int, ...]:
        if start == end:
            return above
        begin = len(self.tokens)
        self.tokens += self._sequences[sequence][start:end]
        self.positions += range(start, end)
        self.nodes.append(PrefixNode(begin, len(self.tokens), above))
        return (*above, len(self.nodes) - 1)


def forest_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,  # noqa: ANN401 (what transformers hands on, model by model)
) -> tuple[Tensor, Tensor | None]:
    """Attention `[1, T, Hq, D]` over the nodes of `options["forest"]`; without one, transformers' `sdpa`.

    `query` `[1, Hq, T, D]`, `key` and `value` `[1, H, T, D]`. Follows transformers' `scaling` and
    `sliding_window`; a soft cap or sinks raise ValueError.
    """
    forest: PrefixForest | None = options.pop("forest", None)
    if forest is None:
        found: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **options
        )
        return found
    if options.get("softcap") or options.get("s_aux") is not None:
        raise ValueError("its attention has a soft cap or sinks")
    scale, window = options.get("scaling"), options.get("sliding_window") or 0
    lengths = [node.end - node.start for node in forest.nodes]
    queries, keys, values = (torch.split(x, lengths, 2) for x in (query, key, value))
    outs = []
    for i, node in enumerate(forest.nodes):
        known = keys[i], values[i]
        if node.above:
            own = (*node.above, i)
            known = torch.cat([keys[n] for n in own], 2), torch.cat([values[n] for n in own], 2)
        if node.above or 0 < window < lengths[i]:
            outs.append(_attend_masked(forest, queries[i], known, scale, window))
        else:
            outs.append(_attend_causal(queries[i], known, scale))
    return torch.cat(outs, 2).transpose(1, 2).contiguous(), None


def _attend_causal(query: Tensor, known: tuple[Tensor, Tensor], scale: float | None) -> Tensor:
    """`[1, Hq, n, D]` of tokens that attend to their own kind alone."""
    group = query.shape[1] // known[0].shape[1]
    key, value = (x.repeat_interleave(group, 1) if group > 1 else x for x in known)
    return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)


def _attend_masked(
    forest: PrefixForest, query: Tensor, known: tuple[Tensor, Tensor], scale: float | None, window: int
) -> Tensor:
    """`[1, Hq, n, D]` of the last n of the tokens that `known` holds.

    The query heads that share a head of keys stand below each other, so that keys and values need no copies.
    """
    key, value = known
    heads, queries = key.shape[1], query.shape[2]
    shape = MaskShape(queries, key.shape[2], window, query.shape[1] // heads)
    if shape not in forest.masks:
        forest.masks[shape] = added_mask(shape, query)
    folded = query.reshape(1, heads, -1, query.shape[3])
    out = scaled_dot_product_attention(folded, key, value, forest.masks[shape], scale=scale)
    return out.view(1, -1, queries, out.shape[3])


def register() -> None:
    """Make the attention known to transformers under `NAME`."""
    AttentionInterface.register(NAME, forest_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
