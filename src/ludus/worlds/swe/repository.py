"""A git repository as files: one commit on `main`, made without git, the same bytes for the same tree.

It holds one pack with its index, references, and a git index whose stat data is empty, so that git compares
contents the first time that it looks (gitformat-pack).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from typing import Final

from ludus.envs.git_objects import GitObjects, Kind, git_index, sha1

_KINDS: Final[Mapping[Kind, int]] = {"commit": 1, "tree": 2, "blob": 3}
"""As a pack numbers them."""
_WHO: Final = "Ludus <ludus@localhost> 1700000000 +0000"
_CONFIG: Final = (
    "[core]\n\trepositoryformatversion = 0\n\tfilemode = false\n\tbare = false\n"
    "[user]\n\tname = Developer\n\temail = developer@localhost\n"
)


def git_files(files: Mapping[str, bytes], message: str, ignored: str = "") -> dict[str, bytes]:
    """The folder `.git` of a repository that has these files in its only commit.

    `ignored` are patterns of what lies in the folder and does not belong to the repository.
    """
    objects = GitObjects()
    tree = objects.tree(files)
    text = f"tree {tree.hex()}\nauthor {_WHO}\ncommitter {_WHO}\n\n{message}\n"
    commit = objects.add("commit", text.encode())
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
        ".git/index": git_index(files),
        f".git/objects/pack/{name}.pack": pack,
        f".git/objects/pack/{name}.idx": index,
    }


def _packed(objects: GitObjects) -> tuple[bytes, bytes]:
    """The pack of all objects, and its index (version 2)."""
    body = bytearray(b"PACK" + struct.pack(">II", 2, len(objects.held)))
    places: dict[bytes, tuple[int, int]] = {}
    for digest, (kind, content) in objects.held.items():
        entry = _size(_KINDS[kind], len(content)) + zlib.compress(content)
        places[digest] = (zlib.crc32(entry), len(body))
        body += entry
    pack = bytes(body) + sha1(bytes(body))
    names = sorted(places)
    fan = [sum(name[0] <= first for name in names) for first in range(256)]
    index = b"\xfftOc" + struct.pack(">I", 2) + struct.pack(">256I", *fan) + b"".join(names)
    index += b"".join(struct.pack(">I", places[name][0]) for name in names)
    index += b"".join(struct.pack(">I", places[name][1]) for name in names) + pack[-20:]
    return pack, index + sha1(index)


def _size(kind: int, size: int) -> bytes:
    """The head of an object in a pack: three bits of kind, then the size, low bits first."""
    first, rest = kind << 4 | size & 15, size >> 4
    found = bytearray()
    while rest:
        found.append(first | 0x80)
        first, rest = rest & 0x7F, rest >> 7
    found.append(first)
    return bytes(found)
