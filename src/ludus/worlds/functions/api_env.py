"""One episode of several turns: calls run on API classes, and an answer is followed by the user's next turn.

When the user has no more turns, the calls of all turns are compared with the gold calls, and the verdict is
left as an outcome that the model does not see.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Final

from ludus.envs.tool_env import ToolEnv
from ludus.envs.toolbox import ToolLimits
from ludus.rewards.base import Reward
from ludus.rewards.paper_rewards import ExpectedCall
from ludus.sandbox.base import Sandbox
from ludus.tools.base import ToolError, ToolSchema, described_tool
from ludus.types import JSON, Action, FunctionCall, Message, MessageToolCall, StepResult, Task, ToolOutcome, ToolStatus
from ludus.worlds.functions.api.apis import VERDICT, ApiTruth, compare, run_calls
from ludus.worlds.functions.tool_distractors import CheckedTool

_MORE: Final = "From now on there are more tools:"
_ASKED: Final = "Can you do it now?"


class ApiEnv:
    """See the module. `offers_tools` is false for a baseline without tools."""

    def __init__(
        self,
        truth: ApiTruth,
        rewards: Sequence[Reward],
        limits: ToolLimits,
        sandbox: Sandbox,
        offers_tools: bool = True,
    ) -> None:
        self.rewards = rewards
        self._truth, self._limits, self._sandbox = truth, limits, sandbox
        self._made: list[list[ExpectedCall]] = [[]]
        self._one_at_a_time = asyncio.Lock()
        self.tools: tuple[CheckedTool, ...] = tuple(map(self._tool, truth.schemas)) if offers_tools else ()
        self._inner = ToolEnv(self.tools, rewards, limits)

    async def start(self, task: Task) -> list[Message]:
        """The task's own messages."""
        return await self._inner.start(task)

    async def step(self, action: Action) -> StepResult:
        """Run the calls; without any, continue with the user's next turn, or compare and end."""
        result = await self._inner.step(action)
        if not result.done:
            return result
        place = len(self._made)
        if place == len(self._truth.turns):
            verdict = await self._verdict()
            return StepResult(done=True, outcomes=(verdict,))
        self._made.append([])
        added = self._truth.added.get(place, ()) if self.tools else ()
        self._inner = ToolEnv((*self._inner.tools, *map(self._tool, added)), self.rewards, self._limits)
        return StepResult(messages=turn_messages(self._truth.turns[place], added))

    async def grade_again(self) -> ToolOutcome | None:
        """The verdict of another comparison of the same calls; None before the last turn."""
        return await self._verdict() if len(self._made) == len(self._truth.turns) else None

    async def close(self) -> None:
        """Close the tools."""
        await self._inner.close()

    async def _verdict(self) -> ToolOutcome:
        agrees = await compare(self._truth, self._made, self._sandbox)
        return ToolOutcome("", VERDICT, ToolStatus.OK, json.dumps(agrees))

    async def _call(self, call: ExpectedCall) -> str:
        """The response to a call, which counts from then on. Raises ToolError for one that raises."""
        async with self._one_at_a_time:
            made = [*self._made[-1], call]
            said = await run_calls(self._truth, [*self._made[:-1], made], self._sandbox)
            if said is None:
                raise ToolError("the call takes too much time or memory and was not made")
            self._made[-1] = made
        if said[-1].raised:
            raise ToolError(said[-1].text)
        return said[-1].text

    def _tool(self, schema: ToolSchema) -> CheckedTool:
        told = described_tool(schema)

        async def call(**given: JSON) -> str:
            return await self._call(ExpectedCall(told.name, given))

        return CheckedTool(told.name, told.description, call, told.arguments, given=schema)


def turn_messages(turn: Sequence[Message], added: Sequence[ToolSchema]) -> tuple[Message, ...]:
    """Return the messages of a turn; functions that are offered from it on are described in one of them."""
    if not added:
        return tuple(turn)
    told = "\n".join(json.dumps(schema["function"], ensure_ascii=False) for schema in added)
    asked = "\n".join(message["content"] for message in turn) or _ASKED
    return (Message(role="user", content=f"{_MORE}\n{told}\n\n{asked}"),)


def gold_messages(truth: ApiTruth) -> list[Message]:
    """Return the gold calls as an episode, the turns of the user from the second on between them.

    The responses are not known here.
    """
    messages: list[Message] = []
    for place, calls in enumerate(truth.gold):
        if place:
            messages += turn_messages(truth.turns[place], truth.added.get(place, ()))
        for number, call in enumerate(calls):
            id_ = f"call_{place}_{number}"
            messages += [_calling(id_, call.name, call.arguments), _unknown(id_, call.name)]
        messages.append(Message(role="assistant", content="Done."))
    return messages


def _calling(id_: str, name: str, arguments: Mapping[str, JSON]) -> Message:
    function = FunctionCall(name=name, arguments=json.dumps(dict(arguments), ensure_ascii=False))
    call = MessageToolCall(id=id_, type="function", function=function)
    return Message(role="assistant", content="", tool_calls=[call])


def _unknown(id_: str, name: str) -> Message:
    return Message(role="tool", content="[no output]", tool_call_id=id_, name=name)
