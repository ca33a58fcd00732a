"""The world `swe`: repositories with a bug to repair, graded by hidden tests; solutions and forgeries of results."""

from __future__ import annotations

import io
import random
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Final, Literal

from pydantic import Field

from ludus.envs.base import SessionWorld
from ludus.envs.settings import WorldSettings, read_settings
from ludus.envs.sources import fetch, require
from ludus.envs.tool_env import ToolEnv, ToolLimits
from ludus.envs.tool_world import Dialogue, calling_message, check_split, tool_turn
from ludus.errors import ConfigError
from ludus.rewards.base import Reward
from ludus.rewards.code.unit_tests import share_passed, suite_passes
from ludus.rewards.extract import last_output
from ludus.tools.base import ToolError
from ludus.tools.files import lines_of, unified_diff
from ludus.types import JSON, Action, Message, StepResult, Task, ToolOutcome
from ludus.worlds.swe import tasks as swe_tasks
from ludus.worlds.swe.grader import REPORT, Grade, SweProblem, grade
from ludus.worlds.swe.repository import DATA, Checkout, checkout, names_of, package_text, repair_tools

SPLITS = ("train", "validation", "test")


class SweSettings(WorldSettings):
    """Settings of the software repair world (`env.settings`)."""

    catalogue: str = ""
    """Folder with `packages.jsonl` and `tasks.jsonl`; empty: the tasks that ship with Ludus."""
    sources: str = ""
    """Folder of the packages' source distributions; empty: `~/.cache/ludus/swe`."""
    packages: tuple[str, ...] = ()
    """Packages whose tasks are selected; empty: all."""
    kinds: tuple[str, ...] = ()
    """Kinds of bugs that are selected; empty: all."""
    levels: tuple[Literal[1, 2, 3], ...] = Field((1, 2, 3), min_length=1)
    """1: a hidden test calls the broken function by name; 2: none does; 3: none does and the function is private."""
    instances: str = ""
    """File of JSON lines in the format of SWE-bench, replaces the catalogue."""
    repositories: str = ""
    """Folder with clones of the instances' repositories."""
    command_s: float = Field(30.0, gt=0, le=600)
    """Time limit of one call of the shell."""
    tests_s: float = Field(30.0, gt=0, le=1800)
    """Time limit of each run of the hidden tests."""
    fixed_weight: float = Field(0.1, ge=0, lt=0.5)
    """Weight of the share of the broken tests that pass again; all hidden tests passing has weight 1."""
    seed: int = 0
    """Seed of the order of tasks."""


class SweEnv(ToolEnv):
    """One episode: tools on a checkout of the repository, then the hidden tests."""

    def __init__(self, world: SweWorld, problem: SweProblem) -> None:
        self._workspace = world.checkout(problem)
        super().__init__(repair_tools(self._workspace), world.rewards, world.limits, [self._workspace])
        self._sandbox, self._problem = world.sandbox, problem
        self._left: Mapping[str, bytes] | None = None

    async def step(self, action: Action) -> StepResult:
        """Run the calls; at the end of the episode run the hidden tests. Raises WorldError."""
        result = await super().step(action)
        if not result.done:
            return result
        try:
            self._left = (await self._workspace.snapshot()).files
            report = await self.grade_again()
        except ToolError as error:
            report = Grade({}, f"the files cannot be read: {error}").outcome()
        return result if report is None else replace(result, outcomes=(*result.outcomes, report))

    async def grade_again(self) -> ToolOutcome | None:
        """Run the hidden tests on the files at the end of the episode; None if there are none."""
        return None if self._left is None else (await grade(self._sandbox, self._problem, self._left)).outcome()


@dataclass(frozen=True)
class SweWorld(SessionWorld):
    """Repositories to repair."""

    settings: SweSettings = field(default_factory=SweSettings)
    limits: ToolLimits = field(default_factory=ToolLimits)
    name: str = "swe"
    splits: Sequence[str] = SPLITS

    @cached_property
    def cases(self) -> Mapping[str, swe_tasks.SweCase]:
        """All tasks by id, in their order. Raises UserError if a file cannot be read."""
        given = self.settings
        if given.instances:
            cases = swe_tasks.load_instances(given.instances, given.repositories, given.tests_s)
        else:
            held = swe_tasks.load_catalogue(self._catalogue)
            cases = [
                swe_tasks.case_of(bug, held.packages[bug.package], self._sources, given.tests_s)
                for bug in held.bugs
                if (not given.packages or bug.package in given.packages)
                and (not given.kinds or bug.edit.kind in given.kinds)
                and bug.level in given.levels
            ]
            random.Random(f"swe:{given.seed}").shuffle(cases)
        return {case.task.id: case for case in cases}

    @cached_property
    def problem(self) -> Callable[[str], SweProblem]:
        """Read the repository of a task by its id. Raises UserError if it is missing."""
        return lru_cache(maxsize=16 if self.settings.instances else 64)(lambda name: self.cases[name].load())

    @cached_property
    def rewards(self) -> tuple[Reward, ...]:
        """The outcome is 1 if all hidden tests pass; the share of broken tests that pass again is a shaping reward."""
        read = last_output(REPORT)
        return (
            Reward("resolved", suite_passes(read), outcome=True),
            Reward("fixed", share_passed(read, "fail_to_pass"), weight=self.settings.fixed_weight),
            Reward("kept", share_passed(read, "pass_to_pass"), weight=0.0),
        )

    def prepare(self, report: Callable[[str], None]) -> None:
        """Download the sources of all packages that tasks need. Raises UserError."""
        fetch(self._packages, self._sources, report)

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split, packages mixed. Raises UserError if sources are missing."""
        check_split(split, self.splits, self.name)
        require(self._packages, self._sources, self.name)
        return [case.task for case in self.cases.values() if case.task.tags["split"] == split]

    def environment(self, task: Task) -> SweEnv:
        return SweEnv(self, self.problem(task.id))

    def checkout(self, problem: SweProblem) -> Checkout:
        """Return a session with the repository of a problem."""
        return checkout(self.sandbox, problem.shown, problem.layout, self.settings.command_s)

    def expert(self, task: Task) -> Dialogue | None:
        """Return the repair; None for a task of another world."""
        if task.id not in self.cases:
            return None
        problem = self.problem(task.id)
        return Dialogue((*task.prompt, *solution(problem)), repair_tools(self.checkout(problem)))

    def difficulty_report(self) -> str:
        """Return the tables of the catalogue (`survey.txt`); empty if there are none."""
        file = self._catalogue / "survey.txt"
        return file.read_text("utf-8").rstrip("\n") if file.is_file() and not self.settings.instances else ""

    def cheats(self, task: Task) -> Mapping[str, Sequence[Message]]:
        """Return forgeries of test results, added to code that the tests import; none for a task of another world."""
        if task.id not in self.cases:
            return {}
        problem, codes = self.problem(task.id), forgeries()
        return {f"forges by {name}": written(forged(problem, codes[name])) for name in WORST}

    @property
    def _catalogue(self) -> Path:
        return Path(self.settings.catalogue or DATA)

    @property
    def _sources(self) -> Path:
        return Path(self.settings.sources) if self.settings.sources else Path.home() / ".cache" / "ludus" / "swe"

    @property
    def _packages(self) -> Iterable[swe_tasks.Package]:
        return {one.package.name: one.package for one in self.cases.values() if one.package is not None}.values()


WORST: Final = ("gc", "frames", "recorder", "reports", "an early end", "lines")
"""Forgeries that `ludus env check` runs."""
_Turn = tuple[str, Mapping[str, JSON], str, str]
"""A tool call: its name, arguments and output, and the text of its message."""
_CONTEXT_LINES: Final = 12
"""Lines that the solver reads before and after a change."""
_FOUND: Final = "This is where it goes wrong."


def solution(problem: SweProblem) -> tuple[Message, ...]:
    """Return the messages after the prompt: read and repair each file, then end the episode."""
    turns: list[_Turn] = []
    for path, content in problem.fixed.items():
        before, after, new = problem.text(path), content.decode("utf-8"), path not in problem.shown
        if not new:
            first, last = _line_range(before, after)
            place: dict[str, JSON] = {"path": path, "first": first, "last": last}
            look = "I look at the code that the issue is about."
            turns.append(("read_file", place, lines_of(before, first, last), look))
        patch, result = unified_diff(path, before, after, new), f"{'made' if new else 'changed'} {path}"
        turns.append(("apply_patch", {"patch": patch}, result, _FOUND))
    return _episode(turns)


def written(texts: Mapping[str, str]) -> tuple[Message, ...]:
    """Return the messages after the prompt of an episode that writes these files."""
    return _episode([("write_file", {"path": path, "text": texts[path]}, f"wrote {path}", _FOUND) for path in texts])


def _episode(turns: Sequence[_Turn]) -> tuple[Message, ...]:
    messages: list[Message] = []
    for name, arguments, output, content in turns:
        messages += tool_turn(len(messages), name, arguments, output, content=content)
    last = calling_message(len(messages), "submit", {"answer": "Mended."}, content="The issue is mended.")
    return (*messages, last)


def _line_range(before: str, after: str) -> tuple[int, int]:
    """Return the first and last line to read (1-based): the changed lines with some context."""
    old, new = list(io.StringIO(before)), list(io.StringIO(after))
    head = next((i for i, (one, other) in enumerate(zip(old, new, strict=False)) if one != other), len(old) - 1)
    same = zip(reversed(old), reversed(new), strict=False)
    tail = next((i for i, (one, other) in enumerate(same) if one != other), 0)
    return max(1, head + 1 - _CONTEXT_LINES), min(len(old), max(head, len(old) - tail) + _CONTEXT_LINES)


@cache
def forgeries() -> Mapping[str, str]:
    """Return the code of each forgery by name."""
    held = tomllib.loads(package_text("data/forgeries.toml"))
    return {name: f"{held['common']}\n{body}" for name, body in held["ways"].items()}


def forged(problem: SweProblem, code: str) -> dict[str, str]:
    """Return the files that a fix changes, unfixed, with code appended."""
    return {path: problem.text(path) + code for path in problem.fixed if path.endswith(".py")}


def make_swe_world(settings: Mapping[str, object], limits: ToolLimits) -> SweWorld:
    """Create the world from its settings. Raises ConfigError for invalid settings."""
    given = read_settings(SweSettings, settings)
    kinds = names_of("kinds")
    if unknown := [kind for kind in given.kinds if kind not in kinds]:
        raise ConfigError(f"Unknown kind of bug: {unknown[0]!r}.", f"Kinds: {', '.join(kinds)}.")
    if bool(given.instances) != bool(given.repositories):
        hint = "The first is a file of instances, the second a folder with clones of their repositories."
        raise ConfigError("env.settings.instances and env.settings.repositories go together.", hint)
    return SweWorld(given, limits)
