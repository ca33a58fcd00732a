"""Torch, imported at its first use, and what each function does first: check shapes, select masked positions.

Specs are declared next to their functions, and a configuration is checked against them without torch. So the modules
of this folder import `torch` and `Tensor` from here: `Tensor` is for annotations, `torch.Tensor` for `isinstance`.

`x * mask` keeps NaN and infinity alive, in the value or in the gradient; selecting before the arithmetic does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor as Tensor
else:

    class _Torch:
        """The module torch. Each name is read from it once."""

        def __getattr__(self, name: str) -> object:
            import torch

            value = torch.__getattribute__(name)
            setattr(self, name, value)
            return value

    torch, Tensor = _Torch(), "torch.Tensor"

MAX_LOG_RATIO = 20.0
"""Importance ratios are clamped to exp(+-20)."""


def select(values: Tensor, mask: Tensor) -> Tensor:
    """Return `values` [N, L] where `mask` [N, L] is set, else 0; no gradient flows to the other positions."""
    return torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))


def clamped_ratio(log_ratio: Tensor) -> Tensor:
    """Return `exp(log_ratio)` with the exponent clamped to +-20; any shape."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def check_shapes(mask: Tensor, **tensors: Tensor) -> None:
    """Raise ValueError unless `mask` is [N, L] and every tensor has its shape (broadcasting hides mistakes)."""
    if mask.ndim != 2:
        raise ValueError(f"mask must be [N, L], not {list(mask.shape)}")
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, mask {list(mask.shape)}")
