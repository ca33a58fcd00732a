"""Linear layers by oneDNN, about twice as fast as torch's default on some processors.

In float32 torch uses Intel MKL, which does not use 512-bit registers on other vendors' processors. oneDNN,
which torch ships and whose operator inductor calls, does.

oneDNN compiles and caches a kernel, with its memory, for each number of rows, so rows are processed in blocks
of few sizes. From `MIN_ROWS` rows on, the result of a row does not depend on the other rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, FunctionCtx, once_differentiable

MIN_ROWS = 16
"""Rows are padded to a multiple of this; fewer rows use torch."""
_BLOCK_ROWS = 256
"""Rows of a block, a multiple of `MIN_ROWS`."""


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply `rows` `[..., in]` by `weight` `[out, in]` and add `bias` `[out]`, as torch up to rounding."""
    if rows.numel() < MIN_ROWS * weight.shape[1] or rows.dtype != weight.dtype or not uses_onednn(weight):
        return nn.functional.linear(rows, weight, bias)
    flat = rows.reshape(-1, rows.shape[-1])
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (rows, weight, bias)):
        (made,) = apply(_Linear, flat, weight, bias)
    else:
        made = _multiply_blocks(flat, weight, bias)
    return made.view(*rows.shape[:-1], -1)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply `left` `[m, k]` by `right` `[k, n]` without gradient; either may be transposed."""
    return _multiply_blocks(left, right.t(), None) if uses_onednn(right) else left @ right


def outer_sum(left: Tensor, right: Tensor) -> Tensor:
    """Sum the outer products of rows: `left` `[r, m]` transposed, times `right` `[r, n]`; `[m, n]`."""
    if not uses_onednn(right) or len(left) < _BLOCK_ROWS:
        return left.t() @ right
    whole = len(left) // _BLOCK_ROWS * _BLOCK_ROWS
    total = torch.mm(left[whole:].t(), right[whole:])
    for a, b in zip(torch.split(left[:whole], _BLOCK_ROWS), torch.split(right[:whole], _BLOCK_ROWS), strict=True):
        total += _multiply(a.t(), b.t(), None)
    return total


def uses_onednn(weight: Tensor) -> bool:
    """Return whether products with `weight` use oneDNN."""
    return (
        weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and bool(torch.backends.mkldnn.enabled)
        and is_faster()
    )


@functools.cache
def is_faster() -> bool:
    """Return whether the CPU has AVX-512 but is not from Intel, so that MKL does not use it.

    Decided by hardware, not by timing, so that a run is reproducible.
    """
    try:
        operator = torch.ops.mkldnn._linear_pointwise
        processor = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except (AttributeError, OSError):
        return False
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return callable(operator) and torch._C.has_mkl and wide and "GenuineIntel" not in processor


class OneDnnLinear(nn.Linear):
    """A linear layer that multiplies by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """Map `[..., in]` to `[..., out]`."""
        return linear(input, self.weight, self.bias)


def use_onednn(model: nn.Module) -> list[nn.Linear]:
    """Make a model's plain linear layers use `linear`; weights and names stay.

    Returns the changed layers, for `restore_linear`.
    """
    plain = [m for m in model.modules() if type(m) is nn.Linear] if is_faster() else []
    for layer in plain:
        layer.__class__ = OneDnnLinear
    return plain


def restore_linear(layers: Iterable[nn.Linear]) -> None:
    """Restore layers changed by `use_onednn`."""
    for layer in layers:
        layer.__class__ = nn.Linear


def apply(function: type[Function], *inputs: object) -> tuple[Tensor, ...]:
    """Apply a custom autograd function."""
    made: Tensor | tuple[Tensor, ...] = function.apply(*inputs)  # type: ignore[no-untyped-call]
    return made if isinstance(made, tuple) else (made,)


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


class _Linear(Function):
    """Linear layer with gradients for rows `[r, in]`, weight `[out, in]` and bias."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return _multiply_blocks(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        needs_grad = ctx.needs_input_grad
        upstream = upstream.contiguous()
        to_rows = product(upstream, weight) if needs_grad[0] else None
        to_weight = outer_sum(upstream, rows) if needs_grad[1] else None
        return to_rows, to_weight, upstream.sum(0) if needs_grad[2] else None


def _multiply_blocks(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply in blocks of `_BLOCK_ROWS` rows, the last one padded to a multiple of `MIN_ROWS`; `[r, out]`."""
    count = len(rows)
    if count <= _BLOCK_ROWS and count % MIN_ROWS == 0:
        return _multiply(rows, weight, bias)
    made = rows.new_empty(count, weight.shape[0])
    for start in range(0, count, _BLOCK_ROWS):
        block = rows[start : start + _BLOCK_ROWS]
        short = -len(block) % MIN_ROWS
        if short:
            block = nn.functional.pad(block, (0, 0, 0, short))
        made[start : start + _BLOCK_ROWS] = _multiply(block, weight, bias)[: len(block) - short]
    return made


def _multiply(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    made: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return made
