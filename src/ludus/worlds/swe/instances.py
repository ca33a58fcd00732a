"""Tasks in the format of SWE-bench (arXiv:2310.06770): JSON lines, and clones of their repositories.

Of each line are read `instance_id`, `repo`, `base_commit`, `patch`, `test_patch`, `problem_statement`,
`FAIL_TO_PASS` and `PASS_TO_PASS` (lists, or their JSON as text), and `split` where there is one (else it is
`test`). Tests are named as pytest does, or as unittest does, `test_a (app.tests.TestB)` and
`test_a (app.tests.TestB.test_a)`; modules of Django's tests lie in `tests/`. A test that is named by its
docstring cannot be found: of `PASS_TO_PASS` it is left out, in `FAIL_TO_PASS` it is refused. What the tests
import has to be in the sandbox: `sandbox.python`, `sandbox.binds` and `sandbox.paths` say where.
"""

from __future__ import annotations

import io
import re
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, BeforeValidator, Field, TypeAdapter, ValidationError, model_validator

from ludus.errors import ConfigError, UserError
from ludus.rewards.code.unit_tests import Suite
from ludus.sandbox.base import Snapshot
from ludus.tools.base import ToolError
from ludus.tools.lines import json_lines
from ludus.tools.patch import patched_files, read_patch
from ludus.worlds.swe.grader.grader import Exam
from ludus.worlds.swe.grader.layout import layout_of
from ludus.worlds.swe.problems import SweProblem

_GIT_S: Final = 60.0
_NAMES: Final = TypeAdapter(tuple[str, ...])


def _names(value: object) -> object:
    return _NAMES.validate_json(value) if isinstance(value, str) else value


class Instance(BaseModel):
    """One line."""

    instance_id: str
    repo: str
    base_commit: str
    patch: str
    test_patch: str
    problem_statement: str
    fail_to_pass: Annotated[tuple[str, ...], BeforeValidator(_names)] = Field(alias="FAIL_TO_PASS", min_length=1)
    pass_to_pass: Annotated[tuple[str, ...], BeforeValidator(_names)] = Field((), alias="PASS_TO_PASS")
    split: str = "test"

    @model_validator(mode="after")
    def _named(self) -> Instance:
        """Test names as pytest has them. Raises ValueError for a broken test that cannot be found."""
        folder = "tests/" if self.repo == "django/django" else ""
        broken = tuple(pytest_name(test, folder) for test in self.fail_to_pass)
        kept = tuple(pytest_name(test, folder) for test in self.pass_to_pass)
        if "" in broken:
            raise ValueError(f"{self.fail_to_pass[broken.index('')]!r} names no test")
        named = {"fail_to_pass": broken, "pass_to_pass": tuple(name for name in kept if name)}
        return self.model_copy(update=named)


def pytest_name(test: str, folder: str) -> str:
    """A test's name as pytest has it; empty for what is no name. `folder` is where unittest's modules lie."""
    if "::" in test:
        return test
    found = re.fullmatch(r"(\w+) \(([\w.]+)\)", test.strip())
    if found is None:
        return ""
    name, place = found[1], found[2].removesuffix(f".{found[1]}")
    module, _, holder = place.rpartition(".")
    return f"{folder}{module.replace('.', '/')}.py::{holder}::{name}" if module else ""


@dataclass(frozen=True, eq=False)
class Reported:
    """An instance, with the folder of the clones."""

    instance: Instance
    folder: Path
    seconds: float

    @property
    def id(self) -> str:
        """The instance's name."""
        return self.instance.instance_id

    @property
    def issue(self) -> str:
        """The problem statement."""
        return self.instance.problem_statement

    @property
    def split(self) -> str:
        """As the line says."""
        return self.instance.split

    @property
    def repository(self) -> str:
        """Its owner and name."""
        return self.instance.repo

    @property
    def tags(self) -> Mapping[str, str]:
        """The repository."""
        return {"family": self.instance.repo, "package": self.instance.repo}

    @property
    def suite(self) -> Suite:
        """The tests of the instance."""
        names = (*self.instance.fail_to_pass, *self.instance.pass_to_pass)
        return Suite(self.instance.fail_to_pass, self.instance.pass_to_pass, hidden=frozenset(names))

    def problem(self) -> SweProblem:
        """The commit, its tests with the test patch applied. Raises UserError."""
        return _reported_problem(self)


def load_instances(file: str, folder: str, seconds: float) -> tuple[Reported, ...]:
    """The tasks of a file. Raises ConfigError for one that cannot be read, naming the line."""
    return tuple(Reported(one, Path(folder), seconds) for one in _read(Path(file)))


def _read(path: Path) -> Iterator[Instance]:
    try:
        lines = json_lines(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"env.settings.instances cannot be read: {error}.", "Name a file.") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield Instance.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the line"
            raise ConfigError(
                f"{path}, line {number}: {where}: {first['msg'].lower()}.",
                "Each line is one instance in the format of SWE-bench.",
            ) from error


@lru_cache(maxsize=16)
def _reported_problem(case: Reported) -> SweProblem:
    instance = case.instance
    tree = tree_at(clone_of(instance.repo, case.folder), instance.base_commit)
    try:
        pristine = patched_files(Snapshot(tree), read_patch(instance.test_patch)).files
        mended = patched_files(Snapshot(tree), read_patch(instance.patch)).files
    except ToolError as error:
        raise UserError(
            f"A patch of the instance {instance.instance_id} does not fit its commit: {error}.",
            "Patches that rename, copy or hold binary files are not read.",
        ) from error
    suite = (*instance.fail_to_pass, *instance.pass_to_pass)
    files = tuple(sorted({test.partition("::")[0] for test in suite}))
    tests = Suite(instance.fail_to_pass, instance.pass_to_pass)
    changed = {path: content for path, content in mended.items() if tree.get(path) != content}
    exam = Exam(pristine, layout_of(tree), tests, files, changed, seconds=case.seconds)
    return SweProblem(tree, exam, changed)


def clone_of(repo: str, folder: Path) -> Path:
    """Where the clone of `owner/name` lies: `owner/name`, `owner__name` or `name`. Raises UserError."""
    places = (folder / repo, folder / repo.replace("/", "__"), folder / repo.rpartition("/")[2])
    for place in places:
        if place.is_dir():
            return place
    raise UserError(
        f"There is no clone of {repo} in {folder}.", f"Clone it to {places[1]}, with the commits of its tasks."
    )


def tree_at(clone: Path, commit: str) -> dict[str, bytes]:
    """The files of a commit. Raises UserError where git cannot give them."""
    if commit.startswith("-"):
        raise UserError(f"{commit!r} is no commit.")
    words = ["git", "-C", str(clone), "archive", "--format=tar", commit]
    try:
        done = subprocess.run(words, capture_output=True, timeout=_GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"git cannot read {clone}: {error}.", "Install git.") from error
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip()
        raise UserError(f"git cannot read the commit {commit} of {clone}: {said}.", "Fetch it into the clone.")
    return dict(_files(done.stdout))


def _files(archive: bytes) -> Sequence[tuple[str, bytes]]:
    found = []
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            content = tar.extractfile(member) if member.isfile() else None
            if content is not None:
                found.append((member.name, content.read()))
    return found
