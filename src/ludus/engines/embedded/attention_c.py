"""The compiled attention kernel, built once with the local compiler and cached per user.

Without a working compiler the slower torch attention is used.
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
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ludus.engines.embedded.attention import RaggedPass
    from ludus.engines.embedded.kv_pool import LayerShape

_LOG = logging.getLogger(__name__)
_COMPILE = ("-c", "-O3", "-march=native", "-ffast-math", "-fPIC", "-std=gnu11")
_LINK = ("-shared",)
"""Flags of a separate link step: linking with `-ffast-math` would add code that flushes subnormal numbers to
zero in the whole process."""
_HEADS = 3
"""Maximum number of query heads processed together: MANY of the source."""
_MIN_WORK = 65_536
"""Products of one head and column below which a second thread does not pay off."""


class _Pass(ctypes.Structure):
    """`Pass` of the C source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("slots", "positions", "table", "query", "key", "value")),
        *((name, ctypes.c_void_p) for name in ("keys", "values", "out")),
        *((name, ctypes.c_int64) for name in ("table_stride", "query_heads", "heads", "width", "window")),
        *((f"{name}_{part}", ctypes.c_int64) for name in ("query", "key", "value") for part in ("head", "token")),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class Kernel:
    """The compiled functions, `threads` to share the tokens of a pass, and memory for scores."""

    def __init__(self, library: ctypes.CDLL, max_tokens: int, threads: int) -> None:
        self._library = library
        self._threads = threads
        self._scratch = torch.empty(threads, _HEADS * (max_tokens + 64))
        self._helpers = ThreadPoolExecutor(threads - 1, "ludus-attention") if threads > 1 else None

    def attend(
        self,
        ragged: RaggedPass,
        keys: Tensor,
        values: Tensor,
        new: tuple[Tensor, Tensor, Tensor],
        how: tuple[float, int, float],
    ) -> Tensor:
        """Write and attend as `ragged_attention` does; return `[T, Hq, D]`.

        `new` holds queries `[Hq, T, D]`, keys and values `[H, T, D]`; `how` the scale, the window (0: all)
        and the soft cap (0: none).
        """
        query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in new)
        num_heads, tokens, width = query.shape
        out = torch.empty(tokens, num_heads, width)
        arguments = _Pass(
            *(array.ctypes.data for array in (ragged.slots, ragged.positions, ragged.table)),
            *(x.data_ptr() for x in (query, key, value, keys, values, out)),
            *(ragged.table.shape[1], num_heads, keys.shape[1], width, how[1]),
            *(stride for x in (query, key, value) for stride in x.stride()[:2]),
            how[0],
            how[2],
        )
        self._library.ludus_write(ctypes.byref(arguments), 0, tokens)
        self._share(arguments, tokens, num_heads * int(ragged.positions.sum()))
        return out

    def _share(self, arguments: _Pass, tokens: int, work: int) -> None:
        parts = self._threads if work >= _MIN_WORK * self._threads else 1
        bounds = [tokens * i // parts for i in range(parts + 1)]

        def part(i: int) -> None:
            self._library.ludus_attend(
                ctypes.byref(arguments), bounds[i], bounds[i + 1], ctypes.c_void_p(self._scratch[i].data_ptr())
            )

        others = [self._helpers.submit(part, i) for i in range(1, parts)] if self._helpers else []
        part(0)
        for other in others:
            other.result()

    def close(self) -> None:
        """Stop the threads."""
        if self._helpers is not None:
            self._helpers.shutdown()


def make_kernel(layers: list[LayerShape], query_width: int, max_tokens: int, threads: int) -> Kernel | None:
    """Create a kernel for float32 layers of these shapes, or return None if unavailable."""
    fits = all(s.key_width == s.value_width == query_width and s.key_width % 8 == 0 for s in layers)
    library = _library() if fits else None
    return None if library is None else Kernel(library, max_tokens, threads)


def available() -> bool:
    """Return whether the kernel is compiled or can be."""
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
        _LOG.info("no compiled attention kernel: %s", error)
        return None
    library.ludus_write.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    library.ludus_attend.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    library.ludus_write.restype = library.ludus_attend.restype = None
    return library


def _compile(compiler: str, source: bytes, target: Path) -> None:
    """Compile to a temporary folder and rename, so that processes may compile concurrently."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        code, unlinked, built = (Path(folder) / f"kernel.{kind}" for kind in ("c", "o", "so"))
        code.write_bytes(source)
        for command in (
            [compiler, *_COMPILE, "-o", str(unlinked), str(code)],
            [compiler, *_LINK, "-o", str(built), str(unlinked), "-lm"],
        ):
            subprocess.run(command, check=True, capture_output=True, timeout=120)
        built.replace(target)


def _processor() -> str:
    """Return the CPU's feature flags: a library may not run on a different CPU."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    return next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
