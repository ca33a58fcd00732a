"""Forward passes on a GPU: attention over pages in one kernel, and CUDA graphs.

All sequences of a pass share one kernel launch per layer, whatever the mix of prompts and decoding tokens. A pass is
therefore the same few hundred kernels each time, captured once per size as a CUDA graph and replayed: if the model is
small, launching the kernels from Python takes ten times as long as running them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludus.engines.embedded.attention import RaggedPass, ScoreRule
from ludus.engines.embedded.kv_cache import PAGE, PagePool

GRAPH_TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Numbers of tokens of captured passes. A pass is padded to the next one; a pass above the last is not captured."""
_ROWS = 4
"""Rows of the inputs of a pass: token ids, slots, positions, and tokens whose logits are needed."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PagedPass:
    """Slots and positions `[T]` of the tokens of a pass and pages of each slot `[S, M]`, int32 on the device."""

    pool: PagePool
    slots: Tensor
    positions: Tensor
    table: Tensor
    _write_rows: dict[int, Tensor] = field(default_factory=dict)

    def attend(self, layer: int, new: tuple[Tensor, Tensor, Tensor], scores: ScoreRule) -> Tensor:
        query, key, value = new
        memory = self.pool.keys[layer], self.pool.values[layer]
        for pages, tensor in zip(memory, (key, value), strict=True):
            rows = self._rows(pages.shape[1])
            pages.view(-1, pages.shape[-1]).index_copy_(0, rows, tensor.transpose(0, 1).reshape(len(rows), -1))
        where = self.slots, self.positions, self.table
        supported = query.is_cuda and query.dtype.itemsize <= 4 and memory[0].shape == memory[1].shape
        if supported and _has_triton():
            from ludus.engines.embedded.paged_kernels import attention

            return attention(query, memory, where, (scores.scale, scores.window, scores.softcap))
        return gathered_attention(query, memory, where, scores)

    def _rows(self, heads: int) -> Tensor:
        """Return the rows of the new tokens in memory `[pages * heads * PAGE, D]`, head by head within a token."""
        if heads not in self._write_rows:
            positions = self.positions.long()
            pages = self.table[self.slots.long(), positions // PAGE].long()
            each = pages[:, None] * heads + torch.arange(heads, device=pages.device)
            self._write_rows[heads] = (each * PAGE + positions[:, None] % PAGE).flatten()
        return self._write_rows[heads]


def runs_on(device: torch.device) -> bool:
    """Return whether passes on this device are paged; on a CPU attention reads the pages in place."""
    return device.type != "cpu"


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def gathered_attention(
    query: Tensor, memory: tuple[Tensor, Tensor], where: tuple[Tensor, Tensor, Tensor], scores: ScoreRule
) -> Tensor:
    """Compute `paged_kernels.attention` with torch: same arguments and result, over a copy of each token's pages."""
    slots, positions, table = where
    pages = table[slots.long()].long()
    key, value = (tensor[pages].transpose(1, 2).flatten(2, 3) for tensor in memory)
    columns = torch.arange(key.shape[2], device=query.device)[None]
    mask = columns <= positions[:, None]
    if scores.window:
        mask &= columns > positions[:, None] - scores.window
    queries = query.transpose(0, 1).reshape(len(slots), key.shape[1], -1, query.shape[-1])
    return scores.attend(queries, key, value, mask[:, None, None]).flatten(1, 2)


Forward = Callable[[Tensor, Tensor, RaggedPass, Tensor], Tensor]
"""Map ids and positions `[1, T]`, the pass, and the tokens `[K]` whose logits are needed, to logits `[K, V]`."""


class Recording(NamedTuple):
    """A captured pass: its inputs `[4, T]`, the function that replays it, and the logits `[T, V]` that it writes."""

    inputs: Tensor
    replay: Callable[[], None]
    logits: Tensor


Recorder = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Capture a function; return a function that replays it, and its result, which each replay overwrites."""


class PassRunner:
    """Replays captured passes of up to `GRAPH_TOKENS[-1]` tokens, and runs larger ones directly.

    Padding is token 0 of an extra slot, whose only page is an extra one at the end of the pool. Captured passes hold
    addresses, so they are dropped if memory is replaced.
    """

    def __init__(self, forward: Forward, pool: PagePool, device: torch.device, recorder: Recorder | None) -> None:
        self._forward, self._pool, self._device, self._recorder = forward, pool, device, recorder
        self._table = torch.empty(0, 0, dtype=torch.int32)
        self._sent = np.empty((0, 0), dtype=np.int32)
        self._recordings: dict[tuple[int, str], Recording] = {}
        self._memory: object = None

    def logits(
        self,
        tokens: tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]],
        table: NDArray[np.int32],
        keep: NDArray[np.int64],
        weights: tuple[str | None, object],
    ) -> Tensor:
        """Return logits `[len(keep), V]` at the tokens `keep`; the next call overwrites them.

        `tokens`: ids, slots and positions. `weights`: adapter of all tokens, None if they differ, and a value that
        changes if memory of cache or adapters is replaced.
        """
        adapter, memory = weights
        if memory != self._memory:
            self._recordings.clear()
            self._memory = memory
        self._send_table(table)
        count = len(tokens[0])
        size = next((size for size in GRAPH_TOKENS if size >= count), 0)
        host = np.zeros((_ROWS, size or count), dtype=np.int32)
        host[1] = len(table)
        rows: tuple[NDArray[np.integer], ...] = (*tokens, keep)
        for row, values in enumerate(rows):
            host[row, : len(values)] = values
        recording = None
        if size and self._recorder is not None and adapter is not None:
            recording = self._recordings.get((size, adapter)) or self._record(size, adapter, host)
        if recording is None:
            return self._run(torch.from_numpy(host[:, :count]).to(self._device), len(keep))
        inputs, replay, logits = recording
        inputs.copy_(torch.from_numpy(host))
        replay()
        return logits[: len(keep)]

    def _run(self, inputs: Tensor, num_kept: int) -> Tensor:
        ids, slots, positions, keep = inputs
        paged = PagedPass(self._pool, slots, positions, self._table)
        return self._forward(ids.long()[None], positions.long()[None], paged, keep[:num_kept].long())

    def _record(self, size: int, adapter: str, host: NDArray[np.int32]) -> Recording | None:
        """Capture a pass of `size` tokens; if that fails, log a warning and disable CUDA graphs."""
        assert self._recorder is not None
        inputs = torch.from_numpy(host).to(self._device)
        try:
            replay, logits = self._recorder(lambda: self._run(inputs, size))
        except RuntimeError as error:
            log.warning("CUDA graphs are disabled, so decoding is slower: %s", str(error).splitlines()[0])
            self._recorder = None
            return None
        self._recordings[size, adapter] = recording = Recording(inputs, replay, logits)
        return recording

    def _send_table(self, table: NDArray[np.int32]) -> None:
        """Copy the table to the device, if it has changed, with the extra slot for padding."""
        if self._sent.shape == table.shape and np.array_equal(self._sent, table):
            return
        if self._sent.shape != table.shape:
            rows = np.full((1, table.shape[1]), self._pool.num_pages, dtype=np.int32)
            self._table = torch.from_numpy(np.concatenate([table, rows])).to(self._device)
            self._recordings.clear()
        else:
            self._table[: len(table)].copy_(torch.from_numpy(table))
        self._sent = table.copy()


def make_recorder(device: torch.device) -> Recorder | None:
    """Return a recorder that captures CUDA graphs with shared memory; None if the device is not a GPU."""
    if device.type != "cuda":
        return None
    memory = torch.cuda.graph_pool_handle()

    def record(function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()  # loads the kernels
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as the learner's, may allocate and wait meanwhile.
        with torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
            result = function()
        return graph.replay, result

    return record
