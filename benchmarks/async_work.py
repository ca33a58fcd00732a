"""The work of the asynchrony benchmark: a world of slow tools, and a session of a real model that acts in it.

Prompts and observations are random tokens, and an action ends at any of some stop tokens, so that its length
is about geometric; a small model with random weights acts, and is trained, as any other. A call of the tool
takes a log-normal time, and some calls a multiple of the median. Which time a call takes depends on its task,
on how often the task was played before, and on the turn: on nothing that the model says.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import rollout_models
from ludus.chat.render import Renderer
from ludus.config.load import load_config
from ludus.config.schema import Config
from ludus.planning.costs import Setup
from ludus.rewards.base import Reward
from ludus.tools.base import Tool
from ludus.training.session import Session
from ludus.types import (
    Action,
    FinishReason,
    Guide,
    Message,
    StepResult,
    Task,
    ToolOutcome,
    ToolStatus,
    Trajectory,
)

FIRST_ID = 16
NUM_TASKS = 20_000


@dataclass(frozen=True)
class Latency:
    """Seconds of a call: log-normal around `median_s`, and `stragglers` of the calls take `slow` medians."""

    median_s: float
    spread: float = 0.5
    stragglers: float = 0.05
    slow: float = 20.0

    def draw(self, source: random.Random) -> float:
        """One call's seconds."""
        if source.random() < self.stragglers:
            return self.median_s * self.slow
        return self.median_s * source.lognormvariate(0.0, self.spread)


@dataclass(frozen=True)
class Sizes:
    """Turns of an episode, the last of which calls no tool, and tokens."""

    turns: int = 4
    prompt: tuple[int, int] = (40, 120)
    observation: tuple[int, int] = (10, 60)
    new: int = 24
    most: int = 160

    @property
    def longest(self) -> int:
        """Tokens of the longest episode."""
        return self.prompt[1] + self.turns * (self.most + self.observation[1]) + 1


@dataclass
class SlowWorld:
    """A world whose only tool takes its time; the outcome is a property of the tokens sampled."""

    sizes: Sizes
    latency: Latency
    name: str = "slow"
    splits: tuple[str, ...] = ("train",)
    played: Counter[str] = field(default_factory=Counter)

    @property
    def rewards(self) -> Sequence[Reward]:
        """Half of all episodes succeed, by chance: groups have variance, and there is nothing to learn."""
        return (Reward("even", _even, outcome=True),)

    @cached_property
    def _tasks(self) -> list[Task]:
        return [Task(str(i), (Message(role="user", content=str(i)),), None) for i in range(NUM_TASKS)]

    def tasks(self, split: str) -> Sequence[Task]:
        """The same for each split."""
        return self._tasks

    def environment(self, task: Task) -> SlowTool:
        """One episode, with the latencies of its own."""
        self.played[task.id] += 1
        return SlowTool(self, random.Random(f"{task.id}/{self.played[task.id]}"))

    async def close(self) -> None:
        """Nothing is open."""


def _even(_: Task, trajectory: Trajectory) -> float:
    return float(sum(sum(s.tokens) for s in trajectory.segments if s.kind == "action") % 2 == 0)


@dataclass
class SlowTool:
    """Every action but the last is taken for a call."""

    world: SlowWorld
    source: random.Random
    turn: int = 0

    @property
    def tools(self) -> Sequence[Tool]:
        """None is told to the model."""
        return ()

    @property
    def rewards(self) -> Sequence[Reward]:
        """The world's."""
        return self.world.rewards

    async def start(self, task: Task) -> list[Message]:
        """The prompt."""
        return list(task.prompt)

    async def step(self, action: Action) -> StepResult:
        """Wait as long as the call takes."""
        self.turn += 1
        if self.turn == self.world.sizes.turns:
            return StepResult(done=True)
        seconds = self.world.latency.draw(self.source)
        await asyncio.sleep(seconds)
        said = Message(role="tool", content=f"{self.source.random()}")
        return StepResult((said,), outcomes=(ToolOutcome("", "slow", ToolStatus.OK, "", seconds=seconds),))

    async def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True)
class RandomTokens(Renderer):
    """Messages as random tokens of random number, the same for the same message."""

    sizes: Sizes
    vocab: int

    @property
    def stop(self) -> tuple[str, ...]:
        """No text is looked at."""
        return ()

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """One in `sizes.new` of all tokens."""
        return _stops(self.vocab, self.sizes.new)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[int, ...]:
        """The tokens of a prompt."""
        return self._tokens(messages[0]["content"], self.sizes.prompt)

    def observation(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens of an observation."""
        return self._tokens(messages[0]["content"], self.sizes.observation)

    def parse(self, tokens: Sequence[int], turn: int, finish_reason: FinishReason) -> Action:
        """An action is what it is; one that reached the limit is as good as any."""
        return Action(Message(role="assistant", content=f"{len(tokens)} tokens"))

    def action(self, history: Sequence[Message], message: Message, tools: Sequence[Tool]) -> tuple[int, ...]:
        """Nobody demonstrates anything."""
        raise NotImplementedError

    def guide(self, tools: Sequence[Tool]) -> Guide:
        """Nobody asks for one."""
        raise NotImplementedError

    def _tokens(self, seed: str, bounds: tuple[int, int]) -> tuple[int, ...]:
        source = random.Random(seed)
        return tuple(source.randrange(FIRST_ID, self.vocab) for _ in range(source.randint(*bounds)))


@cache
def _stops(vocab: int, every: int) -> tuple[int, ...]:
    return tuple(random.Random(0).sample(range(FIRST_ID, vocab), vocab // every))


def session(config: Config, sizes: Sizes, latency: Latency, shape: dict[str, Any]) -> Session:
    """A session of a model of this shape with random weights, always the same ones."""
    model, tokenizer = made(shape)
    renderer = RandomTokens(sizes, int(shape["vocab_size"]))
    return Session(config, SlowWorld(sizes, latency), model, tokenizer, renderer)


def made(shape: dict[str, Any]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, and a tokenizer that nobody asks."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    words = {"a": 0} | {f"<{i}>": i for i in range(1, int(shape["vocab_size"]))}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="a")))
    return Qwen3ForCausalLM(Qwen3Config(**shape)), tokenizer


@contextmanager
def serving(shape: dict[str, Any], folder: Path) -> Iterator[str]:
    """The URL of `ludus serve` for the model, in a process of its own with one thread."""
    model, tokenizer = made(shape)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    serve = [sys.executable, "-m", "ludus", "serve", str(folder / "model"), "--port", "0", "--control"]
    command = ["env", "OMP_NUM_THREADS=1", *serve]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        said = process.stdout.readline().strip() if process.stdout else ""
        try:
            yield said.rsplit(" at ", 1)[1]
        finally:
            process.terminate()


def settings(setup: Setup, sizes: Sizes, folder: Path, url: str = "") -> Config:
    """The configuration of a run of this layout; `url` is that of the engine where it is a server."""
    words = {
        "training.mode": setup.mode,
        "training.steps": setup.steps,
        "training.tasks_per_step": setup.groups,
        "training.checkpoint_every": 10**6,
        "training.learning_rate": 1e-5,
        "training.report_kl": "false",
        "algorithm.group_size": setup.members,
        "algorithm.aggregation": "token_mean",
        "staleness.max_staleness": setup.max_staleness,
        "staleness.in_flight": setup.in_flight,
        "staleness.min_ess": 0,
        "rollout.concurrency": setup.most,
        "rollout.max_turns": sizes.turns,
        "rollout.max_new_tokens": sizes.most,
        "rollout.max_tokens": sizes.longest,
        "rollout.reproducible": "false",
        "evaluation.splits": "[]",
        "evaluation.every": 10**6,
        "env.check": "false",
        "run.threads": 1,
        "run.save_rollouts": "false",
        "run.folder": folder,
        "engine.url": url or "none",
    }
    return load_config("search", [word for key, value in words.items() for word in (f"--{key}", str(value))])


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": rollout_models.TINY | {"vocab_size": 512},
    "small": rollout_models.SMALL | {"initializer_range": 0.02},
    "medium": rollout_models.SMALL
    | {"hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 12, "initializer_range": 0.02},
}
"""About 0.05, 3 and 12 million parameters. A small range makes all tokens about equally likely."""
