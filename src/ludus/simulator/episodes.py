"""Simulated episodes: tools that sleep, and a policy that occupies an engine in each turn.

The scheduler of training runs them. Tool latencies and action lengths are seeded by the indices of an episode (group,
member), so that all training modes run the same episodes.

In trajectories, one token represents consecutive tokens of one weight version; its id is the number of these tokens.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ludus.envs.base import Environment, World
from ludus.rewards.base import Reward
from ludus.rollouts.scheduler import Episode, RolloutRequest
from ludus.simulator.costs import EpisodeShape, ToolCost
from ludus.simulator.devices import DevicePool
from ludus.tools.base import Tool
from ludus.types import Action, Message, Segment, StepResult, StopReason, Task, Trajectory

_ACTION = Action(Message(role="assistant", content="."))
_OBSERVATION = StepResult((Message(role="tool", content="."),))
_DONE = StepResult(done=True)


@dataclass
class EpisodeSampler:
    """Sampler of action lengths and tool latencies, seeded by the group and member of an episode."""

    shape: EpisodeShape
    tool: ToolCost
    seed: int = 0
    _source: random.Random = field(default_factory=random.Random)

    def actions(self, group: int, member: int) -> list[int]:
        """Return the number of tokens of each turn."""
        source = self._seeded(group, member)
        return [self.shape.draw_action(source) for _ in range(self.shape.draw_turns(source))]

    def calls(self, group: int, member: int) -> list[float]:
        """Return the seconds of the tool calls, one after each turn except the last."""
        turns = len(self.actions(group, member))
        source = self._seeded(group, member, 1)
        return [self.tool.draw(source) for _ in range(turns - 1)]

    def _seeded(self, group: int, member: int, stream: int = 0) -> random.Random:
        self._source.seed(2 * ((self.seed * 1_000_003 + group) * 65_537 + member) + stream)
        return self._source


@dataclass
class SimChatSession:
    """Chat session of an episode; each turn occupies an engine."""

    pool: DevicePool
    actions: Sequence[int]
    prefill: float
    engine: int = -1
    _segments: list[Segment] = field(default_factory=list)
    _turn: int = 0

    @property
    def segments(self) -> tuple[Segment, ...]:
        """One action per turn, with one token per weight version."""
        return tuple(self._segments)

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> StopReason | None:
        """Assign the episode to an engine."""
        self.engine = self.pool.join()
        return None

    async def act(self) -> Action | StopReason:
        """Sample an action on the engine."""
        spans = await self.pool.engines[self.engine].generate(self.actions[self._turn], self.prefill)
        versions, tokens = zip(*spans, strict=True)
        self._segments.append(Segment("action", tokens, self._turn, logprobs=(0.0,) * len(spans), versions=versions))
        self._turn += 1
        return _ACTION

    def observe(self, messages: Sequence[Message]) -> StopReason | None:
        """Ignore the messages."""
        return None

    def close(self) -> None:
        """Remove the episode from its engine."""
        if self.engine >= 0:
            self.pool.leave(self.engine)


class NoRewards:
    """Reward executor without rewards; code in virtual time cannot wait for threads."""

    async def scored(
        self, world: World, environment: Environment | None, task: Task, trajectory: Trajectory
    ) -> Trajectory:
        """Return the trajectory unchanged."""
        return trajectory


@dataclass
class SimEnvironment(Environment):
    """Environment of one episode: every action except the last is a tool call."""

    calls: Iterator[float]

    async def start(self, task: Task) -> list[Message]:
        """Return the prompt."""
        return list(task.prompt)

    async def step(self, action: Action) -> StepResult:
        """Sleep for the duration of the call."""
        seconds = next(self.calls, None)
        if seconds is None:
            return _DONE
        await asyncio.sleep(seconds)
        return _OBSERVATION


@dataclass
class SimWorld(World):
    """World of simulated environments; the task of group `n` has the id `n`."""

    sampler: EpisodeSampler
    members: int
    name: str = "simulated"
    splits: Sequence[str] = ("train",)
    rewards: Sequence[Reward] = ()
    _started: Counter[str] = field(default_factory=Counter)

    def tasks(self, split: str) -> Sequence[Task]:
        """Return no tasks; the simulation creates them itself."""
        return ()

    def environment(self, task: Task) -> SimEnvironment:
        """Return the environment of the group's next member; the scheduler starts them in order."""
        group, member = int(task.id), self._started[task.id]
        self._started[task.id] += 1
        if self._started[task.id] == self.members:
            del self._started[task.id]
        return SimEnvironment(iter(self.sampler.calls(group, member)))

    def make_chat(self, pool: DevicePool, request: RolloutRequest) -> SimChatSession:
        """Return the chat session of a request."""
        actions = self.sampler.actions(int(request.task.id), request.key.sample)
        return SimChatSession(pool, actions, self.sampler.shape.read)


def num_sampled(trajectory: Trajectory) -> int:
    """Return the number of sampled tokens of an episode."""
    return sum(sum(segment.tokens) for segment in trajectory.segments)


def token_ages(episodes: Sequence[Episode], step: int) -> Counter[int]:
    """Return the number of tokens trained in `step` by age in versions."""
    ages: Counter[int] = Counter()
    for episode in episodes:
        for segment in episode.trajectory.segments:
            for tokens, version in zip(segment.tokens, segment.versions, strict=True):
                ages[step - 1 - version] += tokens
    return ages
