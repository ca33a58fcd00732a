"""Tasks of a catalogue, and tasks in the format of SWE-bench (arXiv:2310.06770).

A catalogue is a folder with `packages.jsonl`, packages with their pinned source distributions and tests, and
`tasks.jsonl`, bugs with the tests that they break. It has no source except the text that a bug replaces: `ludus env
prepare swe` downloads the source distributions with pip and checks their SHA-256.

Instances of SWE-bench are JSON lines (class `Instance`). Lists of tests may be JSON as text, with names as in pytest or
unittest, `test_a (app.tests.TestB)` and `test_a (app.tests.TestB.test_a)`; modules of Django's tests are in `tests/`. A
test named by its docstring cannot be found: it is dropped from `PASS_TO_PASS` and refused in `FAIL_TO_PASS`. Packages
that tests import must be in the sandbox (`sandbox.python`, `sandbox.binds`, `sandbox.paths`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Final

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from ludus.envs.sources import PinnedSource, commit_files, source_files
from ludus.envs.task_files import read_rows
from ludus.errors import UserError
from ludus.rewards.code.unit_tests import Suite
from ludus.sandbox.base import Snapshot
from ludus.tools.base import ToolError
from ludus.tools.files import patched_files, read_patch
from ludus.types import Message, Task
from ludus.worlds.swe.grader import SweProblem
from ludus.worlds.swe.masking import without_tests
from ludus.worlds.swe.repository import is_inside, layout_of, names_of

SYSTEM: Final = (
    "You repair Python code. A git repository lies in the working folder. Find the cause of the issue, mend "
    "it in the code, and hand in with submit. Tests that you do not see decide; changes of tests and of "
    "settings do not count."
)
_MAX_BYTES: Final = 600_000
"""Size limit of one file: larger ones are tables, not code."""


@dataclass(frozen=True, slots=True)
class Edit:
    """Replacement of `old`, which begins at character `start` of a file, by `new`.

    `symbol` is the dotted name of the innermost function around it, `line` the first line of that function, decorators
    included.
    """

    kind: str
    start: int
    old: str
    new: str
    symbol: str
    line: int

    def apply(self, text: str) -> str:
        """Return the edited text. Raises ValueError if `old` is not at `start`."""
        end = self.start + len(self.old)
        if text[self.start : end] != self.old:
            raise ValueError(f"{self.old!r} is not at character {self.start}")
        return text[: self.start] + self.new + text[end:]


@dataclass(frozen=True)
class Package(PinnedSource):
    """A package of the index. `tests` counts, by test file and test function, the cases that pass without a bug.

    Failing, slow and flaky tests are excluded.
    """

    split: str
    summary: str
    tests: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class Bug:
    """An edit of a file of a package, the tests that it breaks, and the text of the issue.

    `files` are the test files whose other tests still pass. `level` is 1 if a broken test calls the function with the
    bug by name, 3 if that function is private, else 2.
    """

    id: str
    package: str
    path: str
    edit: Edit
    broken: tuple[str, ...]
    files: tuple[str, ...]
    level: int
    style: str
    issue: str


@dataclass(frozen=True)
class Catalogue:
    """All packages by name, and all bugs."""

    packages: Mapping[str, Package]
    bugs: tuple[Bug, ...]


@dataclass(frozen=True, eq=False)
class SweCase:
    """A task of a catalogue, which has a `package`, or an instance.

    `load` reads the repository, and raises UserError if sources or clone are missing.
    """

    task: Task
    load: Callable[[], SweProblem]
    package: Package | None = None


def _task(name: str, repository: str, issue: str, suite: Suite, tags: Mapping[str, str]) -> Task:
    text = f"The repository is {repository}. This issue was reported:\n\n{issue}"
    return Task(name, (Message(role="system", content=SYSTEM), Message(role="user", content=text)), suite, tags)


@cache
def load_catalogue(folder: Path) -> Catalogue:
    """Return the catalogue of a folder. Raises UserError if a file is missing or invalid."""
    hint = "env.settings.catalogue names a folder with packages.jsonl and tasks.jsonl."
    packages = {one.name: one for one in read_rows(folder / "packages.jsonl", Package, hint)}
    return Catalogue(packages, tuple(read_rows(folder / "tasks.jsonl", Bug, hint)))


def case_of(bug: Bug, package: Package, sources: Path, seconds: float) -> SweCase:
    """Return the task of a bug; `sources` is the folder of the archives."""
    cases = {f"{file}::{test}": num for file in bug.files for test, num in package.tests[file].items()}
    suite = Suite(bug.broken, tuple(test for test in cases if test not in bug.broken), hidden=frozenset(cases))

    def load() -> SweProblem:
        tree = read_archive(sources / package.archive, package.sha256)
        right = tree[bug.path]
        pristine = {**tree, bug.path: bug.edit.apply(right.decode("utf-8")).encode()}
        shown = dict(pristine)
        for file in {test.partition("::")[0] for test in bug.broken} & tree.keys():
            hidden = [test.partition("::")[2].partition("[")[0] for test in bug.broken if test.startswith(f"{file}::")]
            shown[file] = without_tests(tree[file].decode("utf-8"), hidden).encode()
        return SweProblem(shown, pristine, layout_of(tree), suite, bug.files, {bug.path: right}, cases, seconds)

    tags = {"split": package.split, "family": bug.edit.kind, "level": str(bug.level)}
    tags |= {"package": package.name, "style": bug.style}
    return SweCase(_task(bug.id, f"{package.name} {package.version}", bug.issue, suite, tags), load, package)


@cache
def read_archive(path: Path, sha256: str = "") -> Mapping[str, bytes]:
    """Return the files of a source distribution that belong to the repository. Raises UserError, as `source_files`."""
    found = source_files(path, sha256)
    return {name: data for name, data in found if len(data) <= _MAX_BYTES and _in_repository(name)}


def _in_repository(name: str) -> bool:
    if not name or is_inside(name, "omitted_folders") or ".egg-info" in name:
        return False
    return PurePosixPath(name).suffix in names_of("suffixes") or "/tests/" in f"/{name}"


def _parsed(value: object) -> object:
    return json.loads(value) if isinstance(value, str) else value


_Names = Annotated[tuple[str, ...], BeforeValidator(_parsed)]


class Instance(BaseModel):
    """One line of a file of SWE-bench instances."""

    instance_id: str
    repo: str
    base_commit: str
    patch: str
    test_patch: str
    problem_statement: str
    fail_to_pass: _Names = Field(alias="FAIL_TO_PASS", min_length=1)
    pass_to_pass: _Names = Field((), alias="PASS_TO_PASS")
    split: str = "test"

    @model_validator(mode="after")
    def _convert_names(self) -> Instance:
        """Convert test names to pytest's. Raises ValueError for a broken test that cannot be found."""
        folder = "tests/" if self.repo == "django/django" else ""
        broken = tuple(pytest_name(test, folder) for test in self.fail_to_pass)
        kept = tuple(name for test in self.pass_to_pass if (name := pytest_name(test, folder)))
        if "" in broken:
            raise ValueError(f"{self.fail_to_pass[broken.index('')]!r} is not a test name")
        return self.model_copy(update={"fail_to_pass": broken, "pass_to_pass": kept})


def pytest_name(test: str, folder: str) -> str:
    """Return a test's pytest name, empty if `test` is not a test name. `folder` is the folder of unittest's modules."""
    if "::" in test:
        return test
    found = re.fullmatch(r"(\w+) \(([\w.]+)\)", test.strip())
    if found is None:
        return ""
    name, place = found[1], found[2].removesuffix(f".{found[1]}")
    module, _, holder = place.rpartition(".")
    return f"{folder}{module.replace('.', '/')}.py::{holder}::{name}" if module else ""


def load_instances(file: str, folder: str, seconds: float) -> list[SweCase]:
    """Return the tasks of a file; `folder` has the clones. Raises UserError, naming the line, if it is invalid."""
    hint = "Each line of env.settings.instances is one instance in the format of SWE-bench."
    return [_instance_case(one, Path(folder), seconds) for one in read_rows(Path(file), Instance, hint)]


def _instance_case(given: Instance, folder: Path, seconds: float) -> SweCase:
    tests = (*given.fail_to_pass, *given.pass_to_pass)
    suite = Suite(given.fail_to_pass, given.pass_to_pass, hidden=frozenset(tests))

    def load() -> SweProblem:
        tree = commit_files(given.repo, given.base_commit, folder)
        try:
            pristine = patched_files(Snapshot(tree), read_patch(given.test_patch)).files
            fixed = patched_files(Snapshot(tree), read_patch(given.patch)).files
        except ToolError as error:
            message = f"A patch of the instance {given.instance_id} does not fit its commit: {error}."
            raise UserError(message, "Patches that rename, copy or hold binary files are not supported.") from error
        files = tuple(sorted({test.partition("::")[0] for test in tests}))
        changed = {path: content for path, content in fixed.items() if tree.get(path) != content}
        return SweProblem(tree, pristine, layout_of(tree), suite, files, changed, seconds=seconds)

    tags = {"split": given.split, "family": given.repo, "package": given.repo}
    return SweCase(_task(given.instance_id, given.repo, given.problem_statement, suite, tags), load)
