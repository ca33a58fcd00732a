"""Shard weights, gradients and moments with FSDP2 (`torch.distributed.fsdp.fully_shard`).

Each decoder layer is one group; the rest of the model (embeddings, last norm, output layer) is another. A
group is unsharded only during its forward or backward pass. Passes are collective: all ranks make the same
passes in the same order. Gradients are summed, not averaged, since the learner divides by global counts.
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
"""Method of a sharded model in which its weights are unsharded."""


class _Split(Protocol):
    """Sharded model."""

    def ludus_within(self, work: Callable[[], T]) -> T: ...


def make_mesh(device: torch.device, count: int) -> DeviceMesh:
    """Return a 1-D device mesh of all ranks. Collective."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device.type, (count,))


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the weights of `model` in place; all ranks must hold the same weights.

    Copy the model before; build optimizers after. Raises UserError for a model without a list of layers.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

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
    """Return whether the model is sharded, without importing FSDP, which takes a second."""
    return "FSDPModule" in {c.__name__ for c in type(model).__mro__}


def is_split(tensor: Tensor) -> bool:
    """Return whether the tensor is a `DTensor`."""
    return type(tensor).__name__ == "DTensor"


def within(model: nn.Module, work: Callable[[], T]) -> T:
    """Run `work` as the forward pass of `model`, with unsharded weights, also in the backward pass.

    The tensors of its result support `backward`.
    """
    if not is_sharded(model):
        return work()
    return cast(_Split, model).ludus_within(work)


def _call(work: Callable[[], T]) -> T:
    return work()


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder's layers: the module list with the most weights. Raises UserError without one."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise UserError(
            f"{type(model).__name__} has no list of layers to shard.", "Set training.learner.shard = false."
        )
    sizes = [sum(p.numel() for p in found.parameters()) for found in lists]
    return list(lists[sizes.index(max(sizes))])


def whole(tensor: Tensor) -> Tensor:
    """Return the unsharded tensor, without gradient. Collective for a sharded tensor."""
    plain = tensor.detach()
    return cast("DTensor", plain).full_tensor() if is_split(plain) else plain


def gathered(model: nn.Module) -> dict[str, Tensor]:
    """Return all weights by name, unsharded, tied ones once. Collective."""
    return {name: whole(p) for name, p in model.named_parameters()}


def local(tensor: Tensor) -> Tensor:
    """Return the local shard of a tensor."""
    return cast("DTensor", tensor).to_local() if is_split(tensor) else tensor


def put(target: Tensor, value: Tensor) -> None:
    """Copy `value`, unsharded or sharded as `target`, into `target`, without communication."""
    with torch.no_grad():
        if is_split(target) and not is_split(value):
            local(target).copy_(_cut(value, cast("DTensor", target)))
        else:
            target.copy_(value)


def _cut(value: Tensor, like: DTensor) -> Tensor:
    """Return this rank's shard of an unsharded tensor, along its first axis."""
    chunks = torch.chunk(value, like.device_mesh.size())
    rank = like.device_mesh.get_local_rank()
    return chunks[rank] if rank < len(chunks) else value[:0]
