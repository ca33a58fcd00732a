"""Helpers of the rollout tests: a small tokenizer, scripted engines and small worlds."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count

from ludus.chat.render import TemplateRenderer
from ludus.chat.tokenizer import train_tokenizer
from ludus.config.sections.rollout import RolloutConfig
from ludus.engines.base import seed_for
from ludus.envs.base import Environment, World
from ludus.envs.tool_env import ToolEnv, ToolLimits
from ludus.rewards.base import Reward
from ludus.rollouts.episode import EngineChatSession, run_episode
from ludus.rollouts.ledger import Ledger, RolloutKey
from ludus.rollouts.scheduler import LockstepEngine, RolloutRequest, Scheduler, episode_name
from ludus.tools.base import Tool, tool
from ludus.types import Message, SamplingParams, Task
from scripted_engine import ScriptedEngine

TEXTS = (
    "Answer the question. Search until you know. What is the capital of France?",
    '<tool_call>\n{"name": "echo", "arguments": {"text": "Paris"}}\n</tool_call>',
    "Error: there is no tool. The argument is missing or wrong. It took longer than a second.",
) * 3


PATIENT = ToolLimits(timeout_s=5.0)
EPISODE = RolloutConfig()


@cache
def tokenizer():
    """Return a byte-level tokenizer of 340 tokens with the package's chat template."""
    return train_tokenizer(TEXTS, 340)


@cache
def renderer():
    return TemplateRenderer(tokenizer())


def end_token():
    return renderer().stop_token_ids[0]


def scripted(script, **options) -> ScriptedEngine:
    """Return an engine that replays `script`: lines by turn, the same for all episodes, or a function."""
    if isinstance(script, list | tuple):
        lines = tuple(script)
        return ScriptedEngine(lambda _, turn: lines[turn], tokenizer(), end_token(), **options)
    return ScriptedEngine(script, tokenizer(), end_token(), **options)


def in_order(*lines):
    """Return a script that replies with the lines in the order of all requests."""
    places = count()
    return lambda request, turn: lines[next(places)]


def call(name: str, **arguments) -> str:
    """Return a tool call as the model writes it."""
    said = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{said}\n</tool_call>"


@tool
def echo(text: str) -> str:
    """Say it again."""
    return text


def tool_of(function, name="it", **options) -> Tool:
    """Return a tool without arguments."""
    return tool(name=name, **options)(function)


def is_right(task, trajectory) -> float:
    """Return 1 if the answer is the task's truth, else 0."""
    return float(trajectory.answer == task.truth)


def make_task(name="t", said="What is the capital of France?", truth="Paris") -> Task:
    return Task(name, (Message(role="user", content=said),), truth)


Hook = Callable[[int], Awaitable[object]]
"""Called with the number of the environment; a result other than None replaces the environment's method."""


@dataclass
class RecordingEnv(Environment):
    """A `ToolEnv` with hooks, which records its calls."""

    inner: ToolEnv
    number: int
    hooks: Mapping[str, Hook]
    events: list[str] = field(default_factory=list)

    @property
    def tools(self):
        return self.inner.tools

    @property
    def rewards(self):
        return self.inner.rewards

    async def start(self, task):
        return await self._do("start", lambda: self.inner.start(task))

    async def step(self, action):
        return await self._do("step", lambda: self.inner.step(action))

    async def close(self):
        return await self._do("close", self.inner.close)

    async def _do(self, what, own):
        self.events.append(what)
        given = await self.hooks[what](self.number) if what in self.hooks else None
        return await own() if given is None else given


@dataclass
class RecordingWorld(World):
    """A world of `RecordingEnv`s, listed in `made` in order of creation."""

    tools: Sequence[Tool] = (echo,)
    rewards: Sequence[Reward] = (Reward("right", is_right, outcome=True),)
    hooks: Mapping[str, Hook] = field(default_factory=dict)
    limits: ToolLimits = PATIENT
    made: list[RecordingEnv] = field(default_factory=list)
    name: str = "watched"
    splits: Sequence[str] = ("train",)

    def tasks(self, split):
        return [make_task()]

    def environment(self, task):
        env = RecordingEnv(ToolEnv(self.tools, self.rewards, self.limits), len(self.made), self.hooks)
        self.made.append(env)
        return env

    @property
    def open(self) -> list[RecordingEnv]:
        """The environments that were started and not closed."""
        return [env for env in self.made if env.events and env.events[-1] != "close"]


def make_chat(engine, episode="e", max_tokens=2000, max_new_tokens=400, seed=1) -> EngineChatSession:
    params = SamplingParams(max_new_tokens=max_new_tokens)
    return EngineChatSession(engine, renderer(), params, max_tokens, episode, seed)


def play(engine, world=None, limits=EPISODE, task=None, **conversation):
    """Run one episode on a new event loop."""
    world = world or RecordingWorld()
    return asyncio.run(
        run_episode(task or make_task(), 0, world.environment(task), make_chat(engine, **conversation), limits)
    )


def make_scheduler(engine, world, rollout=EPISODE, *, lockstep=False, **settings):
    joint = LockstepEngine(engine) if lockstep else None

    def conversation(request):
        key = request.key
        seed = seed_for(key.step, key.task_id, key.sample)
        return make_chat(joint or engine, episode_name(key), seed=seed)

    return Scheduler(world, conversation, rollout.model_copy(update=settings), Ledger(), joint)


def make_requests(num, samples=1, step=0) -> list[RolloutRequest]:
    return [
        RolloutRequest(RolloutKey(step, f"t{i:03d}", sample), make_task(f"t{i:03d}"))
        for i in range(num)
        for sample in range(samples)
    ]
