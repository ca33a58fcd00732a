"""Matrix products of linear layers by oneDNN, on processors where torch's own choice is about half as fast.

In float32 torch multiplies by Intel's MKL, which on other makers' processors leaves registers of 512 bits
unused. oneDNN, which torch also brings and whose operator inductor calls, does not.

oneDNN compiles a product for each number of rows and keeps it with its memory, so rows are taken in blocks of
few sizes. What a row gives is the same number whatever other rows stand beside it, from `LEAST` rows on.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, FunctionCtx, once_differentiable

LEAST = 16
"""Rows are padded to a multiple of this; fewer are torch's."""
_MOST = 256
"""Rows of a block, a multiple of `LEAST`."""


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`rows` `[..., in]` times `weight` `[out, in]`, plus `bias` `[out]`: as torch's, but for rounding."""
    if rows.numel() < LEAST * weight.shape[1] or rows.dtype != weight.dtype or not by_onednn(weight):
        return nn.functional.linear(rows, weight, bias)
    flat = rows.reshape(-1, rows.shape[-1])
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (rows, weight, bias)):
        (made,) = apply(_Linear, flat, weight, bias)
    else:
        made = _in_blocks(flat, weight, bias)
    return made.view(*rows.shape[:-1], -1)


def product(left: Tensor, right: Tensor) -> Tensor:
    """`left` `[m, k]` times `right` `[k, n]`, without gradient; either may be transposed."""
    return _in_blocks(left, right.t(), None) if by_onednn(right) else left @ right


def outer_sum(left: Tensor, right: Tensor) -> Tensor:
    """The sum `[m, n]` of the outer products of rows: `left` `[r, m]` transposed, times `right` `[r, n]`."""
    if not by_onednn(right) or len(left) < _MOST:
        return left.t() @ right
    whole = len(left) // _MOST * _MOST
    total = torch.mm(left[whole:].t(), right[whole:])
    for a, b in zip(torch.split(left[:whole], _MOST), torch.split(right[:whole], _MOST), strict=True):
        total += _multiply(a.t(), b.t(), None)
    return total


def by_onednn(weight: Tensor) -> bool:
    """Whether products with `weight` are oneDNN's."""
    return (
        weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and bool(torch.backends.mkldnn.enabled)
        and is_faster()
    )


@functools.cache
def is_faster() -> bool:
    """Whether this machine has registers of 512 bits on which MKL does not act.

    It is decided by what the machine is and not by a clock, so that a run's numbers stay its numbers.
    """
    try:
        operator = torch.ops.mkldnn._linear_pointwise
        processor = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except (AttributeError, OSError):
        return False
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return callable(operator) and torch._C.has_mkl and wide and "GenuineIntel" not in processor


class OneDnnLinear(nn.Linear):
    """A linear layer that multiplies as `linear` does."""

    def forward(self, input: Tensor) -> Tensor:
        """`[..., out]` of `[..., in]`."""
        return linear(input, self.weight, self.bias)


def use_onednn(model: nn.Module) -> list[nn.Linear]:
    """Let the plain linear layers of a model multiply as `linear` does; weights and names stay.

    Gives the layers that were changed; `as_before` changes them back.
    """
    plain = [m for m in model.modules() if type(m) is nn.Linear] if is_faster() else []
    for layer in plain:
        layer.__class__ = OneDnnLinear
    return plain


def as_before(layers: Iterable[nn.Linear]) -> None:
    """Let layers that were changed multiply as torch does."""
    for layer in layers:
        layer.__class__ = nn.Linear


def apply(function: type[Function], *inputs: object) -> tuple[Tensor, ...]:
    """What a function with a gradient of its own gives."""
    made: Tensor | tuple[Tensor, ...] = function.apply(*inputs)  # type: ignore[no-untyped-call]
    return made if isinstance(made, tuple) else (made,)


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


class _Linear(Function):
    """With gradients for rows `[r, in]`, weight `[out, in]` and bias."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return _in_blocks(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        asked = ctx.needs_input_grad
        upstream = upstream.contiguous()
        to_rows = product(upstream, weight) if asked[0] else None
        to_weight = outer_sum(upstream, rows) if asked[1] else None
        return to_rows, to_weight, upstream.sum(0) if asked[2] else None


def _in_blocks(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`[r, out]`: blocks of `_MOST` rows, and a last one that is padded to a multiple of `LEAST`."""
    count = len(rows)
    if count <= _MOST and count % LEAST == 0:
        return _multiply(rows, weight, bias)
    made = rows.new_empty(count, weight.shape[0])
    for start in range(0, count, _MOST):
        block = rows[start : start + _MOST]
        short = -len(block) % LEAST
        if short:
            block = nn.functional.pad(block, (0, 0, 0, short))
        made[start : start + _MOST] = _multiply(block, weight, bias)[: len(block) - short]
    return made


def _multiply(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    made: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return made
