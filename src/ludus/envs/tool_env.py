"""`ToolEnv`: the ordinary environment. The model calls tools until it writes an answer without a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ludus.envs.base import Environment
from ludus.envs.toolbox import ToolExecutor, ToolLimits
from ludus.rewards.base import Reward
from ludus.tools.base import Tool
from ludus.types import Action, Message, StepResult, Task, ToolOutcome, ToolStatus


class Resource(Protocol):
    """What the tools of an episode work on: a `ludus.tools.workspace.Workspace`, say."""

    async def open(self) -> None:
        """Make it ready. What it raises is a failure of the infrastructure."""
        ...

    async def close(self) -> None:
        """Give it back; also where it was never opened."""
        ...


class ToolEnv(Environment):
    """One episode with tools.

    Calls run in parallel and come back as tool messages in the order of the calls. A malformed or failed
    call comes back as an error text. A message without calls (and without malformed ones) is the answer, and
    so is a call of a tool that ends the episode, unless the call failed. `resources` are opened when the
    episode starts and closed at its end.
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
        self._toolbox = ToolExecutor(tools, limits or ToolLimits())
        self._resources = resources
        self._ending = {tool.name for tool in tools if tool.traits.ends}

    async def start(self, task: Task) -> list[Message]:
        """Open the resources; the task's own messages."""
        for resource in self._resources:
            await resource.open()
        return list(task.prompt)

    async def step(self, action: Action) -> StepResult:
        """Run the calls, or end the episode where there are none."""
        if not action.calls and not action.errors:
            return StepResult(done=True)
        outcomes = await self._toolbox.run(action)
        if any(o.tool in self._ending and o.status is ToolStatus.OK for o in outcomes):
            return StepResult(done=True, outcomes=outcomes)
        return StepResult(messages=tuple(map(_as_message, outcomes)), outcomes=outcomes)

    async def close(self) -> None:
        """Close the resources."""
        for resource in self._resources:
            await resource.close()


def _as_message(outcome: ToolOutcome) -> Message:
    return Message(role="tool", content=outcome.output, tool_call_id=outcome.call_id, name=outcome.tool or "error")
