"""The math world: tasks, episodes and demonstrations."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from ludus.envs.base import World
from ludus.envs.settings import read_settings
from ludus.envs.tool_env import ToolEnv
from ludus.envs.tool_world import Dialogue, check_split
from ludus.envs.toolbox import ToolLimits
from ludus.errors import ConfigError
from ludus.rewards.base import Reward
from ludus.sandbox import Sandbox, open_sandbox
from ludus.tools.base import Tool
from ludus.types import Message, Task
from ludus.worlds.math import reasoning_gym, records
from ludus.worlds.math.generate import DEFAULT_TOPICS, LEVELS, SPLITS, TOPICS, ProblemMaker, make_problems
from ludus.worlds.math.grader import Solution, as_task, math_rewards, opening, other_words
from ludus.worlds.math.problems import MathProblem
from ludus.worlds.math.solver import guess, solve
from ludus.worlds.math.tools import ToolName, make_tools

SHARES = {"train": 1.0, "validation": 0.1, "test": 0.25, "composition": 0.2}
"""Tasks of each split for one of training."""


class MathSettings(BaseModel):
    """Settings of the math world (`env.settings`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_tasks: int = Field(5000, ge=20)
    """Tasks of the training split; the others have a tenth, a quarter and a fifth of it."""
    num_held_out: int | None = Field(None, ge=1)
    """Tasks of the splits test and composition, instead of those shares."""
    levels: tuple[int, ...] = Field(LEVELS, min_length=1)
    """Which levels, 1 to 5."""
    topics: tuple[str, ...] = Field(DEFAULT_TOPICS, min_length=1)
    """Which topics."""
    tool: ToolName = "python"
    """What an episode offers: Python in a sandbox, a calculator, or nothing."""
    well_formed_weight: float = Field(0.1, ge=0, lt=0.5)
    """Of an episode without a failed call whose answer a call gave, or is right; a solved task weighs 1."""
    habit: float = Field(0.5, ge=0, le=1)
    """Share of the demonstrations that stop after the first of several steps, or guess."""
    data: str | None = None
    """A file of problems (JSON lines) instead of the generated ones."""
    gym: tuple[str, ...] = ()
    """Generators of reasoning-gym instead; needs the extra `gym`."""
    seed: int = 0
    """Of all that is drawn."""


@dataclass(frozen=True)
class MathWorld(World):
    """Problems that are solved with a tool."""

    settings: MathSettings = field(default_factory=MathSettings)
    limits: ToolLimits = field(default_factory=ToolLimits)
    name: str = "math"
    sandbox: Sandbox = field(default_factory=open_sandbox, repr=False, compare=False)
    _tasks: dict[str, tuple[Task, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def splits(self) -> Sequence[str]:
        """The names of the splits; `composition` only of generated problems."""
        return SPLITS if self._generated else records.SPLITS

    @property
    def rewards(self) -> tuple[Reward, ...]:
        """The right answer, and a little for an episode without a failed call."""
        return math_rewards(self.settings.well_formed_weight)

    @cached_property
    def tools(self) -> tuple[Tool, ...]:
        """The tools of every episode. They keep nothing between calls."""
        return make_tools(self.settings.tool, self.sandbox)

    @property
    def runs_programs(self) -> bool:
        """Whether the tool is Python."""
        return self.settings.tool == "python"

    def with_sandbox(self, sandbox: Sandbox) -> MathWorld:
        """This world with that sandbox."""
        return replace(self, sandbox=sandbox)

    async def close(self) -> None:
        """Close the sandbox."""
        await self.sandbox.close()

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split."""
        check_split(split, self.splits, self.name)
        if split not in self._tasks:
            self._tasks.update(self._made(split))
        return self._tasks[split]

    def environment(self, task: Task) -> ToolEnv:
        """A fresh episode."""
        del task
        return ToolEnv(self.tools, self.rewards, self.limits)

    def opening(self, question: str) -> tuple[Message, ...]:
        """System message and question."""
        return opening(question)

    def demonstrations(self, seed: int) -> Iterator[Dialogue]:
        """An endless stream by the flawed oracle, on ever new problems that no held-out split can have.

        Problems of a file or of a foreign generator have no steps: there too the generated ones are shown.
        """
        settings = self.settings
        rng = random.Random(f"demonstrations/{settings.seed}/{seed}")
        for problem in _drawn(rng, settings.levels, settings.topics):
            flawed = rng.random() < settings.habit
            tool = settings.tool
            yield self._shown(problem, guess(problem, tool, rng) if flawed else solve(problem, tool))

    def expert(self, task: Task) -> Dialogue | None:
        """The oracle without flaws; None where the steps are not known."""
        if not isinstance(task.truth, Solution):
            return None
        return self._shown(task.truth.problem, solve(task.truth.problem, self.settings.tool))

    def difficulty_report(self) -> str:
        """How many problems differ, and what is solved without skill; nothing of foreign ones."""
        from ludus.worlds.math.difficulty_report import report

        return report(self) if self._generated else ""

    def paraphrases(self, task: Task) -> Sequence[str]:
        """The right number or expression in other writings; none for problems of others."""
        return other_words(task.truth.problem) if isinstance(task.truth, Solution) else ()

    @property
    def _generated(self) -> bool:
        return self.settings.data is None and not self.settings.gym

    def _shown(self, problem: MathProblem, messages: list[Message]) -> Dialogue:
        return Dialogue((*opening(problem.question), *messages), self.tools)

    def _made(self, split: str) -> Mapping[str, tuple[Task, ...]]:
        settings = self.settings
        if settings.data is not None:
            return records.load_problems(Path(settings.data))
        sizes = {name: max(round(settings.num_tasks * share), 1) for name, share in SHARES.items()}
        if settings.num_held_out is not None:
            sizes |= dict.fromkeys(("test", "composition"), settings.num_held_out)
        if settings.gym:
            return reasoning_gym.gym_tasks(settings.gym, sizes, settings.seed)
        problems = make_problems(split, sizes[split], settings.levels, settings.topics, settings.seed)
        return {split: tuple(as_task(p, split, number) for number, p in enumerate(problems))}


def make_math_world(settings: Mapping[str, object], limits: ToolLimits) -> MathWorld:
    """The factory by which the world is registered. Raises ConfigError for settings that do not fit."""
    chosen = read_settings(MathSettings, settings)
    if odd := [level for level in chosen.levels if level not in LEVELS]:
        raise ConfigError(f"There is no level {odd[0]} (env.settings.levels).", "Levels are 1 to 5.")
    if strange := [topic for topic in chosen.topics if topic not in TOPICS]:
        known = ", ".join(TOPICS)
        raise ConfigError(f"There is no topic {strange[0]!r} (env.settings.topics).", f"Topics: {known}.")
    if chosen.data is not None and chosen.gym:
        raise ConfigError("env.settings has both data and gym.", "Choose one of them.")
    world = MathWorld(chosen, limits)
    if chosen.data is not None:
        world.tasks("train")
    return world


def _drawn(rng: random.Random, levels: Sequence[int], topics: Sequence[str]) -> Iterator[MathProblem]:
    """Ever new training problems, levels in turn."""
    makers = [maker for level in levels if (maker := ProblemMaker(level, "train", tuple(topics))).open_topics()]
    if not makers:
        raise ConfigError("The topics have no problems of these levels.", "Add topics or levels.")
    for number in itertools.count():
        maker = makers[number % len(makers)]
        problem = maker.draw(rng, rng.choice(maker.open_topics()))
        if problem is not None:
            yield problem
