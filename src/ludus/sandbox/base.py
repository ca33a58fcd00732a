"""What every sandbox takes and gives: limits, outcomes, sessions, and the protocol of the backends."""

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
    """What one run, or one call of a session, may use. Raises UserError for what is not positive.

    `wall_s` and `cpu_s` (of all its processes together) are seconds. `memory_bytes` bounds the address space
    of each process and the resident memory of all of them together. `disk_bytes` and `disk_files` bound
    everything written, `file_bytes` one file. `output_bytes` bounds what is kept of each of stdout and
    stderr: two thirds from its head, one from its tail. `files_out` and `files_out_bytes` bound the files
    that are given back.
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
                raise UserError(f"The sandbox limit {name} is {value}.", "Give a positive, finite number.")
        if self.files_out < 0 or self.files_out_bytes < 0:
            raise UserError("The sandbox limits files_out and files_out_bytes cannot be negative.")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: never a judgement, for a program chooses its exit code and its output.

    `exit` is the exit code, None where a signal (`signal`) ended it. `timed_out` is true past the wall clock
    or the CPU seconds, `memory_exceeded` where memory ended it, `truncated` where output was cut or files
    were left out; `left_out_bytes` of the output are not kept, and a note in the streams says where. `files`
    are the regular files, with one link, that it made or changed, by their path under its folder.
    `peak_memory_bytes` is of all processes together, sampled.
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
        """Whether it ended by itself with exit code 0."""
        return self.exit == 0 and not self.timed_out and not self.memory_exceeded

    @property
    def text(self) -> str:
        """Its stdout as text; bytes that are no UTF-8 are replaced."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def error_text(self) -> str:
        """Its stderr as text; bytes that are no UTF-8 are replaced."""
        return self.stderr.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The regular files of a session: contents by path, and which of them are executable.

    Links, pipes and empty folders are not among them. `left_out` counts regular files, and folders with all
    that is in them, that no path of a snapshot can name: hard links, names that do not print, more than 32
    folders deep, paths of more than 512 characters.
    """

    files: Mapping[str, bytes]
    executable: frozenset[str] = frozenset()
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a session, as the kernel tells it: `pid` and `started` together are one process for good.

    `started` is in ticks of the kernel's clock, `state` a letter of proc(5) (R S D T Z), `program` the file
    that it runs. `title` is a name of at most 15 bytes that a process gives to itself and to no other one.
    `argv`, `environment` (as it was when the program began) and `folder` are whatever the program chose.
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
    """What to do with files of a session, one by one: all others, links and folders too, stay as they are.

    `write` has contents by path, `executable` says of written files, or of others, whether they are from then
    on; the files in `remove` go last. A file that is written anew keeps its mode.
    """

    write: Mapping[str, bytes] = field(default_factory=dict)
    executable: Mapping[str, bool] = field(default_factory=dict)
    remove: frozenset[str] = frozenset()


class SandboxSession(Protocol):
    """A long-lived interpreter with its files. One call at a time; not safe to share between tasks.

    A call past its limits ends the interpreter: its variables are lost, its files stay, and the next call
    finds a new one. A call may take as long as the limits say, and raises WorldError only where the sandbox
    itself broke.
    """

    async def run(self, code: str) -> Outcome:
        """Run code. A Python session shows the value of a last expression. `files` is empty here."""
        ...

    async def write(self, files: Mapping[str, bytes]) -> None:
        """Put files into its folder; links on the way are refused with WorldError."""
        ...

    async def change(self, change: FileChange) -> None:
        """Write, mark and remove files of its folder; links on the way are refused with WorldError."""
        ...

    async def snapshot(self) -> Snapshot:
        """Its regular files. Raises WorldError where they exceed `files_out` or `files_out_bytes`."""
        ...

    async def processes(self) -> tuple[Process, ...]:
        """What runs in it, its interpreter too. Raises WorldError for more than 128 KiB of words."""
        ...

    async def restore(self, snapshot: Snapshot) -> None:
        """Replace its files by those of the snapshot. Variables and processes stay."""
        ...

    async def reset(self) -> None:
        """End all its processes, remove its files, and start anew."""
        ...

    async def close(self) -> None:
        """End it. Nothing of it stays."""
        ...


class Sandbox(Protocol):
    """Runs programs apart from the host. A backend that cannot do so raises UserError and runs nothing."""

    @property
    def name(self) -> str:
        """The backend's name."""
        ...

    async def run(
        self,
        program: str | Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        limits: Limits | None = None,
    ) -> Outcome:
        """Run a Python program (a string) or a command (a sequence) once, in a folder that has `files`.

        Raises UserError for bad input or a backend that cannot run, WorldError where the sandbox broke.
        """
        ...

    async def session(
        self,
        kind: SessionKind = "python",
        *,
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
    ) -> SandboxSession:
        """A new session; `limits` hold for each call, those of disk and processes for all together."""
        ...

    async def close(self) -> None:
        """End everything that the backend keeps."""
        ...


@runtime_checkable
class BoundsSessions(Protocol):
    """A sandbox that says how many sessions this machine has room for."""

    @property
    def most_sessions(self) -> int:
        """Sessions that should be open at once. Whoever opens them sees to it: none is refused or waits here,
        as one that waits may be what another one waits for."""
        ...


def room_in_memory() -> int:
    """How many sessions with the default limits half of this machine's memory has room for, at least 2."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(2, memory // 2 // Limits().memory_bytes)


class RunsOnly:
    """The part of a backend that has no sessions and keeps nothing between runs. For backends to inherit."""

    async def session(
        self,
        kind: SessionKind = "python",
        *,
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
    ) -> SandboxSession:
        """Raises UserError: this backend has no sessions."""
        raise UserError("This sandbox backend has no sessions.", "Use namespaces, docker, podman or remote.")

    async def close(self) -> None:
        """Nothing is kept between runs."""


@dataclass(frozen=True, slots=True)
class RunOrder:
    """One run, checked: `source` (Python) or `argv`, exactly one of which is given."""

    source: str | None
    argv: tuple[str, ...]
    files: Mapping[str, bytes]
    stdin: bytes
    limits: Limits


def make_order(
    program: str | Sequence[str], files: Mapping[str, bytes] | None, stdin: bytes, limits: Limits | None
) -> RunOrder:
    """Check what `run` was given. Raises UserError."""
    argv = () if isinstance(program, str) else tuple(program)
    if not isinstance(program, str) and (not argv or not argv[0] or any("\0" in word for word in argv)):
        raise UserError("A command needs at least one word, and words without NUL characters.")
    source = program if isinstance(program, str) else None
    return RunOrder(source, argv, checked_files(files or {}), stdin, limits or Limits())


def checked_files(files: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """The files, if their paths are relative and stay inside. Raises UserError."""
    for path in files:
        parts = PurePosixPath(path).parts
        bad = not parts or path.startswith("/") or ".." in parts or "\0" in path or len(path) > LONGEST
        bad = bad or len(parts) > DEEPEST + 1
        if bad or path.endswith("/") or not path.isprintable():
            raise UserError(
                f"{path!r} is no path for a file of a sandbox.",
                f"Give a relative path without '..', at most {DEEPEST} folders deep.",
            )
    return files
