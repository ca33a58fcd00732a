"""`ToolEnv`: the ordinary environment. The model calls tools until it writes an answer without a call."""

from __future__ import annotations

from collections.abc import Sequence

from ludus.envs.toolbox import Toolbox, ToolLimits
from ludus.rewards.base import Reward
from ludus.tools.base import Tool
from ludus.types import Action, Message, StepResult, Task, ToolOutcome


class ToolEnv:
    """One episode with tools.

    Calls run in parallel and come back as tool messages in the order of the calls. A malformed or failed
    call comes back as an error text. A message without calls (and without malformed ones) is the answer.
    """

    def __init__(
        self, tools: Sequence[Tool], rewards: Sequence[Reward], limits: ToolLimits | None = None
    ) -> None:
        self.tools = tools
        self.rewards = rewards
        self._toolbox = Toolbox(tools, limits or ToolLimits())

    async def start(self, task: Task) -> list[Message]:
        """The task's own messages."""
        return list(task.prompt)

    async def step(self, action: Action) -> StepResult:
        """Run the calls, or end the episode where there are none."""
        if not action.calls and not action.errors:
            return StepResult(done=True)
        outcomes = await self._toolbox.run(action)
        return StepResult(messages=tuple(map(_as_message, outcomes)), outcomes=outcomes)

    async def close(self) -> None:
        """Nothing to give back."""


def _as_message(outcome: ToolOutcome) -> Message:
    return Message(
        role="tool", content=outcome.output, tool_call_id=outcome.call_id, name=outcome.tool or "error"
    )
