"""Write the objects and the index of a git repository deterministically, without git (see gitformat-index)."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["commit", "tree", "blob"]


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
