"""What has to hold of the files at the end: judged on the host, from bytes that came out of the sandbox.

A check is data, and nothing that it says ever enters a session. Whatever a policy leaves may be broken or
made to harm: contents are read with bounds, and what cannot be read is not right.
"""

from __future__ import annotations

import fnmatch
import gzip
import io
import json
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from ludus.sandbox.base import Snapshot

MOST_BYTES: Final = 16 * 2**20
"""Of an archive, unpacked."""
MOST_MEMBERS: Final = 2000
How = Literal["lines", "unordered", "json", "bytes"]


class Check(Protocol):
    """One thing that has to hold."""

    @property
    def name(self) -> str:
        """What it is called in a report."""
        ...

    def holds(self, state: Snapshot) -> bool:
        """Whether it holds of these files."""
        ...


@dataclass(frozen=True, slots=True)
class Text:
    """A file has this text.

    `lines`: but for blanks at the end of lines and empty lines at the end; `unordered`: lines in any order;
    `json`: the same value; `bytes`: exactly.
    """

    path: str
    due: str
    how: How = "lines"

    @property
    def name(self) -> str:
        """By its path."""
        return f"text of {self.path}"

    def holds(self, state: Snapshot) -> bool:
        """Whether the file is there and fits."""
        found = state.files.get(self.path)
        return found is not None and same_text(found, self.due, self.how)


def same_text(found: bytes, due: str, how: How) -> bool:
    """Whether bytes are the text that is due."""
    if how == "bytes":
        return found == due.encode()
    try:
        text = found.decode("utf-8")
        if how == "json":
            return _plain(json.loads(text)) == _plain(json.loads(due))
    except (ValueError, RecursionError):
        return False
    given, wanted = _lines(text), _lines(due)
    return sorted(given) == sorted(wanted) if how == "unordered" else given == wanted


def _plain(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


@dataclass(frozen=True, slots=True)
class FilesUnchanged:
    """What was there is there, byte by byte, but for files that fit the patterns of `changes`."""

    files: Mapping[str, bytes] = field(repr=False)
    changes: tuple[str, ...] = ()
    executable: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """The same for each task."""
        return "originals kept"

    def holds(self, state: Snapshot) -> bool:
        """Whether all of them are as they were, and as executable."""
        return all(
            state.files.get(path) == data and (path in state.executable) == (path in self.executable)
            for path, data in self.files.items()
            if not matches(path, self.changes)
        )


def matches(path: str, patterns: tuple[str, ...]) -> bool:
    """Whether a path fits one of the patterns."""
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


@dataclass(frozen=True, slots=True)
class Only:
    """The files that fit a pattern are exactly these."""

    pattern: str
    paths: frozenset[str]

    @property
    def name(self) -> str:
        """By its pattern."""
        return f"files in {self.pattern}"

    def holds(self, state: Snapshot) -> bool:
        """Whether none is missing and none is too many."""
        return {path for path in state.files if fnmatch.fnmatchcase(path, self.pattern)} == self.paths


@dataclass(frozen=True, slots=True)
class Executable:
    """The executable ones among the files that fit a pattern are exactly these."""

    pattern: str
    paths: frozenset[str]

    @property
    def name(self) -> str:
        """By its pattern."""
        return f"executable in {self.pattern}"

    def holds(self, state: Snapshot) -> bool:
        """Whether they are."""
        return {path for path in state.executable if fnmatch.fnmatchcase(path, self.pattern)} == self.paths


@dataclass(frozen=True, slots=True)
class Archive:
    """An archive (.tar, .tar.gz, .tgz or .zip) holds exactly these files."""

    path: str
    members: Mapping[str, bytes] = field(repr=False)

    @property
    def name(self) -> str:
        """By its path."""
        return f"contents of {self.path}"

    def holds(self, state: Snapshot) -> bool:
        """Whether it can be read and holds them."""
        data = state.files.get(self.path)
        return data is not None and members_of(self.path, data) == self.members


def members_of(path: str, data: bytes) -> dict[str, bytes] | None:
    """The files in an archive by their names without `./`; None where it is broken, too large or odd."""
    try:
        return dict(_zipped(data) if path.endswith(".zip") else _tarred(path, data))
    except (OSError, EOFError, tarfile.TarError, zipfile.BadZipFile, zlib.error, ValueError, RuntimeError):
        return None
    except NotImplementedError:  # a compression that this interpreter lacks
        return None


def _zipped(data: bytes) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        found = [info for info in archive.infolist() if not info.is_dir()]
        if len(found) > MOST_MEMBERS or sum(info.file_size for info in found) > MOST_BYTES:
            raise ValueError("too large")
        for info in found:
            with archive.open(info) as file:
                yield info.filename.removeprefix("./"), file.read(info.file_size)


def _tarred(path: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    plain = unzipped(data) if path.endswith((".gz", ".tgz")) else data
    with tarfile.open(fileobj=io.BytesIO(plain), mode="r:") as archive:
        for number, member in enumerate(archive):
            if number > MOST_MEMBERS or member.size > len(plain):
                raise ValueError("too large")
            file = archive.extractfile(member) if member.isreg() else None
            if file is not None:
                yield member.name.removeprefix("./"), file.read()
            elif not member.isdir():
                raise ValueError("a link")


def unzipped(data: bytes) -> bytes:
    """What gzip packed. Raises ValueError where that is more than the bound, OSError where it is broken."""
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        plain = file.read(MOST_BYTES + 1)
    if len(plain) > MOST_BYTES:
        raise ValueError("too large")
    return plain


@dataclass(frozen=True, slots=True)
class Gzipped:
    """A file is the gzip of this text."""

    path: str
    due: str

    @property
    def name(self) -> str:
        """By its path."""
        return f"text in {self.path}"

    def holds(self, state: Snapshot) -> bool:
        """Whether it can be unpacked and fits."""
        data = state.files.get(self.path)
        try:
            return data is not None and same_text(unzipped(data), self.due, "lines")
        except (OSError, EOFError, ValueError, zlib.error):
            return False
