"""Docker or Podman containers, optionally with gVisor.

The supervisor of the namespaces backend is process 1 of a container created for one run or session. It reads requests
from stdin and writes responses to stdout; when stdin closes, also because this process died, it exits and the container
with it. The container has no network, a read-only root, no capabilities, an unprivileged user, size-limited in-memory
folders, and the engine's process and memory limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import socket
import subprocess
from dataclasses import dataclass, field
from typing import IO

from ludus.errors import UserError, WorldError
from ludus.sandbox.base import Limits, Outcome, RunRequest, SandboxSettings
from ludus.sandbox.guest.wire import pack_request
from ludus.sandbox.local.namespaces import (
    PROGRAM_ENVIRONMENT,
    bootstrap,
    guest_modules,
    open_errors,
    read_errors,
    wait_exit,
)
from ludus.sandbox.local.seccomp import seccomp_filter
from ludus.sandbox.local.supervisor_client import (
    GRACE_S,
    SupervisorHost,
    SupervisorSandbox,
    SupervisorSocket,
    run_request,
)

_PACKAGES = {"docker": "docker.io", "podman": "podman"}
_START_S = 60.0
_LABEL = "ludus"  # label of all containers: `docker ps --filter label=ludus`
_ENGINE_FAILED = 125  # exit code of the engine's client if the engine, not the container, failed
_SUPERVISOR_BYTES = 64 * 2**20  # memory of the supervisor itself


@dataclass(eq=False)
class Container(SupervisorHost):
    """Runs supervisors as process 1 of containers, one new container per supervisor."""

    engine: str
    settings: SandboxSettings
    limits: Limits
    _name: str = field(default="", init=False)
    _running: tuple[subprocess.Popen[bytes], IO[bytes], SupervisorSocket] | None = field(default=None, init=False)

    async def start_supervisor(self) -> SupervisorSocket:
        await self.kill()
        client, errors, sock = self._running = self._spawn()
        try:
            async with asyncio.timeout(_START_S):
                data = guest_modules(as_bytecode=False) + pack_request({}, [seccomp_filter()])
                await asyncio.get_running_loop().sock_sendall(sock.sock, data)
                await sock.receive(max_body=0)
        except (OSError, WorldError, TimeoutError) as error:
            sock.close()
            await wait_exit(client, GRACE_S)
            reason = read_errors(errors)[:500] or type(error).__name__
            await self.kill()
            raise WorldError(f"The container did not start its supervisor: {reason}.") from error
        return sock

    def prefork(self) -> None:
        """Do nothing: containers are started on demand."""

    async def survives(self) -> bool:
        """Return whether process 1 exited, as opposed to a failure of the engine."""
        assert self._running is not None
        code = await wait_exit(self._running[0], GRACE_S)
        return code is None or (code >= 0 and code != _ENGINE_FAILED)

    async def kill(self) -> None:
        """Close the connection, so that supervisor and container exit; remove the container if it does not."""
        if self._running is None:
            return
        client, errors, sock = self._running
        sock.close()
        if await wait_exit(client, GRACE_S) is None:
            command = [self.engine, "rm", "--force", self._name]  # else the container would outlive its client
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=GRACE_S, check=False)
            client.kill()
            client.wait()
        errors.close()
        self._running = None

    def _spawn(self) -> tuple[subprocess.Popen[bytes], IO[bytes], SupervisorSocket]:
        self._name = f"ludus-{secrets.token_hex(8)}"
        command = [self.engine, *run_arguments(self.settings, self.limits, self._name)]
        command += ["python3", "-s", "-c", bootstrap("run_container", 0)]
        ours, theirs = socket.socketpair()
        errors = open_errors()
        try:
            fd, env = theirs.fileno(), {"PATH": os.defpath, "HOME": "/"}
            client = subprocess.Popen(
                command, stdin=fd, stdout=fd, stderr=errors, env=env, cwd="/", start_new_session=True
            )
        except OSError as error:
            ours.close()
            errors.close()
            raise WorldError(f"{self.settings.backend} cannot be started: {error}.") from error
        finally:
            theirs.close()
        ours.setblocking(False)
        return client, errors, SupervisorSocket(ours)


@dataclass(eq=False)
class ContainerSandbox(SupervisorSandbox[Container]):
    """The container backend. Raises UserError if the engine or runtime is not installed."""

    def __post_init__(self) -> None:
        self.name, runtime = self.settings.backend, self.settings.runtime
        if self.name not in _PACKAGES:
            raise UserError(f"Unknown container engine {self.name!r}.", "Engines: docker, podman.")
        self._engine = shutil.which(self.name) or ""
        if not self._engine:
            hint = f"Install it: on Debian `apt-get install {_PACKAGES[self.name]}`."
            raise UserError(f"The {self.name} backend needs {self.name}, which is not installed.", hint)
        if runtime and shutil.which(runtime) is None:
            hint = "For gVisor, install runsc (see gvisor.dev) and register it with the engine."
            raise UserError(f"The container runtime {runtime} is not installed.", hint)

    async def _run(self, request: RunRequest) -> Outcome:
        container = await self._new_host(request.limits)
        try:
            return await run_request(container, request)
        finally:
            await asyncio.shield(self._kill(container))

    async def _new_host(self, limits: Limits) -> Container:
        container = Container(self._engine, self.settings, limits)
        self._open.add(container)
        return container


def run_arguments(settings: SandboxSettings, limits: Limits, name: str) -> list[str]:
    """Return the engine's arguments, ending with the image."""
    memory = str(limits.memory_bytes + limits.disk_bytes + _SUPERVISOR_BYTES)
    tmpfs = f"rw,nosuid,nodev,exec,mode=1777,size={limits.disk_bytes}"
    if settings.backend == "docker":  # Podman rejects the option
        tmpfs += f",nr_inodes={limits.disk_files}"
    args = ["run", "--rm", "--interactive", "--name", name, "--label", _LABEL]
    args += ["--pull", "never", "--network", "none"]
    args += ["--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", "65534:65534"]
    args += ["--pids-limit", str(limits.processes + 2), "--memory", memory, "--memory-swap", memory]
    args += ["--tmpfs", f"/box:{tmpfs}", "--tmpfs", f"/tmp:{tmpfs}", "--workdir", "/box", "--hostname", "box"]
    args += ["--ipc", "private", "--shm-size", str(limits.disk_bytes), "--ulimit", "core=0", "--log-driver", "none"]
    for name, value in PROGRAM_ENVIRONMENT.items():
        args += ["--env", f"{name}={value}"]
    if settings.runtime:
        args += ["--runtime", settings.runtime]
    return [*args, settings.image]
