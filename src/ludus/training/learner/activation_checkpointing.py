"""Activation checkpointing: keep each layer's input and recompute the rest in the backward pass.

transformers' layers support this only in training mode, which would also enable dropout. So only the layers'
own flags are switched during a forward pass, and their submodules are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ludus.errors import UserError
from ludus.training.learner.float64 import in_float64

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Checkpointable(Protocol):
    """Interface of transformers' `GradientCheckpointingLayer`."""

    training: bool
    gradient_checkpointing: bool
    _gradient_checkpointing_func: Callable[..., object]


def recomputable_layers(model: PreTrainedModel) -> list[Checkpointable]:
    """Return the layers that support checkpointing. Raises UserError if there are none."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(
            f"{type(model).__name__} has no layers that support activation checkpointing.",
            "Unset model.activation_checkpointing.",
        )
    return layers


@contextmanager
def recomputing(layers: Sequence[Checkpointable]) -> Iterator[None]:
    """Checkpoint `layers` in forward passes within the block; passes without gradient are unchanged."""
    if not layers or not torch.is_grad_enabled():
        yield
        return
    modes = [layer.training for layer in layers]
    for layer in layers:
        again = partial(_contexts, layer)
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, context_fn=again)
        layer.gradient_checkpointing = True
        layer.training = True
    try:
        yield
    finally:
        for layer, mode in zip(layers, modes, strict=True):
            layer.gradient_checkpointing = False
            layer.training = mode


def _contexts(layer: Checkpointable) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Return the contexts of a layer's forward pass and of its recomputation.

    The forward pass uses its caller's; autograd runs the recomputation outside of any function mode.
    """
    assert isinstance(layer, nn.Module)
    return nullcontext(), in_float64(layer)
