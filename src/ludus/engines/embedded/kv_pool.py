"""Paged memory for keys and values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ludus.engines.embedded.radix_cache import PAGE

_LINE = 64
"""Bytes of a CPU cache line."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Number of key heads, width of a key and of a value."""

    heads: int
    key_width: int
    value_width: int


class PagePool:
    """Page memory: per layer keys and values `[pages, heads, PAGE, width]`.

    If `transposed`, keys are `[pages, heads, width, PAGE]`, as the compiled kernel expects.
    """

    def __init__(
        self,
        layers: list[LayerShape],
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
        transposed: bool = False,
    ) -> None:
        self._shapes = [
            (
                (num_pages, s.heads, *((s.key_width, PAGE) if transposed else (PAGE, s.key_width))),
                (num_pages, s.heads, PAGE, s.value_width),
            )
            for s in layers
        ]
        self._kind = dtype, device
        self.take_back()

    def take_back(self) -> None:
        """Allocate the memory, filled with zeros."""
        self.keys = [lazy_zeros(key, *self._kind) for key, _ in self._shapes]
        self.values = [lazy_zeros(value, *self._kind) for _, value in self._shapes]

    def give_up(self) -> None:
        """Free all memory and its contents."""
        self.keys, self.values = [], []

    @property
    def is_there(self) -> bool:
        """Whether the memory is allocated."""
        return bool(self.keys)

    def copy(self, source: int, target: int) -> None:
        """Copy one page in every layer."""
        for memory in (*self.keys, *self.values):
            memory[target] = memory[source]


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros that use no CPU memory until written (numpy maps them lazily)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    room = np.zeros(num_bytes + _LINE, dtype=np.uint8)
    start = -room.ctypes.data % _LINE
    return torch.from_numpy(room[start : start + num_bytes]).view(dtype).view(shape)
