"""Collective operations of the learner's ranks, each with a part of the rows.

Gradients are summed, not averaged, since the learner divides by global counts. Weights, gradients and moments may be
sharded with FSDP2: each decoder layer is a group, unsharded only during its forward or backward pass, and the rest of
the model is another. Passes are collective: all ranks run the same passes in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar, cast

import torch
from torch import Tensor, distributed, nn
from torch.utils._pytree import tree_map_only

from ludus.errors import LearnerError, UserError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

T = TypeVar("T")


RankMethod = Literal[
    "start",
    "score",
    "set_temperature",
    "train",
    "score_values",
    "train_values",
    "gather_weights",
    "probe",
    "save",
    "dry_run",
    "stop",
]
"""Method that rank 0 calls on the other ranks (`rl.rank_worker`)."""


class Collectives:
    """Collectives of a single process, the base of others. Every rank calls every method in the same order."""

    receives_all_rows = True
    """Whether each rank receives all rows and selects its part; otherwise it receives its part."""

    @property
    def world_size(self) -> int:
        return 1

    @property
    def rank(self) -> int:
        return 0

    def sum(self, tensor: Tensor) -> None:
        """All-reduce `tensor` in place (sum)."""

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in order."""
        return [value]

    def shard_model(self, model: torch.nn.Module) -> None:
        """Shard a model's weights in place, if the ranks use sharding."""

    def call_on_ranks(self, method: RankMethod, *arguments: object) -> AbstractContextManager[None]:
        """Call `method` on the other ranks during the block, if this is rank 0 (`distributed.launcher`)."""
        return nullcontext()


ONE_PROCESS = Collectives()


class ProcessGroup(Collectives):
    """Collectives of torch's default process group. Each rank receives its own part of the rows."""

    receives_all_rows = False

    @property
    def world_size(self) -> int:
        return distributed.get_world_size()

    @property
    def rank(self) -> int:
        return distributed.get_rank()

    def sum(self, tensor: Tensor) -> None:
        distributed.all_reduce(tensor)

    def gather(self, value: T) -> list[T]:
        found: list[T] = [value] * self.world_size
        distributed.all_gather_object(found, value)
        return found


class SharedBatch(ProcessGroup):
    """Process group whose ranks select their part of all rows; weights are sharded if `shard_device` is set."""

    receives_all_rows = True

    def __init__(self, shard_device: torch.device | None = None) -> None:
        self.shard_device = shard_device
        self._mesh: DeviceMesh | None = None

    def shard_model(self, model: torch.nn.Module) -> None:
        if self.shard_device is not None:
            from torch.distributed.device_mesh import init_device_mesh

            self._mesh = self._mesh or init_device_mesh(self.shard_device.type, (self.world_size,))
            shard(model, self._mesh)


def current_ranks() -> Collectives:
    """Return the process group if `torch.distributed` is initialized, otherwise a single process."""
    return ProcessGroup() if distributed.is_available() and distributed.is_initialized() else ONE_PROCESS


def sum_gradients(parameters: Iterable[torch.nn.Parameter], ranks: Collectives) -> None:
    """All-reduce the gradients of replicated weights. One that is missing on all ranks stays None for AdamW to skip."""
    if ranks.world_size == 1:
        return
    replicated = [p for p in parameters if not is_dtensor(p)]
    present = ranks.gather([p.grad is not None for p in replicated])
    for parameter, any_present in zip(replicated, map(any, zip(*present, strict=True)), strict=True):
        if not any_present:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        ranks.sum(parameter.grad)


def gather_rows(found: Mapping[int, T], ranks: Collectives) -> dict[int, T]:
    """Gather the ranks' results by row; with several ranks, tensors are moved to the CPU."""
    if ranks.world_size == 1 or not ranks.receives_all_rows:
        return dict(found)
    plain: dict[int, T] = tree_map_only(Tensor, lambda tensor: tensor.cpu(), dict(found))
    return {i: value for part in ranks.gather(plain) for i, value in part.items()}


def raise_on_all_ranks(fault: str, hint: str, ranks: Collectives) -> None:
    """Raise LearnerError with the message and hint of the first rank whose `fault` is not empty. Collective."""
    faults: Sequence[tuple[str, str]] = ranks.gather((fault, hint))
    for rank, (text, advice) in enumerate(faults):
        if text:
            where = f" (rank {rank} of {ranks.world_size})" if ranks.world_size > 1 else ""
            raise LearnerError(text + where, advice)


@torch.no_grad()
def broadcast_weights(model: torch.nn.Module, ranks: Collectives) -> None:
    """Broadcast the weights of rank 0."""
    if ranks.world_size > 1:
        for parameter in model.parameters():
            distributed.broadcast(parameter.detach(), src=0)


_FORWARD_METHOD = "ludus_forward"
"""Method of a sharded model during which its weights are unsharded."""


class _ShardedModel(Protocol):
    def ludus_forward(self, work: Callable[[], T]) -> T: ...


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard weights, equal on all ranks, in place: after copies, before optimizers. Raises UserError without layers."""
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    policy = MixedPrecisionPolicy()
    if any(p.requires_grad and p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters()):
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for part in (*decoder_layers(model), model):
        fully_shard(part, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    setattr(model, _FORWARD_METHOD, lambda work: work())
    register_fsdp_forward_method(model, _FORWARD_METHOD)


def is_sharded(model: nn.Module) -> bool:
    """Return whether the model is sharded, without importing FSDP, which takes a second."""
    return "FSDPModule" in {c.__name__ for c in type(model).__mro__}


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether the tensor is a `DTensor`."""
    return type(tensor).__name__ == "DTensor"


def run_as_forward(model: nn.Module, work: Callable[[], T]) -> T:
    """Run `work` as the forward pass of `model`, with unsharded weights, also in the backward pass of its result."""
    return cast(_ShardedModel, model).ludus_forward(work) if is_sharded(model) else work()


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder's layers: the module list with the most weights. Raises UserError without one."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        hint = "Set training.learner.shard = false."
        raise UserError(f"{type(model).__name__} has no list of layers to shard.", hint)
    largest = max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters()))
    return list(largest)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the unsharded tensor, without gradient. Collective for a sharded tensor."""
    plain = tensor.detach()
    return cast("DTensor", plain).full_tensor() if is_dtensor(plain) else plain


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the unsharded weights by name, tied weights once. Collective."""
    return {name: full_tensor(p) for name, p in model.named_parameters()}


def local_shard(tensor: Tensor) -> Tensor:
    """Return the local shard of a tensor."""
    return cast("DTensor", tensor).to_local() if is_dtensor(tensor) else tensor


def copy_into(target: Tensor, value: Tensor) -> None:
    """Copy `value`, unsharded or sharded as `target`, into `target`, without communication."""
    with torch.no_grad():
        if not is_dtensor(target) or is_dtensor(value):
            target.copy_(value)
            return
        mesh = cast("DTensor", target).device_mesh
        chunks, rank = torch.chunk(value, mesh.size()), mesh.get_local_rank()
        local_shard(target).copy_(chunks[rank] if rank < len(chunks) else value[:0])
