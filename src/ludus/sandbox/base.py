"""Sandbox interface: limits, outcomes, sessions and the base class of backends."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Literal

from ludus.errors import UserError
from ludus.sandbox.guest.files import MAX_DEPTH, MAX_PATH_CHARS

MIB = 2**20
SessionKind = Literal["python", "shell"]


@dataclass(frozen=True, slots=True)
class SandboxSettings:
    """Name of the backend, and options of some backends.

    namespaces: `concurrency` is the maximum of concurrent runs (0: one per CPU, at least 2), `python` the interpreter
    inside (empty: this one, else the system's). `binds` are host folders that programs may read, at the same path or,
    as `folder:target`, at another; `paths` are added to `sys.path`. namespaces, docker and podman: `sessions` is the
    maximum of open sessions (0: as many as fit in half of the memory). docker and podman: `image` needs Python 3.10 or
    newer, `runtime` is a container runtime (runsc). remote and public services: `url`, and `token`, sent as a bearer
    token. process: `unsafe`.
    """

    backend: str = "namespaces"
    concurrency: int = 0
    sessions: int = 0
    python: str = ""
    binds: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    image: str = "python:3.12-slim"
    runtime: str = ""
    url: str = ""
    token: str = ""
    unsafe: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of one run, or of one call of a session. Raises UserError unless positive.

    `wall_s` and `cpu_s` (total of all processes) are seconds. `memory_bytes` bounds the address space of each process
    and the resident memory of all together. `disk_bytes` and `disk_files` bound everything written, `file_bytes` one
    file. `output_bytes` bounds the captured part of stdout and of stderr: two thirds from its head, one from its tail.
    `files_out` and `files_out_bytes` bound the returned files and may be 0.
    """

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_bytes: int = 512 * MIB
    processes: int = 32
    open_files: int = 128
    file_bytes: int = 32 * MIB
    disk_bytes: int = 64 * MIB
    disk_files: int = 4096
    output_bytes: int = 64 * 1024
    files_out: int = 64
    files_out_bytes: int = 4 * MIB

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            may_be_zero = name in ("files_out", "files_out_bytes")
            if not (0 < value < math.inf or (value == 0 and may_be_zero)):
                raise UserError(f"The sandbox limit {name} is {value}.", "Set a positive, finite number.")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a run. It is untrusted: the program chooses its exit code and output.

    `exit` is the exit code, None if a signal (`signal`) ended the program. `timed_out`: the wall-clock or CPU limit was
    exceeded; `memory_exceeded`: the memory limit; `truncated`: output was cut or files were omitted. `omitted_bytes` of
    the output were dropped, with a note in the stream. `files` are the regular files with one link that the program
    created or changed, by path relative to its folder. `peak_memory_bytes` is the sampled total of all processes.
    """

    stdout: bytes = b""
    stderr: bytes = b""
    exit: int | None = None
    signal: int | None = None
    timed_out: bool = False
    memory_exceeded: bool = False
    truncated: bool = False
    omitted_bytes: int = 0
    files: Mapping[str, bytes] = field(default_factory=dict)
    cpu_s: float = 0.0
    wall_s: float = 0.0
    peak_memory_bytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether the program exited with code 0 within its limits."""
        return self.exit == 0 and not self.timed_out and not self.memory_exceeded

    @property
    def text(self) -> str:
        """The stdout as text; invalid UTF-8 is replaced."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def error_text(self) -> str:
        """The stderr as text; invalid UTF-8 is replaced."""
        return self.stderr.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Regular files of a session: contents by path, and the executable ones.

    Links, pipes and empty folders are not included. `skipped` counts regular files and folders that a snapshot cannot
    name: hard links, unprintable names, more than 32 levels deep, paths longer than 512 characters.
    """

    files: Mapping[str, bytes]
    executable: frozenset[str] = frozenset()
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a session as reported by the kernel; `pid` and `started` identify it uniquely.

    `started` is in kernel clock ticks, `state` a letter of proc(5) (R S D T Z), `program` the executable's path.
    `title` is a name of at most 15 bytes that the process sets. `argv`, `environment` (as of program start) and
    `folder` are also under the program's control.
    """

    pid: int
    parent: int
    started: int
    state: str
    title: str
    program: str
    folder: str
    argv: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FileChange:
    """Changes to individual files of a session; all other files, links and folders are unchanged.

    `write` maps paths to contents, `executable` sets or clears the executable flag of written or existing files;
    `remove` is applied last. An overwritten file keeps its mode.
    """

    write: Mapping[str, bytes] = field(default_factory=dict)
    executable: Mapping[str, bool] = field(default_factory=dict)
    remove: frozenset[str] = frozenset()


class SandboxSession(ABC):
    """A persistent interpreter with its files. One call at a time; not safe to share between tasks.

    A call that exceeds its limits ends the interpreter. Variables are lost, files remain; the next call starts a new
    interpreter. Methods raise UserError for invalid input and WorldError if the sandbox failed or is closed.
    """

    @abstractmethod
    async def run(self, code: str) -> Outcome:
        """Run code. A Python session prints the value of a final expression. `files` is empty."""

    async def write(self, files: Mapping[str, bytes]) -> None:
        """Write files to the session's folder; links in a path raise WorldError."""
        await self.change(FileChange(files))

    @abstractmethod
    async def change(self, change: FileChange) -> None:
        """Write, mark and remove files; links in a path raise WorldError."""

    @abstractmethod
    async def snapshot(self) -> Snapshot:
        """Return the regular files. Raises WorldError if they exceed `files_out` or `files_out_bytes`."""

    @abstractmethod
    async def processes(self) -> tuple[Process, ...]:
        """List the session's processes, including its interpreter. Raises WorldError above 128 KiB of text."""

    @abstractmethod
    async def restore(self, snapshot: Snapshot) -> None:
        """Replace the files with those of the snapshot. Variables and processes are unaffected."""

    @abstractmethod
    async def reset(self) -> None:
        """End all processes, remove the files, and start a new interpreter."""

    @abstractmethod
    async def close(self) -> None:
        """End the session and delete its files."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A validated run: either `source` (Python as UTF-8, including surrogates) or `argv`."""

    source: bytes | None
    argv: tuple[str, ...]
    files: Mapping[str, bytes]
    stdin: bytes
    limits: Limits


class Sandbox(ABC):
    """Runs programs isolated from the host. A backend that cannot do so raises UserError and runs nothing.

    Backends implement `_run` and, if they have sessions, `_open_session`; both receive validated arguments.
    """

    name: str
    """Name of the backend."""

    @property
    def max_sessions(self) -> int | None:
        """Recommended maximum of open sessions, None if there is none. The caller must enforce it.

        The sandbox neither refuses nor queues sessions, since a queued one could deadlock with one that waits for it.
        """
        return None

    async def run(
        self,
        program: str | Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        limits: Limits | None = None,
    ) -> Outcome:
        """Run a Python program (str) or a command (sequence) once, in a folder that contains `files`.

        Raises UserError for invalid input or an unavailable backend, WorldError if the sandbox failed.
        """
        return await self._run(make_request(program, files, stdin, limits))

    async def session(
        self, kind: SessionKind = "python", *, files: Mapping[str, bytes] | None = None, limits: Limits | None = None
    ) -> SandboxSession:
        """Open a session; `limits` apply per call, those of disk and processes in all. Raises as `run` does."""
        if kind not in ("python", "shell"):
            raise UserError(f"Unknown session kind {kind!r}.", "Kinds: python, shell.")
        return await self._open_session(kind, validate_files(files or {}), limits or Limits())

    @abstractmethod
    async def close(self) -> None:
        """End all processes and free all resources of the backend."""

    @abstractmethod
    async def _run(self, request: RunRequest) -> Outcome: ...

    async def _open_session(self, kind: SessionKind, files: Mapping[str, bytes], limits: Limits) -> SandboxSession:
        raise UserError("This sandbox backend does not support sessions.", "Use namespaces, docker, podman or remote.")


def sessions_in_memory() -> int:
    """Return how many sessions with default limits fit in half of this machine's memory, at least 2."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(2, memory // 2 // Limits().memory_bytes)


def make_request(
    program: str | Sequence[str], files: Mapping[str, bytes] | None, stdin: bytes, limits: Limits | None
) -> RunRequest:
    """Validate the arguments of `Sandbox.run`. Raises UserError."""
    source = program.encode("utf-8", "surrogatepass") if isinstance(program, str) else None
    argv = () if isinstance(program, str) else tuple(program)
    if source is None and (not argv or not argv[0] or any("\0" in word for word in argv)):
        raise UserError("A command needs at least one argument, without NUL characters.")
    return RunRequest(source, argv, validate_files(files or {}), stdin, limits or Limits())


def validate_files(files: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """Validate that all paths are relative and inside the folder; return the files. Raises UserError."""
    for path in files:
        parts = PurePosixPath(path).parts
        invalid = not parts or path.startswith("/") or ".." in parts or "\0" in path or len(path) > MAX_PATH_CHARS
        invalid = invalid or len(parts) > MAX_DEPTH + 1 or path.endswith("/") or not path.isprintable()
        if invalid:
            hint = f"Use a relative path without '..', at most {MAX_DEPTH} folders deep."
            raise UserError(f"{path!r} is not a valid sandbox file path.", hint)
    return files
