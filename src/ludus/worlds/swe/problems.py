"""A problem: a repository with a bug, an issue, how it is graded, and how it is mended."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from ludus.rewards.code.unit_tests import Suite
from ludus.worlds.swe.catalogue import Bug, Package
from ludus.worlds.swe.grader.grader import Exam
from ludus.worlds.swe.grader.layout import layout_of
from ludus.worlds.swe.grader.leak_tests import without_tests
from ludus.worlds.swe.sources import read_archive


@dataclass(frozen=True, slots=True)
class SweProblem:
    """`shown` is the repository as the model finds it, `mended` the files that a fix changes, after it."""

    shown: Mapping[str, bytes]
    exam: Exam
    mended: Mapping[str, bytes]


class SweCase(Protocol):
    """What a task is made of. `problem` needs the sources, the rest does not."""

    @property
    def id(self) -> str: ...

    @property
    def issue(self) -> str: ...

    @property
    def split(self) -> str: ...

    @property
    def repository(self) -> str:
        """The name of the repository, for people."""
        ...

    @property
    def tags(self) -> Mapping[str, str]: ...

    @property
    def suite(self) -> Suite: ...

    def problem(self) -> SweProblem:
        """The repository and its exam. Raises UserError where sources are missing."""
        ...


@dataclass(frozen=True, eq=False)
class Mined:
    """A bug of the catalogue."""

    bug: Bug
    package: Package
    sources: Path
    seconds: float
    suite: Suite = field(init=False)

    def __post_init__(self) -> None:
        names = [f"{file}::{test}" for file in self.bug.files for test in self.package.tests[file]]
        broken = frozenset(self.bug.broken)
        kept = tuple(name for name in names if name not in broken)
        object.__setattr__(self, "suite", Suite(self.bug.broken, kept, hidden=frozenset(names)))

    @property
    def id(self) -> str:
        """The bug's name."""
        return self.bug.id

    @property
    def issue(self) -> str:
        """What is reported."""
        return self.bug.issue

    @property
    def split(self) -> str:
        """That of the package."""
        return self.package.split

    @property
    def repository(self) -> str:
        """Name and version."""
        return f"{self.package.name} {self.package.version}"

    @property
    def tags(self) -> Mapping[str, str]:
        """Family (the kind of bug), level, package and style of the issue."""
        bug = self.bug
        names = {"family": bug.edit.kind, "level": str(bug.level)}
        return names | {"package": self.package.name, "style": bug.style}

    def problem(self) -> SweProblem:
        """The package with its bug, its broken tests taken away."""
        return _mined_problem(self)


@lru_cache(maxsize=64)
def _mined_problem(case: Mined) -> SweProblem:
    bug, package = case.bug, case.package
    tree = read_archive(case.sources / package.archive, package.sha256)
    right = tree[bug.path]
    pristine = {**tree, bug.path: bug.edit.apply(right.decode("utf-8")).encode()}
    counts = {f"{file}::{test}": cases for file in bug.files for test, cases in package.tests[file].items()}
    exam = Exam(pristine, layout_of(tree), case.suite, bug.files, {bug.path: right}, counts, case.seconds)
    return SweProblem(hide(pristine, bug.broken), exam, {bug.path: right})


def hide(tree: Mapping[str, bytes], tests: Collection[str]) -> dict[str, bytes]:
    """A tree without these tests."""
    found = dict(tree)
    for file in {test.partition("::")[0] for test in tests} & tree.keys():
        names = [test.partition("::")[2].partition("[")[0] for test in tests if test.startswith(f"{file}::")]
        found[file] = without_tests(tree[file].decode("utf-8"), names).encode()
    return found
