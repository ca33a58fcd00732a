"""The code world: tasks, episodes and demonstrations."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from ludus.envs.base import World
from ludus.envs.difficulty_report import shipped_report
from ludus.envs.settings import read_settings
from ludus.envs.tool_world import Dialogue, check_split
from ludus.envs.toolbox import ToolLimits
from ludus.errors import ConfigError
from ludus.rewards.base import Reward, truth_of
from ludus.rewards.code.turns import TurnVerifier, suite_progress
from ludus.sandbox import Sandbox, open_sandbox
from ludus.tools.base import Tool
from ludus.tools.python import python_tool
from ludus.types import Message, Task
from ludus.worlds.code import records
from ludus.worlds.code.environment import REPORT, CodeEnv, Weights, code_rewards
from ludus.worlds.code.grader import LIMITS, CodeGrader, CodeTruth
from ludus.worlds.code.problems import FAMILIES, NUM_TESTS, SPLITS, CodeProblem, problems
from ludus.worlds.code.solver import solve, solve_without_a_step
from ludus.worlds.code.tools import run_tests_tool, submit_tool

SYSTEM = {
    "tools": (
        "Write the program that is asked for. Try code with python; run_tests runs a whole program against "
        "the tests that are shown. Hand in the whole program with submit, or as your answer."
    ),
    "none": "Write the program that is asked for. Answer with the whole program.",
}


class CodeSettings(BaseModel):
    """Settings of the code world (`env.settings`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tasks: int = Field(500, ge=20, le=2_000)
    """Of all splits together; fewer if the data has no more of these levels and families."""
    levels: tuple[Literal[1, 2, 3, 4, 5], ...] = Field((1, 2, 3, 4, 5), min_length=1)
    """Of the tasks: 1 is an easy step or two, 5 two hard ones or several in a row."""
    families: tuple[str, ...] = Field(FAMILIES, min_length=1)
    """What the hardest step of a task is about."""
    styles: tuple[Literal["function", "stdin"], ...] = Field(("function", "stdin"), min_length=1)
    """A function to write, or a program that reads and prints."""
    tests: int = Field(NUM_TESTS, ge=8, le=NUM_TESTS)
    """Tests of a task; three of them are shown."""
    tools: bool = True
    """Whether an episode offers `python`, `run_tests` and `submit`, or nothing."""
    outcome: Literal["all", "share"] = "all"
    """What a program earns: 1 where all tests pass and else 0, or the share that passes."""
    share_weight: float = Field(0.25, ge=0, lt=0.5)
    """Of the share of hidden tests that pass, beside an outcome of all or nothing."""
    loads_weight: float = Field(0.05, ge=0, lt=0.5)
    """Of a program that compiles and defines what is asked for."""
    well_formed_weight: float = Field(0.05, ge=0, lt=0.5)
    """Of an episode that ends with an answer, has no failed call and whose program loads."""
    thrift_weight: float = Field(0.0, ge=0, lt=0.5)
    """Of time and memory that a right program leaves; it is measured, and does not repeat bit for bit."""
    timeout_s: float = Field(5.0, gt=0, le=60)
    """CPU seconds of a run."""
    habit: float = Field(0.5, ge=0, le=1)
    """Share of the demonstrations that leave a step out and hand in without a try."""
    check_turns: bool = False
    """Run all tests, unseen, on each program that `run_tests` is called with, for the turn verifier."""
    data: str | None = None
    """A file of tasks (JSON lines, also .gz) instead of the generated ones."""
    format: records.Format = "own"
    """How that file is laid out."""
    seed: int = 0
    """Of the demonstrations."""


@dataclass(frozen=True)
class CodeWorld(World):
    """Programs from a specification, with tests that are shown and tests that are not."""

    num_text_dialogues: ClassVar[int] = 600

    settings: CodeSettings = field(default_factory=CodeSettings)
    limits: ToolLimits = field(default_factory=ToolLimits)
    sandbox: Sandbox | None = None
    name: str = "code"

    @property
    def splits(self) -> Sequence[str]:
        """The names of the splits; `composition` only of generated tasks."""
        return tuple(self._task_lists)

    @cached_property
    def rewards(self) -> tuple[Reward, ...]:
        """The tests, and a little for what leads there."""
        chosen = self.settings
        weights = Weights(chosen.share_weight, chosen.loads_weight, chosen.well_formed_weight, chosen.thrift_weight)
        return code_rewards(chosen.outcome, weights)

    @property
    def turn_verifier(self) -> TurnVerifier | None:
        """A milestone is one more test that passes; there is no verifier unless `check_turns` is on."""
        return suite_progress(REPORT) if self.settings.check_turns and self.settings.tools else None

    @cached_property
    def grader(self) -> CodeGrader:
        """Who runs the tests, in the sandbox that was given or else the default one."""
        limits = replace(LIMITS, cpu_s=self.settings.timeout_s, wall_s=self.settings.timeout_s + 1)
        return CodeGrader(self.sandbox or open_sandbox(), limits)

    @cached_property
    def problems(self) -> Mapping[str, Sequence[CodeProblem]]:
        """The generated problems of each split. They hold the truth: not for an environment."""
        return _problems(self.settings)

    @cached_property
    def _task_lists(self) -> Mapping[str, Sequence[Task]]:
        system = SYSTEM["tools" if self.settings.tools else "none"]
        if self.settings.data is not None:
            return records.load_code_tasks(Path(self.settings.data), self.settings.format, system)
        return {
            split: [_task(one, split, system, self.settings.tests) for one in self.problems[split]] for split in SPLITS
        }

    @cached_property
    def _by_id(self) -> Mapping[str, CodeProblem]:
        return {one.id: one for found in self.problems.values() for one in found}

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split, levels mixed, in a fixed order."""
        check_split(split, self.splits, self.name)
        return self._task_lists[split]

    def environment(self, task: Task) -> CodeEnv:
        """A fresh episode."""
        tools = self.tools(truth_of(task, CodeTruth)) if self.settings.tools else ()
        return CodeEnv(tools, self.rewards, self.grader, self.limits, self.settings.check_turns)

    def tools(self, truth: CodeTruth) -> tuple[Tool, ...]:
        """`python`, `run_tests` on the visible tests of a task, `submit`. They keep no state."""
        own = python_tool(self.grader.sandbox, replace(self.grader.limits, output_bytes=64 * 1024))
        return own, run_tests_tool(self.grader, truth), submit_tool()

    def demonstrations(self, seed: int) -> Iterator[Dialogue]:
        """An endless stream by the flawed oracle on training tasks; of a file's tasks, all that have a
        solution."""
        rng = random.Random(f"demonstrations/{self.settings.seed}/{seed}")
        tasks = [task for task in self.tasks("train") if truth_of(task, CodeTruth).reference]
        while tasks:
            task = rng.choice(tasks)
            flawed = self.settings.data is None and rng.random() < self.settings.habit
            yield self._shown(task, solve_without_a_step(self._by_id[task.id], rng) if flawed else None)

    def expert(self, task: Task) -> Dialogue | None:
        """The oracle without flaws; None where no solution is known."""
        return self._shown(task, None) if truth_of(task, CodeTruth).reference else None

    def difficulty_report(self) -> str:
        """Return how many tasks differ, and how many are solved without skill; empty for tasks of a file."""
        if self.settings.data is not None:
            return ""
        return shipped_report(self, self.problems == _problems(CodeSettings()))

    def paraphrases(self, task: Task) -> Sequence[str]:
        """The solution as bare text, and in other words: without its own layout, in a longer answer."""
        reference = truth_of(task, CodeTruth).reference
        if not reference:
            return ()
        other = ast.unparse(ast.parse(reference))
        return (reference, f"First an idea:\n```python\nx = 1\n```\nAnd here it is.\n```py\n# done\n{other}\n```\n")

    def with_sandbox(self, sandbox: Sandbox) -> CodeWorld:
        """This world with that sandbox."""
        return replace(self, sandbox=sandbox)

    async def close(self) -> None:
        """Close the sandbox."""
        await self.grader.sandbox.close()

    def _shown(self, task: Task, messages: list[Message] | None) -> Dialogue:
        truth = truth_of(task, CodeTruth)
        tools = self.tools(truth) if self.settings.tools else ()
        turns = solve(truth, self.settings.tools) if messages is None else messages
        return Dialogue((*task.prompt, *turns), tools)


def _task(problem: CodeProblem, split: str, system: str, num_tests: int) -> Task:
    tags = {
        "split": split,
        "family": problem.family,
        "level": str(problem.level),
        "style": problem.style,
        "steps": str(len(problem.steps)),
    }
    prompt = (Message(role="system", content=system), Message(role="user", content=problem.text))
    return Task(problem.id, prompt, problem.truth(num_tests), tags)


@cache
def _problems(settings: CodeSettings) -> Mapping[str, Sequence[CodeProblem]]:
    """The problems of each split, read once in a process. Raises ConfigError if none is left for training."""
    found = problems(settings.tasks, settings.levels, settings.families, settings.styles)
    if not found["train"]:
        raise ConfigError(
            "The levels and families have no problems for training.", "Add levels or families, or more tasks."
        )
    return found


def make_code_world(settings: Mapping[str, object], limits: ToolLimits) -> CodeWorld:
    """The factory by which the world is registered. Raises ConfigError for settings that do not fit."""
    chosen = read_settings(CodeSettings, settings)
    if strange := [family for family in chosen.families if family not in FAMILIES]:
        known = ", ".join(FAMILIES)
        raise ConfigError(f"There is no family {strange[0]!r} (env.settings.families).", f"Families: {known}.")
    if chosen.data is None and chosen.format != "own":
        raise ConfigError("env.settings.format is set without env.settings.data.", "Name the file of tasks.")
    world = CodeWorld(chosen, limits)
    if chosen.data is not None:
        world.tasks("train")
    return world
