"""Interfaces of worker processes and of their launchers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from ludus.cluster.protocol import Message, Spec
from ludus.errors import LudusError


class WorkerDied(LudusError):
    """Raised if a worker process has exited or does not respond."""

    exit_code = 7
    part = "cluster"


class WorkerHandle(Protocol):
    """Handle of a worker in another process."""

    async def call(self, message: Message, deadline_s: float) -> object:
        """Send a message and return the response.

        Raises the worker's error, or WorkerDied if the process exits or the deadline passes. On cancellation
        or timeout the remote work is cancelled.
        """
        ...

    async def kill(self) -> None:
        """Kill the process immediately."""
        ...


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """Resources of a machine that a worker needs."""

    cpus: float = 1.0
    gpus: float = 0.0
    resources: dict[str, float] = field(default_factory=dict)


class Launcher(Protocol):
    """Start worker processes."""

    @property
    def host(self) -> str:
        """The address of this process as seen by workers; empty if all are on this machine."""
        ...

    async def start(self, name: str, spec: Spec, needs: ResourceRequest) -> WorkerHandle:
        """Start a worker process without initializing it. Raises LudusError if it cannot be started."""
        ...

    async def close(self) -> None:
        """Stop everything."""
        ...
