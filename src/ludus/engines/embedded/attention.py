"""Ragged-batch attention over paged keys and values, as a transformers attention implementation.

All new tokens of all sequences form one row `[1, T]`. Each layer writes the new keys and values to the pages; each
token then attends to its sequence's pages up to its position: by a compiled kernel on a CPU in float32 if a compiler
is available (cached per user), by `paged_pass` on a GPU, otherwise by torch: dense, or sparse for decoding tokens.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import platform
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from ludus.engines.embedded.kv_cache import PAGE, PagePool
from ludus.errors import EngineError

if TYPE_CHECKING:
    from ludus.engines.embedded.kv_cache import LayerShape

NAME = "ludus_ragged"
"""Name of the attention implementation in transformers."""


class RaggedPass(Protocol):
    """Attention of one forward pass over several sequences, used by every layer."""

    def attend(self, layer: int, new: tuple[Tensor, Tensor, Tensor], scores: ScoreRule) -> Tensor:
        """Store new keys and values `[H, T, D]` and attend from queries `[Hq, T, D]`; `[T, Hq, D]`."""
        ...


@dataclass(frozen=True, slots=True)
class KernelPass:
    """Slots (-1: padding) and positions of the T new tokens of a pass, and pages of each slot `[S, M]`; int32."""

    pool: PagePool
    slots: NDArray[np.int32]
    positions: NDArray[np.int32]
    table: NDArray[np.int32]
    kernel: Kernel

    def attend(self, layer: int, new: tuple[Tensor, Tensor, Tensor], scores: ScoreRule) -> Tensor:
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (x.to(keys.dtype) for x in new))
        num_heads, tokens, width = query.shape
        out = torch.empty(tokens, num_heads, width)
        arguments = _Pass(
            *(array.ctypes.data for array in (self.slots, self.positions, self.table)),
            *(x.data_ptr() for x in (query, key, value, keys, values, out)),
            *(self.table.shape[1], num_heads, keys.shape[1], width, scores.window),
            *(stride for x in (query, key, value) for stride in x.stride()[:2]),
            scores.scale,
            scores.softcap,
        )
        self.kernel.run(arguments, tokens, num_heads * int(self.positions.sum()))
        return out.to(new[0].dtype)


def ragged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,  # noqa: ANN401 (options of transformers, per model)
) -> tuple[Tensor, None]:
    """Store `key` and `value` `[1, H, T, D]` in the pages and attend from `query` `[1, Hq, T, D]`.

    Returns `[1, T, Hq, D]`. `options` holds transformers' `scaling`, `sliding_window` and `softcap`, and
    `ragged`, the `RaggedPass`. Raises EngineError for an unsupported kind of attention.
    """
    ragged: RaggedPass | None = options.get("ragged")
    if ragged is None:
        raise EngineError("The model does not pass the engine's `ragged` argument to its attention.")
    if options.get("s_aux") is not None or attention_mask is not None:
        raise EngineError("The model's attention has sinks or its own mask.")
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    scores = ScoreRule(scale, options.get("sliding_window") or 0, options.get("softcap") or 0.0)
    new = (query[0], key[0], value[0])
    return ragged.attend(layer, new, scores)[None], None


def register() -> None:
    """Register the attention with transformers under `NAME`."""
    warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)
    AttentionInterface.register(NAME, ragged_attention)


class QuerySpan(NamedTuple):
    """Tokens `first` to `last` of a pass, of one sequence with `pages`, ending at position `end` (exclusive)."""

    first: int
    last: int
    end: int
    pages: NDArray[np.int32]

    @property
    def is_single(self) -> bool:
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
    """Sparse matrix `[queries, pages * heads * PAGE]` of the tokens that the queries attend to, one row per head and
    token. `blocks` are views of its values, `[heads, attended tokens]` per token."""

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
            key_rows = span.rows(begin, shape.heads)
            start = end - length * shape.query_heads
            np.add(heads, key_rows, out=columns[start:end].reshape(shape.query_heads, length))
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
    """One pass over several sequences, used by every layer. The T new tokens go to `offsets` of `pages`, both `[T]`;
    padding after the last span yields zeros."""

    pool: PagePool
    spans: tuple[QuerySpan, ...]
    pages: NDArray[np.int64]
    offsets: NDArray[np.int64]
    _patterns: dict[HeadShape, Pattern] = field(default_factory=dict)
    _masks: dict[MaskShape, Tensor] = field(default_factory=dict)
    _write_rows: dict[int, Tensor] = field(default_factory=dict)
    _key_rows: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    _single_rows: list[Tensor] = field(default_factory=list)

    def attend(self, layer: int, new: tuple[Tensor, Tensor, Tensor], scores: ScoreRule) -> Tensor:
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        query, key, value = (tensor.to(keys.dtype) for tensor in new)
        self._write(keys, key)
        self._write(values, value)
        out = query.new_zeros(query.shape[1], query.shape[0], values.shape[-1])
        singles = [span for span in self.spans if span.is_single]
        if singles:
            if not self._single_rows:  # once per pass
                self._single_rows.append(torch.tensor([span.first for span in singles]))
            (index,) = self._single_rows
            queries = query.index_select(1, index).transpose(0, 1)
            key_rows, value_rows = (tensor.view(-1, tensor.shape[-1]) for tensor in (keys, values))
            shape = HeadShape(keys.shape[1], len(query), scores.window)
            if shape not in self._patterns:
                self._patterns[shape] = Pattern.of(singles, shape, len(key_rows), keys.dtype)
            rows = queries.reshape(-1, query.shape[-1])
            attended = self._patterns[shape].attend(rows, key_rows, value_rows, scores)
            out.index_copy_(0, index, attended.view(len(queries), -1, attended.shape[-1]))
        for span in self.spans:
            if not span.is_single:
                out[span.first : span.last] = self._attend_dense(span, query, (keys, values), scores)
        return out.to(new[0].dtype)

    def _write(self, memory: Tensor, new: Tensor) -> None:
        heads, width = new.shape[0], new.shape[2]
        if heads not in self._write_rows:
            rows = (self.pages[:, None] * heads + np.arange(heads)) * PAGE + self.offsets[:, None]
            self._write_rows[heads] = torch.from_numpy(rows.ravel()).to(new.device)
        real = new[:, : len(self.pages)].transpose(0, 1).reshape(-1, width)
        memory.view(-1, width).index_copy_(0, self._write_rows[heads], real)

    def _attend_dense(self, span: QuerySpan, query: Tensor, memory: tuple[Tensor, Tensor], scores: ScoreRule) -> Tensor:
        """Attend from several tokens of one sequence, with a group's heads stacked; `[n, Hq, D]`."""
        heads = memory[0].shape[1]
        place = (span.first, heads)
        if place not in self._key_rows:  # of all heads of a sequence, head by head
            rows = np.arange(heads)[:, None] * PAGE + span.rows(0, heads)
            self._key_rows[place] = torch.from_numpy(rows.ravel()).to(query.device)
        picked = (x.view(-1, x.shape[-1]).index_select(0, self._key_rows[place]) for x in memory)
        key, value = (x.view(1, heads, span.end, -1) for x in picked)
        queries = query[:, span.first : span.last].reshape(1, heads, -1, query.shape[-1])
        mask = MaskShape(span.last - span.first, span.end, scores.window, len(query) // heads)
        if mask not in self._masks:
            self._masks[mask] = added_mask(mask, query)
        out = scores.attend(queries, key, value, self._masks[mask])
        return out.view(len(query), -1, out.shape[-1]).transpose(0, 1)


class MaskShape(NamedTuple):
    """The last `queries` of `columns` positions, with `window` (0: all) and `group` heads."""

    queries: int
    columns: int
    window: int
    group: int


def added_mask(shape: MaskShape, like: Tensor) -> Tensor:
    """Return the additive mask `[group * queries, columns]`, the heads of a group stacked: -inf where masked."""
    at = torch.arange(shape.columns - shape.queries, shape.columns, device=like.device)[:, None]
    attended = torch.arange(shape.columns, device=like.device)[None]
    mask = attended <= at
    if shape.window:
        mask &= attended > at - shape.window
    added = like.new_zeros(mask.shape).masked_fill_(~mask, -torch.inf)
    return added.repeat(shape.group, 1)


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """Scale, window (0: all) and soft cap (0: none) of the attention scores."""

    scale: float
    window: int
    softcap: float

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attend from `query` to `key` and `value` `[N, H, L, D]`; `[N, H, Q, D]`. `mask` is boolean or additive."""
        if not self.softcap:
            return scaled_dot_product_attention(query, key, value, mask, scale=self.scale)
        weights = self.softcap * torch.tanh(query @ key.transpose(-1, -2) * (self.scale / self.softcap))
        if mask is not None:
            weights = weights.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else weights + mask
        return weights.float().softmax(-1).to(value.dtype) @ value


log = logging.getLogger(__name__)
_COMPILE = ("-c", "-O3", "-march=native", "-ffast-math", "-fPIC", "-std=gnu11")
_LINK = ("-shared",)
"""Flags of a separate link step: linking with `-ffast-math` would add code that flushes subnormal numbers to
zero in the whole process."""
_HEADS = 3
"""Maximum number of query heads processed together; must equal MANY of `attention.c`."""
_MIN_WORK = 65_536
"""Minimum number of attention scores per thread."""


class _Pass(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("slots", "positions", "table", "query", "key", "value")),
        *((name, ctypes.c_void_p) for name in ("keys", "values", "out")),
        *((name, ctypes.c_int64) for name in ("table_stride", "query_heads", "heads", "width", "window")),
        *((f"{name}_{part}", ctypes.c_int64) for name in ("query", "key", "value") for part in ("head", "token")),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class Kernel:
    """Compiled attention: splits the tokens of a pass between `threads`, each with scratch memory for scores."""

    def __init__(self, library: ctypes.CDLL, max_tokens: int, threads: int) -> None:
        self._library = library
        self._threads = threads
        self._scratch = torch.empty(threads, _HEADS * (max_tokens + 64))
        self._helpers = ThreadPoolExecutor(threads - 1, "ludus-attention") if threads > 1 else None

    def run(self, arguments: _Pass, tokens: int, work: int) -> None:
        """Write the new keys and values of `tokens`, then attend; `work` is the number of attention scores."""
        self._library.ludus_write(ctypes.byref(arguments), 0, tokens)
        parts = self._threads if work >= _MIN_WORK * self._threads else 1
        bounds = [tokens * i // parts for i in range(parts + 1)]

        def part(i: int) -> None:
            self._library.ludus_attend(
                ctypes.byref(arguments), bounds[i], bounds[i + 1], ctypes.c_void_p(self._scratch[i].data_ptr())
            )

        futures = [self._helpers.submit(part, i) for i in range(1, parts)] if self._helpers else []
        part(0)
        for future in futures:
            future.result()

    def close(self) -> None:
        if self._helpers is not None:
            self._helpers.shutdown()


def make_kernel(layers: list[LayerShape], max_tokens: int, threads: int) -> Kernel | None:
    """Create a kernel for float32 layers of these shapes, or return None if unavailable."""
    width = layers[0].key_width
    fits = width % 8 == 0 and all(s.key_width == s.value_width == width for s in layers)
    library = _library() if fits else None
    return None if library is None else Kernel(library, max_tokens, threads)


def available() -> bool:
    """Return whether the kernel is available; compiles it on the first call."""
    return _library() is not None


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Load the library from the cache, compiling if needed; the file name hashes source, flags and CPU."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    source = files("ludus.engines.embedded").joinpath("attention.c").read_bytes()
    key = repr((source, _COMPILE, _LINK, compiler, platform.machine(), _processor())).encode()
    target = Path.home() / ".cache" / "ludus" / f"kernel-{hashlib.sha256(key).hexdigest()[:16]}.so"
    try:
        if not target.is_file():
            _compile(compiler, source, target)
        library = ctypes.CDLL(str(target))
    except (OSError, subprocess.SubprocessError) as error:
        log.info("no compiled attention kernel: %s", error)
        return None
    library.ludus_write.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    library.ludus_attend.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    library.ludus_write.restype = library.ludus_attend.restype = None
    return library


def _compile(compiler: str, source: bytes, target: Path) -> None:
    """Compile to a temporary folder and rename, so that processes may compile concurrently."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        source_file, object_file, shared_library = (Path(folder) / f"kernel.{kind}" for kind in ("c", "o", "so"))
        source_file.write_bytes(source)
        for command in (
            [compiler, *_COMPILE, "-o", str(object_file), str(source_file)],
            [compiler, *_LINK, "-o", str(shared_library), str(object_file), "-lm"],
        ):
            subprocess.run(command, check=True, capture_output=True, timeout=120)
        shared_library.replace(target)


def _processor() -> str:
    """Return the CPU's feature flags: a library may not run on a different CPU."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    return next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
