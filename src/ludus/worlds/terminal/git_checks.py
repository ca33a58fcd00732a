"""What has to hold of a git repository at the end, read from its bytes (`ludus.worlds.terminal.git_read`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from ludus.sandbox.base import Snapshot
from ludus.worlds.terminal.git_read import BrokenRepository, GitFolder


class GitCheck(ABC):
    """A check of the repository in `root`; none holds of one that is broken."""

    __slots__ = ()
    root: str

    def holds(self, state: Snapshot) -> bool:
        """Whether it holds of the repository among these files."""
        try:
            return self._holds(GitFolder(state.files, self.root))
        except (BrokenRepository, RecursionError):
            return False

    @abstractmethod
    def _holds(self, git: GitFolder) -> bool:
        """Whether it holds. Raises BrokenRepository."""


@dataclass(frozen=True, slots=True)
class Refs(GitCheck):
    """The branches, or the tags, are exactly these; `head` is the one checked out, where it is given."""

    root: str
    names: frozenset[str]
    kind: str = "heads"
    head: str = ""

    @property
    def name(self) -> str:
        """By what is listed."""
        return f"{'branches' if self.kind == 'heads' else 'tags'} of {self.root}"

    def _holds(self, git: GitFolder) -> bool:
        return set(git.refs(self.kind)) == self.names and (not self.head or git.head == self.head)


@dataclass(frozen=True, slots=True)
class At(GitCheck):
    """A branch or tag is at this commit. `annotated`, where given, says which sort of tag it is."""

    root: str
    ref: str
    sha: str
    annotated: bool | None = None

    @property
    def name(self) -> str:
        """By the ref."""
        return f"{self.ref} of {self.root}"

    def _holds(self, git: GitFolder) -> bool:
        found = {**git.refs("tags"), **git.refs("heads")}.get(self.ref)
        if found is None or git.resolve(self.ref) != self.sha:
            return False
        return self.annotated is None or (git.read(found)[0] == "tag") == self.annotated


@dataclass(frozen=True, slots=True)
class GitTree(GitCheck):
    """The files of a commit are exactly these."""

    root: str
    ref: str
    files: Mapping[str, str] = field(repr=False)

    @property
    def name(self) -> str:
        """By the ref."""
        return f"files of {self.ref} in {self.root}"

    def _holds(self, git: GitFolder) -> bool:
        return git.tree(self.ref) == {path: text.encode() for path, text in self.files.items()}


@dataclass(frozen=True, slots=True)
class Subjects(GitCheck):
    """The commits of a branch along first parents, newest first: an empty text stands for any subject."""

    root: str
    ref: str
    subjects: tuple[str, ...]

    @property
    def name(self) -> str:
        """By the ref."""
        return f"history of {self.ref} in {self.root}"

    def _holds(self, git: GitFolder) -> bool:
        found = [commit.subject for _, commit in git.history(self.ref, first_parents=True)]
        return len(found) == len(self.subjects) and all(
            not due or due == subject for due, subject in zip(self.subjects, found, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Reaches(GitCheck):
    """These commits are in the history of a ref, those of `without` are not; its tip has so many parents."""

    root: str
    ref: str
    shas: tuple[str, ...]
    without: tuple[str, ...] = ()
    num_parents: int | None = None

    @property
    def name(self) -> str:
        """By the ref."""
        return f"commits of {self.ref} in {self.root}"

    def _holds(self, git: GitFolder) -> bool:
        found = {sha for sha, _ in git.history(self.ref)}
        tip = git.commit(git.resolve(self.ref))
        parents = self.num_parents is None or len(tip.parents) == self.num_parents
        return parents and set(self.shas) <= found and not found & set(self.without)


@dataclass(frozen=True, slots=True)
class Clean(GitCheck):
    """Nothing is left to commit: index and working tree have the files of HEAD, beside untracked ones."""

    root: str

    @property
    def name(self) -> str:
        """By the folder."""
        return f"{self.root} is clean"

    def _holds(self, git: GitFolder) -> bool:
        prefix = f"{self.root}/" if self.root else ""
        tree = git.tree("HEAD")
        same = all(git.files.get(prefix + path) == data for path, data in tree.items())
        return same and git.index() == git.staged_tree("HEAD")
