"""The world `swe`: repositories with a bug to repair, graded by tests that the model does not see."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from ludus.envs.base import Environment, World, room_of
from ludus.envs.settings import read_settings
from ludus.envs.tool_env import ToolEnv
from ludus.envs.tool_world import Dialogue, check_split
from ludus.envs.toolbox import ToolLimits
from ludus.errors import ConfigError
from ludus.rewards.base import Reward
from ludus.rewards.code.unit_tests import share_passed, suite_passes
from ludus.rewards.extract import last_output
from ludus.sandbox import open_sandbox
from ludus.sandbox.base import Sandbox
from ludus.tools.base import Tool, ToolError
from ludus.types import Action, Message, StepResult, Task, ToolOutcome
from ludus.worlds.swe.alternative_solutions import other_repairs
from ludus.worlds.swe.catalogue import Catalogue, Package, load_catalogue, shipped_folder
from ludus.worlds.swe.cheats import WORST, forged, forgeries
from ludus.worlds.swe.difficulty_report import survey
from ludus.worlds.swe.grader.grader import REPORT, Grade, grade
from ludus.worlds.swe.instances import load_instances
from ludus.worlds.swe.mutations import KINDS
from ludus.worlds.swe.problems import Mined, SweCase, SweProblem
from ludus.worlds.swe.solver import solution, written
from ludus.worlds.swe.sources import default_folder, fetch, require
from ludus.worlds.swe.tools import Checkout, checkout, repair_tools

SPLITS = ("train", "validation", "test")
SYSTEM = (
    "You repair Python code. A git repository lies in the working folder. Find the cause of the issue, mend "
    "it in the code, and hand in with submit. Tests that you do not see decide; changes of tests and of "
    "settings do not count."
)


class SweSettings(BaseModel):
    """Settings of the world of software repair (`env.settings`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    catalogue: str = ""
    """A folder with `packages.jsonl` and `tasks.jsonl`; empty: the tasks that ship with Ludus."""
    sources: str = ""
    """Where the packages' source distributions lie; empty: `~/.cache/ludus/swe`."""
    packages: tuple[str, ...] = ()
    """Only tasks of these; none: of all."""
    kinds: tuple[str, ...] = ()
    """Only bugs of these kinds; none: of all."""
    levels: tuple[Literal[1, 2, 3], ...] = Field((1, 2, 3), min_length=1)
    """1: a hidden test calls the broken function by name; 2: it does not; 3: and the function is private."""
    instances: str = ""
    """A file of JSON lines in the format of SWE-bench, in the place of the catalogue."""
    repositories: str = ""
    """The folder with clones of the instances' repositories."""
    command_s: float = Field(30.0, gt=0, le=600)
    """Seconds that one call of the shell may take."""
    tests_s: float = Field(30.0, gt=0, le=1800)
    """Seconds for the hidden tests, each time that they run."""
    fixed_weight: float = Field(0.1, ge=0, lt=0.5)
    """Of the share of the broken tests that pass again; all hidden tests passing weighs 1."""
    seed: int = 0
    """Of the order of tasks."""


class SweEnv(Environment):
    """One episode: tools on a checkout, and the hidden tests at its end."""

    def __init__(self, world: SweWorld, problem: SweProblem, workspace: Checkout, tools: Sequence[Tool]) -> None:
        self.tools = tools
        self.rewards = world.rewards
        self._sandbox = workspace.sandbox
        self._problem = problem
        self._workspace = workspace
        self._inner = ToolEnv(tools, world.rewards, world.limits, [workspace])
        self._left: Mapping[str, bytes] | None = None

    async def start(self, task: Task) -> list[Message]:
        """Open the checkout."""
        return await self._inner.start(task)

    async def step(self, action: Action) -> StepResult:
        """Run the calls; where the episode ends, run the hidden tests. Raises WorldError."""
        result = await self._inner.step(action)
        if not result.done:
            return result
        return replace(result, outcomes=(*result.outcomes, (await self._grade()).outcome()))

    async def close(self) -> None:
        """End the session."""
        await self._inner.close()

    async def _grade(self) -> Grade:
        try:
            left = await self._workspace.snapshot()
        except ToolError as error:
            return Grade({}, f"the files cannot be taken out: {error}")
        self._left = left.files
        return await grade(self._sandbox, self._problem.exam, left.files)

    async def grade_again(self) -> ToolOutcome | None:
        """The report of another run of the hidden tests on the files that were left."""
        if self._left is None:
            return None
        return (await grade(self._sandbox, self._problem.exam, self._left)).outcome()


@dataclass(frozen=True)
class SweWorld(World):
    """Repositories to repair."""

    settings: SweSettings = field(default_factory=SweSettings)
    limits: ToolLimits = field(default_factory=ToolLimits)
    sandbox: Sandbox = field(default_factory=open_sandbox)
    name: str = "swe"
    splits: Sequence[str] = SPLITS

    @cached_property
    def catalogue(self) -> Catalogue:
        """The mined tasks."""
        return load_catalogue(Path(self.settings.catalogue) if self.settings.catalogue else shipped_folder())

    @cached_property
    def cases(self) -> Mapping[str, SweCase]:
        """All tasks by id, in their order. Raises ConfigError and UserError for files that cannot be read."""
        given = self.settings
        if given.instances:
            return {case.id: case for case in load_instances(given.instances, given.repositories, given.tests_s)}
        folder = self._folder
        chosen = [
            Mined(bug, self.catalogue.packages[bug.package], folder, given.tests_s)
            for bug in self.catalogue.bugs
            if (not given.packages or bug.package in given.packages)
            and (not given.kinds or bug.edit.kind in given.kinds)
            and bug.level in given.levels
        ]
        random.Random(f"swe:{given.seed}").shuffle(chosen)
        return {case.id: case for case in chosen}

    @cached_property
    def rewards(self) -> tuple[Reward, ...]:
        """All hidden tests decide; the share of the broken ones that pass again shapes."""
        read = last_output(REPORT)
        return (
            Reward("resolved", suite_passes(read), outcome=True),
            Reward("fixed", share_passed(read, "fail_to_pass"), weight=self.settings.fixed_weight),
            Reward("kept", share_passed(read, "pass_to_pass"), weight=0.0),
        )

    def with_sandbox(self, sandbox: Sandbox) -> SweWorld:
        """This world with that sandbox."""
        return replace(self, sandbox=sandbox)

    @property
    def episodes_at_once(self) -> int | None:
        """As many as the sandbox has room for sessions."""
        return room_of(self.sandbox)

    async def close(self) -> None:
        """Close the sandbox."""
        await self.sandbox.close()

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Fetch the sources of all packages that tasks need. Raises UserError."""
        fetch(self._packages, self._folder, tell)

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split, packages mixed. Raises UserError where sources are missing."""
        check_split(split, self.splits, self.name)
        if not self.settings.instances:
            require(self._packages, self._folder)
        return self._task_lists[split]

    def environment(self, task: Task) -> SweEnv:
        """A fresh checkout."""
        problem = self.cases[task.id].problem()
        workspace = checkout(self.sandbox, problem.shown, problem.exam.layout, self.settings.command_s)
        return SweEnv(self, problem, workspace, repair_tools(workspace))

    def expert(self, task: Task) -> Dialogue | None:
        """How it is mended; None for a task of another world."""
        case = self.cases.get(task.id)
        if case is None:
            return None
        problem = case.problem()
        workspace = checkout(self.sandbox, problem.shown, problem.exam.layout, self.settings.command_s)
        return Dialogue((*task.prompt, *solution(problem)), repair_tools(workspace))

    def difficulty_report(self) -> str:
        """How many bugs of the catalogue differ, and what is mended without skill; nothing of instances."""
        return "" if self.settings.instances else survey(self.catalogue)

    def alternative_solutions(self, task: Task) -> Sequence[Sequence[Message]]:
        """Repairs of the same meaning in another text; none for a task of another world."""
        case = self.cases.get(task.id)
        return () if case is None else tuple(map(written, other_repairs(case.problem())))

    def cheats(self, task: Task) -> Mapping[str, Sequence[Message]]:
        """Code that forges the results of tests, put where the tests import it; none for a foreign task."""
        case = self.cases.get(task.id)
        if case is None:
            return {}
        problem, codes = case.problem(), forgeries()
        return {f"forges by {name}": written(forged(problem, codes[name])) for name in WORST}

    @property
    def _folder(self) -> Path:
        return Path(self.settings.sources) if self.settings.sources else default_folder()

    @property
    def _packages(self) -> list[Package]:
        named = {case.package.name: case.package for case in self.cases.values() if isinstance(case, Mined)}
        return list(named.values())

    @cached_property
    def _task_lists(self) -> Mapping[str, Sequence[Task]]:
        return {split: [_task(c) for c in self.cases.values() if c.split == split] for split in self.splits}


def _task(case: SweCase) -> Task:
    asked = f"The repository is {case.repository}. This issue was reported:\n\n{case.issue}"
    prompt = (Message(role="system", content=SYSTEM), Message(role="user", content=asked))
    return Task(case.id, prompt, case.suite, {"split": case.split, **case.tags})


def make_swe_world(settings: Mapping[str, object], limits: ToolLimits) -> SweWorld:
    """The factory by which the world is registered. Raises ConfigError for settings that do not fit."""
    given = read_settings(SweSettings, settings)
    unknown = [kind for kind in given.kinds if kind not in KINDS]
    if unknown:
        raise ConfigError(f"There is no kind of bug {unknown[0]!r}.", f"Kinds: {', '.join(KINDS)}.")
    if bool(given.instances) != bool(given.repositories):
        raise ConfigError(
            "env.settings.instances and env.settings.repositories go together.",
            "The first is a file of instances, the second a folder with clones of their repositories.",
        )
    return SweWorld(given, limits)
