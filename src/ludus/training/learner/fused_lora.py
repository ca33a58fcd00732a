"""LoRA layers without elementwise passes over their outputs.

PEFT computes `W x + b`, then `B (A x)`, its product with the scaling, a sum, and in 16 bits three conversions, each a
pass over all outputs, and as many in the backward pass. Here matrix products accumulate into the outputs and gradients:
the same formula (Hu et al., arXiv:2106.09685) up to rounding. In 16 bits the factors, kept in 32 bits, are rounded for
the products as in mixed-precision training.
"""

from __future__ import annotations

from typing import cast

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable

from ludus.engines.embedded.model_runner import OneDnnLinear, apply, linear, product


class FusedLora(Linear):
    """PEFT's LoRA layer, fused for one plain adapter of a frozen linear layer."""

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        base, names = self.base_layer, self.active_adapters
        if args or kwargs or len(names) != 1 or names[0] not in self.lora_A or not _is_plain(self, base, x):
            return cast("Tensor", super().forward(x, *args, **kwargs))
        down, up = self.lora_A[names[0]].weight, self.lora_B[names[0]].weight * self.scaling[names[0]]
        (out,) = apply(_LoraProduct, x.reshape(-1, x.shape[-1]), base.weight, base.bias, down, up)
        return out.view(*x.shape[:-1], -1)


def _is_plain(layer: Linear, base: nn.Module, x: Tensor) -> bool:
    return (
        type(base) in (nn.Linear, OneDnnLinear)
        and type(base.weight) is nn.Parameter
        and base.weight.dtype == x.dtype
        and not (base.weight.requires_grad or layer.disable_adapters or layer.merged or layer.lora_variant)
        and not torch.is_autocast_enabled(x.device.type)
        and all(isinstance(one, nn.Identity) for one in layer.lora_dropout.values())
        and not any(layer.lora_bias.values())
    )


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


class _LoraProduct(Function):
    """`x W^T + b + (x A^T) B^T` for rows x `[r, in]`, W `[out, in]`, A `[rank, in]` and the scaled B `[out, rank]`."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, rows: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor
    ) -> Tensor:
        down, up = down.to(rows.dtype), up.to(rows.dtype)
        hidden = rows @ down.t()
        ctx.save_for_backward(rows, weight, hidden, down, up)
        return linear(rows, weight, bias).addmm_(hidden, up.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, hidden, down, up = ctx.saved_tensors
        to_hidden = upstream @ up
        to_rows = product(upstream, weight).addmm_(to_hidden, down) if ctx.needs_input_grad[0] else None
        return to_rows, None, None, to_hidden.t() @ rows, upstream.t() @ hidden


def fuse_lora(model: nn.Module) -> int:
    """Switch a model's plain LoRA layers to `FusedLora`; return their number."""
    layers = [module for module in model.modules() if type(module) is Linear]
    for layer in layers:
        layer.__class__ = FusedLora
    return len(layers)
