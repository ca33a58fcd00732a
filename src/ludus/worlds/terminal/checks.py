"""Checks of the final state: files, archives and processes, read on the host from data that left the sandbox.

A check is data and never enters a session. The files of a policy may be broken or hostile: they are read with
bounds, and what cannot be read fails the check.
"""

from __future__ import annotations

import fnmatch
import gzip
import io
import json
import tarfile
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import ClassVar, Final, Literal

from ludus.sandbox.base import Process, Snapshot
from ludus.tools.fetch import stripped_lines

BOX: Final = "/box"
"""The session's folder."""
MAX_BYTES: Final = 16 * 2**20
"""Maximum size of an unpacked archive."""
MAX_MEMBERS: Final = 2000
"""Maximum number of files in an archive."""
Identity = tuple[int, int]
"""Process id and start time, which together identify a process."""
How = Literal["lines", "unordered", "json", "bytes"]
_ENDED: Final = ("Z", "X")


@dataclass(frozen=True)
class Running:
    """The processes of a session (`now`), and the process as which each service started."""

    began: Mapping[str, Identity] = field(default_factory=dict)
    now: tuple[Process, ...] = ()

    def process(self, name: str) -> Process | None:
        """Return the process as which a service started, or None if it ended."""
        own = self.began.get(name)
        found = [one for one in self.now if (one.pid, one.started) == own and one.state not in _ENDED]
        return found[0] if found else None

    def like(self, words: tuple[str, ...]) -> list[Process]:
        """Return the processes in /box that run a Python script, by the host's Python, with these arguments."""
        return [one for one in self.now if one.state not in _ENDED and _words_of(one) == words]


NOTHING_RUNS: Final = Running()


def _words_of(process: Process) -> tuple[str, ...] | None:
    """Return the script, relative to /box, and the arguments of a Python process."""
    program, words = PurePosixPath(process.program), process.argv[1:]
    if not program.is_relative_to("/usr") or not program.name.startswith("python3"):
        return None
    if process.folder != BOX or not words or words[0].startswith("-"):
        return None
    return (words[0].removeprefix(f"{BOX}/").removeprefix("./"), *words[1:])


class Check(ABC):
    """A condition on the final state. `label` is the format of its name in reports."""

    __slots__ = ()
    label: ClassVar[str]

    @property
    def name(self) -> str:
        """The name in reports."""
        return self.label.format(self)

    @abstractmethod
    def holds(self, state: Snapshot, running: Running = NOTHING_RUNS) -> bool:
        """Return whether the condition holds of these files and processes."""


@dataclass(frozen=True, slots=True)
class Text(Check):
    """A file has this text.

    `lines` ignores blanks at the end of lines and empty lines at the end; `unordered` also ignores the order of
    lines; `json` compares values; `bytes` is exact.
    """

    label: ClassVar[str] = "text of {0.path}"
    path: str
    due: str
    how: How = "lines"

    def holds(self, state: Snapshot, running: Running = NOTHING_RUNS) -> bool:
        """Return whether the file exists and has the text."""
        found = state.files.get(self.path)
        return found is not None and same_text(found, self.due, self.how)


def same_text(found: bytes, due: str, how: How) -> bool:
    """Return whether the bytes are the expected text."""
    if how == "bytes":
        return found == due.encode()
    try:
        text = found.decode("utf-8")
        if how == "json":
            return json.dumps(json.loads(text), sort_keys=True) == json.dumps(json.loads(due), sort_keys=True)
    except (ValueError, RecursionError):
        return False
    given, wanted = stripped_lines(text), stripped_lines(due)
    return sorted(given) == sorted(wanted) if how == "unordered" else given == wanted


@dataclass(frozen=True, slots=True)
class FilesUnchanged(Check):
    """The original files are unchanged, except those that match the patterns in `changes`."""

    label: ClassVar[str] = "originals kept"
    files: Mapping[str, bytes] = field(repr=False)
    changes: tuple[str, ...] = ()
    executable: frozenset[str] = frozenset()

    def holds(self, state: Snapshot, running: Running = NOTHING_RUNS) -> bool:
        """Return whether contents and execute permissions are unchanged."""
        return all(
            state.files.get(path) == data and (path in state.executable) == (path in self.executable)
            for path, data in self.files.items()
            if not matches(path, self.changes)
        )


def matches(path: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a path matches one of the patterns."""
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


@dataclass(frozen=True, slots=True)
class Only(Check):
    """The files that match a pattern are exactly these."""

    label: ClassVar[str] = "files in {0.pattern}"
    pattern: str
    paths: frozenset[str]

    def holds(self, state: Snapshot, running: Running = NOTHING_RUNS) -> bool:
        """Return whether no file is missing or unexpected."""
        return {path for path in state.files if fnmatch.fnmatchcase(path, self.pattern)} == self.paths


@dataclass(frozen=True, slots=True)
class Executable(Check):
    """The executable files that match a pattern are exactly these."""

    label: ClassVar[str] = "executable in {0.pattern}"
    pattern: str
    paths: frozenset[str]

    def holds(self, state: Snapshot, running: Running = NOTHING_RUNS) -> bool:
        """Return whether no executable file is missing or unexpected."""
        return {path for path in state.executable if fnmatch.fnmatchcase(path, self.pattern)} == self.paths


@dataclass(frozen=True, slots=True)
class Archive(Check):
    """An archive (.tar, .tar.gz, .tgz or .zip) holds exactly these files."""

    label: ClassVar[str] = "contents of {0.path}"
    path: str
    members: Mapping[str, bytes] = field(repr=False)

    def holds(self, state: Snapshot, running: Running = NOTHING_RUNS) -> bool:
        """Return whether the archive can be read and holds the files."""
        data = state.files.get(self.path)
        return data is not None and archive_members(self.path, data) == self.members


def archive_members(path: str, data: bytes) -> dict[str, bytes] | None:
    """Return the files in an archive by their names without `./`; None if it is broken, too large or has links."""
    try:
        return dict(_zip_members(data) if path.endswith(".zip") else _tar_members(path, data))
    except (OSError, EOFError, tarfile.TarError, zipfile.BadZipFile, zlib.error, ValueError, RuntimeError):
        return None  # NotImplementedError, for an unsupported compression, is a RuntimeError


def _zip_members(data: bytes) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        found = [info for info in archive.infolist() if not info.is_dir()]
        if len(found) > MAX_MEMBERS or sum(info.file_size for info in found) > MAX_BYTES:
            raise ValueError("too large")
        for info in found:
            with archive.open(info) as file:
                yield info.filename.removeprefix("./"), file.read(info.file_size)


def _tar_members(path: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    plain = gunzip(data) if path.endswith((".gz", ".tgz")) else data
    with tarfile.open(fileobj=io.BytesIO(plain), mode="r:") as archive:
        for number, member in enumerate(archive):
            if number > MAX_MEMBERS or member.size > len(plain):
                raise ValueError("too large")
            file = archive.extractfile(member) if member.isreg() else None
            if file is not None:
                yield member.name.removeprefix("./"), file.read()
            elif not member.isdir():
                raise ValueError("a link")


def gunzip(data: bytes) -> bytes:
    """Return decompressed data. Raises ValueError if it is larger than `MAX_BYTES`, OSError if it is broken."""
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        plain = file.read(MAX_BYTES + 1)
    if len(plain) > MAX_BYTES:
        raise ValueError("too large")
    return plain


@dataclass(frozen=True, slots=True)
class Gzipped(Check):
    """A file is the gzip of this text."""

    label: ClassVar[str] = "text in {0.path}"
    path: str
    due: str

    def holds(self, state: Snapshot, running: Running = NOTHING_RUNS) -> bool:
        """Return whether the file can be decompressed and has the text."""
        data = state.files.get(self.path)
        try:
            return data is not None and same_text(gunzip(data), self.due, "lines")
        except (OSError, EOFError, ValueError, zlib.error):
            return False


@dataclass(frozen=True, slots=True)
class Lives(Check):
    """The process as which a service started lives, suspended or not, with this title if one is set."""

    label: ClassVar[str] = "{0.service} lives"
    service: str
    title: str = ""
    suspended: bool = False

    def holds(self, state: Snapshot, running: Running = NOTHING_RUNS) -> bool:
        """Return whether it lives."""
        process = running.process(self.service)
        if process is None or (self.title and process.title != self.title):
            return False
        return (process.state in ("T", "t")) == self.suspended


@dataclass(frozen=True, slots=True)
class ServiceEnded(Check):
    """The process as which a service started has ended."""

    label: ClassVar[str] = "{0.service} has ended"
    service: str

    def holds(self, state: Snapshot, running: Running = NOTHING_RUNS) -> bool:
        """Return whether it has ended; false if no such service started."""
        return self.service in running.began and running.process(self.service) is None


@dataclass(frozen=True)
class Runs(Check):
    """Exactly `num` processes run a script, none suspended, with these environment variables.

    `pid_file` holds the process id of the only one.
    """

    words: tuple[str, ...]
    num: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    pid_file: str = ""

    @property
    def name(self) -> str:
        """The name in reports."""
        return f"{self.num} of {' '.join(self.words)}"

    def holds(self, state: Snapshot, running: Running = NOTHING_RUNS) -> bool:
        """Return whether they run."""
        found = running.like(self.words)
        fit = all(self.environment.items() <= one.environment.items() for one in found)
        pids = state.files.get(self.pid_file, b"").split()
        named = not self.pid_file or pids == [str(one.pid).encode() for one in found]
        return len(found) == self.num and fit and named and all(one.state != "T" for one in found)
