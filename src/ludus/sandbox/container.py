"""Containers by Docker or Podman, with gVisor's runtime where it is asked for.

The same guard as in the namespaces backend is process 1 of a container that exists for one run: it gets the
order over stdin and answers over stdout. The container has no network, a read-only root, no capabilities, an
unprivileged user, sized folders in memory and the engine's limits of processes and memory.
"""

from __future__ import annotations

import os
import secrets
import shutil
import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ludus.errors import UserError, WorldError
from ludus.sandbox.base import Limits, Outcome, RunsOnly, make_order
from ludus.sandbox.cell import GRACE_S, given, most_bytes, outcome_of, sources
from ludus.sandbox.guest.wire import pack, sizes_of, unpack
from ludus.sandbox.job import Job
from ludus.sandbox.seccomp import system_call_filter

_PACKAGES = {"docker": "docker.io", "podman": "podman"}
_START_S = 60.0
_HEADER_BYTES = 1 << 20
_OTHER_MEMORY = 64 * 2**20
"""What the guard itself uses."""

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
    """`engine` is docker or podman, `image` has Python 3.9 or newer, `runtime` is the engine's (runsc)."""

    engine: str = "docker"
    image: str = "python:3.12-slim"
    runtime: str = ""


@dataclass(eq=False)
class ContainerSandbox(RunsOnly):
    """See the module. Raises UserError where the engine or the runtime is missing."""

    settings: ContainerSettings = field(default_factory=ContainerSettings)

    def __post_init__(self) -> None:
        self._engine = find_engine(self.settings)

    @property
    def name(self) -> str:
        """The engine's name."""
        return self.settings.engine

    async def run(
        self,
        program: str | Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        limits: Limits | None = None,
    ) -> Outcome:
        """One run in a container of its own. Raises UserError, and WorldError where the engine fails."""
        order = make_order(program, files, stdin, limits)
        label = f"ludus-{secrets.token_hex(8)}"
        words = [
            self._engine,
            *run_words(self.settings, order.limits, label),
            "python3",
            "-S",
            "-s",
            "-c",
            _BOOT,
        ]
        header = {"op": "run", "argv": list(order.argv), **given(order.limits, order.files)}
        source = (order.source or "").encode("utf-8", "surrogatepass")
        frame = pack(header, [system_call_filter(), order.stdin, source, *order.files.values()])
        wall_s = order.limits.wall_s + _START_S
        environment = {"PATH": os.defpath, "HOME": "/"}
        job = Job(words, "/", environment, wall_s, most_bytes(order.limits) + _HEADER_BYTES)
        try:
            done = await job.run(sources(same_python=False) + frame, lambda: self._remove(label))
        except OSError as error:
            raise WorldError(f"{self.settings.engine} cannot be started: {error}.") from error
        if done.timed_out:
            raise WorldError(f"{self.settings.engine} gave no answer within {wall_s:g} s.")
        return _read(done.stdout, done.stderr)

    def _remove(self, label: str) -> None:
        """End the container itself: to kill the engine's client alone would leave it running."""
        command = [self._engine, "rm", "--force", label]
        subprocess.run(command, capture_output=True, timeout=GRACE_S, check=False)


def find_engine(settings: ContainerSettings) -> str:
    """The engine's program. Raises UserError for one that is missing."""
    if settings.engine not in _PACKAGES:
        raise UserError(f"There is no container engine {settings.engine!r}.", "Engines: docker, podman.")
    engine = shutil.which(settings.engine)
    if engine is None:
        raise UserError(
            f"The {settings.engine} backend needs {settings.engine}, which is not installed.",
            f"Install it: on Debian `apt-get install {_PACKAGES[settings.engine]}`.",
        )
    if settings.runtime and shutil.which(settings.runtime) is None:
        raise UserError(
            f"The container runtime {settings.runtime} is not installed.",
            "gVisor's is runsc: install it as gvisor.dev says, and register it with the engine.",
        )
    return engine


def run_words(settings: ContainerSettings, limits: Limits, label: str) -> list[str]:
    """The engine's arguments up to the image, which is the last."""
    memory = str(limits.memory_bytes + limits.disk_bytes + _OTHER_MEMORY)
    sized = f"rw,nosuid,nodev,exec,mode=1777,size={limits.disk_bytes},nr_inodes={limits.disk_files}"
    words = ["run", "--rm", "--interactive", "--name", label, "--pull", "never", "--network", "none"]
    words += [
        "--read-only",
        "--cap-drop",
        "ALL",
        "--security-opt",
        "no-new-privileges",
        "--user",
        "65534:65534",
    ]
    words += ["--pids-limit", str(limits.processes + 2), "--memory", memory, "--memory-swap", memory]
    words += [
        "--tmpfs",
        f"/box:{sized}",
        "--tmpfs",
        f"/tmp:{sized}",
        "--workdir",
        "/box",
        "--hostname",
        "box",
    ]
    words += ["--ipc", "private", "--ulimit", "core=0", "--env", "HOME=/box", "--log-driver", "none"]
    if settings.runtime:
        words += ["--runtime", settings.runtime]
    return [*words, settings.image]


def _read(stdout: bytes, stderr: bytes) -> Outcome:
    """The guard's answer. Raises WorldError with the engine's words where there is none."""
    try:
        text, body = sizes_of(stdout[:8])
        header, blobs = unpack(stdout[8 : 8 + text], stdout[8 + text : 8 + text + body])
    except (ValueError, KeyError, struct.error) as error:
        words = " ".join(stderr.decode("utf-8", "replace").split())[:500]
        raise WorldError(f"The container gave no outcome: {words or 'the engine says nothing'}.") from error
    if "error" in header:
        raise WorldError(f"The sandbox failed: {header['error']}.")
    return outcome_of(header, blobs)
