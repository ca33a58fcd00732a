"""Several processes that share one batch: what the learner asks of them.

Each works on a part of the rows. Counts are of all rows, gradients are summed, and every process takes the
same step. Without `torch.distributed` there is one process, and nothing is sent.
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
    """The processes of a run. Each calls every method, in the same order."""

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    @property
    def rank(self) -> int:
        """Which of them this is, from 0."""
        ...

    @property
    def whole(self) -> bool:
        """Whether each is given all rows, and takes its part of them; otherwise it is given its part."""
        ...

    def sum(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over the processes."""
        ...

    def gather(self, value: T) -> list[T]:
        """The values of all processes, in their order."""
        ...

    def split(self, model: torch.nn.Module) -> None:
        """Split the weights of a model between the processes, in place, where they work so."""
        ...

    def together(self, command: object) -> AbstractContextManager[None]:
        """Have the others do what is done within the block, where this process leads them
        (`distributed.launcher`).
        """
        ...


class SingleProcess:
    """One process."""

    count = 1
    rank = 0
    whole = True

    def sum(self, tensor: Tensor) -> None:
        """Nothing to add."""

    def gather(self, value: T) -> list[T]:
        """Its own value."""
        return [value]

    def split(self, model: torch.nn.Module) -> None:
        """Nothing to split."""

    def together(self, command: object) -> AbstractContextManager[None]:
        """Nobody to tell."""
        return nullcontext()


ONE_PROCESS = SingleProcess()


class ProcessGroup:
    """The processes of torch's default group. Each is given its own part of the rows."""

    whole = False

    @property
    def count(self) -> int:
        """How many there are."""
        return distributed.get_world_size()

    @property
    def rank(self) -> int:
        """Which of them this is."""
        return distributed.get_rank()

    def sum(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over the processes."""
        distributed.all_reduce(tensor)

    def gather(self, value: T) -> list[T]:
        """The values of all processes; they travel pickled."""
        found: list[T] = [value] * self.count
        distributed.all_gather_object(found, value)
        return found

    def split(self, model: torch.nn.Module) -> None:
        """Each holds all weights."""

    def together(self, command: object) -> AbstractContextManager[None]:
        """Each knows by itself what comes next."""
        return nullcontext()


class SharedBatch(ProcessGroup):
    """The same, where each is given all rows and takes its part of them.

    With a device to `split` on, each holds a part of the weights there (`distributed.fsdp`), otherwise all.
    """

    whole = True

    def __init__(self, split: torch.device | None = None) -> None:
        self._device = split
        self._mesh: DeviceMesh | None = None

    def split(self, model: torch.nn.Module) -> None:
        """Split the weights where there is a device to."""
        if self._device is not None:
            self._mesh = self._mesh or make_mesh(self._device, self.count)
            shard(model, self._mesh)


def current_ranks() -> Collectives:
    """The group where `torch.distributed` is set up, otherwise this process."""
    return ProcessGroup() if distributed.is_available() and distributed.is_initialized() else SingleProcess()


def sum_gradients(parameters: Iterable[torch.nn.Parameter], ranks: Collectives) -> None:
    """Replace each gradient by its sum. One that no process has stays away; AdamW skips it.

    Shards of gradients are sums already.
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
    """What the processes found, each for rows of its own, by row; tensors of several come on the CPU."""
    if ranks.count == 1 or not ranks.whole:
        return dict(found)
    plain: dict[int, T] = tree_map_only(Tensor, lambda tensor: tensor.cpu(), dict(found))
    return {i: value for part in ranks.gather(plain) for i, value in part.items()}


def raise_together(fault: str, hint: str, ranks: Collectives) -> None:
    """Raise LearnerError in every process where one has a fault (a sentence; empty: none), with its hint."""
    faults: Sequence[tuple[str, str]] = ranks.gather((fault, hint))
    for rank, (text, way_on) in enumerate(faults):
        if text:
            where = f" (process {rank} of {ranks.count})" if ranks.count > 1 else ""
            raise LearnerError(text + where, way_on)


@torch.no_grad()
def same_weights(model: torch.nn.Module, ranks: Collectives) -> None:
    """Give every process the weights of the first."""
    if ranks.count > 1:
        for parameter in model.parameters():
            distributed.broadcast(parameter.detach(), src=0)
