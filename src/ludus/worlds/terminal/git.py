"""Git repository reader on the bytes of files: runs no git, and ignores settings and hooks.

An object is valid only if the hash of its content is its name. Broken files raise BrokenRepository, IndexError,
KeyError, ValueError, struct.error or zlib.error.
Not dulwich: its `Repo` follows alternates, grafts and gitfiles, and its parsers bound no memory below 1 GiB (a
pack of 185 bytes allocates 2 GiB), so that a wrapper would have to replace the pack and zlib code, most of this.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

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
class GitRepository:
    """The repository whose `.git` is in the folder `root` of `files`."""

    files: Mapping[str, bytes]
    root: str

    @property
    def head(self) -> str:
        """The checked-out branch, or the hash of a detached HEAD."""
        return _text(self._files["HEAD"]).removeprefix("ref: refs/heads/")

    def refs(self, kind: str) -> dict[str, str]:
        """Return the hashes of the refs under refs/`kind`/ by name; loose refs override packed ones."""
        prefix = f"refs/{kind}/"
        lines = [line.partition(" ") for line in _text(self._files.get("packed-refs", b"")).splitlines()]
        packed = {name.removeprefix(prefix): sha for sha, _, name in lines if name.startswith(prefix)}
        loose = {path.removeprefix(prefix): _text(d) for path, d in self._files.items() if path.startswith(prefix)}
        return {**packed, **loose}

    def resolve(self, name: str) -> str:
        """Return the hash of the commit that a branch, a tag, HEAD or a hash refers to."""
        name = self.head if name == "HEAD" else name
        sha = self.refs("heads").get(name) or self.refs("tags").get(name) or name
        kind, body = self.read(sha)
        while kind == "tag":
            sha = _text(body.partition(b"\n")[0].removeprefix(b"object "))
            kind, body = self.read(sha)
        if kind != "commit":
            raise BrokenRepository(f"{name} is a {kind}")
        return sha

    def commit(self, sha: str) -> Commit:
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
        return dict(self._tree_entries(self.commit(self.resolve(name)).tree, "", 0))

    def contents(self, name: str) -> dict[str, bytes]:
        """Return the contents of a commit's files by path."""
        return {path: self._content(sha, "blob") for path, sha in self.tree(name).items()}

    def index(self) -> dict[str, str]:
        """Return the staged hashes by path. Versions 2 and 3 are supported; a conflict is an error."""
        data, place, found = self._files["index"], 12, dict[str, str]()
        magic, version, count = struct.unpack(">4sII", data[:12])
        if magic != b"DIRC" or version not in (2, 3):
            raise BrokenRepository("no index of version 2 or 3")
        for _ in range(count):
            (flags,) = struct.unpack(">H", data[place + 60 : place + 62])
            if flags & 0x3000:
                raise BrokenRepository("unresolved conflicts")
            begin = place + (64 if flags & 0x4000 else 62)
            end = data.index(b"\0", begin)
            found[data[begin:end].decode()] = data[place + 40 : place + 60].hex()
            place += (end - place) // 8 * 8 + 8
        return found

    def read(self, sha: str) -> GitObject:
        """Return kind and content of an object."""
        data = self._files.get(f"objects/{sha[:2]}/{sha[2:]}")
        if data is None:
            return self._packed[sha]
        whole, _ = _inflate(data)
        if hashlib.sha1(whole).hexdigest() != sha:
            raise BrokenRepository(f"the content of {sha} does not match its hash")
        head, _, body = whole.partition(b"\0")
        return head.partition(b" ")[0].decode("ascii", "replace"), body

    @cached_property
    def _files(self) -> Mapping[str, bytes]:
        base = f"{self.root}/.git/" if self.root else ".git/"
        return {path.removeprefix(base): data for path, data in self.files.items() if path.startswith(base)}

    @cached_property
    def _packed(self) -> Mapping[str, GitObject]:
        packs = (d for path, d in self._files.items() if path.startswith("objects/pack/") and path.endswith(".pack"))
        return {sha: found for data in packs for sha, found in _unpack(data)}

    def _content(self, sha: str, kind: str) -> bytes:
        found, body = self.read(sha)
        if found != kind:
            raise BrokenRepository(f"{sha} is a {found}")
        return body

    def _tree_entries(self, sha: str, prefix: str, depth: int) -> Iterator[tuple[str, str]]:
        """Yield paths and hashes of the blobs below a tree."""
        body = self._content(sha, "tree")
        if depth > _MAX_DEPTH:
            raise BrokenRepository(f"{sha} is nested too deep")
        while body:
            head, _, rest = body.partition(b"\0")
            mode, _, name = head.decode("utf-8", "replace").partition(" ")
            inner, body = rest[:20].hex(), rest[20:]
            if mode == "40000":
                yield from self._tree_entries(inner, f"{prefix}{name}/", depth + 1)
            else:
                yield prefix + name, inner


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace").strip()


def _inflate(data: bytes) -> tuple[bytes, int]:
    """Return the decompressed data at the start of some bytes, and the number of bytes used."""
    decompressor = zlib.decompressobj()
    whole = decompressor.decompress(data, MAX_OBJECT_BYTES)
    if not decompressor.eof:
        raise BrokenRepository("an object is too large, or cut")
    return whole, len(data) - len(decompressor.unused_data)


def _unpack(data: bytes) -> Iterator[tuple[str, GitObject]]:
    """Yield the objects of a pack of version 2 with their hashes."""
    if data[:8] != b"PACK\0\0\0\2":
        raise BrokenRepository("not a pack of version 2")
    by_place: dict[int, GitObject] = {}
    by_hash: dict[str, GitObject] = {}
    place = 12
    for _ in range(int.from_bytes(data[8:12], "big")):
        start, code = place, data[place] >> 4 & 7
        place, base = _skip_varint(data, place), ("", b"")
        if code == _OFFSET_DELTA:
            distance, place = _base_offset(data, place)
            base = by_place[start - distance]
        elif code == _REF_DELTA:
            base, place = by_hash[data[place : place + 20].hex()], place + 20
        body, used = _inflate(data[place:])
        place += used
        kind, content = found = (base[0], _apply_delta(base[1], body)) if base[0] else (_KINDS[code], body)
        sha = hashlib.sha1(f"{kind} {len(content)}\0".encode() + content).hexdigest()
        by_place[start] = by_hash[sha] = found
        yield sha, found


def _base_offset(data: bytes, place: int) -> tuple[int, int]:
    """Return the backward offset of a delta base in a pack, and the position after it."""
    value = data[place] & 0x7F
    while data[place] & 0x80:
        place += 1
        value = (value + 1 << 7) | data[place] & 0x7F
    return value, place + 1


def _apply_delta(base: bytes, delta: bytes) -> bytes:
    place, made = _skip_varint(delta, _skip_varint(delta, 0)), b""
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


def _skip_varint(data: bytes, place: int) -> int:
    """Return the position after a number of variable length."""
    while data[place] & 0x80:
        place += 1
    return place + 1
