"""Run float64 models in float64 throughout.

transformers computes norms, rotary angles, routers and some softmaxes in float32, whatever the weights' type.
Under `Float64` casts to float32 become float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Float64(TorchFunctionMode):
    """Function mode that replaces float32 by float64 in casts and in `dtype` arguments."""

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
            *(_wider(value) for value in args), **{name: _wider(value) for name, value in (kwargs or {}).items()}
        )


def in_float64(module: nn.Module) -> AbstractContextManager[object]:
    """Return `Float64()` if the weights of `module` are float64, otherwise a null context."""
    return Float64() if next(module.parameters()).dtype == torch.float64 else nullcontext()


def _wider(value: object) -> object:
    return torch.float64 if value is torch.float32 else value
