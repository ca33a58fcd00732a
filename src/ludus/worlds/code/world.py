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

from ludus.envs.base import World, shipped_report
from ludus.envs.settings import read_settings
from ludus.envs.tool_env import ToolLimits
from ludus.envs.tool_world import Dialogue, split_of
from ludus.errors import ConfigError
from ludus.rewards.base import Reward, truth_of
from ludus.rewards.code.turns import TurnVerifier, suite_progress
from ludus.sandbox import Sandbox, open_sandbox
from ludus.tools.base import Tool
from ludus.types import Message, Task
from ludus.worlds.code.environment import REPORT, CodeEnv, code_rewards, code_tools, program_message, solution
from ludus.worlds.code.grader import LIMITS, CodeGrader, CodeTruth
from ludus.worlds.code.problems import FAMILIES, NUM_TESTS, SPLITS, CodeProblem, problems
from ludus.worlds.code.records import Format, load_code_tasks

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
    """Number of tasks in all splits; fewer if the data has fewer of these levels and families."""
    levels: tuple[Literal[1, 2, 3, 4, 5], ...] = Field((1, 2, 3, 4, 5), min_length=1)
    """Difficulty levels: 1 is one or two easy steps, 5 two hard ones or several in sequence."""
    families: tuple[str, ...] = Field(FAMILIES, min_length=1)
    """Families of the hardest step of a task."""
    styles: tuple[Literal["function", "stdin"], ...] = Field(("function", "stdin"), min_length=1)
    """A function to write, or a program that reads stdin and prints."""
    tests: int = Field(NUM_TESTS, ge=8, le=NUM_TESTS)
    """Number of tests per task, three of which are shown."""
    tools: bool = True
    """Whether to offer `python`, `run_tests` and `submit`."""
    outcome: Literal["all", "share"] = "all"
    """Outcome of a program: 1 if all tests pass and else 0, or the share that passes."""
    share_weight: float = Field(0.25, ge=0, lt=0.5)
    """Weight of the share of hidden tests that pass, if the outcome is all or nothing."""
    loads_weight: float = Field(0.05, ge=0, lt=0.5)
    """Weight of a program that compiles and defines the function."""
    well_formed_weight: float = Field(0.05, ge=0, lt=0.5)
    """Weight of an episode that ends with an answer, has no failed call and whose program loads."""
    thrift_weight: float = Field(0.0, ge=0, lt=0.5)
    """Weight of unused time and memory of a correct program; measured, so not bit-reproducible."""
    timeout_s: float = Field(5.0, gt=0, le=60)
    """CPU time limit of a run in seconds."""
    flaw_rate: float = Field(0.5, ge=0, le=1)
    """Fraction of demonstrations that omit a step and submit an untested program."""
    check_turns: bool = False
    """Run all tests, invisibly to the model, on each program passed to `run_tests`, for the turn verifier."""
    data: str | None = None
    """File of tasks (JSON lines, also .gz) that replaces the generated ones."""
    format: Format = "own"
    """Format of that file."""
    seed: int = 0
    """Seed of the demonstrations."""


@dataclass(frozen=True)
class CodeWorld(World):
    """Programming tasks with visible and hidden tests."""

    num_text_dialogues: ClassVar[int] = 600

    settings: CodeSettings = field(default_factory=CodeSettings)
    limits: ToolLimits = field(default_factory=ToolLimits)
    sandbox: Sandbox | None = None
    name: str = "code"

    @property
    def splits(self) -> Sequence[str]:
        """The names of the splits; `composition` only with generated tasks."""
        return tuple(self._task_lists)

    @cached_property
    def rewards(self) -> tuple[Reward, ...]:
        """The outcome of the tests, and small shaping rewards."""
        given = self.settings
        weights = {"hidden_share": given.share_weight, "loads": given.loads_weight}
        weights |= {"well_formed": given.well_formed_weight, "thrift": given.thrift_weight}
        return code_rewards(given.outcome, weights)

    @property
    def turn_verifier(self) -> TurnVerifier | None:
        """With `check_turns`, every test that newly passes is a milestone."""
        return suite_progress(REPORT) if self.settings.check_turns and self.settings.tools else None

    @cached_property
    def grader(self) -> CodeGrader:
        """The grader, in the given or the default sandbox."""
        limits = replace(LIMITS, cpu_s=self.settings.timeout_s, wall_s=self.settings.timeout_s + 1)
        return CodeGrader(self.sandbox or open_sandbox(), limits)

    @cached_property
    def problems(self) -> Mapping[str, Sequence[CodeProblem]]:
        """The generated problems of each split, with their truth; they must not reach an environment."""
        return _problems(self.settings)

    @cached_property
    def _task_lists(self) -> Mapping[str, Sequence[Task]]:
        system = SYSTEM["tools" if self.settings.tools else "none"]
        if self.settings.data is not None:
            return load_code_tasks(Path(self.settings.data), self.settings.format, system)
        return {
            split: [_task(one, split, system, self.settings.tests) for one in self.problems[split]] for split in SPLITS
        }

    @cached_property
    def _by_id(self) -> Mapping[str, CodeProblem]:
        return {one.id: one for found in self.problems.values() for one in found}

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split, levels mixed."""
        return split_of(self._task_lists, split, self.name)

    def environment(self, task: Task) -> CodeEnv:
        """Return a new episode."""
        truth, check_turns = truth_of(task, CodeTruth), self.settings.check_turns
        return CodeEnv(self._tools(task), self.rewards, self.grader, truth, self.limits, check_turns)

    def _tools(self, task: Task) -> tuple[Tool, ...]:
        return code_tools(self.grader, truth_of(task, CodeTruth)) if self.settings.tools else ()

    def demonstrations(self, seed: int) -> Iterator[Dialogue]:
        """Yield solutions of training tasks without end; some are flawed, unless the tasks are from a file."""
        rng = random.Random(f"demonstrations/{self.settings.seed}/{seed}")
        tasks = [task for task in self.tasks("train") if truth_of(task, CodeTruth).reference]
        while tasks:
            task = rng.choice(tasks)
            if self.settings.data is None and rng.random() < self.settings.flaw_rate:
                problem = self._by_id[task.id]
                flawed = rng.choice(problem.flawed) if len(problem.steps) > 1 else problem.flawed[0]
                yield Dialogue((*task.prompt, program_message(flawed)), self._tools(task))
            else:
                yield self._solution(task)

    def expert(self, task: Task) -> Dialogue | None:
        """Return the solution, or None if it is unknown."""
        return self._solution(task) if truth_of(task, CodeTruth).reference else None

    def _solution(self, task: Task) -> Dialogue:
        messages = solution(truth_of(task, CodeTruth), self.settings.tools)
        return Dialogue((*task.prompt, *messages), self._tools(task))

    def difficulty_report(self) -> str:
        """Return the number of distinct tasks and the success rates of trivial policies; empty for tasks of a file."""
        if self.settings.data is not None:
            return ""
        return shipped_report(self, self.problems == _problems(CodeSettings()))

    def paraphrases(self, task: Task) -> Sequence[str]:
        """Return the solution as plain text, and reformatted in a longer answer."""
        reference = truth_of(task, CodeTruth).reference
        if not reference:
            return ()
        other = ast.unparse(ast.parse(reference))
        return (reference, f"First an idea:\n```python\nx = 1\n```\nAnd here it is.\n```py\n# done\n{other}\n```\n")

    def with_sandbox(self, sandbox: Sandbox) -> CodeWorld:
        """Return this world with another sandbox."""
        return replace(self, sandbox=sandbox)

    async def close(self) -> None:
        """Close the sandbox."""
        await self.grader.sandbox.close()


def _task(problem: CodeProblem, split: str, system: str, num_tests: int) -> Task:
    tags = {"split": split, "family": problem.family, "level": str(problem.level)}
    tags |= {"style": problem.style, "steps": str(len(problem.steps))}
    prompt = (Message(role="system", content=system), Message(role="user", content=problem.text))
    return Task(problem.id, prompt, problem.truth(num_tests), tags)


@cache
def _problems(settings: CodeSettings) -> Mapping[str, Sequence[CodeProblem]]:
    """Return the problems of each split, read once per process. Raises ConfigError if none is for training."""
    found = problems(settings.tasks, settings.levels, settings.families, settings.styles)
    if not found["train"]:
        raise ConfigError(
            "The levels and families have no problems for training.", "Add levels or families, or more tasks."
        )
    return found


def make_code_world(settings: Mapping[str, object], limits: ToolLimits) -> CodeWorld:
    """Return the world with these settings. Raises ConfigError for invalid ones."""
    chosen = read_settings(CodeSettings, settings)
    if unknown := [family for family in chosen.families if family not in FAMILIES]:
        known = ", ".join(FAMILIES)
        raise ConfigError(f"Unknown family {unknown[0]!r} in env.settings.families.", f"Families: {known}.")
    if chosen.data is None and chosen.format != "own":
        raise ConfigError("env.settings.format is set without env.settings.data.", "Name the file of tasks.")
    world = CodeWorld(chosen, limits)
    if chosen.data is not None:
        world.tasks("train")
    return world
