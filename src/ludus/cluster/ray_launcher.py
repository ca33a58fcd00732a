"""Workers as Ray actors, placed on the cluster's machines by resources.

The trainer's process owns the actors; Ray kills them when it exits. Episodes return through Ray's object store.
Ray's restarts are disabled; the worker pools restart workers.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ludus.cluster.protocol import (
    Message,
    ResourceRequest,
    Started,
    WorkerDied,
    WorkerHandle,
    WorkerResponse,
    WorkerSpec,
    log_records,
    start_forwarding,
    unreadable_request,
)
from ludus.cluster.workers import WorkerServer
from ludus.config.sections.cluster import ClusterConfig
from ludus.errors import LudusError, UserError

if TYPE_CHECKING:
    from ray.actor import ActorHandle

_KILL_TIMEOUT_S = 60.0
"""Timeout of killing an unresponsive actor on its machine."""
_MAX_CONCURRENCY = 10_000
"""Maximum concurrent messages of an actor; episodes are limited elsewhere."""


class RayActor(WorkerServer):
    """Worker in a Ray process."""

    def __init__(self, spec: WorkerSpec) -> None:
        import ray

        super().__init__(spec, str(ray.util.get_node_ip_address()), start_forwarding())


@dataclass
class RayWorkerHandle:
    """Handle of a Ray actor."""

    name: str
    actor: ActorHandle
    needs: ResourceRequest
    _number: int = 0
    _location: Started | None = None

    async def call(self, message: Message, deadline_s: float) -> object:
        from ray.exceptions import RayError, RaySystemError, RayTaskError

        self._number += 1
        number = self._number
        try:
            async with asyncio.timeout(deadline_s):
                response: WorkerResponse = await self.actor.call.remote(number, message)
        except TimeoutError as error:
            self.actor.cancel.remote(number)
            raise WorkerDied(f"{self.name} did not respond within {deadline_s:g} s.", self._hint()) from error
        except asyncio.CancelledError:
            self.actor.cancel.remote(number)
            raise
        except RayError as error:
            # The worker's own errors arrive as responses, so a task error here is a decoding error.
            if isinstance(error, RayTaskError) and isinstance(error.cause, RaySystemError):
                raise unreadable_request(str(error.cause).splitlines()[0].removeprefix("System error: ")) from error
            raise WorkerDied(f"{self.name} died: {_one_line(error)}") from error
        log_records(self.name, response.records)
        value = response.take()
        if isinstance(value, Started):
            self._location = value
        return value

    def _hint(self) -> str:
        """Return the required and free resources if the actor has not started, otherwise an empty string."""
        import ray

        if self._location is not None:
            return ""
        free = {name: count for name, count in ray.available_resources().items() if ":" not in name}
        return f"It needs {self.needs}, and the cluster has {free} free. See cluster.startup_timeout_s."

    async def kill(self) -> None:
        """Kill the actor. Also kill its process: a process stopped by a signal does not respond to Ray."""
        import ray

        ray.kill(self.actor)
        if (location := self._location) is None:
            return
        if location.host == ray.util.get_node_ip_address():
            _kill_process(location.pid)
        else:
            await _kill_on_node(location)


def _kill_process(pid: int) -> None:
    """Kill an actor's process, unless its id has been reused."""
    with suppress(OSError):
        if b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)


async def _kill_on_node(location: Started) -> None:
    """Kill an actor through a task on its machine, if it still exists."""
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = await asyncio.to_thread(ray.nodes)
    found = [n["NodeID"] for n in nodes if n["Alive"] and n["NodeManagerAddress"] == location.host]
    for node in found[:1]:
        on_node = NodeAffinitySchedulingStrategy(node, soft=False)
        task = ray.remote(_kill_process).options(num_cpus=0, max_retries=0, scheduling_strategy=on_node)
        with suppress(RayError, TimeoutError):
            async with asyncio.timeout(_KILL_TIMEOUT_S):
                await task.remote(location.pid)


class RayLauncher:
    """Start actors in the configured cluster, which `__init__` joins or starts. Raises UserError."""

    def __init__(self, config: ClusterConfig, needs: list[ResourceRequest]) -> None:
        try:
            import ray
        except ImportError as error:
            hint = "Install it: pip install 'ludus[cluster]'."
            raise UserError("A Ray cluster needs the package ray.", hint) from error
        self._joined = ray.is_initialized()
        if self._joined:
            return
        try:
            if config.address is not None:
                ray.init(address=config.address, log_to_driver=False, logging_level="warning")
            else:
                _start_local_cluster(needs)
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            text = f"Cannot connect to the Ray cluster {config.address or 'of this machine'}: {_one_line(error)}"
            raise UserError(text, "Start it with `ray start --head`, and check cluster.address.") from error

    @property
    def host(self) -> str:
        """Address of this machine in the cluster; empty if it is the only machine."""
        import ray

        return str(ray.util.get_node_ip_address()) if len(ray.nodes()) > 1 else ""

    async def start(self, name: str, spec: WorkerSpec) -> WorkerHandle:
        """Start an actor on a machine with the required resources; returns before it is placed."""
        import ray

        needs = spec.needs
        try:
            actor = ray.remote(RayActor).options(
                num_cpus=needs.cpus,
                num_gpus=needs.gpus,
                resources=needs.resources or None,
                scheduling_strategy="SPREAD",
                max_concurrency=_MAX_CONCURRENCY,
                max_restarts=0,
            )
            return RayWorkerHandle(name, actor.remote(spec), needs)
        except (ValueError, TypeError) as error:
            raise LudusError(f"Ray cannot start {name}: {_one_line(error)}") from error

    async def close(self) -> None:
        """Disconnect from the cluster, unless Ray was initialized before; a cluster started here stops."""
        import ray

        if not self._joined:
            await asyncio.to_thread(ray.shutdown)


def _start_local_cluster(needs: list[ResourceRequest]) -> None:
    """Start a private cluster on this machine with resources for all workers."""
    import ray

    resources: Counter[str] = Counter()
    for need in needs:
        resources.update(need.resources)
    cpus = max(os.cpu_count() or 1, math.ceil(sum(need.cpus for need in needs)))
    own = {"resources": dict(resources) or None, "include_dashboard": False}
    try:
        ray.init(num_cpus=cpus, log_to_driver=False, logging_level="warning", **own)
    except Exception as error:
        if type(error) is not Exception:
            raise
        # Ray raises a bare Exception if its processes exceed its 30 s timeout
        raise UserError(
            f"Ray did not start on this machine: {_one_line(error)}",
            "Ray's own timeout is 30 s, independent of cluster.startup_timeout_s. Retry with less load on the "
            "machine, or use --cluster local.",
        ) from error


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:1000] or type(error).__name__
