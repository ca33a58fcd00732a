"""A world of slow tools, for `env.name`: prompts and results are random words, and every action is a tool call.

Call latencies are log-normal; some calls take a multiple of the median. The latency depends on the task, on the
number of earlier episodes of the task in this process, and on the turn, but not on the model's output.
`env.settings` has the fields of `Sizes` and `Latency`, and `vocab`, the number of words.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from ludus.envs.base import Environment, World
from ludus.envs.tool_env import ToolLimits
from ludus.rewards.base import Reward
from ludus.types import Action, Message, StepResult, Task, ToolOutcome, ToolStatus, Trajectory

NUM_TASKS = 4_000


@dataclass(frozen=True)
class Latency:
    """Latency of a call: log-normal around `median_s`; a fraction `stragglers` of the calls takes `slow` medians."""

    median_s: float
    spread: float = 0.5
    stragglers: float = 0.05
    slow: float = 20.0

    def draw(self, source: random.Random) -> float:
        """Draw the seconds of one call."""
        if source.random() < self.stragglers:
            return self.median_s * self.slow
        return self.median_s * source.lognormvariate(0.0, self.spread)


@dataclass(frozen=True)
class Sizes:
    """Turns per episode (the last one without a call), words per prompt and result, and tokens per action."""

    turns: int = 4
    prompt: tuple[int, int] = (40, 120)
    result: tuple[int, int] = (10, 60)
    new: int = 24
    most: int = 160

    @property
    def longest(self) -> int:
        """The maximum length of an episode in tokens, template included."""
        return self.prompt[1] + self.turns * (self.most + self.result[1]) + 8 * self.turns


@dataclass
class SlowWorld(World):
    """A world with one slow tool; the reward depends only on the sampled tokens."""

    sizes: Sizes
    latency: Latency
    vocab: int
    name: str = "slow"
    splits: tuple[str, ...] = ("train",)
    played: Counter[str] = field(default_factory=Counter)

    @property
    def rewards(self) -> Sequence[Reward]:
        """A random half of the episodes succeeds, so that groups have variance."""
        return (Reward("even", _even, outcome=True),)

    @cached_property
    def _tasks(self) -> list[Task]:
        prompts = (self.words(str(i), self.sizes.prompt) for i in range(NUM_TASKS))
        return [Task(str(i), (Message(role="user", content=p),), None) for i, p in enumerate(prompts)]

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks, the same for each split."""
        return self._tasks

    def environment(self, task: Task) -> SlowTool:
        """Return the environment of one episode with its own latencies."""
        self.played[task.id] += 1
        return SlowTool(self, random.Random(f"{task.id}/{self.played[task.id]}"))

    def words(self, seed: str, bounds: tuple[int, int]) -> str:
        """Return random words that depend only on the seed."""
        source = random.Random(seed)
        return " ".join(f"w{source.randrange(self.vocab)}" for _ in range(source.randint(*bounds)))


def _even(_: Task, trajectory: Trajectory) -> float:
    return float(sum(sum(s.tokens) for s in trajectory.segments if s.kind == "action") % 2 == 0)


@dataclass
class SlowTool(Environment):
    """Treats every action except the last as a call."""

    world: SlowWorld
    source: random.Random
    turn: int = 0

    def __post_init__(self) -> None:
        self.rewards = self.world.rewards

    async def start(self, task: Task) -> list[Message]:
        """Return the prompt."""
        return list(task.prompt)

    async def step(self, action: Action) -> StepResult:
        """Wait for the latency of the call."""
        self.turn += 1
        if self.turn == self.world.sizes.turns:
            return StepResult(done=True)
        seconds = self.world.latency.draw(self.source)
        await asyncio.sleep(seconds)
        words = self.world.words(f"{self.source.random()}", self.world.sizes.result)
        said = Message(role="tool", content=words)
        return StepResult((said,), outcomes=(ToolOutcome("", "slow", ToolStatus.OK, "", seconds=seconds),))


def make_world(settings: Mapping[str, Any], limits: ToolLimits) -> SlowWorld:
    """Return the world of these settings."""
    given = dict(settings)
    latency = Latency(**{f.name: given.pop(f.name) for f in fields(Latency) if f.name in given})
    return SlowWorld(Sizes(**_pairs(given, "turns", "prompt", "result", "new", "most")), latency, given["vocab"])


def _pairs(given: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the settings of these names, with lists as tuples."""
    return {n: tuple(given[n]) if isinstance(given[n], list) else given[n] for n in names if n in given}
