"""Activation checkpointing: of each layer the input is kept, and what is inside computed again backward.

transformers' layers do it themselves where they are told to, but only in training mode, which would also
switch dropout on. So the layers alone are told, for the time of a forward pass; their parts stay as they are.
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
    """What switches one of transformers' layers, `GradientCheckpointingLayer`."""

    training: bool
    gradient_checkpointing: bool
    _gradient_checkpointing_func: Callable[..., object]


def recomputable_layers(model: PreTrainedModel) -> list[Checkpointable]:
    """The layers whose inside can be computed again. Raises UserError for a model that has none."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(
            f"{type(model).__name__} has no layers that can be computed again in the backward pass.",
            "Leave out model.activation_checkpointing.",
        )
    return layers


@contextmanager
def recomputing(layers: Sequence[Checkpointable]) -> Iterator[None]:
    """A forward pass within keeps the inputs of `layers` only; without gradient it is as ever."""
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

    The forward pass is in that of its caller; autograd runs the recomputation outside of any function mode.
    """
    assert isinstance(layer, nn.Module)
    return nullcontext(), in_float64(layer)
