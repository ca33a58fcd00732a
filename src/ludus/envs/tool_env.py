"""`ToolEnv`: the standard environment. The model calls tools until it writes an answer without a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ludus.envs.base import Environment
from ludus.envs.toolbox import ToolExecutor, ToolLimits
from ludus.rewards.base import Reward
from ludus.tools.base import Tool
from ludus.types import Action, Message, StepResult, Task, ToolOutcome, ToolStatus


class Resource(Protocol):
    """A resource of an episode's tools, such as a `ludus.tools.workspace.Workspace`."""

    async def open(self) -> None:
        """Acquire it. An exception is an infrastructure failure."""
        ...

    async def close(self) -> None:
        """Release it; also called if it was never opened."""
        ...


class ToolEnv(Environment):
    """One episode with tools.

    The calls of a turn run in parallel and return as tool messages in order; a malformed or failed call returns an
    error text. The episode ends with a message without calls, or with a successful call of a tool whose traits say
    that it `ends` the episode. `resources` are opened at the start and closed at the end.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        rewards: Sequence[Reward],
        limits: ToolLimits | None = None,
        resources: Sequence[Resource] = (),
    ) -> None:
        self.tools = tools
        self.rewards = rewards
        self._executor = ToolExecutor(tools, limits or ToolLimits())
        self._resources = resources
        self._ending = {tool.name for tool in tools if tool.traits.ends}

    async def start(self, task: Task) -> list[Message]:
        """Open the resources and return the task's messages."""
        for resource in self._resources:
            await resource.open()
        return list(task.prompt)

    async def step(self, action: Action) -> StepResult:
        """Run the calls; without any, end the episode."""
        if not action.calls and not action.errors:
            return StepResult(done=True)
        outcomes = await self._executor.run(action)
        if any(o.tool in self._ending and o.status is ToolStatus.OK for o in outcomes):
            return StepResult(done=True, outcomes=outcomes)
        return StepResult(messages=tuple(map(_as_message, outcomes)), outcomes=outcomes)

    async def close(self) -> None:
        """Close the resources."""
        for resource in self._resources:
            await resource.close()


def _as_message(outcome: ToolOutcome) -> Message:
    return Message(role="tool", content=outcome.output, tool_call_id=outcome.call_id, name=outcome.tool or "error")
