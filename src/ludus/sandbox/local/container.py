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
    _client: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _errors: IO[bytes] | None = field(default=None, init=False)
    _sock: SupervisorSocket | None = field(default=None, init=False)

    async def start_supervisor(self) -> SupervisorSocket:
        await self.kill()
        client, errors, self._sock = self._spawn()
        try:
            async with asyncio.timeout(_START_S):
                data = guest_modules(as_bytecode=False) + pack_request({}, [seccomp_filter()])
                await asyncio.get_running_loop().sock_sendall(self._sock.sock, data)
                await self._sock.receive(max_body=0)
        except (OSError, WorldError, TimeoutError) as error:
            self._sock.close()
            await wait_exit(client, GRACE_S)
            reason = read_errors(errors)[:500] or type(error).__name__
            await self.kill()
            raise WorldError(f"The container did not start its supervisor: {reason}.") from error
        return self._sock

    def prefork(self) -> None:
        """Do nothing: containers are started on demand."""

    async def survives(self) -> bool:
        """Return whether process 1 exited, as opposed to a failure of the engine."""
        assert self._client is not None
        code = await wait_exit(self._client, GRACE_S)
        return code is None or (code >= 0 and code != _ENGINE_FAILED)

    async def kill(self) -> None:
        """Close the connection, so that supervisor and container exit; remove the container if it does not."""
        client, errors = self._client, self._errors
        if client is None or errors is None or self._sock is None:
            return
        self._sock.close()
        if await wait_exit(client, GRACE_S) is None:
            await asyncio.to_thread(self._remove)  # killing only the client would leave the container running
            client.kill()
            client.wait()
        errors.close()
        self._client = self._errors = None

    def _spawn(self) -> tuple[subprocess.Popen[bytes], IO[bytes], SupervisorSocket]:
        self._name = f"ludus-{secrets.token_hex(8)}"
        command = [self.engine, *run_arguments(self.settings, self.limits, self._name)]
        ours, theirs = socket.socketpair()
        errors = open_errors()
        try:
            client = subprocess.Popen(
                [*command, "python3", "-s", "-c", bootstrap("run_container", 0)],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=errors,
                env={"PATH": os.defpath, "HOME": "/"},
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            errors.close()
            raise WorldError(f"{self.settings.backend} cannot be started: {error}.") from error
        finally:
            theirs.close()
        ours.setblocking(False)
        self._client, self._errors = client, errors
        return client, errors, SupervisorSocket(ours)

    def _remove(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            command = [self.engine, "rm", "--force", self._name]
            subprocess.run(command, capture_output=True, timeout=GRACE_S, check=False)


@dataclass(eq=False)
class ContainerSandbox(SupervisorSandbox[Container]):
    """The container backend. Raises UserError if the engine or runtime is not installed."""

    def __post_init__(self) -> None:
        self.name, self._engine = self.settings.backend, find_engine(self.settings)

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


def find_engine(settings: SandboxSettings) -> str:
    """Return the path of the engine. Raises UserError if it is not installed."""
    if settings.backend not in _PACKAGES:
        raise UserError(f"Unknown container engine {settings.backend!r}.", "Engines: docker, podman.")
    engine = shutil.which(settings.backend)
    if engine is None:
        raise UserError(
            f"The {settings.backend} backend needs {settings.backend}, which is not installed.",
            f"Install it: on Debian `apt-get install {_PACKAGES[settings.backend]}`.",
        )
    if settings.runtime and shutil.which(settings.runtime) is None:
        raise UserError(
            f"The container runtime {settings.runtime} is not installed.",
            "For gVisor, install runsc (see gvisor.dev) and register it with the engine.",
        )
    return engine


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
