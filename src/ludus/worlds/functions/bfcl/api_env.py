"""Episodes of BFCL tasks of several turns, whose calls run on API classes in the sandbox.

The sandbox keeps no state: each run replays all earlier calls first, which is deterministic because the
classes draw from seeds in their configuration.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from ludus.envs.messages import assistant, tool_call
from ludus.envs.tool_env import ToolEnv, ToolLimits
from ludus.errors import WorldError
from ludus.rewards.base import Reward
from ludus.rewards.code.unit_tests import Suite
from ludus.rewards.extract import NotJson, read_json
from ludus.rewards.paper_rewards import ExpectedCall
from ludus.sandbox.base import MIB, Limits, Sandbox
from ludus.tools.base import ToolError, ToolSchema
from ludus.types import JSON, Action, Message, StepResult, ToolOutcome, ToolStatus
from ludus.worlds.functions.bfcl import guest_runner
from ludus.worlds.functions.bfcl.api_classes import archive
from ludus.worlds.functions.catalogue import CheckedTool
from ludus.worlds.functions.gold_calls import VERDICT

LIMITS: Final = Limits(wall_s=20.0, cpu_s=15.0, output_bytes=8 * MIB, files_out=0)
Turns = Sequence[Sequence[ExpectedCall]]
"""The calls of each turn."""


@dataclass(frozen=True, slots=True)
class ApiTruth(Suite):
    """The truth of a task of several turns: a test `turn N` for each turn with gold calls.

    `modules` are those of the involved classes. `schemas` are offered from the start, `added` maps a turn to
    the schemas offered from then on. `turns` are the messages of the user.
    """

    modules: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, JSON] = field(default_factory=dict)
    extended: bool = False
    turns: tuple[tuple[Message, ...], ...] = ()
    gold: Turns = ()
    schemas: tuple[ToolSchema, ...] = ()
    added: Mapping[int, tuple[ToolSchema, ...]] = field(default_factory=dict)

    def messages_of(self, place: int) -> tuple[Message, ...]:
        """Return the messages of a later turn; descriptions of functions that it adds are part of one of them."""
        turn, added = self.turns[place], self.added.get(place)
        if not added:
            return turn
        described = "\n".join(json.dumps(schema["function"], ensure_ascii=False) for schema in added)
        request = "\n".join(message["content"] for message in turn) or "Can you do it now?"
        content = f"From now on there are more tools:\n{described}\n\n{request}"
        return (Message(role="user", content=content),)


class ApiEnv(ToolEnv):
    """One episode of several turns: an answer without a call is followed by the user's next turn.

    After the last turn, all calls are compared with the gold calls, and the verdict becomes an outcome that
    the model does not see. `offers_tools` is false for a baseline without tools.
    """

    def __init__(
        self,
        truth: ApiTruth,
        rewards: Sequence[Reward],
        limits: ToolLimits,
        sandbox: Sandbox,
        offers_tools: bool = True,
    ) -> None:
        super().__init__(tuple(map(self._tool, truth.schemas)) if offers_tools else (), rewards, limits)
        self._truth, self._sandbox = truth, sandbox
        self._made: list[list[ExpectedCall]] = [[]]
        self._lock = asyncio.Lock()

    async def step(self, action: Action) -> StepResult:
        """Run the calls; without any, continue with the user's next turn, or compare and end."""
        result = await super().step(action)
        if not result.done:
            return result
        place = len(self._made)
        if place == len(self._truth.turns):
            return StepResult(done=True, outcomes=(await self._verdict(),))
        self._made.append([])
        if not self.tools:
            return StepResult(messages=self._truth.turns[place])
        added = map(self._tool, self._truth.added.get(place, ()))
        self._executor = replace(self._executor, tools=(*self._executor.tools, *added))
        return StepResult(messages=self._truth.messages_of(place))

    async def grade_again(self) -> ToolOutcome | None:
        """Compare the same calls again and return the verdict; None before the last turn."""
        return await self._verdict() if len(self._made) == len(self._truth.turns) else None

    async def _verdict(self) -> ToolOutcome:
        """Return whether each turn agrees with the gold calls, by test name; all False if the run fails."""
        agrees = (await self._run(self._made, self._truth.gold)).get("agrees")
        flags = enumerate(agrees, 1) if isinstance(agrees, list) else ()
        agreeing = {f"turn {number}" for number, flag in flags if flag is True}
        verdict = {test: test in agreeing for test in self._truth.fail_to_pass}
        return ToolOutcome("", VERDICT, ToolStatus.OK, json.dumps(verdict))

    async def _call(self, call: ExpectedCall) -> str:
        """Record a call and return its response. Raises ToolError if the call raised an exception."""
        async with self._lock:
            made = [*self._made[-1], call]
            reply = await self._run([*self._made[:-1], made], None)
            texts, raised = reply.get("said"), reply.get("raised")
            if not isinstance(texts, list) or not isinstance(raised, list):
                raise ToolError("the call takes too much time or memory and was not made")
            self._made[-1] = made
        if raised[-1] is True:
            raise ToolError(str(texts[-1]))
        return str(texts[-1])

    async def _run(self, made: Turns, gold: Turns | None) -> Mapping[str, JSON]:
        """Return the reply of the sandbox, empty if the run exceeds its limits. Raises WorldError if it fails."""
        truth = self._truth
        order = {
            "classes": dict(truth.modules),
            "config": dict(truth.config),
            "extended": truth.extended,
            "made": _as_json(made),
            "gold": None if gold is None else _as_json(gold),
        }
        outcome = await self._sandbox.run(
            f"{inspect.getsource(guest_runner)}\nmain()\n",
            files={"apis.zip": archive(frozenset(truth.modules.values()))},
            stdin=json.dumps(order).encode(),
            limits=LIMITS,
        )
        try:
            reply = read_json(outcome.text) if outcome.ok else {}
        except NotJson:
            return {}
        if not isinstance(reply, dict):
            return {}
        if "fault" in reply:
            raise WorldError(f"The objects of the task cannot be created: {reply['fault']}.")
        return reply

    def _tool(self, schema: ToolSchema) -> CheckedTool:
        described = schema["function"]

        async def call(**given: JSON) -> str:
            return await self._call(ExpectedCall(described["name"], given))

        return CheckedTool(described["name"], described["description"], call, given=schema)


def _as_json(turns: Turns) -> list[list[list[JSON]]]:
    return [[[call.name, dict(call.arguments)] for call in calls] for calls in turns]


def gold_messages(truth: ApiTruth) -> list[Message]:
    """Return the gold calls of several turns as an episode, without the responses, which are unknown here."""
    messages: list[Message] = []
    for place, calls in enumerate(truth.gold):
        if place:
            messages += truth.messages_of(place)
        for number, call in enumerate(calls):
            made = tool_call(f"call_{place}_{number}", call.name, call.arguments)
            messages.append(Message(role="assistant", content="", tool_calls=[made]))
            messages.append(Message(role="tool", content="[no output]", tool_call_id=made["id"], name=call.name))
        messages.append(assistant("Done."))
    return messages
