"""A process that has a role, as the trainer sees it, and whoever starts such processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from ludus.cluster.protocol import Message, Spec
from ludus.errors import LudusError


class WorkerDied(LudusError):
    """A process that samples has ended, or does not answer any more."""

    exit_code = 7
    part = "cluster"


class WorkerHandle(Protocol):
    """A role in another process."""

    async def call(self, message: Message, deadline_s: float) -> object:
        """What it answers.

        Raises its error, with its own words, and RoleLost where the process ends or the deadline passes.
        Whoever is cancelled while it waits, or waits too long, has the work over there cancelled as well.
        """
        ...

    async def kill(self) -> None:
        """End it at once, whatever it does."""
        ...


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """What a machine must have for a role."""

    cpus: float = 1.0
    gpus: float = 0.0
    resources: dict[str, float] = field(default_factory=dict)


class Launcher(Protocol):
    """Starts processes."""

    @property
    def host(self) -> str:
        """The address at which they reach this process; empty where they all are on this machine."""
        ...

    async def start(self, name: str, spec: Spec, needs: ResourceRequest) -> WorkerHandle:
        """A process for a role; it has yet to begin. Raises LudusError where none can be started."""
        ...

    async def close(self) -> None:
        """Leave nothing behind."""
        ...
