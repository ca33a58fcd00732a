"""A git repository as files: one commit on `main`, made without git, the same bytes for the same tree.

It holds one pack with its index, references, and a git index whose stat data is empty, so that git compares
contents the first time that it looks (gitformat-pack, gitformat-index).
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

_COMMIT, _TREE, _BLOB = 1, 2, 3
_KINDS: Final = {_COMMIT: b"commit", _TREE: b"tree", _BLOB: b"blob"}
_WHO: Final = "Ludus <ludus@localhost> 1700000000 +0000"
_CONFIG: Final = (
    "[core]\n\trepositoryformatversion = 0\n\tfilemode = false\n\tbare = false\n"
    "[user]\n\tname = Developer\n\temail = developer@localhost\n"
)


@dataclass
class _Objects:
    """Objects in the order they are added, each once: its digest, its kind and its content."""

    held: dict[bytes, tuple[int, bytes]] = field(default_factory=dict)

    def add(self, kind: int, content: bytes) -> bytes:
        """Take an object; gives its digest."""
        head = b"%s %d\0" % (_KINDS[kind], len(content))
        digest = hashlib.sha1(head + content, usedforsecurity=False).digest()
        self.held.setdefault(digest, (kind, content))
        return digest

    def tree(self, files: Mapping[str, bytes]) -> bytes:
        """Take a folder with all that is in it."""
        entries: dict[str, tuple[bytes, bytes]] = {}
        folders: dict[str, dict[str, bytes]] = {}
        for path, content in files.items():
            head, slash, rest = path.partition("/")
            if slash:
                folders.setdefault(head, {})[rest] = content
            else:
                entries[head] = (b"100644", self.add(_BLOB, content))
        for name, inner in folders.items():
            entries[f"{name}/"] = (b"40000", self.tree(inner))
        lines = [
            b"%s %s\0%s" % (mode, name.rstrip("/").encode(), digest)
            for name, (mode, digest) in sorted(entries.items(), key=lambda entry: entry[0].encode())
        ]
        return self.add(_TREE, b"".join(lines))


def git_files(files: Mapping[str, bytes], message: str, ignored: str = "") -> dict[str, bytes]:
    """The folder `.git` of a repository that has these files in its only commit.

    `ignored` are patterns of what lies in the folder and does not belong to the repository.
    """
    objects = _Objects()
    tree = objects.tree(files)
    text = f"tree {tree.hex()}\nauthor {_WHO}\ncommitter {_WHO}\n\n{message}\n"
    commit = objects.add(_COMMIT, text.encode())
    pack, index = _packed(objects)
    name = f"pack-{pack[-20:].hex()}"
    log = f"{'0' * 40} {commit.hex()} {_WHO}\tcommit (initial): {message}\n".encode()
    return {
        ".git/HEAD": b"ref: refs/heads/main\n",
        ".git/config": _CONFIG.encode(),
        ".git/refs/heads/main": f"{commit.hex()}\n".encode(),
        ".git/logs/HEAD": log,
        ".git/logs/refs/heads/main": log,
        ".git/info/exclude": ignored.encode(),
        ".git/index": _index(files),
        f".git/objects/pack/{name}.pack": pack,
        f".git/objects/pack/{name}.idx": index,
    }


def _packed(objects: _Objects) -> tuple[bytes, bytes]:
    """The pack of all objects, and its index (version 2)."""
    body = bytearray(b"PACK" + struct.pack(">II", 2, len(objects.held)))
    places: dict[bytes, tuple[int, int]] = {}
    for digest, (kind, content) in objects.held.items():
        entry = _size(kind, len(content)) + zlib.compress(content)
        places[digest] = (zlib.crc32(entry), len(body))
        body += entry
    pack = bytes(body) + _sha1(bytes(body))
    names = sorted(places)
    fan = [sum(name[0] <= first for name in names) for first in range(256)]
    index = b"\xfftOc" + struct.pack(">I", 2) + struct.pack(">256I", *fan) + b"".join(names)
    index += b"".join(struct.pack(">I", places[name][0]) for name in names)
    index += b"".join(struct.pack(">I", places[name][1]) for name in names) + pack[-20:]
    return pack, index + _sha1(index)


def _size(kind: int, size: int) -> bytes:
    """The head of an object in a pack: three bits of kind, then the size, low bits first."""
    first, rest = kind << 4 | size & 15, size >> 4
    found = bytearray()
    while rest:
        found.append(first | 0x80)
        first, rest = rest & 0x7F, rest >> 7
    found.append(first)
    return bytes(found)


def _index(files: Mapping[str, bytes]) -> bytes:
    """The git index (version 2) of these files."""
    body = b"DIRC" + struct.pack(">II", 2, len(files))
    for path in sorted(files, key=str.encode):
        name = path.encode()
        head = b"blob %d\0" % len(files[path])
        digest = _sha1(head + files[path])
        entry = struct.pack(">10I", *(0,) * 6, 0o100644, 0, 0, 0) + digest
        entry += struct.pack(">H", min(len(name), 0xFFF)) + name
        body += entry + b"\0" * (8 - len(entry) % 8)
    return body + _sha1(body)


def _sha1(content: bytes) -> bytes:
    return hashlib.sha1(content, usedforsecurity=False).digest()
