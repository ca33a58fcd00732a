"""`MixedWorld`: several worlds as one, each with its share of the tasks and its own bounds.

A task keeps its world's name in front of its id and family, and in the tag `world`; the world itself sees it
as it made it. The outcome of every world is the part `solved`, in which a solved task is 1, and its other
parts keep their proportion to that; they carry the world's name, and are scored on its tasks alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ludus.config.schema import Config
from ludus.config.sections.mixture import BUDGETS, MIXTURE, MemberConfig
from ludus.config.sections.rollout import RolloutConfig
from ludus.envs.base import Demonstration, Environment, World
from ludus.envs.tool_world import check_split
from ludus.errors import ConfigError, UserError
from ludus.rewards.base import Reward
from ludus.rewards.code.turns import Progress, TurnVerifier
from ludus.sandbox.base import Sandbox
from ludus.tasks.mixture import MixtureOrder, Shares, TaskPool
from ludus.types import WORLD_TAG, Action, Message, StepResult, Task, ToolOutcome, Trajectory

SOLVED = "solved"
"""The part of the reward that all worlds of a mixture share: 1 where the task is solved."""
_BELOW_ONE = math.nextafter(1.0, 0.0)


@dataclass(frozen=True)
class MixtureMember:
    """A world of a mixture: its name there, its weight at the first and the last step, its bounds."""

    name: str
    world: World
    rollout: RolloutConfig
    weight: float = 1.0
    weight_end: float | None = None

    def mixed(self, task: Task) -> Task:
        """A task of the world as the mixture has it. Raises ConfigError for one that has the tag `world`."""
        if WORLD_TAG in task.tags:
            raise ConfigError(
                f"Tasks of the world {self.name!r} have a tag {WORLD_TAG!r}, which a mixture needs.",
                "Give the tag another name.",
            )
        tags = {**task.tags, WORLD_TAG: self.name}
        if "family" in tags:
            tags["family"] = f"{self.name}/{tags['family']}"
        return replace(task, id=f"{self.name}/{task.id}", tags=tags)

    def own(self, task: Task) -> Task:
        """The task as the world made it; one that is not of the mixture stays as it is."""
        if task.tags.get(WORLD_TAG) != self.name:
            return task
        tags = {name: tag for name, tag in task.tags.items() if name != WORLD_TAG}
        if "family" in tags:
            tags["family"] = tags["family"].removeprefix(f"{self.name}/")
        return replace(task, id=task.id.removeprefix(f"{self.name}/"), tags=tags)


def bounded(rollout: RolloutConfig, member: MemberConfig) -> RolloutConfig:
    """The settings of episodes of one world: its own budgets, and what the run says otherwise."""
    own = {key: value for key, value in member.model_dump(include=set(BUDGETS)).items() if value is not None}
    return rollout.model_copy(update=own)


class MemberEnvironment(Environment):
    """Episode in a world of a mixture; the world receives its own task."""

    def __init__(self, environment: Environment, task: Task, rewards: Sequence[Reward]) -> None:
        self.tools = environment.tools
        self.rewards = rewards
        self._environment = environment
        self._task = task

    async def start(self, task: Task) -> list[Message]:
        """Return the initial messages of the episode."""
        del task
        return await self._environment.start(self._task)

    async def step(self, action: Action) -> StepResult:
        """Return the world's response."""
        return await self._environment.step(action)

    async def close(self) -> None:
        """Release the world's resources."""
        await self._environment.close()

    def implements(self, method: str) -> bool:
        """Return whether the world's environment defines an optional method."""
        return self._environment.implements(method)

    def state_key(self) -> str:
        """Return the world's state key."""
        return self._environment.state_key()

    async def grade_again(self) -> ToolOutcome | None:
        """Return the outcome of grading once more."""
        return await self._environment.grade_again()


@dataclass(frozen=True)
class MixedWorld(World):
    """Several worlds as one. Splits are those of any of them, tasks of a split in turns."""

    members: Sequence[MixtureMember]
    name: str = MIXTURE
    _tasks: dict[str, tuple[Task, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def splits(self) -> Sequence[str]:
        """The splits that a world has, in their first order."""
        return tuple(dict.fromkeys(split for member in self.members for split in member.world.splits))

    @cached_property
    def rewards(self) -> Sequence[Reward]:
        """`solved`, and the other parts of each world under its name."""
        shared = Reward(SOLVED, self._solved, weight=1.0, outcome=True)
        return (shared, *(part for member in self.members for part in _own_parts(member)))

    @property
    def emits_turn_rewards(self) -> bool:
        """Whether a member's does."""
        worlds = (member.world for member in self.members)
        return any(one.emits_turn_rewards for one in worlds)

    @property
    def turn_verifier(self) -> TurnVerifier | None:
        """That of the task's world; None if no member has one."""
        verifies = any(member.world.turn_verifier is not None for member in self.members)
        return self._verify_turns if verifies else None

    def _verify_turns(self, task: Task, trajectory: Trajectory) -> Progress:
        member = self.member_of(task)
        verifier = member.world.turn_verifier
        if verifier is None:
            return Progress((), 0)
        return verifier(member.own(task), _own_view(member, task, trajectory))

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of the worlds that have the split, in turns, until each has run out."""
        check_split(split, self.splits, self.name)
        if split not in self._tasks:
            lists = [
                [member.mixed(task) for task in member.world.tasks(split)]
                for member in self.members
                if split in member.world.splits
            ]
            rounds = itertools.zip_longest(*lists)
            self._tasks[split] = tuple(task for turn in rounds for task in turn if task is not None)
        return self._tasks[split]

    def environment(self, task: Task) -> MemberEnvironment:
        """A fresh episode in the task's world; in the first one for a task of none."""
        member = self.member_of(task)
        own = member.own(task)
        return MemberEnvironment(member.world.environment(own), own, self.rewards)

    def member_of(self, task: Task) -> MixtureMember:
        """The world that a task is of; the first one for a task of none."""
        name = task.tags.get(WORLD_TAG)
        return next((member for member in self.members if member.name == name), self.members[0])

    def rollout_of(self, task: Task) -> RolloutConfig:
        """The bounds of an episode of this task."""
        return self.member_of(task).rollout

    def order(self, seed: int, chunk: int, num_chunks: int) -> MixtureOrder:
        """Training tasks by weight. Raises ConfigError where a world has too few of them."""
        pools = []
        for member in self.members:
            mine = [task for task in self.tasks("train") if task.tags[WORLD_TAG] == member.name]
            pools.append(TaskPool(member.name, mine, member.weight, member.weight_end))
        return MixtureOrder(pools, seed, chunk, num_chunks)

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        """Dialogues of all worlds, by the weights of the first step.

        Raises UserError for a world that has none.
        """
        streams = []
        for member in self.members:
            if not member.world.implements("demonstrations"):
                raise UserError(
                    f"The world {member.name!r} of the mixture has no demonstrations to fine-tune on.",
                    "Pass dialogues in a file (sft.data), or start from a model (model.path).",
                )
            streams.append(member.world.demonstrations(seed))
        pools = [TaskPool(member.name, (), member.weight) for member in self.members]
        for turn in Shares(pools).turns():
            shown = next(streams[turn], None)
            if shown is None:
                return
            yield shown

    def texts(self) -> Iterator[str]:
        """Texts of all worlds that have some, for a tokenizer."""
        for member in self.members:
            yield from member.world.texts()

    def expert(self, task: Task) -> Demonstration | None:
        """What the task's world shows."""
        member = self.member_of(task)
        return member.world.expert(member.own(task))

    def paraphrases(self, task: Task) -> Sequence[str]:
        """What the task's world says."""
        member = self.member_of(task)
        return member.world.paraphrases(member.own(task))

    def alternative_solutions(self, task: Task) -> Sequence[Sequence[Message]]:
        """Return those of the task's world."""
        member = self.member_of(task)
        return member.world.alternative_solutions(member.own(task))

    def cheats(self, task: Task) -> Mapping[str, Sequence[Message]]:
        """What the task's world knows."""
        member = self.member_of(task)
        return member.world.cheats(member.own(task))

    @property
    def runs_programs(self) -> bool:
        """Whether a world needs a sandbox."""
        return any(member.world.runs_programs for member in self.members)

    def with_sandbox(self, sandbox: Sandbox) -> MixedWorld:
        """This mixture with one sandbox for all of its worlds that need one."""
        members = [replace(member, world=member.world.with_sandbox(sandbox)) for member in self.members]
        return MixedWorld(tuple(members), self.name)

    @property
    def episodes_at_once(self) -> int | None:
        """The least that one of the worlds has room for."""
        rooms = [member.world.episodes_at_once for member in self.members]
        return min((room for room in rooms if room is not None), default=None)

    async def close(self) -> None:
        """Close what the worlds have opened."""
        for member in self.members:
            await member.world.close()

    def _solved(self, task: Task, trajectory: Trajectory) -> float:
        """The weighted mean of the outcomes of the task's world; 1 or more exactly where it is solved."""
        member = self.member_of(task)
        own, seen = member.own(task), _own_view(member, task, trajectory)
        parts = [part for part in member.world.rewards if part.outcome]
        values = [float(part.function(own, seen)) for part in parts]
        mean = sum(p.weight * v for p, v in zip(parts, values, strict=True)) / _full(member.world.rewards)
        return max(mean, 1.0) if all(value >= 1 for value in values) else min(mean, _BELOW_ONE)


def worlds_in(world: World, config: Config) -> list[tuple[World, Config]]:
    """The worlds of a mixture, each with the settings of a run on it alone; any other world as it is."""
    if not isinstance(world, MixedWorld):
        return [(world, config)]
    return [(member.world, _alone(config, member)) for member in world.members]


def _alone(config: Config, member: MixtureMember) -> Config:
    own = config.env.mixture[member.name]
    env = {"name": own.world or member.name, "settings": own.settings, "mixture": {}}
    return config.model_copy(update={"env": config.env.model_copy(update=env), "rollout": member.rollout})


def check_tools(world: MixedWorld, rendering: str) -> None:
    """Raise ConfigError where a rendering that writes calls of one tool only meets worlds that share none."""
    if rendering == "chat":
        return
    offered: dict[str, set[str]] = {}
    for member in world.members:
        tools = member.world.environment(member.world.tasks("train")[0]).tools
        if tools:
            offered[member.name] = {tool.name for tool in tools}
    if offered and not set.intersection(*offered.values()):
        told = "; ".join(f"{name} has {', '.join(sorted(tools))}" for name, tools in offered.items())
        raise ConfigError(
            f"env.rendering is {rendering!r}: it writes calls of one tool, and the worlds share none: {told}.",
            "Set env.rendering to 'chat', or take the others out with --env.mixture.NAME none.",
        )


def _full(rewards: Sequence[Reward]) -> float:
    """What a solved task earns by its outcomes."""
    return sum(part.weight for part in rewards if part.outcome)


def _own_view(member: MixtureMember, task: Task, trajectory: Trajectory) -> Trajectory:
    own = member.own(task)
    return replace(trajectory, task_id=own.id, tags=dict(own.tags))


def _own_parts(member: MixtureMember) -> Iterator[Reward]:
    """The parts that only this world has. Several outcomes are reported one by one as well."""
    rewards = member.world.rewards
    full = _full(rewards)
    several = sum(part.outcome for part in rewards) > 1
    for part in rewards:
        if not part.outcome or several:
            weight = 0.0 if part.outcome else part.weight / full
            yield Reward(f"{member.name}/{part.name}", _Own(member, part), weight, world=member.name)


@dataclass(frozen=True)
class _Own:
    """A world's reward, called with its own task."""

    member: MixtureMember
    part: Reward

    def __call__(self, task: Task, trajectory: Trajectory) -> float:
        return self.part.function(self.member.own(task), _own_view(self.member, task, trajectory))
