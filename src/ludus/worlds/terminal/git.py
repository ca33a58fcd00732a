"""Checks of a git repository, read from the bytes of its files: no git runs, and no setting or hook is obeyed.

An object counts only if its content has the hash of its name; whatever cannot be read raises BrokenRepository.
Not dulwich: its `Repo` follows alternates, grafts and gitfiles, and its parsers bound no memory below 1 GiB (a
pack of 185 bytes allocates 2 GiB), so that a wrapper would have to replace the pack and zlib code, most of this.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final

from ludus.sandbox.base import Snapshot
from ludus.worlds.terminal.checks import NOTHING_RUNS, Check, Running

MAX_OBJECT_BYTES: Final = 8 * 2**20
"""Maximum size of an unpacked object."""
_KINDS: Final = {1: "commit", 2: "tree", 3: "blob", 4: "tag"}
_OFFSET_DELTA, _REF_DELTA = 6, 7
_MAX_COMMITS: Final = 5000
_MAX_DEPTH: Final = 32
GitObject = tuple[str, bytes]
"""Kind and content of an object."""


class BrokenRepository(ValueError):
    """The repository is missing, incomplete or corrupt."""


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit. `subject` is the first line of its message."""

    tree: str
    parents: tuple[str, ...]
    subject: str


@dataclass(frozen=True)
class GitFolder:
    """The repository whose `.git` is in the folder `root` of `files`. Methods raise BrokenRepository."""

    files: Mapping[str, bytes]
    root: str
    _packed: dict[str, GitObject] = field(default_factory=dict, init=False)
    _opened: list[str] = field(default_factory=list, init=False)

    @property
    def head(self) -> str:
        """The checked-out branch, or the hash of a detached HEAD."""
        return self._text("HEAD").removeprefix("ref: refs/heads/")

    def refs(self, kind: str) -> dict[str, str]:
        """Return the hashes of the refs under refs/`kind`/ by name; loose refs override packed ones."""
        found, prefix = {}, f"{self._base}refs/{kind}/"
        for line in self._text("packed-refs", missing="").splitlines():
            sha, _, name = line.partition(" ")
            if name.startswith(f"refs/{kind}/"):
                found[name.removeprefix(f"refs/{kind}/")] = sha
        for path, data in self.files.items():
            if path.startswith(prefix):
                found[path.removeprefix(prefix)] = data.decode("ascii", "replace").strip()
        return found

    def resolve(self, name: str) -> str:
        """Return the hash of the commit that a branch, a tag, HEAD or a hash refers to."""
        name = self.head if name == "HEAD" else name
        sha = self.refs("heads").get(name) or self.refs("tags").get(name) or name
        kind, body = self.read(sha)
        while kind == "tag":
            sha = body.partition(b"\n")[0].removeprefix(b"object ").decode("ascii", "replace")
            kind, body = self.read(sha)
        if kind != "commit":
            raise BrokenRepository(f"{name} is a {kind}")
        return sha

    def commit(self, sha: str) -> Commit:
        """Return a commit by its hash."""
        head, _, message = self._content(sha, "commit").decode("utf-8", "replace").partition("\n\n")
        fields = [line.partition(" ") for line in head.split("\n")]
        parents = tuple(value for key, _, value in fields if key == "parent")
        tree = {key: value for key, _, value in fields}.get("tree", "")
        return Commit(tree, parents, message.strip().partition("\n")[0])

    def history(self, name: str, first_parents: bool = False) -> Iterator[tuple[str, Commit]]:
        """Yield the ancestors of a commit, itself first, each once; optionally along first parents only."""
        waiting, seen = [self.resolve(name)], set[str]()
        while waiting and len(seen) < _MAX_COMMITS:
            sha = waiting.pop(0)
            if sha not in seen:
                seen.add(sha)
                commit = self.commit(sha)
                yield sha, commit
                waiting += commit.parents[:1] if first_parents else commit.parents

    def tree(self, name: str) -> dict[str, str]:
        """Return the blob hashes of a commit's files by path."""
        return dict(self._entries(self.commit(self.resolve(name)).tree, "", 0))

    def contents(self, name: str) -> dict[str, bytes]:
        """Return the contents of a commit's files by path."""
        return {path: self._content(sha, "blob") for path, sha in self.tree(name).items()}

    def index(self) -> dict[str, str]:
        """Return the staged hashes by path. Versions 2 and 3 are supported; a conflict is an error."""
        data = self.files.get(f"{self._base}index", b"")
        try:
            magic, version, count = struct.unpack(">4sII", data[:12])
            if magic != b"DIRC" or version not in (2, 3):
                raise BrokenRepository("no index of version 2 or 3")
            return dict(_index_entries(data, count))
        except (struct.error, IndexError, ValueError) as error:
            raise BrokenRepository("a broken index") from error

    def read(self, sha: str) -> GitObject:
        """Return kind and content of an object."""
        data = self.files.get(f"{self._base}objects/{sha[:2]}/{sha[2:]}")
        if data is None:
            self._open_packs()
            if sha not in self._packed:
                raise BrokenRepository(f"there is no object {sha[:40]!r}")
            return self._packed[sha]
        whole, _ = _inflate(data)
        if hashlib.sha1(whole).hexdigest() != sha:
            raise BrokenRepository(f"the object {sha} is a forgery")
        head, _, body = whole.partition(b"\0")
        return head.partition(b" ")[0].decode("ascii", "replace"), body

    def _content(self, sha: str, kind: str) -> bytes:
        found, body = self.read(sha)
        if found != kind:
            raise BrokenRepository(f"{sha} is a {found}")
        return body

    @property
    def _base(self) -> str:
        return f"{self.root}/.git/" if self.root else ".git/"

    def _text(self, name: str, missing: str | None = None) -> str:
        data = self.files.get(self._base + name)
        if data is None and missing is None:
            raise BrokenRepository(f"there is no {name}")
        return (missing or "") if data is None else data.decode("utf-8", "replace").strip()

    def _entries(self, sha: str, prefix: str, depth: int) -> Iterator[tuple[str, str]]:
        """Yield paths and hashes of the blobs below a tree."""
        body = self._content(sha, "tree")
        if depth > _MAX_DEPTH:
            raise BrokenRepository(f"{sha} is nested too deep")
        while body:
            head, _, rest = body.partition(b"\0")
            mode, _, name = head.decode("utf-8", "replace").partition(" ")
            inner, body = rest[:20].hex(), rest[20:]
            if mode == "40000":
                yield from self._entries(inner, f"{prefix}{name}/", depth + 1)
            else:
                yield prefix + name, inner

    def _open_packs(self) -> None:
        prefix = f"{self._base}objects/pack/"
        for path, data in self.files.items():
            if path.startswith(prefix) and path.endswith(".pack") and path not in self._opened:
                self._opened.append(path)
                self._packed.update(_unpack(data))


def _index_entries(data: bytes, count: int) -> Iterator[tuple[str, str]]:
    place = 12
    for _ in range(count):
        sha = data[place + 40 : place + 60].hex()
        flags = struct.unpack(">H", data[place + 60 : place + 62])[0]
        if flags & 0x3000:
            raise BrokenRepository("unresolved conflicts")
        begin = place + (64 if flags & 0x4000 else 62)
        end = data.index(b"\0", begin)
        yield data[begin:end].decode(), sha
        place += (end - place) // 8 * 8 + 8


def _inflate(data: bytes) -> tuple[bytes, int]:
    """Return the decompressed data at the start of some bytes, and the number of bytes used."""
    machine = zlib.decompressobj()
    try:
        whole = machine.decompress(data, MAX_OBJECT_BYTES)
    except zlib.error as error:
        raise BrokenRepository("an object cannot be unpacked") from error
    if not machine.eof:
        raise BrokenRepository("an object is too large, or cut")
    return whole, len(data) - len(machine.unused_data)


def _unpack(data: bytes) -> dict[str, GitObject]:
    """Return all objects of a pack of version 2 by their hashes."""
    if data[:8] != b"PACK\0\0\0\2":
        raise BrokenRepository("no pack")
    by_place: dict[int, GitObject] = {}
    by_hash: dict[str, GitObject] = {}
    place = 12
    try:
        for _ in range(int.from_bytes(data[8:12], "big")):
            start, code = place, data[place] >> 4 & 7
            place, base = _skip(data, place), ("", b"")
            if code == _OFFSET_DELTA:
                back, place = _offset(data, place)
                base = by_place[start - back]
            elif code == _REF_DELTA:
                base, place = by_hash[data[place : place + 20].hex()], place + 20
            body, used = _inflate(data[place:])
            place += used
            found = (base[0], _apply(base[1], body)) if base[0] else (_KINDS[code], body)
            by_place[start] = found
            by_hash[hashlib.sha1(f"{found[0]} {len(found[1])}\0".encode() + found[1]).hexdigest()] = found
    except (IndexError, KeyError) as error:
        raise BrokenRepository("a broken pack") from error
    return by_hash


def _offset(data: bytes, place: int) -> tuple[int, int]:
    value = data[place] & 0x7F
    while data[place] & 0x80:
        place += 1
        value = (value + 1 << 7) | data[place] & 0x7F
    return value, place + 1


def _apply(base: bytes, delta: bytes) -> bytes:
    """Return the result of a delta."""
    place, made = _skip(delta, _skip(delta, 0)), b""
    while place < len(delta):
        code = delta[place]
        place += 1
        if not code & 0x80:
            made += delta[place : place + code]
            place += code
            continue
        values = [0, 0]  # offset and size
        for bit in range(7):
            if code >> bit & 1:
                values[bit // 4] |= delta[place] << 8 * (bit % 4)
                place += 1
        made += base[values[0] : values[0] + (values[1] or 0x10000)]
        if len(made) > MAX_OBJECT_BYTES:
            raise BrokenRepository("an object is too large")
    return made


def _skip(data: bytes, place: int) -> int:
    """Return the place after a number of variable length."""
    while data[place] & 0x80:
        place += 1
    return place + 1


class GitCheck(Check):
    """A check of the repository in `root`, which fails if it is broken."""

    __slots__ = ()
    root: str

    def holds(self, state: Snapshot, running: Running = NOTHING_RUNS) -> bool:
        """Return whether the condition holds of the repository among these files."""
        try:
            return self._holds(GitFolder(state.files, self.root))
        except (BrokenRepository, RecursionError):
            return False

    @abstractmethod
    def _holds(self, git: GitFolder) -> bool:
        """Return whether the condition holds. Raises BrokenRepository."""


@dataclass(frozen=True, slots=True)
class Refs(GitCheck):
    """The branches, or the tags, are exactly these; `head` is the checked-out branch, if set."""

    root: str
    names: frozenset[str]
    kind: str = "heads"
    head: str = ""

    @property
    def name(self) -> str:
        """The name in reports."""
        return f"{'branches' if self.kind == 'heads' else 'tags'} of {self.root}"

    def _holds(self, git: GitFolder) -> bool:
        return set(git.refs(self.kind)) == self.names and (not self.head or git.head == self.head)


@dataclass(frozen=True, slots=True)
class At(GitCheck):
    """A branch or tag points to this commit; `annotated`, if set, is the kind of tag."""

    label: ClassVar[str] = "{0.ref} of {0.root}"
    root: str
    ref: str
    sha: str
    annotated: bool | None = None

    def _holds(self, git: GitFolder) -> bool:
        found = {**git.refs("tags"), **git.refs("heads")}.get(self.ref)
        if found is None or git.resolve(self.ref) != self.sha:
            return False
        return self.annotated is None or (git.read(found)[0] == "tag") == self.annotated


@dataclass(frozen=True, slots=True)
class GitTree(GitCheck):
    """The files of a commit are exactly these."""

    label: ClassVar[str] = "files of {0.ref} in {0.root}"
    root: str
    ref: str
    files: Mapping[str, str] = field(repr=False)

    def _holds(self, git: GitFolder) -> bool:
        return git.contents(self.ref) == {path: text.encode() for path, text in self.files.items()}


@dataclass(frozen=True, slots=True)
class Subjects(GitCheck):
    """The subjects of a branch's commits along first parents, newest first; an empty text matches any subject."""

    label: ClassVar[str] = "history of {0.ref} in {0.root}"
    root: str
    ref: str
    subjects: tuple[str, ...]

    def _holds(self, git: GitFolder) -> bool:
        found = [commit.subject for _, commit in git.history(self.ref, first_parents=True)]
        return len(found) == len(self.subjects) and all(
            not due or due == subject for due, subject in zip(self.subjects, found, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Reaches(GitCheck):
    """The history of a ref has the commits `shas` and none of `without`; its tip has `num_parents` parents."""

    label: ClassVar[str] = "commits of {0.ref} in {0.root}"
    root: str
    ref: str
    shas: tuple[str, ...]
    without: tuple[str, ...] = ()
    num_parents: int | None = None

    def _holds(self, git: GitFolder) -> bool:
        found = {sha for sha, _ in git.history(self.ref)}
        tip = git.commit(git.resolve(self.ref))
        parents = self.num_parents is None or len(tip.parents) == self.num_parents
        return parents and set(self.shas) <= found and not found & set(self.without)


@dataclass(frozen=True, slots=True)
class Clean(GitCheck):
    """Index and working tree have the files of HEAD; untracked files are allowed."""

    label: ClassVar[str] = "{0.root} is clean"
    root: str

    def _holds(self, git: GitFolder) -> bool:
        prefix = f"{self.root}/" if self.root else ""
        same = all(git.files.get(prefix + path) == data for path, data in git.contents("HEAD").items())
        return same and git.index() == git.tree("HEAD")
