"""Triton kernels: attention of each token to the pages of its sequence.

`attend` computes a softmax over a part of the keys in one pass, as in FlashAttention (Dao, arXiv:2307.08691, algorithm
1). With several parts per token, which keep a GPU busy if few tokens have long contexts, `combine` adds the parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ludus.engines.embedded.kv_cache import PAGE

_PROGRAMS = 264
"""Number of programs from which one part per token is enough: two for each multiprocessor of a large GPU."""
_MAX_PARTS = 16
_WIDE_BYTES = 256
"""Bytes of a key from which fewer keys are loaded at once, for the shared memory of smaller GPUs."""


def attention(
    query: Tensor, memory: tuple[Tensor, Tensor], where: tuple[Tensor, Tensor, Tensor], scores: tuple[float, int, float]
) -> Tensor:
    """Attend from `query` `[Hq, T, D]` to keys and values `[pages, H, PAGE, D]`; returns `[T, Hq, D]`.

    `where`: slots and positions `[T]` of the tokens and the pages of each slot `[S, M]`, int32. `scores`: scale, window
    and soft cap (0: none).
    """
    keys, values = memory
    slots, positions, table = where
    scale, window, softcap = scores
    query_heads, tokens, width = query.shape
    heads, group = keys.shape[1], query_heads // keys.shape[1]
    query = query if query.stride(2) == 1 else query.contiguous()
    parts = min(_MAX_PARTS, max(1, _PROGRAMS // (tokens * heads)))
    out = torch.empty(tokens, query_heads, width, dtype=query.dtype, device=query.device)
    partial = torch.empty(parts, tokens, query_heads, width + 2, dtype=torch.float32, device=query.device)
    padded = max(16, triton.next_power_of_2(width))
    attend[(tokens, heads, parts)](
        query,
        keys,
        values,
        partial,
        slots,
        positions,
        table,
        scale,
        softcap,
        *(query.stride(0), query.stride(1), table.stride(0), tokens),
        HEADS=heads,
        GROUP=group,
        ROWS=max(16, triton.next_power_of_2(group)),
        WIDTH=width,
        PADDED=padded,
        BLOCK=64 if padded * query.element_size() < _WIDE_BYTES else 32,
        PAGE=PAGE,
        WINDOW=window,
        CAPPED=softcap > 0,
        PARTS=parts,
        num_stages=2,
    )
    combine[(tokens, query_heads)](
        partial, out, tokens, HEADS=query_heads, WIDTH=width, PADDED=padded, PARTS=parts, num_warps=1
    )
    return out


@triton.jit
def attend(
    query,
    keys,
    values,
    partial,
    slots,
    positions,
    table,
    scale,
    softcap,
    query_head,
    query_token,
    table_slot,
    tokens,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Write sum of weighted values, maximum score and sum of weights for one token, key head and part of the keys."""
    token, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    end = tl.load(positions + token) + 1
    pages = table + tl.load(slots + token) * table_slot
    begin = tl.maximum(end - WINDOW, 0) if WINDOW > 0 else 0
    length = tl.cdiv(end - begin, PARTS)
    first = begin + part * length
    last = tl.minimum(first + length, end)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, PADDED)
    heads = head * GROUP + rows
    used = (rows < GROUP)[:, None] & (dims < WIDTH)[None, :]
    queries = tl.load(query + token * query_token + heads[:, None] * query_head + dims[None, :], mask=used, other=0.0)
    highest, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, PADDED], tl.float32)
    for start in range(first, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        valid = at < last
        page = tl.load(pages + at // PAGE, mask=valid, other=0).to(tl.int64)
        row = ((page * HEADS + head) * PAGE + at % PAGE) * WIDTH
        loaded = valid[:, None] & (dims < WIDTH)[None, :]
        key = tl.load(keys + row[:, None] + dims[None, :], mask=loaded, other=0.0)
        score = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale
        if CAPPED:
            score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)  # tanh
        score = tl.where(valid[None, :], score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        weight, fade = tl.exp(score - higher[:, None]), tl.exp(highest - higher)
        value = tl.load(values + row[:, None] + dims[None, :], mask=loaded, other=0.0)
        summed = summed * fade[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        total = total * fade + tl.sum(weight, 1)
        highest = higher
    target = partial + ((part * tokens + token).to(tl.int64) * (HEADS * GROUP) + heads) * (WIDTH + 2)
    tl.store(target[:, None] + dims[None, :], summed, mask=used)
    tl.store(target + WIDTH, highest, mask=rows < GROUP)
    tl.store(target + WIDTH + 1, total, mask=rows < GROUP)


@triton.jit
def combine(partial, out, tokens, HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr):
    """Add the parts of one token and query head, and divide by the sum of weights."""
    token, head = tl.program_id(0), tl.program_id(1)
    row = token.to(tl.int64) * HEADS + head
    dims = tl.arange(0, PADDED)
    highest = float("-inf")
    for part in range(PARTS):
        source = partial + (row + part * tokens * HEADS) * (WIDTH + 2)
        highest = tl.maximum(highest, tl.load(source + WIDTH))
    total = 0.0
    summed = tl.zeros([PADDED], tl.float32)
    for part in range(PARTS):
        source = partial + (row + part * tokens * HEADS) * (WIDTH + 2)
        fade = tl.exp(tl.load(source + WIDTH) - highest)
        total += fade * tl.load(source + WIDTH + 1)
        summed += fade * tl.load(source + dims, mask=dims < WIDTH, other=0.0)
    tl.store(out + row * WIDTH + dims, summed / total, mask=dims < WIDTH)
