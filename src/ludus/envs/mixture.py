"""`MixedWorld`: several worlds as one, each with its share of the tasks and its own limits.

A task's id and family are prefixed with its world's name, which is also its tag `world`; the world itself receives the
original task. The outcome of every world is the part `solved`, normalized so that a solved task is 1. Its other parts
are scaled accordingly, named after the world, and scored only on its tasks.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import count, islice

from ludus.config.schema import Config
from ludus.config.sections.rollout import BUDGETS, MIXTURE, MemberConfig, RolloutConfig
from ludus.envs.base import Demonstration, Environment, World, WrappedEnvironment, permutation
from ludus.envs.tool_world import check_split
from ludus.errors import ConfigError, UserError
from ludus.rewards.base import Reward, value_of
from ludus.rewards.code.turns import Progress, TurnVerifier
from ludus.rewards.process import Retrieval, Retriever
from ludus.rewards.rubric import Rubric
from ludus.sandbox.base import Sandbox
from ludus.types import WORLD_TAG, Message, Task, Trajectory

_SLACK = 1e-9  # tolerance for equality of sums of shares


@dataclass(frozen=True)
class TaskPool:
    """Tasks that share a weight, which moves linearly from `weight` to `weight_end` (None: constant)."""

    name: str
    tasks: Sequence[Task]
    weight: float = 1.0
    weight_end: float | None = None

    @property
    def moves(self) -> bool:
        """Whether the weight changes."""
        return self.weight_end is not None and self.weight_end != self.weight


@dataclass
class Shares:
    """Assignment of a pool to each position, from the weights, which change over the first `num_chunks` chunks, alone.

    With `S(p)` the sum of a pool's shares over the first `p` positions, the pool has been chosen at least `floor(S(p))`
    and at most `ceil(S(p))` times. Its j-th turn may come from the first position with `S > j - 1` on, and is due at
    the first one with `S >= j`; the earliest due goes first (Tijdeman, Discrete Mathematics 32, 1980).
    """

    pools: Sequence[TaskPool]
    chunk: int = 1
    num_chunks: int = 1
    _starts: list[list[float]] = field(default_factory=list, init=False)
    """Each pool's `S` before each chunk."""

    def turns(self) -> Iterator[int]:
        """Yield pool indices endlessly."""
        indices, counts = range(len(self.pools)), [0] * len(self.pools)
        due_chunks = [0] * len(self.pools)
        deadlines = [self._deadline(i, 1, due_chunks) for i in indices]
        for number in count():
            chunk = min(number, self._last)
            starts, shares = self.sums(chunk), self.at(chunk)
            offset = (number - chunk) * self.chunk
            for position in range(offset + 1, offset + self.chunk + 1):
                ready = [i for i in indices if counts[i] + _SLACK < starts[i] + position * shares[i]]
                chosen = min(ready, key=lambda i: (deadlines[i], i))
                counts[chosen] += 1
                deadlines[chosen] = self._deadline(chosen, counts[chosen] + 1, due_chunks)
                yield chosen

    def at(self, chunk: int) -> Sequence[float]:
        """Return the share of every pool in a chunk."""
        progress = min(min(chunk, self._last) / max(self.num_chunks - 1, 1), 1.0)
        ends = [pool.weight if pool.weight_end is None else pool.weight_end for pool in self.pools]
        weights = [p.weight + (end - p.weight) * progress for p, end in zip(self.pools, ends, strict=True)]
        total = sum(weights)
        return [weight / total for weight in weights]

    def sums(self, chunk: int) -> Sequence[float]:
        """Return `S` of every pool before a chunk, at most the one after which weights are constant."""
        self._starts = self._starts or [[0.0] * len(self.pools)]
        while len(self._starts) <= chunk:
            before, shares = self._starts[-1], self.at(len(self._starts) - 1)
            self._starts.append([s + share * self.chunk for s, share in zip(before, shares, strict=True)])
        return self._starts[chunk]

    def _deadline(self, pool: int, turn: int, due_chunks: list[int]) -> float:
        """Return the first position at which `S` reaches `turn`, or infinity."""
        while due_chunks[pool] < self._last and self.sums(due_chunks[pool] + 1)[pool] < turn - _SLACK:
            due_chunks[pool] += 1
        chunk = due_chunks[pool]
        share, missing = self.at(chunk)[pool], turn - self.sums(chunk)[pool]
        return chunk * self.chunk + math.ceil(missing / share - _SLACK) if share > 0 else math.inf

    @cached_property
    def _last(self) -> int:
        """First chunk from which the shares are constant."""
        return self.num_chunks - 1 if any(pool.moves for pool in self.pools) else 0


@dataclass
class MixtureOrder:
    """An endless order over the tasks of several pools; see `TaskOrder`.

    A pool's epochs each have a different order and visit a task at most once. No chunk repeats a task: if an
    epoch has fewer tasks left than a chunk needs, the next epoch starts. Weights reach their end values after
    `num_chunks` chunks. Raises ConfigError if a pool has fewer tasks than one chunk may need.
    """

    pools: Sequence[TaskPool]
    seed: int
    chunk: int = 1
    num_chunks: int = 1
    _chunks: list[list[Task]] = field(default_factory=list, init=False)
    _progress: list[tuple[int, int]] = field(default_factory=list, init=False)
    """Epoch of each pool, and number of its tasks used in this epoch."""

    def __post_init__(self) -> None:
        shares = Shares(self.pools, self.chunk, self.num_chunks)
        self._turns = shares.turns()
        self._progress = [(0, 0)] * len(self.pools)
        for i, pool in enumerate(self.pools):
            exact = max(shares.at(0)[i], shares.at(self.num_chunks)[i]) * self.chunk
            whole = not any(p.moves for p in self.pools) and abs(exact - round(exact)) < _SLACK
            max_tasks = min(round(exact) if whole else math.ceil(exact) + 1, self.chunk)
            if len(pool.tasks) < max_tasks:
                raise ConfigError(
                    f"One step may need {max_tasks} tasks of the world {pool.name!r}, but its train split has "
                    f"{len(pool.tasks)}.",
                    "Lower its weight, or training.prompts_per_step.",
                )

    @cached_property
    def tasks(self) -> Sequence[Task]:
        """The tasks of all pools."""
        return [task for pool in self.pools for task in pool.tasks]

    def take(self, start: int, num: int) -> list[Task]:
        """Return the tasks at positions `start` to `start + num`, counted over all epochs."""
        while len(self._chunks) * self.chunk < start + num:
            self._chunks.append(self._next_chunk())
        return [self._chunks[p // self.chunk][p % self.chunk] for p in range(start, start + num)]

    def _next_chunk(self) -> list[Task]:
        turns = list(islice(self._turns, self.chunk))
        found: list[Iterator[Task]] = []
        for i, pool in enumerate(self.pools):
            (epoch, done), num = self._progress[i], turns.count(i)
            if done + num > len(pool.tasks):
                epoch, done = epoch + 1, 0
            self._progress[i] = epoch, done + num
            places = permutation(len(pool.tasks), f"{self.seed}:{pool.name}", epoch)[done : done + num]
            found.append(iter([pool.tasks[place] for place in places]))
        return [next(found[i]) for i in turns]


SOLVED = "solved"  # the reward part that all worlds share: 1 if the task is solved
_BELOW_ONE = math.nextafter(1.0, 0.0)


@dataclass(frozen=True)
class MixtureMember:
    """A world of a mixture, with its name, its weight at the first and last step, and its episode settings."""

    name: str
    world: World
    rollout: RolloutConfig
    weight: float = 1.0
    weight_end: float | None = None

    def mixed(self, task: Task) -> Task:
        """Return a task of the world as a task of the mixture. Raises ConfigError if it has the tag `world`."""
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
        """Return the world's original task; a task from outside the mixture is unchanged."""
        if task.tags.get(WORLD_TAG) != self.name:
            return task
        tags = {name: tag for name, tag in task.tags.items() if name != WORLD_TAG}
        if "family" in tags:
            tags["family"] = tags["family"].removeprefix(f"{self.name}/")
        return replace(task, id=task.id.removeprefix(f"{self.name}/"), tags=tags)


def bounded(rollout: RolloutConfig, member: MemberConfig) -> RolloutConfig:
    """Return the run's episode settings with the budgets of one world."""
    own = {key: value for key, value in member.model_dump(include=set(BUDGETS)).items() if value is not None}
    return rollout.model_copy(update=own)


class MemberEnvironment(WrappedEnvironment):
    """Episode in a world of a mixture; the world receives its own task."""

    def __init__(self, environment: Environment, task: Task, rewards: Sequence[Reward]) -> None:
        super().__init__(environment)
        self.rewards = rewards
        self._task = task

    def task_of(self, task: Task) -> Task:
        return self._task


@dataclass(frozen=True)
class MixedWorld(World):
    """Several worlds as one. A split has the tasks of all worlds that have it, interleaved."""

    members: Sequence[MixtureMember]
    name: str = MIXTURE
    _tasks: dict[str, tuple[Task, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def splits(self) -> Sequence[str]:
        """The splits of all worlds, in order of first occurrence."""
        return tuple(dict.fromkeys(split for member in self.members for split in member.world.splits))

    @cached_property
    def rewards(self) -> Sequence[Reward]:
        """The part `solved`, and the other parts of each world."""
        shared = Reward(SOLVED, self._solved, weight=1.0, outcome=True)
        return (shared, *(part for member in self.members for part in _own_parts(member)))

    @property
    def emits_turn_rewards(self) -> bool:
        return any(member.world.emits_turn_rewards for member in self.members)

    @property
    def runs_agents(self) -> bool:
        return any(member.world.runs_agents for member in self.members)

    @property
    def needs_server(self) -> bool:
        return any(member.world.needs_server for member in self.members)

    @property
    def needs_opponents(self) -> bool:
        return any(member.world.needs_opponents for member in self.members)

    @property
    def roles(self) -> Sequence[str]:
        return tuple(dict.fromkeys(role for member in self.members for role in member.world.roles))

    @property
    def turn_verifier(self) -> TurnVerifier | None:
        """The verifier of the task's world; None if no world has one."""
        verifies = any(member.world.turn_verifier is not None for member in self.members)
        return self._verify_turns if verifies else None

    def _verify_turns(self, task: Task, trajectory: Trajectory) -> Progress:
        member = self.member_of(task)
        verifier = member.world.turn_verifier
        if verifier is None:
            return Progress((), 0)
        return verifier(member.own(task), _own_view(member, task, trajectory))

    @property
    def retrieval(self) -> Retriever | None:
        """The documents of the task's world; None if no world has them."""
        return self._retrieve if any(member.world.retrieval is not None for member in self.members) else None

    def _retrieve(self, task: Task, trajectory: Trajectory) -> Retrieval:
        member = self.member_of(task)
        retriever = member.world.retrieval
        if retriever is None:
            return Retrieval((), ())
        return retriever(member.own(task), _own_view(member, task, trajectory))

    def tasks(self, split: str) -> Sequence[Task]:
        check_split(split, self.splits, self.name)
        if split not in self._tasks:
            lists = [
                [member.mixed(task) for task in member.world.tasks(split)]
                for member in self.members
                if split in member.world.splits
            ]
            rows = itertools.zip_longest(*lists)
            self._tasks[split] = tuple(task for row in rows for task in row if task is not None)
        return self._tasks[split]

    def environment(self, task: Task) -> MemberEnvironment:
        member = self.member_of(task)
        own = member.own(task)
        return MemberEnvironment(member.world.environment(own), own, self.rewards)

    def member_of(self, task: Task) -> MixtureMember:
        """Return the task's world; the first one for a task from outside the mixture."""
        name = task.tags.get(WORLD_TAG)
        return next((member for member in self.members if member.name == name), self.members[0])

    def implements(self, method: str) -> bool:
        """Return whether an optional method is available; `achieved` if a world has it."""
        return super().implements(method) and (
            method != "achieved" or any(member.world.implements(method) for member in self.members)
        )

    def achieved(self, task: Task, trajectory: Trajectory) -> Task | None:
        member = self.member_of(task)
        found = member.world.achieved(member.own(task), _own_view(member, task, trajectory))
        return None if found is None else member.mixed(found)

    def rollout_of(self, task: Task) -> RolloutConfig:
        return self.member_of(task).rollout

    def order(self, seed: int, chunk: int, num_chunks: int) -> MixtureOrder:
        """Return the training tasks in an order by weight. Raises ConfigError if a world has too few."""
        pools = []
        for member in self.members:
            mine = [task for task in self.tasks("train") if task.tags[WORLD_TAG] == member.name]
            pools.append(TaskPool(member.name, mine, member.weight, member.weight_end))
        return MixtureOrder(pools, seed, chunk, num_chunks)

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        """Yield dialogues of all worlds, by the weights of the first step. Raises UserError if a world has none."""
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
        for member in self.members:
            yield from member.world.texts()

    def expert(self, task: Task) -> Demonstration | None:
        member = self.member_of(task)
        return member.world.expert(member.own(task))

    def variant(self, task: Task, rng: random.Random) -> Task | None:
        member = self.member_of(task)
        made = member.world.variant(member.own(task), rng)
        return None if made is None else member.mixed(made)

    def rubric(self, task: Task) -> Rubric | None:
        member = self.member_of(task)
        return member.world.rubric(member.own(task))

    def rubric_checks(self, task: Task, trajectory: Trajectory) -> Mapping[str, bool]:
        member = self.member_of(task)
        return member.world.rubric_checks(member.own(task), _own_view(member, task, trajectory))

    def hint(self, task: Task, attempt: Trajectory, num_actions: int) -> str | None:
        member = self.member_of(task)
        return member.world.hint(member.own(task), attempt, num_actions)

    def paraphrases(self, task: Task) -> Sequence[str]:
        member = self.member_of(task)
        return member.world.paraphrases(member.own(task))

    def alternative_solutions(self, task: Task) -> Sequence[Sequence[Message]]:
        member = self.member_of(task)
        return member.world.alternative_solutions(member.own(task))

    def cheats(self, task: Task) -> Mapping[str, Sequence[Message]]:
        member = self.member_of(task)
        return member.world.cheats(member.own(task))

    @property
    def runs_programs(self) -> bool:
        return any(member.world.runs_programs for member in self.members)

    def with_sandbox(self, sandbox: Sandbox) -> MixedWorld:
        """Return this mixture with one sandbox for all worlds that need one."""
        members = [replace(member, world=member.world.with_sandbox(sandbox)) for member in self.members]
        return MixedWorld(tuple(members), self.name)

    @property
    def episodes_at_once(self) -> int | None:
        limits = [member.world.episodes_at_once for member in self.members]
        return min((limit for limit in limits if limit is not None), default=None)

    async def close(self) -> None:
        for member in self.members:
            await member.world.close()

    def _solved(self, task: Task, trajectory: Trajectory) -> float:
        """Return the weighted mean of the world's outcomes; at least 1 if and only if the task is solved."""
        member = self.member_of(task)
        own, view = member.own(task), _own_view(member, task, trajectory)
        parts = [part for part in member.world.rewards if part.outcome]
        values = [value_of(part, own, view) or 0.0 for part in parts]
        mean = sum(p.weight * v for p, v in zip(parts, values, strict=True)) / _outcome_weight(member.world.rewards)
        return max(mean, 1.0) if all(value >= 1 for value in values) else min(mean, _BELOW_ONE)


def worlds_in(world: World, config: Config) -> list[tuple[World, Config]]:
    """Return the worlds of a mixture, each with the settings of a run on it alone; any other world unchanged."""
    if not isinstance(world, MixedWorld):
        return [(world, config)]
    found = []
    for member in world.members:
        own = config.env.mixture[member.name]
        env = {"name": own.world or member.name, "settings": own.settings, "mixture": {}}
        update = {"env": config.env.model_copy(update=env), "rollout": member.rollout}
        found.append((member.world, config.model_copy(update=update)))
    return found


def check_tools(world: MixedWorld, rendering: str) -> None:
    """Raise ConfigError if a rendering for one tool is used with worlds that share no tool."""
    if rendering == "chat":
        return
    offered: dict[str, set[str]] = {}
    for member in world.members:
        tools = member.world.environment(member.world.tasks("train")[0]).tools
        if tools:
            offered[member.name] = {tool.name for tool in tools}
    if offered and not set.intersection(*offered.values()):
        listed = "; ".join(f"{name} has {', '.join(sorted(tools))}" for name, tools in offered.items())
        raise ConfigError(
            f"env.rendering is {rendering!r}: it supports one tool, but the worlds share none: {listed}.",
            "Set env.rendering to 'chat', or remove the other worlds with --env.mixture.NAME none.",
        )


def _outcome_weight(rewards: Sequence[Reward]) -> float:
    return sum(part.weight for part in rewards if part.outcome)


def _own_view(member: MixtureMember, task: Task, trajectory: Trajectory) -> Trajectory:
    own = member.own(task)
    return replace(trajectory, task_id=own.id, tags=dict(own.tags))


def _own_parts(member: MixtureMember) -> Iterator[Reward]:
    """Yield the world's own parts; if it has several outcomes, they are also reported separately."""
    rewards = member.world.rewards
    outcome_weight = _outcome_weight(rewards)
    several = sum(part.outcome for part in rewards) > 1
    for part in rewards:
        if not part.outcome or several:
            weight = 0.0 if part.outcome else part.weight / outcome_weight
            yield Reward(f"{member.name}/{part.name}", partial(_score_own, member, part), weight, world=member.name)


def _score_own(member: MixtureMember, part: Reward, task: Task, trajectory: Trajectory) -> float | None:
    return part.function(member.own(task), _own_view(member, task, trajectory))
