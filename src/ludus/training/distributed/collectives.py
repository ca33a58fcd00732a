"""Collective operations of the learner's ranks.

Each rank works on a part of the rows. Counts are global, gradients are summed, and all ranks take the same
step. Without `torch.distributed` there is one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor, distributed
from torch.utils._pytree import tree_map_only

from ludus.errors import LearnerError
from ludus.training.distributed.fsdp import is_split, make_mesh, shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


class Collectives(Protocol):
    """The ranks of a run. Every rank calls every method in the same order."""

    @property
    def count(self) -> int:
        """The world size."""
        ...

    @property
    def rank(self) -> int:
        """The rank of this process."""
        ...

    @property
    def whole(self) -> bool:
        """Whether each rank receives all rows and selects its part; otherwise it receives its part."""
        ...

    def sum(self, tensor: Tensor) -> None:
        """All-reduce `tensor` in place (sum)."""
        ...

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in order."""
        ...

    def split(self, model: torch.nn.Module) -> None:
        """Shard a model's weights in place, if the ranks use sharding."""
        ...

    def together(self, command: object) -> AbstractContextManager[None]:
        """Run `command` on the other ranks during the block, if this is rank 0 (`distributed.launcher`)."""
        ...


class SingleProcess:
    """Collectives of a single process."""

    count = 1
    rank = 0
    whole = True

    def sum(self, tensor: Tensor) -> None:
        """Do nothing."""

    def gather(self, value: T) -> list[T]:
        """Return the value in a list."""
        return [value]

    def split(self, model: torch.nn.Module) -> None:
        """Do nothing."""

    def together(self, command: object) -> AbstractContextManager[None]:
        """Return a null context."""
        return nullcontext()


ONE_PROCESS = SingleProcess()


class ProcessGroup:
    """Ranks of torch's default group. Each receives its own part of the rows."""

    whole = False

    @property
    def count(self) -> int:
        """The world size."""
        return distributed.get_world_size()

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return distributed.get_rank()

    def sum(self, tensor: Tensor) -> None:
        """All-reduce `tensor` in place (sum)."""
        distributed.all_reduce(tensor)

    def gather(self, value: T) -> list[T]:
        """Return the pickled values of all ranks."""
        found: list[T] = [value] * self.count
        distributed.all_gather_object(found, value)
        return found

    def split(self, model: torch.nn.Module) -> None:
        """Do nothing: weights are replicated."""

    def together(self, command: object) -> AbstractContextManager[None]:
        """Return a null context: every rank runs the same program."""
        return nullcontext()


class SharedBatch(ProcessGroup):
    """Process group in which every rank receives all rows and selects its part.

    Weights are sharded if there is a device to `split` on (`distributed.fsdp`), otherwise replicated.
    """

    whole = True

    def __init__(self, split: torch.device | None = None) -> None:
        self._device = split
        self._mesh: DeviceMesh | None = None

    def split(self, model: torch.nn.Module) -> None:
        """Shard the weights if a device is set."""
        if self._device is not None:
            self._mesh = self._mesh or make_mesh(self._device, self.count)
            shard(model, self._mesh)


def current_ranks() -> Collectives:
    """Return the process group if `torch.distributed` is initialized, otherwise a single process."""
    return ProcessGroup() if distributed.is_available() and distributed.is_initialized() else SingleProcess()


def sum_gradients(parameters: Iterable[torch.nn.Parameter], ranks: Collectives) -> None:
    """All-reduce the gradients. A gradient missing on all ranks stays None, and AdamW skips it.

    Gradients of sharded weights are already reduced.
    """
    if ranks.count == 1:
        return
    held = [p for p in parameters if not is_split(p)]
    present = ranks.gather([p.grad is not None for p in held])
    for parameter, some in zip(held, map(any, zip(*present, strict=True)), strict=True):
        if not some:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        ranks.sum(parameter.grad)


def merged(found: Mapping[int, T], ranks: Collectives) -> dict[int, T]:
    """Gather the ranks' results by row; with several ranks, tensors are moved to the CPU."""
    if ranks.count == 1 or not ranks.whole:
        return dict(found)
    plain: dict[int, T] = tree_map_only(Tensor, lambda tensor: tensor.cpu(), dict(found))
    return {i: value for part in ranks.gather(plain) for i, value in part.items()}


def raise_together(fault: str, hint: str, ranks: Collectives) -> None:
    """Raise LearnerError on every rank if one has a fault (message; empty: none), with its hint."""
    faults: Sequence[tuple[str, str]] = ranks.gather((fault, hint))
    for rank, (text, way_on) in enumerate(faults):
        if text:
            where = f" (rank {rank} of {ranks.count})" if ranks.count > 1 else ""
            raise LearnerError(text + where, way_on)


@torch.no_grad()
def same_weights(model: torch.nn.Module, ranks: Collectives) -> None:
    """Broadcast the weights of rank 0."""
    if ranks.count > 1:
        for parameter in model.parameters():
            distributed.broadcast(parameter.detach(), src=0)
