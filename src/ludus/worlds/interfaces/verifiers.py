"""Tasksets of the package verifiers 0.4 (interface v1) as a world, and a world as a taskset.

A taskset's tasks are prompts; its tools are called in this process, without the package's servers; at the end its
metrics and rewards score a trace of the conversation. Tasks that need a container are refused, and their hooks of a
runtime are not called. A message without a call ends an episode.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final, cast

from pydantic import Field, JsonValue

from ludus.envs.base import World
from ludus.envs.settings import WorldSettings, read_settings
from ludus.envs.task_files import SPLITS, split_by_hash
from ludus.envs.tool_env import ToolEnv, ToolLimits
from ludus.envs.tool_world import split_of
from ludus.errors import UserError
from ludus.rewards.base import Reward, score
from ludus.rewards.extract import last_output
from ludus.tools.base import Tool, tool
from ludus.types import Action, Message, Segment, StepResult, StopReason, Task, ToolOutcome, ToolStatus, Trajectory
from ludus.worlds.adapters.base import load_package

if TYPE_CHECKING:
    import verifiers.v1 as vf

GRADE: Final = "verifiers"
"""Tool name of the outcome with the taskset's reward."""


class VerifiersSettings(WorldSettings):
    """Settings of the world verifiers (`env.settings`)."""

    taskset: str
    """Id of the taskset: an installed package that exports a `Taskset`."""
    config: dict[str, JsonValue] = Field(default_factory=dict)
    """Fields of the taskset's own configuration."""
    max_tasks: int = Field(10_000, ge=1)
    """Maximum number of tasks, for endless tasksets. Tasks are split by a hash of their prompts, 8 : 1 : 1."""
    full_reward: float = Field(1.0, gt=0)
    """Sum of the taskset's weighted rewards that is a success."""


def graded(task: Task, trajectory: Trajectory) -> float:
    """Return the taskset's reward, from 0 to 1; 0 for an episode that did not end with an answer."""
    return float(json.loads(last_output(GRADE)(trajectory) or "0"))


REWARDS = (Reward("reward", graded, outcome=True),)


class VerifiersEnv(ToolEnv):
    """One episode, which scores a trace at its end."""

    def __init__(self, world: VerifiersWorld, one: vf.Task, tools: Sequence[Tool]) -> None:
        super().__init__(tools, REWARDS, world.limits)
        self._world, self._task = world, one
        self._messages: list[Message] = []

    async def start(self, task: Task) -> list[Message]:
        self._messages = list(await super().start(task))
        return list(self._messages)

    async def step(self, action: Action) -> StepResult:
        """Run the calls; without any, score."""
        result = await super().step(action)
        self._messages += [action.message, *result.messages]
        if not result.done:
            return result
        trace = make_trace(self._task, self._messages)
        await self._task.score(trace)
        reward = min(max(float(trace.reward) / self._world.settings.full_reward, 0.0), 1.0)
        return StepResult(done=True, outcomes=(ToolOutcome("", GRADE, ToolStatus.OK, json.dumps(reward)),))


def make_trace(one: vf.Task, messages: Sequence[Message]) -> vf.Trace:
    """Return the package's record of a conversation, without tokens."""
    package = load_package("verifiers.v1", "verifiers", "verifiers")
    nodes = []
    for i, message in enumerate(messages):
        given: dict[str, object] = {key: value for key, value in message.items() if key != "train"}
        if calls := message.get("tool_calls"):
            given["tool_calls"] = [{"id": call["id"], **call["function"]} for call in calls]
        nodes.append({"parent": i - 1 if i else None, "message": given, "sampled": message["role"] == "assistant"})
    task = {"type": type(one).__name__, "data": one.data, "key": one.key, "hash": one.hash}
    trace: vf.Trace = package.Trace(task=task, agent={"config": {}}, nodes=nodes, is_completed=True, ok=True)
    return trace


@dataclass(frozen=True)
class VerifiersWorld(World):
    """The tasks of a taskset."""

    settings: VerifiersSettings
    limits: ToolLimits = field(default_factory=ToolLimits)
    splits: Sequence[str] = SPLITS
    rewards: Sequence[Reward] = REWARDS

    @property
    def name(self) -> str:
        return self.settings.taskset

    def tasks(self, split: str) -> Sequence[Task]:
        return split_of(self._lists, split, self.name)

    def environment(self, task: Task) -> VerifiersEnv:
        one, tools = self._theirs[task.id], list[Tool]()
        decorated = load_package("verifiers.v1.utils.decorators", "verifiers", "verifiers").discover_decorated
        for toolset in (*type(one).toolsets(one.config), *self._taskset.toolsets(self._taskset.config)):
            tools += [tool(function) for function in decorated(toolset, "tool")]
        return VerifiersEnv(self, one, tools)

    @cached_property
    def _taskset(self) -> vf.Taskset:
        package = load_package("verifiers.v1", "verifiers", "verifiers")
        kind = package.taskset_config_type(self.settings.taskset)
        taskset: vf.Taskset = package.load_taskset(kind(id=self.settings.taskset, **self.settings.config))
        if taskset.task_type().NEEDS_CONTAINER:
            raise UserError(f"The tasks of {self.name!r} need a container.", "Choose another taskset.")
        return taskset

    @cached_property
    def _theirs(self) -> Mapping[str, vf.Task]:
        return {f"{one.data.idx}": one for one in self._taskset.take(self.settings.max_tasks)}

    @cached_property
    def _lists(self) -> Mapping[str, Sequence[Task]]:
        lists: dict[str, list[Task]] = {split: [] for split in SPLITS}
        for id_, one in self._theirs.items():
            split = split_by_hash(one.data.prompt_text)
            lists[split].append(Task(id_, _prompt(one.data), None, {"split": split}))
        return lists


def _prompt(data: vf.TaskData) -> tuple[Message, ...]:
    system = (Message(role="system", content=data.system_prompt),) if data.system_prompt else ()
    if data.prompt is None or isinstance(data.prompt, str):
        return *system, Message(role="user", content=data.prompt or "")
    given = (Message(role=one.role, content=str(one.content)) for one in data.prompt)
    return *system, *given


def to_verifiers(world: World, split: str = "train") -> vf.Taskset:
    """Return a split of a world as a taskset of the package, whose reward is that of the world.

    For worlds whose episodes are one answer: raises UserError if the first task has tools or another environment.
    """
    package = load_package("verifiers.v1", "verifiers", "verifiers")
    tasks = {task.id: task for task in world.tasks(split)}
    first = world.environment(next(iter(tasks.values())))
    if not isinstance(first, ToolEnv) or first.tools:
        raise UserError(f"The episodes of the world {world.name!r} are more than one answer.", "Use `ludus env serve`.")

    async def reward(self: vf.Task, trace: vf.Trace) -> dict[str, float]:
        task = tasks[str(self.data.id)]
        found = score(world.rewards, task, _trajectory(task, str(trace.branches[-1].messages[-1].content)))
        return {part.name: part.weight * found.rewards[part.name] for part in world.rewards}

    made = cast("type[vf.Task]", type("LudusTask", (package.Task,), {"reward": package.reward(reward)}))

    def load(self: vf.Taskset) -> list[vf.Task]:
        data = package.TaskData
        return [made(data(id=id_, prompt=[dict(one) for one in task.prompt])) for id_, task in tasks.items()]

    taskset: vf.Taskset = type("LudusTaskset", (package.Taskset,), {"load": load})(package.TasksetConfig())
    return taskset


def _trajectory(task: Task, answer: str) -> Trajectory:
    segment = Segment("action", (0,), logprobs=(0.0,), versions=(0,))
    messages = (*task.prompt, Message(role="assistant", content=answer))
    return Trajectory(task.id, 0, (segment,), messages, StopReason.ANSWERED, tags=dict(task.tags))


def make_verifiers_world(settings: Mapping[str, object], limits: ToolLimits) -> VerifiersWorld:
    """Build the world (the registered factory). Raises ConfigError, and UserError if the package is missing."""
    chosen = read_settings(VerifiersSettings, settings)
    load_package("verifiers.v1", "verifiers", "verifiers")
    return VerifiersWorld(chosen, limits)
