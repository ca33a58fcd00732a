"""Linear layers with weights that oneDNN has packed: the bits of torch's product of two matrices, packed only once.

On a CPU, torch copies a bfloat16 weight into the processor's tile order in each product, which takes longer than the
product itself if it has few rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_ROWS = 16
"""Rows of the products that weights are packed for; those of more rows have the same bits."""


class PackedLinear(nn.Linear):
    """A linear layer without gradient that keeps a packed copy of its weight, renewed if the weight has changed."""

    def forward(self, input: Tensor) -> Tensor:
        version = self.weight.data_ptr(), self.weight._version
        kept = self.__dict__.get("packed")
        if kept is None or kept[0] != version:
            kept = version, torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), _ROWS)
            self.__dict__["packed"] = kept
        out: Tensor = torch.ops.mkldnn._linear_pointwise(input, kept[1], self.bias, "none", [], "")
        return out

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "packed"}


def pack_linear(model: nn.Module) -> list[nn.Linear]:
    """Switch a model's plain bfloat16 linear layers on a CPU to `PackedLinear`; return them, for `restore_linear`."""
    layers = [m for m in model.modules() if type(m) is nn.Linear and _packs(m.weight)]
    for layer in layers:
        layer.__class__ = PackedLinear
    return layers


def _packs(weight: Tensor) -> bool:
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu" or weight.requires_grad:
        return False
    usable = bool(torch.backends.mkldnn.enabled) and torch._C._has_mkldnn
    return usable and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
