"""The math world: tasks, episodes, and demonstrations (one call per step and then the answer, or a guess)."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Literal

from pydantic import Field

from ludus.envs import task_files
from ludus.envs.base import SandboxWorld, shipped_report
from ludus.envs.benchmarks import BenchmarkName
from ludus.envs.settings import WorldSettings, read_settings
from ludus.envs.task_archive import SPLITS, read_lines, repeat_lines, split_sizes
from ludus.envs.tool_env import ToolEnv, ToolLimits
from ludus.envs.tool_world import Dialogue, assistant, check_split, tool_turn
from ludus.errors import ConfigError
from ludus.rewards.base import Reward
from ludus.rewards.exact_match import well_formed
from ludus.rewards.shaping import citation_support, either, only_if
from ludus.sandbox import Limits
from ludus.tools.base import Tool
from ludus.tools.calculator import exact_calculator_tool, show
from ludus.tools.workspace import python_tool
from ludus.types import Message, Task
from ludus.worlds.math import sources
from ludus.worlds.math.grader import Solution, answer_text, as_task, opening, paraphrases, solved
from ludus.worlds.math.problems import DEFAULT_TOPICS, MathProblem, Topic, read_problems, worked

_LIMITS = Limits(wall_s=5.0, cpu_s=5.0, files_out=0)


class MathSettings(WorldSettings):
    """Settings of the math world (`env.settings`)."""

    num_tasks: int = Field(5000, ge=20)
    """Number of training tasks; validation, test and composition have a tenth, a quarter and a fifth of it."""
    num_held_out: int | None = Field(None, ge=1)
    """Number of tasks of test and of composition, instead of those shares."""
    levels: tuple[Literal[1, 2, 3, 4, 5], ...] = Field((1, 2, 3, 4, 5), min_length=1)
    """Levels of the problems."""
    topics: tuple[Topic, ...] = Field(DEFAULT_TOPICS, min_length=1)
    """Topics of the problems."""
    tool: ToolName = "python"
    """Tool of an episode: Python in a sandbox, a calculator, or none."""
    well_formed_weight: float = Field(0.1, ge=0, lt=0.5)
    """Weight of an episode without a failed call whose answer is right or the output of a call. `solved` has 1."""
    flaw_rate: float = Field(0.5, ge=0, le=1)
    """Fraction of demonstrations that stop after the first of several steps, or guess."""
    data: str | None = None
    """File of problems that replaces the generated ones: JSON lines or a table."""
    format: BenchmarkName = "own"
    """Format of `data`: `own`, or the published format of a benchmark."""
    gym: tuple[str, ...] = ()
    """Generators of reasoning-gym that replace the generated problems; needs the extra `gym`."""
    seed: int = 0
    """Seed of the problems and of the demonstrations."""


@dataclass(frozen=True)
class MathWorld(SandboxWorld):
    """Problems to be solved with a tool."""

    settings: MathSettings = field(default_factory=MathSettings)
    limits: ToolLimits = field(default_factory=ToolLimits)
    name: str = "math"
    _tasks: dict[str, tuple[Task, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def splits(self) -> Sequence[str]:
        """Names of the splits; only generated problems have `composition`."""
        return SPLITS if self._generated else task_files.SPLITS

    @property
    def rewards(self) -> tuple[Reward, ...]:
        """The outcome, and a small reward without failed calls if the answer is right or the output of a call."""
        form = only_if(well_formed, either(citation_support, solved))
        return Reward("solved", solved, outcome=True), Reward("well_formed", form, self.settings.well_formed_weight)

    @cached_property
    def tools(self) -> tuple[Tool, ...]:
        """The stateless tools of every episode."""
        match self.settings.tool:
            case "python":
                return (python_tool(self.sandbox, _LIMITS),)
            case "calculator":
                return (exact_calculator_tool(),)
            case "none":
                return ()

    @property
    def runs_programs(self) -> bool:
        """Whether the tool is Python."""
        return self.settings.tool == "python"

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split."""
        check_split(split, self.splits, self.name)
        if split not in self._tasks:
            self._tasks.update(self._made(split))
        return self._tasks[split]

    def environment(self, task: Task) -> ToolEnv:
        """Return a new episode."""
        return ToolEnv(self.tools, self.rewards, self.limits)

    def opening(self, question: str) -> tuple[Message, ...]:
        """Return the system message and the question."""
        return opening(question)

    def demonstrations(self, seed: int) -> Iterator[Dialogue]:
        """Yield solutions and guesses without end, on problems of no held-out split.

        Problems of a user's file or of reasoning-gym have no steps; demonstrations then use generated problems.
        """
        settings = self.settings
        rng = random.Random(f"demonstrations/{settings.seed}/{seed}")
        lines = partial(repeat_lines, "math", rng=rng)
        for problem in read_problems("demonstrations", settings.levels, settings.topics, lines):
            flawed = rng.random() < settings.flaw_rate
            yield self._shown(problem, guess(problem, settings.tool, rng) if flawed else solve(problem, settings.tool))
        raise ConfigError("The topics have no problems of these levels.", "Add topics or levels.")

    def expert(self, task: Task) -> Dialogue | None:
        """Return the solution without flaws, or None if the steps are unknown."""
        if not isinstance(task.truth, Solution):
            return None
        return self._shown(task.truth.problem, solve(task.truth.problem, self.settings.tool))

    def variant(self, task: Task, rng: random.Random) -> Task | None:
        """Return another generated training problem of the topic and level, which is not in the train split."""
        if not (self._generated and isinstance(task.truth, Solution)):
            return None
        problem, lines = task.truth.problem, partial(read_lines, "math", seed=self.settings.seed)
        known = {one.prompt[-1]["content"] for one in self.tasks("train")}
        others = read_problems("train", (problem.level,), (problem.topic,), lines)
        free = [one for one in others if one.question not in known]
        return as_task(rng.choice(free), "train", 0) if free else None

    def difficulty_report(self) -> str:
        """Return the difficulty report; empty for problems of a user's file or of reasoning-gym."""
        return shipped_report(self, self.settings == MathSettings()) if self._generated else ""

    def paraphrases(self, task: Task) -> Sequence[str]:
        """Return the right answer in other notations; empty if the steps are unknown."""
        return paraphrases(task.truth.problem) if isinstance(task.truth, Solution) else ()

    @property
    def _generated(self) -> bool:
        return self.settings.data is None and not self.settings.gym

    def _shown(self, problem: MathProblem, messages: list[Message]) -> Dialogue:
        return Dialogue((*opening(problem.question), *messages), self.tools)

    def _made(self, split: str) -> Mapping[str, tuple[Task, ...]]:
        settings = self.settings
        if settings.data is not None:
            return sources.load_problems(Path(settings.data), settings.format)
        sizes = split_sizes(settings.num_tasks, settings.num_held_out)
        if settings.gym:
            return sources.gym_tasks(settings.gym, sizes, settings.seed)
        lines = partial(read_lines, "math", seed=settings.seed)
        problems = tuple(islice(read_problems(split, settings.levels, settings.topics, lines), sizes[split]))
        if len(problems) < sizes[split] and split == "train":
            message = f"The levels and topics have {len(problems)} different problems for training, not {sizes[split]}."
            raise ConfigError(message, "Lower env.settings.num_tasks, or add levels or topics.")
        return {split: tuple(as_task(problem, split, number) for number, problem in enumerate(problems))}


ToolName = Literal["python", "calculator", "none"]
_IMPORTED = ("comb", "factorial", "gcd", "lcm", "perm")
_PRIMES = "def primes(n):\n    return sum(all(k % d for d in range(2, k)) for k in range(2, n + 1))"


def solve(problem: MathProblem, tool: ToolName) -> list[Message]:
    """Return the messages of a solution; without a tool the answer alone."""
    return [*_calls(problem, tool), assistant(answer_text(problem))]


def guess(problem: MathProblem, tool: ToolName, rng: random.Random) -> list[Message]:
    """Return a flawed solution: the result of the first of several steps as the answer; for a problem of one step
    a random number without a call."""
    calls = _calls(problem, tool)
    if len(calls) > 2:
        return [*calls[:2], assistant(calls[1]["content"])]
    return [assistant(str(rng.randint(2, 99)))]


def _calls(problem: MathProblem, tool: ToolName) -> Sequence[Message]:
    """Return calls with their results, computed without the tool (a test compares them)."""
    if tool == "none":
        return []
    messages: list[Message] = []
    for number, (expression, value) in enumerate(worked(problem.steps)):
        arguments = {"expression": expression} if tool == "calculator" else {"code": as_program(expression)}
        messages += tool_turn(number, tool, arguments, show(value))
    return messages


def as_program(expression: str) -> str:
    """Return a Python program that prints the exact value of an expression of the calculator."""
    tree = _ExactDivision().visit(ast.parse(expression, mode="eval"))
    text = ast.unparse(ast.fix_missing_locations(tree))
    used = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    lines = ["from fractions import Fraction"] if "Fraction" in used else []
    if names := sorted(used & {*_IMPORTED, "isqrt"}):
        lines.append(f"from math import {', '.join(names)}")
    lines += [_PRIMES] if "primes" in used else []
    return "\n".join([*lines, f"print({text})"])


class _ExactDivision(ast.NodeTransformer):
    """Replaces divisions with fractions, and `sqrt` with `isqrt`."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Div):
            return node
        return ast.Call(ast.Name("Fraction", ast.Load()), [node.left, node.right], [])

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Name("isqrt", node.ctx) if node.id == "sqrt" else node


def make_math_world(settings: Mapping[str, object], limits: ToolLimits) -> MathWorld:
    """Build the world (the registered factory). Raises ConfigError for invalid settings."""
    chosen = read_settings(MathSettings, settings)
    if chosen.data is not None and chosen.gym:
        raise ConfigError("env.settings has both data and gym.", "Choose one of them.")
    if chosen.format != "own" and chosen.data is None:
        raise ConfigError(f"env.settings.format is {chosen.format!r}, and data is not set.", "Set env.settings.data.")
    world = MathWorld(chosen, limits)
    if chosen.data is not None:
        world.tasks("train")
    return world
