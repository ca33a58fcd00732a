"""Simulated episodes: a world whose tools take time, and a policy that says nothing for a while.

They are what the scheduler plays in the place of real ones. How long each call takes and how many tokens each
action has is drawn by the episode's place (its group, its member), so that every mode plays the same work.

In their trajectories one token stands for a run of tokens of one version: its id is how many they are.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ludus.envs.base import Environment, World
from ludus.planning.costs import EpisodeShape, ToolCost
from ludus.planning.devices import DevicePool
from ludus.rewards.base import Reward
from ludus.rollout.scheduler import Episode, RolloutRequest
from ludus.tools.base import Tool
from ludus.types import Action, Message, Segment, StepResult, StopReason, Task, Trajectory

_SAID = Action(Message(role="assistant", content="."))
_HEARD = StepResult((Message(role="tool", content="."),))
_DONE = StepResult(done=True)


@dataclass
class Draws:
    """What chance decides of each episode, by its place."""

    shape: EpisodeShape
    tool: ToolCost
    seed: int = 0
    _source: random.Random = field(default_factory=random.Random)

    def actions(self, group: int, member: int) -> list[int]:
        """Tokens of each turn."""
        source = self._at(group, member)
        return [self.shape.draw_action(source) for _ in range(self.shape.draw_turns(source))]

    def calls(self, group: int, member: int) -> list[float]:
        """Seconds of the calls, after all turns but the last."""
        turns = len(self.actions(group, member))
        source = self._at(group, member, 1)
        return [self.tool.draw(source) for _ in range(turns - 1)]

    def _at(self, group: int, member: int, what: int = 0) -> random.Random:
        self._source.seed(2 * ((self.seed * 1_000_003 + group) * 65_537 + member) + what)
        return self._source


@dataclass
class SimChatSession:
    """The policy's side: each turn takes an engine's time."""

    pool: DevicePool
    actions: Sequence[int]
    read: float
    engine: int = -1
    _segments: list[Segment] = field(default_factory=list)
    _turn: int = 0

    @property
    def segments(self) -> tuple[Segment, ...]:
        """An action a turn, one token for each version that sampled some of it."""
        return tuple(self._segments)

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> StopReason | None:
        """Join an engine."""
        self.engine = self.pool.join()
        return None

    async def act(self) -> Action | StopReason:
        """Wait for the engine."""
        spans = await self.pool.engines[self.engine].generate(self.actions[self._turn], self.read)
        versions, tokens = zip(*spans, strict=True)
        self._segments.append(Segment("action", tokens, self._turn, logprobs=(0.0,) * len(spans), versions=versions))
        self._turn += 1
        return _SAID

    def observe(self, messages: Sequence[Message]) -> StopReason | None:
        """Not looked at."""
        return None

    def close(self) -> None:
        """Leave the engine."""
        if self.engine >= 0:
            self.pool.leave(self.engine)


class NoRewards:
    """As `ludus.rollout.reward_executor.RewardExecutor`: nothing is judged, and on no thread, for which a
    clock that jumps would not wait."""

    async def scored(
        self, world: World, environment: Environment | None, task: Task, trajectory: Trajectory
    ) -> Trajectory:
        """The trajectory as it is."""
        return trajectory


@dataclass
class SimEnvironment:
    """One episode's tools: every action but the last is a call."""

    calls: Iterator[float]

    @property
    def tools(self) -> Sequence[Tool]:
        """None is told to the policy."""
        return ()

    @property
    def rewards(self) -> Sequence[Reward]:
        """Nothing is judged."""
        return ()

    async def start(self, task: Task) -> list[Message]:
        """The prompt."""
        return list(task.prompt)

    async def step(self, action: Action) -> StepResult:
        """Take as long as the call."""
        seconds = next(self.calls, None)
        if seconds is None:
            return _DONE
        await asyncio.sleep(seconds)
        return _HEARD

    async def close(self) -> None:
        """Nothing is open."""


@dataclass
class SimWorld(World):
    """Where simulated environments come from: task `n` is group `n`'s."""

    draws: Draws
    members: int
    name: str = "simulated"
    splits: Sequence[str] = ("train",)
    rewards: Sequence[Reward] = ()
    _begun: Counter[str] = field(default_factory=Counter)

    def tasks(self, split: str) -> Sequence[Task]:
        """None beforehand: `task` makes them."""
        return ()

    def task(self, group: int) -> Task:
        """The task of a group."""
        return Task(str(group), (), None)

    def environment(self, task: Task) -> SimEnvironment:
        """That of the group's next member; the scheduler begins them in their order."""
        group, member = int(task.id), self._begun[task.id]
        self._begun[task.id] += 1
        if self._begun[task.id] == self.members:
            del self._begun[task.id]
        return SimEnvironment(iter(self.draws.calls(group, member)))

    def make_chat(self, pool: DevicePool, job: RolloutRequest) -> SimChatSession:
        """The conversation of a job."""
        actions = self.draws.actions(int(job.task.id), job.key.sample)
        return SimChatSession(pool, actions, self.draws.shape.read)


def sampled(trajectory: Trajectory) -> int:
    """Tokens that an episode sampled."""
    return sum(sum(segment.tokens) for segment in trajectory.segments)


def ages(episodes: Sequence[Episode], step: int) -> Counter[int]:
    """How many tokens of each age `step` trains."""
    found: Counter[int] = Counter()
    for episode in episodes:
        for segment in episode.trajectory.segments:
            for tokens, version in zip(segment.tokens, segment.versions, strict=True):
                found[step - 1 - version] += tokens
    return found
