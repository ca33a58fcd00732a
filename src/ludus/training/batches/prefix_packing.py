"""Pack sequences into one row of tokens in which shared prefixes occur once.

`pack_sequences` sorts sequences and splits them where they diverge into a forest whose nodes are runs of tokens. Each
node's tokens attend to those of its ancestors and causally to their own, so every token is computed once,
forward and backward, and sequences are isolated. This is exact, since under a causal mask a token's state
depends only on its prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ludus.engines.base import common_prefix
from ludus.engines.embedded.attention import MaskShape, added_mask
from ludus.engines.embedded.model_runner import apply

NAME = "ludus_forest"
"""Name of the attention implementation in transformers. Without a forest it is `sdpa`."""

MIN_SHARED_TOKENS = 8
"""Shortest shared prefix that gets its own node."""

MAX_MASK = 16_777_216
"""Elements of an attention mask that is stored for the backward pass (64 MiB in float32)."""

MAX_WIDE = 131_072
"""Scores of a key head up to which attention in bfloat16 on a CPU has its backward pass in float32, where torch's takes
about half as long; that of more scores takes as long."""


@dataclass(frozen=True, slots=True)
class PrefixNode:
    """Run of tokens, [`start`, `end`) in the row; `above` are its ancestors, root first."""

    start: int
    end: int
    above: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefixForest:
    """Sequences packed as a forest.

    `tokens` and `positions` `[1, T]` int64, `T` the number of distinct tokens; `nodes` in row order;
    `places[i]` int64 maps the tokens of sequence `i` to the row. `masks` caches attention masks for all
    layers.
    """

    tokens: Tensor
    positions: Tensor
    nodes: tuple[PrefixNode, ...]
    places: tuple[Tensor, ...]
    masks: dict[MaskShape, Tensor] = field(default_factory=dict, compare=False)

    @property
    def num_tokens(self) -> int:
        return self.tokens.shape[1]

    @property
    def branches(self) -> bool:
        """Whether any token is shared by several sequences."""
        return any(node.above for node in self.nodes)


def pack_sequences(sequences: Sequence[Sequence[int]], device: torch.device) -> PrefixForest:
    """Build the forest of `sequences`; empty ones are allowed."""
    order = sorted((i for i, s in enumerate(sequences) if len(s)), key=lambda i: tuple(sequences[i]))
    common = [common_prefix(sequences[a], sequences[b]) for a, b in pairwise(order)]
    tokens: list[int] = []
    positions: list[int] = []
    nodes: list[PrefixNode] = []
    indices = [torch.empty(0, dtype=torch.int64, device=device)] * len(sequences)
    pending: list[tuple[int, int, int, tuple[int, ...]]] = [(0, len(order), 0, ())] if order else []
    while pending:  # depth first: sequences [first, last) share `depth` tokens, which are in the nodes `above`
        first, last, depth, above = pending.pop()
        sequence = sequences[order[first]]
        length = min(common[first : last - 1], default=len(sequence))
        if last - first > 1 and length - depth < MIN_SHARED_TOKENS:
            length = depth
        elif length > depth:
            nodes.append(PrefixNode(len(tokens), len(tokens) + length - depth, above))
            tokens += sequence[depth:length]
            positions += range(depth, length)
            above = (*above, len(nodes) - 1)
        if last - first == 1:
            spans = [torch.arange(nodes[n].start, nodes[n].end) for n in above]
            indices[order[first]] = torch.cat(spans)[: len(sequence)].to(device)
            continue
        children = _split_range(common, first, last, length)
        pending += [(a, b, length, above) for a, b in reversed(children)]
    return PrefixForest(
        tokens=torch.tensor([tokens], dtype=torch.int64, device=device),
        positions=torch.tensor([positions], dtype=torch.int64, device=device),
        nodes=tuple(nodes),
        places=tuple(indices),
    )


def _split_range(common: Sequence[int], first: int, last: int, length: int) -> list[tuple[int, int]]:
    """Return ranges of sequences that share enough tokens beyond `length`; i and i + 1 share `common[i]`."""
    starts = [first, *(i + 1 for i in range(first, last - 1) if common[i] - length < MIN_SHARED_TOKENS)]
    return list(zip(starts, [*starts[1:], last], strict=True))


def forest_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,  # noqa: ANN401 (model-specific arguments of transformers)
) -> tuple[Tensor, Tensor | None]:
    """Compute attention `[1, T, Hq, D]` over `options["forest"]`; without one, transformers' `sdpa`.

    `query` `[1, Hq, T, D]`, `key` and `value` `[1, H, T, D]`. Supports transformers' `scaling` and
    `sliding_window`; raises ValueError for a soft cap or sinks.
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
    """Return `[1, Hq, n, D]` of causal self-attention within a node."""
    group = query.shape[1] // known[0].shape[1]
    key, value = (x.repeat_interleave(group, 1) if group > 1 else x for x in known)
    return _attend(query, key, value, None, scale)


def _attend_masked(
    forest: PrefixForest, query: Tensor, known: tuple[Tensor, Tensor], scale: float | None, window: int
) -> Tensor:
    """Return `[1, Hq, n, D]` of the last n tokens in `known`.

    If the mask exceeds `MAX_MASK`, queries attend in blocks, whose masks are recomputed in the backward pass.
    """
    queries, total = query.shape[2], known[0].shape[2]
    shape = MaskShape(queries, total, window, query.shape[1] // known[0].shape[1])
    if queries * total * shape.group <= MAX_MASK:
        if shape not in forest.masks:
            forest.masks[shape] = added_mask(shape, query)
        return _attend_stacked(query, *known, shape, scale, forest.masks[shape])
    size, outs = max(1, MAX_MASK // (total * shape.group)), []
    for start in range(0, queries, size):
        block = query[:, :, start : start + size]
        end = total - queries + start + block.shape[2]
        first = max(0, end - block.shape[2] - window + 1) if window else 0
        part = shape._replace(queries=block.shape[2], columns=end - first)
        near = (x[:, :, first:end] for x in known)
        outs.append(
            checkpoint(_attend_stacked, block, *near, part, scale, use_reentrant=False, preserve_rng_state=False)
        )
    return torch.cat(outs, 2)


def _attend_stacked(
    query: Tensor, key: Tensor, value: Tensor, shape: MaskShape, scale: float | None, mask: Tensor | None = None
) -> Tensor:
    """Return `[1, Hq, n, D]`; query heads are stacked instead of copying keys."""
    folded = query.reshape(1, key.shape[1], -1, query.shape[3])
    mask = added_mask(shape, query) if mask is None else mask
    out = _attend(folded, key, value, mask, scale)
    return out.view(1, -1, query.shape[2], out.shape[3])


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Return the attention of as many query as key heads, causal without a mask."""
    few = query.shape[2] * key.shape[2] <= MAX_WIDE and query.shape[3] == value.shape[3]
    narrow = query.dtype == torch.bfloat16 and query.device.type == "cpu"
    if few and narrow and torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
        return apply(_WideBackward, query, key, value, mask, scale)[0]
    return scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, scale=scale)


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    mask: Tensor | None
    scale: float | None


class _WideBackward(Function):
    """Torch's flash attention on a CPU, causal without a mask, with the backward pass in float32."""

    @staticmethod
    def forward(
        ctx: _Context, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
    ) -> Tensor:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, mask is None, attn_mask=mask, scale=scale
        )
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.mask, ctx.scale = mask, scale
        made: Tensor = out
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, upstream: Tensor) -> tuple[Tensor | None, ...]:
        *narrow, lse = ctx.saved_tensors
        wide = [x.float() for x in (upstream, *narrow)]
        mask = None if ctx.mask is None else ctx.mask.float()
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *wide, lse, 0.0, mask is None, attn_mask=mask, scale=ctx.scale
        )
        return *(grad.to(upstream.dtype) for grad in grads), None, None


def register() -> None:
    """Register the attention with transformers as `NAME`."""
    AttentionInterface.register(NAME, forest_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
