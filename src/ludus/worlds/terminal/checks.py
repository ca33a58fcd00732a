"""Checks of a session's state: files, archives, git repositories and processes, read on the host.

A check is data (the name of a function of this module, and its arguments) and never enters a session. The files of a
policy may be malformed or malicious: reads are bounded, and a check fails if a file is missing or unreadable.
"""

from __future__ import annotations

import fnmatch
import gzip
import inspect
import io
import json
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import PurePosixPath
from typing import Concatenate, Final, Literal, ParamSpec

from ludus.sandbox.base import Process
from ludus.tools.fetch import stripped_lines
from ludus.worlds.terminal.git import GitRepository

BOX: Final = "/box"
"""The session's folder."""
MAX_BYTES: Final = 16 * 2**20
"""Maximum size of an unpacked archive."""
MAX_MEMBERS: Final = 2000
"""Maximum number of files in an archive."""
UNREADABLE: Final = (
    *(OSError, EOFError, ValueError, LookupError, RuntimeError),
    *(struct.error, zlib.error, tarfile.TarError, zipfile.BadZipFile),
)
"""Exceptions of readers of broken files; RecursionError and NotImplementedError are RuntimeErrors."""
ProcessId = tuple[int, int]
"""Process id and start time, which together identify a process."""
How = Literal["lines", "unordered", "json", "bytes"]
P = ParamSpec("P")


@dataclass(frozen=True)
class SessionState:
    """Files and processes of a session, and the initial process of each service."""

    files: Mapping[str, bytes]
    executable: frozenset[str] = frozenset()
    started: Mapping[str, ProcessId] = field(default_factory=dict)
    processes: tuple[Process, ...] = ()

    @property
    def running(self) -> Iterator[Process]:
        return (process for process in self.processes if process.state not in ("Z", "X"))

    def process(self, service: str) -> Process | None:
        """Return the initial process of a service, or None if it exited."""
        started = self.started.get(service)
        return next((process for process in self.running if (process.pid, process.started) == started), None)


@dataclass(frozen=True)
class Check:
    """A condition on the state of a session: the name of a check function, and its arguments."""

    kind: str
    arguments: Mapping[str, object]

    @property
    def name(self) -> str:
        texts = {key: " ".join(one) if isinstance(one, tuple) else one for key, one in self.arguments.items()}
        return CHECKS[self.kind][0].format(**texts)

    def holds(self, state: SessionState) -> bool:
        try:
            return CHECKS[self.kind][1](state, **self.arguments)
        except UNREADABLE:
            return False


CHECKS: Final[dict[str, tuple[str, Callable[..., bool]]]] = {}
"""The check functions by name, each with the format of its checks' names in reports."""


def make_check(kind: str, *arguments: object, **named: object) -> Check:
    """Return a check with the default values of arguments that are not given."""
    bound = inspect.signature(CHECKS[kind][1]).bind(None, *arguments, **named)
    bound.apply_defaults()
    return Check(kind, dict(list(bound.arguments.items())[1:]))


def check(label: str) -> Callable[[Callable[Concatenate[SessionState, P], bool]], Callable[P, Check]]:
    """Register a check function; calling it with all arguments but the state returns a `Check`."""

    def register(function: Callable[Concatenate[SessionState, P], bool]) -> Callable[P, Check]:
        CHECKS[function.__name__] = label, function
        return wraps(function)(partial(make_check, function.__name__))

    return register


# Files


@check("text of {path}")
def has_text(state: SessionState, path: str, due: str, how: How = "lines") -> bool:
    """Return whether a file contains exactly this text.

    `lines` ignores blanks at the end of lines and empty lines at the end; `unordered` also ignores the order of
    lines; `json` compares values; `bytes` is exact.
    """
    return same_text(state.files[path], due, how)


def same_text(found: bytes, due: str, how: How) -> bool:
    """Return whether the bytes are the expected text. Raises ValueError and RecursionError for malformed input."""
    if how == "bytes":
        return found == due.encode()
    text = found.decode("utf-8")
    if how == "json":
        return json.dumps(json.loads(text), sort_keys=True) == json.dumps(json.loads(due), sort_keys=True)
    given, wanted = stripped_lines(text), stripped_lines(due)
    return sorted(given) == sorted(wanted) if how == "unordered" else given == wanted


@check("originals kept")
def files_unchanged(
    state: SessionState,
    files: Mapping[str, bytes],
    changes: tuple[str, ...] = (),
    executable: frozenset[str] = frozenset(),
) -> bool:
    """Return whether contents and execute permissions of `files` are unchanged, except for paths matching `changes`."""
    return all(
        state.files.get(path) == data and (path in state.executable) == (path in executable)
        for path, data in files.items()
        if not matches(path, changes)
    )


def matches(path: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a path matches one of the patterns."""
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


@check("files in {pattern}")
def only_files(state: SessionState, pattern: str, paths: frozenset[str]) -> bool:
    """Return whether the files that match a pattern are exactly these."""
    return {path for path in state.files if fnmatch.fnmatchcase(path, pattern)} == paths


@check("executable in {pattern}")
def only_executable(state: SessionState, pattern: str, paths: frozenset[str]) -> bool:
    """Return whether the executable files that match a pattern are exactly these."""
    return {path for path in state.executable if fnmatch.fnmatchcase(path, pattern)} == paths


# Archives


@check("contents of {path}")
def archive_holds(state: SessionState, path: str, members: Mapping[str, bytes]) -> bool:
    """Return whether an archive (.tar, .tar.gz, .tgz or .zip), without `./`, holds exactly these files and no link."""
    data = state.files[path]
    return dict(_zip_members(data) if path.endswith(".zip") else _tar_members(path, data)) == members


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


@check("text in {path}")
def gzip_has_text(state: SessionState, path: str, due: str) -> bool:
    """Return whether a file is the gzip of this text."""
    return same_text(gunzip(state.files[path]), due, "lines")


# Processes


@check("{service} lives")
def service_lives(state: SessionState, service: str, title: str = "", suspended: bool = False) -> bool:
    """Return whether the initial process of a service is running, with this title if one is set."""
    process = state.process(service)
    return process is not None and title in ("", process.title) and (process.state in ("T", "t")) == suspended


@check("{service} has ended")
def service_ended(state: SessionState, service: str) -> bool:
    """Return whether the initial process of a service has exited; false if no such service started."""
    return service in state.started and state.process(service) is None


@check("{num} of {words}")
def processes_run(
    state: SessionState, words: tuple[str, ...], num: int = 1, environment: Mapping[str, str] = {}, pid_file: str = ""
) -> bool:
    """Return whether exactly `num` processes in /box run this script with these arguments, by the host's Python.

    None may be suspended, and all need these environment variables. If set, `pid_file` contains the single pid.
    """
    found = [process for process in state.running if _script_of(process) == words]
    fit = all(environment.items() <= process.environment.items() and process.state != "T" for process in found)
    pids = [str(process.pid).encode() for process in found]
    return len(found) == num and fit and (not pid_file or state.files.get(pid_file, b"").split() == pids)


def _script_of(process: Process) -> tuple[str, ...] | None:
    """Return the script, relative to /box, and the arguments of a Python process."""
    program, words = PurePosixPath(process.program), process.argv[1:]
    is_python = program.is_relative_to("/usr") and program.name.startswith("python3") and process.folder == BOX
    if not is_python or not words or words[0].startswith("-"):
        return None
    return (words[0].removeprefix(f"{BOX}/").removeprefix("./"), *words[1:])


# Git: checks of the repository in the folder `root`


@check("branches of {root}")
def git_branches(state: SessionState, root: str, names: frozenset[str], head: str = "") -> bool:
    """Return whether the branches are exactly these, and `head`, if set, is checked out."""
    git = GitRepository(state.files, root)
    return set(git.refs("heads")) == names and (not head or git.head == head)


@check("{ref} of {root}")
def git_ref(state: SessionState, root: str, ref: str, sha: str, annotated: bool | None = None) -> bool:
    """Return whether a branch or tag points to this commit; `annotated`, if set, is the kind of tag."""
    git = GitRepository(state.files, root)
    found = {**git.refs("tags"), **git.refs("heads")}[ref]
    return git.resolve(ref) == sha and (annotated is None or (git.read(found)[0] == "tag") == annotated)


@check("files of {ref} in {root}")
def git_files(state: SessionState, root: str, ref: str, files: Mapping[str, str]) -> bool:
    """Return whether the files of a commit are exactly these."""
    return GitRepository(state.files, root).contents(ref) == {path: text.encode() for path, text in files.items()}


@check("history of {ref} in {root}")
def git_subjects(state: SessionState, root: str, ref: str, subjects: tuple[str, ...]) -> bool:
    """Return whether the commits along first parents have these subjects, newest first; an empty text matches all."""
    found = [commit.subject for _, commit in GitRepository(state.files, root).history(ref, first_parents=True)]
    return len(found) == len(subjects) and all(due in ("", got) for due, got in zip(subjects, found, strict=True))


@check("commits of {ref} in {root}")
def git_commits(
    state: SessionState,
    root: str,
    ref: str,
    shas: tuple[str, ...],
    without: tuple[str, ...] = (),
    num_parents: int | None = None,
) -> bool:
    """Return whether the history of a ref has the commits `shas` and none of `without`.

    The last commit has `num_parents` parents, if set.
    """
    git = GitRepository(state.files, root)
    found = {sha for sha, _ in git.history(ref)}
    tip = git.commit(git.resolve(ref))
    parents = num_parents is None or len(tip.parents) == num_parents
    return parents and set(shas) <= found and not found & set(without)


@check("{root} is clean")
def git_clean(state: SessionState, root: str) -> bool:
    """Return whether index and working tree have the files of HEAD; untracked files are allowed."""
    git, prefix = GitRepository(state.files, root), f"{root}/" if root else ""
    same = all(state.files.get(prefix + path) == data for path, data in git.contents("HEAD").items())
    return same and git.index() == git.tree("HEAD")
