"""A reader of git repositories from the bytes of their files: no git runs, no setting or hook is obeyed.

Objects are believed only where their contents have the hash of their name. Everything that comes from a
policy's folder may be broken: whatever cannot be read raises BrokenRepository.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

MOST_BYTES: Final = 8 * 2**20
"""Of one object, unpacked."""
_KINDS: Final = {1: "commit", 2: "tree", 3: "blob", 4: "tag"}
_OFFSET_DELTA, _NAMED_DELTA = 6, 7
_MOST_COMMITS: Final = 5000


class BrokenRepository(ValueError):
    """What lies there is no repository, or not a whole one."""


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit. `subject` is the first line of its message, `author` is name and address."""

    tree: str
    parents: tuple[str, ...]
    author: str
    message: str

    @property
    def subject(self) -> str:
        """The first line of the message."""
        return self.message.strip().partition("\n")[0]


@dataclass(frozen=True)
class GitFolder:
    """The repository whose `.git` lies in `root` of a folder's files."""

    files: Mapping[str, bytes]
    root: str
    _packed: dict[str, tuple[str, bytes]] = field(default_factory=dict, init=False)
    _opened: list[str] = field(default_factory=list, init=False)

    @property
    def head(self) -> str:
        """The branch that is checked out, or the hash where it is detached."""
        text = self._text("HEAD")
        return text.removeprefix("ref: refs/heads/")

    def refs(self, kind: str) -> dict[str, str]:
        """The refs under refs/`kind`/ with their hashes: those packed, then those that lie loose."""
        found = {}
        for line in self._text("packed-refs", missing="").splitlines():
            sha, _, name = line.partition(" ")
            if name.startswith(f"refs/{kind}/"):
                found[name.removeprefix(f"refs/{kind}/")] = sha
        prefix = f"{self._base}refs/{kind}/"
        for path, data in self.files.items():
            if path.startswith(prefix):
                found[path.removeprefix(prefix)] = data.decode("ascii", "replace").strip()
        return found

    def resolve(self, name: str) -> str:
        """The commit that a branch, a tag, HEAD or a hash means. Raises BrokenRepository."""
        if name == "HEAD":
            name = self.head
        sha = self.refs("heads").get(name) or self.refs("tags").get(name) or name
        kind, body = self.read(sha)
        while kind == "tag":
            sha = body.partition(b"\n")[0].removeprefix(b"object ").decode("ascii", "replace")
            kind, body = self.read(sha)
        if kind != "commit":
            raise BrokenRepository(f"{name} is a {kind}")
        return sha

    def commit(self, sha: str) -> Commit:
        """A commit by its hash. Raises BrokenRepository."""
        kind, body = self.read(sha)
        if kind != "commit":
            raise BrokenRepository(f"{sha} is a {kind}")
        head, _, message = body.decode("utf-8", "replace").partition("\n\n")
        fields = [line.partition(" ") for line in head.split("\n")]
        parents = tuple(value for key, _, value in fields if key == "parent")
        values = {key: value for key, _, value in fields}
        author = values.get("author", "").rpartition(" ")[0].rpartition(" ")[0]
        return Commit(values.get("tree", ""), parents, author, message)

    def history(self, name: str, first_parents: bool = False) -> Iterator[tuple[str, Commit]]:
        """The commits that can be reached from one, each once, or those along first parents."""
        waiting, seen = [self.resolve(name)], set[str]()
        while waiting and len(seen) < _MOST_COMMITS:
            sha = waiting.pop(0)
            if sha in seen:
                continue
            seen.add(sha)
            commit = self.commit(sha)
            yield sha, commit
            waiting += commit.parents[:1] if first_parents else commit.parents

    def tree(self, name: str) -> dict[str, bytes]:
        """The files of a commit. Raises BrokenRepository."""
        return {path: self._blob(sha) for path, sha in self._entries(self.commit(self.resolve(name)).tree, "", 0)}

    def index(self) -> dict[str, str]:
        """Hashes by path of what is staged. Raises BrokenRepository for conflicts and formats but 2 and 3."""
        data = self.files.get(f"{self._base}index", b"")
        if data[:4] != b"DIRC":
            raise BrokenRepository("no index")
        try:
            version, count = struct.unpack(">II", data[4:12])
            if version not in (2, 3):
                raise BrokenRepository(f"an index of version {version}")
            return dict(self._staged(data, count))
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise BrokenRepository("a broken index") from error

    def staged_tree(self, name: str) -> dict[str, str]:
        """Hashes by path of the files of a commit. Raises BrokenRepository."""
        return dict(self._entries(self.commit(self.resolve(name)).tree, "", 0))

    def read(self, sha: str) -> tuple[str, bytes]:
        """Kind and contents of an object. Raises BrokenRepository."""
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

    @property
    def _base(self) -> str:
        return f"{self.root}/.git/" if self.root else ".git/"

    def _text(self, name: str, missing: str | None = None) -> str:
        data = self.files.get(self._base + name)
        if data is None and missing is not None:
            return missing
        if data is None:
            raise BrokenRepository(f"there is no {name}")
        return data.decode("utf-8", "replace").strip()

    def _blob(self, sha: str) -> bytes:
        kind, body = self.read(sha)
        if kind != "blob":
            raise BrokenRepository(f"{sha} is a {kind}")
        return body

    def _entries(self, sha: str, prefix: str, depth: int) -> Iterator[tuple[str, str]]:
        kind, body = self.read(sha)
        if kind != "tree" or depth > 32:
            raise BrokenRepository(f"{sha} is no tree")
        while body:
            head, _, rest = body.partition(b"\0")
            mode, _, name = head.decode("utf-8", "replace").partition(" ")
            inner, body = rest[:20].hex(), rest[20:]
            if mode == "40000":
                yield from self._entries(inner, f"{prefix}{name}/", depth + 1)
            else:
                yield prefix + name, inner

    def _staged(self, data: bytes, count: int) -> Iterator[tuple[str, str]]:
        place = 12
        for _ in range(count):
            sha = data[place + 40 : place + 60].hex()
            flags = struct.unpack(">H", data[place + 60 : place + 62])[0]
            if flags & 0x3000:
                raise BrokenRepository("conflicts are not resolved")
            begin = place + (64 if flags & 0x4000 else 62)
            end = data.index(b"\0", begin)
            yield data[begin:end].decode(), sha
            place += (end - place) // 8 * 8 + 8

    def _open_packs(self) -> None:
        prefix = f"{self._base}objects/pack/"
        for path, data in self.files.items():
            if path.startswith(prefix) and path.endswith(".pack") and path not in self._opened:
                self._opened.append(path)
                self._packed.update(_unpack(data))


def _inflate(data: bytes) -> tuple[bytes, int]:
    """What is compressed at the begin of some bytes, and how many of them it takes."""
    machine = zlib.decompressobj()
    try:
        whole = machine.decompress(data, MOST_BYTES)
    except zlib.error as error:
        raise BrokenRepository("an object cannot be unpacked") from error
    if not machine.eof:
        raise BrokenRepository("an object is too large, or cut")
    return whole, len(data) - len(machine.unused_data)


def _unpack(data: bytes) -> dict[str, tuple[str, bytes]]:
    """All objects of a pack of version 2, by their hashes. Raises BrokenRepository."""
    if data[:8] != b"PACK\0\0\0\2":
        raise BrokenRepository("no pack")
    by_place: dict[int, tuple[str, bytes]] = {}
    named: dict[str, tuple[str, bytes]] = {}
    place = 12
    try:
        for _ in range(int.from_bytes(data[8:12], "big")):
            start = place
            code, place = _kind(data, place)
            base = ("", b"")
            if code == _OFFSET_DELTA:
                back, place = _offset(data, place)
                base = by_place[start - back]
            elif code == _NAMED_DELTA:
                base, place = named[data[place : place + 20].hex()], place + 20
            body, used = _inflate(data[place:])
            place += used
            found = (base[0], _apply(base[1], body)) if base[0] else (_KINDS[code], body)
            by_place[start] = found
            head = f"{found[0]} {len(found[1])}\0".encode()
            named[hashlib.sha1(head + found[1]).hexdigest()] = found
    except (IndexError, KeyError) as error:
        raise BrokenRepository("a broken pack") from error
    return named


def _kind(data: bytes, place: int) -> tuple[int, int]:
    code = data[place] >> 4 & 7
    while data[place] & 0x80:
        place += 1
    return code, place + 1


def _offset(data: bytes, place: int) -> tuple[int, int]:
    value = data[place] & 0x7F
    while data[place] & 0x80:
        place += 1
        value = (value + 1 << 7) | data[place] & 0x7F
    return value, place + 1


def _apply(base: bytes, delta: bytes) -> bytes:
    """What a delta makes of its base."""
    place, made = _skip(delta, _skip(delta, 0)), b""
    while place < len(delta):
        code = delta[place]
        place += 1
        if not code & 0x80:
            made += delta[place : place + code]
            place += code
            continue
        values = [0, 0]
        for bit in range(7):
            if code >> bit & 1:
                values[bit // 4] |= delta[place] << 8 * (bit % 4)
                place += 1
        made += base[values[0] : values[0] + (values[1] or 0x10000)]
        if len(made) > MOST_BYTES:
            raise BrokenRepository("an object is too large")
    return made


def _skip(delta: bytes, place: int) -> int:
    while delta[place] & 0x80:
        place += 1
    return place + 1
