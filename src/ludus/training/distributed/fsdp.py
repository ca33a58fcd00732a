"""Weights, gradients and moments split between processes: FSDP2 (`torch.distributed.fsdp.fully_shard`).

Each decoder layer is one group, what is left of the model (embeddings, last norm, output layer) another. A
group is whole in every process for the time of its forward or backward pass, and split otherwise. Passes are
collective: each process makes as many as the others, in the same order. Gradients are summed, not averaged:
the learner divides by counts of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from ludus.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

T = TypeVar("T")

_WITHIN = "ludus_within"
"""The method, of a model that is split, in which its weights are whole."""


class _Split(Protocol):
    """A model that is split."""

    def ludus_within(self, work: Callable[[], T]) -> T: ...


def make_mesh(device: torch.device, count: int) -> DeviceMesh:
    """All processes in one line. Every process calls this."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device.type, (count,))


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the weights of `model`, in place; every process holds the same ones before.

    Copies of the model, and optimisers over it, are made before and after. Raises UserError for a model
    without a list of layers.
    """
    from torch.distributed.fsdp import (
        FSDPModule,
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    policy = MixedPrecisionPolicy()
    if any(p.requires_grad and p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters()):
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    setattr(model, _WITHIN, _call)
    register_fsdp_forward_method(model, _WITHIN)


def is_sharded(model: nn.Module) -> bool:
    """Whether its weights are split. Without importing FSDP, which takes a second."""
    return "FSDPModule" in {c.__name__ for c in type(model).__mro__}


def is_split(tensor: Tensor) -> bool:
    """Whether only a part of it is here: it is a `DTensor`."""
    return type(tensor).__name__ == "DTensor"


def within(model: nn.Module, work: Callable[[], T]) -> T:
    """Do `work` as the forward pass of `model`: what is split is whole in it, and in its backward pass.

    The tensors of its result may be called `backward` on.
    """
    if not is_sharded(model):
        return work()
    return cast(_Split, model).ludus_within(work)


def _call(work: Callable[[], T]) -> T:
    return work()


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a decoder: the list of modules that holds most weights. Raises UserError without one."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise UserError(
            f"{type(model).__name__} has no list of layers to split between processes.",
            "Leave training.learner.shard off.",
        )
    sizes = [sum(p.numel() for p in found.parameters()) for found in lists]
    return list(lists[sizes.index(max(sizes))])


def whole(tensor: Tensor) -> Tensor:
    """The tensor in one piece, without gradient. Of one that is split every process calls this."""
    plain = tensor.detach()
    return cast("DTensor", plain).full_tensor() if is_split(plain) else plain


def gathered(model: nn.Module) -> dict[str, Tensor]:
    """All weights by name, in one piece, a tied one once. Every process that has a part calls this."""
    return {name: whole(p) for name, p in model.named_parameters()}


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that is here."""
    return cast("DTensor", tensor).to_local() if is_split(tensor) else tensor


def put(target: Tensor, value: Tensor) -> None:
    """Copy `value`, in one piece or split as `target` is, into `target`. Nothing is sent."""
    with torch.no_grad():
        if is_split(target) and not is_split(value):
            local(target).copy_(_cut(value, cast("DTensor", target)))
        else:
            target.copy_(value)


def _cut(value: Tensor, like: DTensor) -> Tensor:
    """The part of a whole tensor that this process has of `like`: a piece of its first axis."""
    chunks = torch.chunk(value, like.device_mesh.size())
    rank = like.device_mesh.get_local_rank()
    return chunks[rank] if rank < len(chunks) else value[:0]
