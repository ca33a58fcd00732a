"""Write git repositories without git, reproducibly and with known hashes."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ludus.envs.git_objects import GitObjects, git_index, object_head

FIRST_SECOND = 1_700_000_000
_HOUR = 3600
ADA = "Ada Abel <ada@example.com>"
CONFIG = "[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = false\n"
IDENTITY = "[user]\n\tname = Box\n\temail = box@example.com\n[init]\n\tdefaultBranch = main\n"
"""Content of `.gitconfig`, which defines the author of commits."""


@dataclass
class Repository:
    """A repository built commit by commit. `root` is its folder, `head` the checked-out branch."""

    root: str
    head: str = "main"
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    trees: dict[str, dict[str, str]] = field(default_factory=dict)
    _objects: GitObjects = field(default_factory=GitObjects)

    def commit(self, files: Mapping[str, str], subject: str, branch: str = "main", author: str = ADA) -> str:
        """Commit exactly these files to a branch, which is created if missing; return the hash."""
        parents = [self.branches[branch]] if branch in self.branches else []
        when = FIRST_SECOND + _HOUR * len(self.trees)
        lines = [f"tree {self._objects.tree(_as_bytes(files)).hex()}", *(f"parent {parent}" for parent in parents)]
        lines += [f"author {author} {when} +0000", f"committer {author} {when} +0000", "", subject, ""]
        sha = self._objects.add("commit", "\n".join(lines).encode()).hex()
        self.branches[branch] = sha
        self.trees[sha] = dict(files)
        return sha

    def branch(self, name: str, at: str) -> None:
        """Create a branch at a commit."""
        self.branches[name] = at

    @property
    def tracked(self) -> dict[str, str]:
        """The files of the checked-out branch."""
        return self.trees[self.branches[self.head]]

    def files(self, work: Mapping[str, str] | None = None) -> dict[str, bytes]:
        """Return the whole folder: `.git` and the working tree `work`, by default that of `head`."""
        base = f"{self.root}/.git"
        found = {f"{base}/HEAD": f"ref: refs/heads/{self.head}\n".encode(), f"{base}/config": CONFIG.encode()}
        for digest, (kind, content) in self._objects.held.items():
            name = digest.hex()
            found[f"{base}/objects/{name[:2]}/{name[2:]}"] = zlib.compress(object_head(kind, content) + content)
        found |= {f"{base}/refs/heads/{name}": f"{sha}\n".encode() for name, sha in self.branches.items()}
        found |= {f"{base}/refs/tags/{name}": f"{sha}\n".encode() for name, sha in self.tags.items()}
        if self.branches:
            found[f"{base}/index"] = git_index(_as_bytes(self.tracked))
        there = self.tracked if work is None else work
        return found | {f"{self.root}/{path}": text for path, text in _as_bytes(there).items()}


def _as_bytes(files: Mapping[str, str]) -> dict[str, bytes]:
    return {path: text.encode() for path, text in files.items()}


def grow(root: str, history: Sequence[tuple[str, Mapping[str, str]]]) -> tuple[Repository, list[str]]:
    """Return a repository with one branch from subjects and changed files (an empty text removes a file)."""
    repository, shas, files = Repository(root), [], dict[str, str]()
    for subject, changed in history:
        files = {path: text for path, text in {**files, **changed}.items() if text}
        shas.append(repository.commit(files, subject))
    return repository, shas
