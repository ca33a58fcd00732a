"""Passes of a float64 model in float64 throughout.

The models of transformers compute norms, rotary angles, routers and some softmaxes in float32, whatever their
weights are. Under `Float64` what they cast to float32 becomes float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Float64(TorchFunctionMode):
    """A mode in which casts to float32, and functions asked to compute in it, give float64."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        del types
        if func is Tensor.float:
            func = Tensor.double
        return func(
            *(_wider(value) for value in args),
            **{name: _wider(value) for name, value in (kwargs or {}).items()},
        )


def in_float64(module: nn.Module) -> AbstractContextManager[object]:
    """Return `Float64()` if the weights of `module` are float64, else a context that does nothing."""
    return Float64() if next(module.parameters()).dtype == torch.float64 else nullcontext()


def _wider(value: object) -> object:
    return torch.float64 if value is torch.float32 else value
