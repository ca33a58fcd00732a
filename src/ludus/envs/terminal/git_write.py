"""Git repositories made of bytes, without git: the same ones each time, with their hashes known here."""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

FIRST_SECOND = 1_700_000_000
_HOUR = 3600
ADA = "Ada Abel <ada@example.com>"
CONFIG = "[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = false\n"
IDENTITY = "[user]\n\tname = Box\n\temail = box@example.com\n[init]\n\tdefaultBranch = main\n"
"""What `.gitconfig` says, so that commits have an author."""


@dataclass
class Repository:
    """A repository that grows a commit at a time. `root` is its folder, `head` the branch checked out."""

    root: str
    head: str = "main"
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    trees: dict[str, dict[str, str]] = field(default_factory=dict)
    _objects: dict[str, bytes] = field(default_factory=dict)

    def commit(self, files: Mapping[str, str], subject: str, branch: str = "main", author: str = ADA) -> str:
        """A commit of exactly these files at the tip of a branch, which is made where there is none."""
        parents = [self.branches[branch]] if branch in self.branches else []
        when = FIRST_SECOND + _HOUR * len(self.trees)
        lines = [f"tree {self._tree(files)}", *(f"parent {parent}" for parent in parents)]
        lines += [f"author {author} {when} +0000", f"committer {author} {when} +0000", "", subject, ""]
        sha = self._put("commit", "\n".join(lines).encode())
        self.branches[branch] = sha
        self.trees[sha] = dict(files)
        return sha

    def branch(self, name: str, at: str) -> None:
        """A branch that begins at a commit."""
        self.branches[name] = at

    @property
    def tracked(self) -> dict[str, str]:
        """The files of the branch that is checked out."""
        return self.trees[self.branches[self.head]]

    def files(self, work: Mapping[str, str] | None = None) -> dict[str, bytes]:
        """The whole folder: `.git` and the working tree, which is that of `head` where none is given."""
        base = f"{self.root}/.git"
        found = {
            f"{base}/HEAD": f"ref: refs/heads/{self.head}\n".encode(),
            f"{base}/config": CONFIG.encode(),
        }
        for sha, data in self._objects.items():
            found[f"{base}/objects/{sha[:2]}/{sha[2:]}"] = data
        found |= {f"{base}/refs/heads/{name}": f"{sha}\n".encode() for name, sha in self.branches.items()}
        found |= {f"{base}/refs/tags/{name}": f"{sha}\n".encode() for name, sha in self.tags.items()}
        if self.branches:
            found[f"{base}/index"] = self._index(self.tracked)
        there = self.tracked if work is None else work
        return found | {f"{self.root}/{path}": text.encode() for path, text in there.items()}

    def _put(self, kind: str, body: bytes) -> str:
        data = f"{kind} {len(body)}\0".encode() + body
        sha = hashlib.sha1(data).hexdigest()
        self._objects[sha] = zlib.compress(data)
        return sha

    def _tree(self, files: Mapping[str, str]) -> str:
        entries: dict[str, tuple[str, str]] = {}
        folders: dict[str, dict[str, str]] = {}
        for path, text in files.items():
            first, _, rest = path.partition("/")
            if rest:
                folders.setdefault(first, {})[rest] = text
            else:
                entries[first] = ("100644", self._put("blob", text.encode()))
        for name, inner in folders.items():
            entries[f"{name}/"] = ("40000", self._tree(inner))
        body = b"".join(
            f"{mode} {name.rstrip('/')}\0".encode() + bytes.fromhex(sha)
            for name, (mode, sha) in sorted(entries.items())
        )
        return self._put("tree", body)

    def _index(self, files: Mapping[str, str]) -> bytes:
        """An index of version 2 without times: git looks at the contents at its first call."""
        entries = []
        for path in sorted(files):
            blob = bytes.fromhex(self._put("blob", files[path].encode()))
            name = path.encode()
            head = struct.pack(">10I", 0, 0, 0, 0, 0, 0, 0o100644, 0, 0, 0) + blob
            entry = head + struct.pack(">H", min(len(name), 0xFFF)) + name
            entries.append(entry + b"\0" * (8 - len(entry) % 8))
        body = b"DIRC" + struct.pack(">II", 2, len(entries)) + b"".join(entries)
        return body + hashlib.sha1(body).digest()


def grow(root: str, history: Sequence[tuple[str, Mapping[str, str]]]) -> tuple[Repository, list[str]]:
    """A repository with one branch: subjects with what each commit changes (an empty text removes a file)."""
    repository, shas, files = Repository(root), [], dict[str, str]()
    for subject, changed in history:
        files = {path: text for path, text in {**files, **changed}.items() if text}
        shas.append(repository.commit(files, subject))
    return repository, shas
