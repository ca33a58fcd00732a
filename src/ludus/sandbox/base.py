"""Sandbox interface: limits, outcomes, sessions and the backend protocol."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal, Protocol, runtime_checkable

from ludus.errors import UserError
from ludus.sandbox.guest.files import DEEPEST, LONGEST

MIB = 2**20
SessionKind = Literal["python", "shell"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of one run, or of one call of a session. Raises UserError unless positive.

    `wall_s` and `cpu_s` (total of all processes) are seconds. `memory_bytes` bounds the address space of each
    process and the resident memory of all together. `disk_bytes` and `disk_files` bound everything written,
    `file_bytes` one file. `output_bytes` bounds the kept part of each of stdout and stderr: two thirds from
    its head, one from its tail. `files_out` and `files_out_bytes` bound the returned files.
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
        values = {
            "wall_s": self.wall_s,
            "cpu_s": self.cpu_s,
            "memory_bytes": self.memory_bytes,
            "processes": self.processes,
            "open_files": self.open_files,
            "file_bytes": self.file_bytes,
            "disk_bytes": self.disk_bytes,
            "disk_files": self.disk_files,
            "output_bytes": self.output_bytes,
        }
        for name, value in values.items():
            if not 0 < value < float("inf"):
                raise UserError(f"The sandbox limit {name} is {value}.", "Set a positive, finite number.")
        if self.files_out < 0 or self.files_out_bytes < 0:
            raise UserError("The sandbox limits files_out and files_out_bytes cannot be negative.")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a run. It is untrusted: the program chooses its exit code and output.

    `exit` is the exit code, None if a signal (`signal`) ended the program. `timed_out`: the wall-clock or CPU
    limit was exceeded; `memory_exceeded`: the memory limit; `truncated`: output was cut or files were
    omitted. `left_out_bytes` of the output were dropped, with a note in the stream. `files` are the regular
    files with one link that the program created or changed, by path relative to its folder.
    `peak_memory_bytes` is the sampled total of all processes.
    """

    stdout: bytes = b""
    stderr: bytes = b""
    exit: int | None = None
    signal: int | None = None
    timed_out: bool = False
    memory_exceeded: bool = False
    truncated: bool = False
    left_out_bytes: int = 0
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

    Links, pipes and empty folders are not included. `left_out` counts regular files and folders that a
    snapshot cannot name: hard links, unprintable names, more than 32 levels deep, paths longer than 512
    characters.
    """

    files: Mapping[str, bytes]
    executable: frozenset[str] = frozenset()
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a session as reported by the kernel; `pid` and `started` identify it uniquely.

    `started` is in kernel clock ticks, `state` a letter of proc(5) (R S D T Z), `program` the executable's
    path. `title` is a name of at most 15 bytes that the process sets. `argv`, `environment` (as of program
    start) and `folder` are also under the program's control.
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
    """Changes to individual files of a session; all other files, links and folders stay.

    `write` maps paths to contents, `executable` sets or clears the executable flag of written or existing
    files; `remove` is applied last. An overwritten file keeps its mode.
    """

    write: Mapping[str, bytes] = field(default_factory=dict)
    executable: Mapping[str, bool] = field(default_factory=dict)
    remove: frozenset[str] = frozenset()


class SandboxSession(Protocol):
    """A persistent interpreter with its files. One call at a time; not safe to share between tasks.

    A call that exceeds its limits ends the interpreter: variables are lost, files stay, and the next call
    starts a new interpreter. Methods raise WorldError only if the sandbox itself failed.
    """

    async def run(self, code: str) -> Outcome:
        """Run code. A Python session prints the value of a final expression. `files` is empty."""
        ...

    async def write(self, files: Mapping[str, bytes]) -> None:
        """Write files to the session's folder; links in a path raise WorldError."""
        ...

    async def change(self, change: FileChange) -> None:
        """Write, mark and remove files; links in a path raise WorldError."""
        ...

    async def snapshot(self) -> Snapshot:
        """Return the regular files. Raises WorldError if they exceed `files_out` or `files_out_bytes`."""
        ...

    async def processes(self) -> tuple[Process, ...]:
        """List the session's processes, including its interpreter. Raises WorldError above 128
        KiB of text."""
        ...

    async def restore(self, snapshot: Snapshot) -> None:
        """Replace the files by those of the snapshot. Variables and processes stay."""
        ...

    async def reset(self) -> None:
        """End all processes, remove the files, and start a new interpreter."""
        ...

    async def close(self) -> None:
        """End the session and delete its files."""
        ...


class Sandbox(Protocol):
    """Runs programs isolated from the host. A backend that cannot do so raises UserError and runs nothing."""

    @property
    def name(self) -> str:
        """Name of the backend."""
        ...

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
        ...

    async def session(
        self, kind: SessionKind = "python", *, files: Mapping[str, bytes] | None = None, limits: Limits | None = None
    ) -> SandboxSession:
        """Open a session; `limits` hold per call, those of disk and processes for the whole session."""
        ...

    async def close(self) -> None:
        """End all processes and free all resources of the backend."""
        ...


@runtime_checkable
class BoundsSessions(Protocol):
    """A sandbox that recommends a maximum number of sessions for this machine."""

    @property
    def most_sessions(self) -> int:
        """Recommended maximum of open sessions. The caller must enforce it: the sandbox neither refuses nor
        queues sessions, since a queued one could deadlock with one that waits for it."""
        ...


def room_in_memory() -> int:
    """Return how many sessions with default limits fit in half of this machine's memory, at least 2."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(2, memory // 2 // Limits().memory_bytes)


class RunsOnly:
    """Base class of backends without sessions or state between runs."""

    async def session(
        self, kind: SessionKind = "python", *, files: Mapping[str, bytes] | None = None, limits: Limits | None = None
    ) -> SandboxSession:
        """Raise UserError: this backend has no sessions."""
        raise UserError("This sandbox backend has no sessions.", "Use namespaces, docker, podman or remote.")

    async def close(self) -> None:
        """Do nothing: nothing is kept between runs."""


@dataclass(frozen=True, slots=True)
class RunOrder:
    """A validated run: either `source` (Python) or `argv`."""

    source: str | None
    argv: tuple[str, ...]
    files: Mapping[str, bytes]
    stdin: bytes
    limits: Limits


def make_order(
    program: str | Sequence[str], files: Mapping[str, bytes] | None, stdin: bytes, limits: Limits | None
) -> RunOrder:
    """Validate the arguments of `run`. Raises UserError."""
    argv = () if isinstance(program, str) else tuple(program)
    if not isinstance(program, str) and (not argv or not argv[0] or any("\0" in word for word in argv)):
        raise UserError("A command needs at least one argument, without NUL characters.")
    source = program if isinstance(program, str) else None
    return RunOrder(source, argv, checked_files(files or {}), stdin, limits or Limits())


def checked_files(files: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """Return the files if all paths are relative and inside the folder. Raises UserError."""
    for path in files:
        parts = PurePosixPath(path).parts
        bad = not parts or path.startswith("/") or ".." in parts or "\0" in path or len(path) > LONGEST
        bad = bad or len(parts) > DEEPEST + 1
        if bad or path.endswith("/") or not path.isprintable():
            raise UserError(
                f"{path!r} is not a valid sandbox file path.",
                f"Use a relative path without '..', at most {DEEPEST} folders deep.",
            )
    return files
