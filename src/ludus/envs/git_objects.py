"""Write git repositories deterministically, without git: objects, packs, indexes (gitformat-pack, gitformat-index)."""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

Kind = Literal["commit", "tree", "blob"]
_PACK_TYPES: Final[Mapping[Kind, int]] = {"commit": 1, "tree": 2, "blob": 3}
_AUTHOR: Final = "Ludus <ludus@localhost> 1700000000 +0000"
_CONFIG: Final = (
    "[core]\n\trepositoryformatversion = 0\n\tfilemode = false\n\tbare = false\n"
    "[user]\n\tname = Developer\n\temail = developer@localhost\n"
)


@dataclass
class GitObjects:
    """Kind and content of objects by digest, in the order in which they were added."""

    held: dict[bytes, tuple[Kind, bytes]] = field(default_factory=dict)

    def add(self, kind: Kind, content: bytes) -> bytes:
        """Add an object and return its digest."""
        digest = sha1(object_head(kind, content) + content)
        self.held.setdefault(digest, (kind, content))
        return digest

    def tree(self, files: Mapping[str, bytes]) -> bytes:
        """Add a folder with all its files and return its digest."""
        entries: dict[str, tuple[bytes, bytes]] = {}
        folders: dict[str, dict[str, bytes]] = {}
        for path, content in files.items():
            head, slash, rest = path.partition("/")
            if slash:
                folders.setdefault(head, {})[rest] = content
            else:
                entries[head] = (b"100644", self.add("blob", content))
        for name, inner in folders.items():
            entries[f"{name}/"] = (b"40000", self.tree(inner))
        lines = [
            b"%s %s\0%s" % (mode, name.rstrip("/").encode(), digest)
            for name, (mode, digest) in sorted(entries.items(), key=lambda entry: entry[0].encode())
        ]
        return self.add("tree", b"".join(lines))

    def packed(self) -> tuple[bytes, bytes]:
        """Return the pack of all objects, and its index (version 2)."""
        pack = bytearray(b"PACK" + struct.pack(">II", 2, len(self.held)))
        places: dict[bytes, tuple[int, int]] = {}
        for digest, (kind, content) in self.held.items():
            head, rest = [_PACK_TYPES[kind] << 4 | len(content) & 15], len(content) >> 4  # then size, low bits first
            while rest:
                head[-1] |= 0x80
                head.append(rest & 0x7F)
                rest >>= 7
            entry = bytes(head) + zlib.compress(content)
            places[digest] = (zlib.crc32(entry), len(pack))
            pack += entry
        pack += sha1(bytes(pack))
        names = sorted(places)
        fanout = [sum(name[0] <= first for name in names) for first in range(256)]
        checksums, offsets = zip(*(places[name] for name in names), strict=True)
        numbers = struct.pack(f">{2 * len(names)}I", *checksums, *offsets)
        index = b"\xfftOc" + struct.pack(">257I", 2, *fanout) + b"".join(names) + numbers + pack[-20:]
        return bytes(pack), index + sha1(index)


def git_folder(files: Mapping[str, bytes], message: str, ignored: str = "") -> dict[str, bytes]:
    """Return the folder `.git` of a repository with one commit of these files on `main`.

    `ignored` are its exclude patterns. The index has no stat data, so the first git command compares contents.
    """
    objects = GitObjects()
    text = f"tree {objects.tree(files).hex()}\nauthor {_AUTHOR}\ncommitter {_AUTHOR}\n\n{message}\n"
    commit = objects.add("commit", text.encode()).hex()
    pack, index = objects.packed()
    name = f".git/objects/pack/pack-{pack[-20:].hex()}"
    log = f"{'0' * 40} {commit} {_AUTHOR}\tcommit (initial): {message}\n".encode()
    return {
        ".git/HEAD": b"ref: refs/heads/main\n",
        ".git/config": _CONFIG.encode(),
        ".git/refs/heads/main": f"{commit}\n".encode(),
        ".git/logs/HEAD": log,
        ".git/logs/refs/heads/main": log,
        ".git/info/exclude": ignored.encode(),
        ".git/index": git_index(files),
        f"{name}.pack": pack,
        f"{name}.idx": index,
    }


def object_head(kind: Kind, content: bytes) -> bytes:
    """Return the header of an object, which precedes its content in the hash and in a file."""
    return f"{kind} {len(content)}\0".encode()


def git_index(files: Mapping[str, bytes]) -> bytes:
    """Return the index (version 2) of these files, without times, so that git reads the contents at its first call."""
    body = b"DIRC" + struct.pack(">II", 2, len(files))
    for path in sorted(files, key=str.encode):
        name, content = path.encode(), files[path]
        entry = struct.pack(">10I", *(0,) * 6, 0o100644, 0, 0, 0) + sha1(object_head("blob", content) + content)
        entry += struct.pack(">H", min(len(name), 0xFFF)) + name
        body += entry + b"\0" * (8 - len(entry) % 8)
    return body + sha1(body)


def sha1(content: bytes) -> bytes:
    """Return git's digest, 20 bytes."""
    return hashlib.sha1(content, usedforsecurity=False).digest()
