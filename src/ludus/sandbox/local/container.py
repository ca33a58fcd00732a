"""Docker or Podman containers, optionally with gVisor.

The guard of the namespaces backend is process 1 of a container created for one run or session. It reads
orders from stdin and writes responses to stdout; when stdin closes, also because this process died, it exits
and the container with it. The container has no network, a read-only root, no capabilities, an unprivileged
user, size-limited in-memory folders, and the engine's process and memory limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from ludus.errors import UserError, WorldError
from ludus.sandbox.base import Limits, Outcome, SandboxSession, SessionKind, checked_files, make_order, room_in_memory
from ludus.sandbox.guest.wire import pack_order
from ludus.sandbox.local.cell import GRACE_S, Wire, sources
from ludus.sandbox.local.guard_session import GuardSession, run_order
from ludus.sandbox.local.seccomp import system_call_filter

_PACKAGES = {"docker": "docker.io", "podman": "podman"}
_START_S = 60.0
_LABEL = "ludus"
"""Label of all containers: `docker ps --filter label=ludus`."""
_ENGINE_FAILED = 125
"""Exit code of the engine's client if the engine, not the container, failed."""
_OTHER_MEMORY = 64 * 2**20
"""Memory of the guard itself."""

_BOOT = """
import marshal, os, sys
def some(count):
    parts = b""
    while len(parts) < count:
        parts += os.read(0, count - len(parts)) or sys.exit(3)
    return parts
for name, code in marshal.loads(some(int(some(8)))):
    module = sys.modules[name] = type(sys)(name)
    exec(compile(code, name, "exec"), module.__dict__)
sys.modules["ludus.sandbox.guest.contained"].main()
"""


@dataclass(frozen=True, slots=True)
class ContainerSettings:
    """`engine` is docker or podman, `image` needs Python 3.9 or newer, `runtime` is a container runtime
    (runsc).

    `sessions` is the maximum of open sessions (0: as many as fit in half of the memory).
    """

    engine: str = "docker"
    image: str = "python:3.12-slim"
    runtime: str = ""
    sessions: int = 0


@dataclass(eq=False)
class Container:
    """Runs guards as process 1 of containers, one new container per guard."""

    engine: str
    settings: ContainerSettings
    limits: Limits
    _label: str = field(default="", init=False)
    _client: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _errors: IO[bytes] | None = field(default=None, init=False)
    _wire: Wire | None = field(default=None, init=False)

    async def guard(self) -> Wire:
        """Start a new container. Raises WorldError with the engine's message."""
        await self.end()
        self._wire = wire = Wire(self._spawn())
        try:
            async with asyncio.timeout(_START_S):
                loop = asyncio.get_running_loop()
                filtered = pack_order({}, [system_call_filter()])
                await loop.sock_sendall(wire.sock, sources(same_python=False) + filtered)
                await wire.read(most=0)
        except (OSError, WorldError, TimeoutError) as error:
            wire.close()
            await self._wait(GRACE_S)
            words = self._words()
            await self.end()
            raise WorldError(f"The container started no guard: {words or type(error).__name__}.") from error
        return wire

    def prepare(self) -> None:
        """Do nothing: containers are started on demand."""

    async def goes_on(self) -> bool:
        """Return whether process 1 ended, as opposed to a failure of the engine."""
        ended = await self._wait(GRACE_S)
        return ended is None or (ended >= 0 and ended != _ENGINE_FAILED)

    async def end(self) -> None:
        """Close the wire, which ends the guard and the container; kill the container if it does not end."""
        client, errors = self._client, self._errors
        if client is None or errors is None or self._wire is None:
            return
        self._wire.close()
        if await self._wait(GRACE_S) is None:
            await asyncio.to_thread(self._remove)
            client.kill()
            client.wait()
        errors.close()
        self._client = self._errors = None

    def _spawn(self) -> socket.socket:
        """Start the engine's client and return our end of its stdin and stdout. Raises WorldError."""
        self._label = f"ludus-{secrets.token_hex(8)}"
        words = [self.engine, *run_words(self.settings, self.limits, self._label)]
        ours, theirs = socket.socketpair()
        self._errors = os.fdopen(os.memfd_create("ludus-errors"), "w+b")
        try:
            self._client = subprocess.Popen(
                [*words, "python3", "-s", "-c", _BOOT],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._errors,
                env={"PATH": os.defpath, "HOME": "/"},
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            self._errors.close()
            raise WorldError(f"{self.settings.engine} cannot be started: {error}.") from error
        finally:
            theirs.close()
        ours.setblocking(False)
        return ours

    async def _wait(self, within_s: float) -> int | None:
        """Return the exit code of the engine's client, or None if it still runs."""
        assert self._client is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self._client.poll() is None:
                    await asyncio.sleep(0.002)
        return self._client.poll()

    def _remove(self) -> None:
        """Remove the container: killing only the engine's client would leave it running."""
        command = [self.engine, "rm", "--force", self._label]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, capture_output=True, timeout=GRACE_S, check=False)

    def _words(self) -> str:
        assert self._errors is not None
        self._errors.seek(0)
        return " ".join(self._errors.read(2000).decode("utf-8", "replace").split())[:500]


@dataclass(eq=False)
class ContainerSandbox:
    """The container backend. Raises UserError if the engine or runtime is not installed."""

    settings: ContainerSettings = field(default_factory=ContainerSettings)
    _open: set[Container] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._engine = find_engine(self.settings)

    @property
    def name(self) -> str:
        """Name of the engine."""
        return self.settings.engine

    @property
    def most_sessions(self) -> int:
        """Maximum number of open sessions."""
        return self.settings.sessions or room_in_memory()

    async def run(
        self,
        program: str | Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        limits: Limits | None = None,
    ) -> Outcome:
        """Run in a new container. Raises UserError, and WorldError if the engine fails."""
        order = make_order(program, files, stdin, limits)
        home = self._home(order.limits)
        try:
            return await run_order(home, order)
        finally:
            await asyncio.shield(self._end(home))

    async def session(
        self, kind: SessionKind = "python", *, files: Mapping[str, bytes] | None = None, limits: Limits | None = None
    ) -> SandboxSession:
        """Open a session in a new container. Raises UserError, and WorldError if the engine fails."""
        given, bounds = checked_files(files or {}), limits or Limits()
        home = self._home(bounds)
        try:
            return await GuardSession.start(home, kind, given, bounds, self._end)
        except BaseException:
            await asyncio.shield(self._end(home))
            raise

    async def close(self) -> None:
        """End all containers."""
        await asyncio.gather(*(self._end(home) for home in list(self._open)))

    def _home(self, limits: Limits) -> Container:
        home = Container(self._engine, self.settings, limits)
        self._open.add(home)
        return home

    async def _end(self, home: Container) -> None:
        self._open.discard(home)
        await home.end()


def find_engine(settings: ContainerSettings) -> str:
    """Return the path of the engine. Raises UserError if it is not installed."""
    if settings.engine not in _PACKAGES:
        raise UserError(f"Unknown container engine {settings.engine!r}.", "Engines: docker, podman.")
    engine = shutil.which(settings.engine)
    if engine is None:
        raise UserError(
            f"The {settings.engine} backend needs {settings.engine}, which is not installed.",
            f"Install it: on Debian `apt-get install {_PACKAGES[settings.engine]}`.",
        )
    if settings.runtime and shutil.which(settings.runtime) is None:
        raise UserError(
            f"The container runtime {settings.runtime} is not installed.",
            "For gVisor, install runsc (see gvisor.dev) and register it with the engine.",
        )
    return engine


def run_words(settings: ContainerSettings, limits: Limits, label: str) -> list[str]:
    """Return the engine's arguments, ending with the image."""
    memory = str(limits.memory_bytes + limits.disk_bytes + _OTHER_MEMORY)
    sized = f"rw,nosuid,nodev,exec,mode=1777,size={limits.disk_bytes},nr_inodes={limits.disk_files}"
    words = ["run", "--rm", "--interactive", "--name", label, "--label", _LABEL]
    words += ["--pull", "never", "--network", "none"]
    words += ["--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", "65534:65534"]
    words += ["--pids-limit", str(limits.processes + 2), "--memory", memory, "--memory-swap", memory]
    words += ["--tmpfs", f"/box:{sized}", "--tmpfs", f"/tmp:{sized}", "--workdir", "/box", "--hostname", "box"]
    words += ["--ipc", "private", "--ulimit", "core=0", "--env", "HOME=/box", "--log-driver", "none"]
    if settings.runtime:
        words += ["--runtime", settings.runtime]
    return [*words, settings.image]
