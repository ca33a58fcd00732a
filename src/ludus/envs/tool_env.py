"""Environment with tools: execute the tool calls of each action; end with an answer.

`ToolExecutor` executes the calls of one action and returns one `ToolOutcome` for each: the well-formed calls in
order, then the malformed ones. Calls run in parallel, each with a deadline that includes the wait for the tool's
concurrency limit and excludes the wait for a sandbox. A thread past its deadline, or a coroutine that ignores
cancellation, is abandoned. A coroutine that blocks without awaiting blocks the event loop; blocking code belongs in a
plain function.

Every failure of a call becomes an observation, except WorldError and EngineError, which mean that the tool's
infrastructure failed. A call of an idempotent tool is then retried once, within the same deadline. If that fails too,
or the tool is not idempotent, `ToolFault` is raised after all calls of the action have ended.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar

from ludus.config.sections.rollout import RolloutConfig
from ludus.envs.base import Environment, WrappedEnvironment
from ludus.errors import EngineError, ToolFault, UserError, WorldError
from ludus.rewards.base import Reward
from ludus.tools.base import TIMEOUT_FACTORS, ArgumentError, Tool, ToolError, call_timeout
from ludus.types import Action, Message, StepResult, Task, ToolCall, ToolOutcome, ToolStatus
from ludus.untrusted.worker import run_in_thread

T = TypeVar("T")


class Resource(Protocol):
    """Resource of an episode's tools, such as a `ludus.tools.workspace.Workspace`."""

    async def open(self) -> None:
        """Acquire the resource. An exception is an infrastructure failure."""

    async def close(self) -> None:
        """Release the resource; also called if it was never opened."""


class ToolEnv(Environment):
    """One episode with tools.

    The calls of a turn run in parallel and return as tool messages in order; a malformed or failed call returns an
    error text. The episode ends with a message without calls, or with a successful call of a tool with the trait
    `ends`. `resources` are opened at the start and closed at the end.
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
        return StepResult(messages=tuple(map(tool_message, outcomes)), outcomes=outcomes)

    async def close(self) -> None:
        """Close the resources."""
        for resource in self._resources:
            await resource.close()


class ExtraToolsEnv(WrappedEnvironment):
    """An environment with more tools, whose calls it does not receive. The tools with the names `hidden` are removed.

    The additional calls of a turn run before the others.
    """

    def __init__(
        self, inner: Environment, extra: Sequence[Tool], limits: ToolLimits, hidden: Collection[str] = ()
    ) -> None:
        super().__init__(inner)
        self.tools = (*(one for one in inner.tools if one.name not in hidden), *extra)
        self._executor = ToolExecutor(extra, limits)
        self._own = {*hidden, *(one.name for one in extra)}

    async def step(self, action: Action) -> StepResult:
        """Run the additional calls, and forward the others; tool messages are in the order of the calls."""
        calls = tuple(call for call in action.calls if call.name in self._own)
        rest = replace(action, calls=tuple(call for call in action.calls if call.name not in self._own))
        if not calls:
            return await self.inner.step(action)
        outcomes = await self._executor.run(replace(action, calls=calls, errors=()))
        result = StepResult()
        if rest.calls or rest.errors:
            result = await self.inner.step(rest)
        order = {call.id: place for place, call in enumerate(action.calls)}
        all_outcomes = sorted((*outcomes, *result.outcomes), key=lambda one: order.get(one.call_id, len(order)))
        messages = sorted(
            (*map(tool_message, outcomes), *result.messages),
            key=lambda one: order.get(one.get("tool_call_id", ""), len(order)),
        )
        return replace(result, messages=tuple(messages), outcomes=tuple(all_outcomes))


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """Limits of one call: timeout in seconds, and maximum characters of output in the observation.

    The middle of a longer output is replaced by a note with the number of omitted characters.
    """

    timeout_s: float = 20.0
    max_output: int = 2000

    @classmethod
    def of(cls, rollout: RolloutConfig) -> ToolLimits:
        """Return the limits of a run."""
        return cls(rollout.tool_timeout_s, rollout.max_tool_output)

    def deadline_s(self, tool: Tool) -> float:
        """Return the timeout of a call: the tool's, or else `timeout_s` scaled by its latency class."""
        return self.timeout_s * TIMEOUT_FACTORS[tool.traits.latency] if tool.timeout_s is None else tool.timeout_s


@dataclass(frozen=True, slots=True)
class _Reply:
    """Status and complete output of a call, or its infrastructure failure."""

    status: ToolStatus
    text: str
    fault: WorldError | EngineError | None = None


@dataclass(slots=True)
class _Attempts:
    """Number of times that the function of a call was started."""

    count: int = 0


@dataclass
class ToolExecutor:
    """Executor of tool calls of an episode. Raises UserError if two tools share a name."""

    tools: Sequence[Tool]
    limits: ToolLimits = ToolLimits()
    _by_name: Mapping[str, Tool] = field(init=False)

    def __post_init__(self) -> None:
        self._by_name = {tool.name: tool for tool in self.tools}
        if len(self._by_name) < len(self.tools):
            names = ", ".join(tool.name for tool in self.tools)
            raise UserError(f"Two tools share a name: {names}.", "Set unique names with @tool(name=...).")

    async def run(self, action: Action) -> tuple[ToolOutcome, ...]:
        """Run all calls of an action concurrently; malformed calls return outcomes with the reason.

        Raises ToolFault, with the message of the first tool whose infrastructure failed.
        """
        results = await asyncio.gather(*(self._call(call) for call in action.calls))
        for outcome in results:
            if isinstance(outcome, ToolFault):
                raise outcome
        outcomes = [outcome for outcome in results if isinstance(outcome, ToolOutcome)]
        for error in action.errors:
            text, truncated = self._truncated(as_text(f"Error: {error.reason}"))
            outcomes.append(ToolOutcome(error.id, "", ToolStatus.MALFORMED, text, truncated))
        return tuple(outcomes)

    async def _call(self, call: ToolCall) -> ToolOutcome | ToolFault:
        start_s, attempts = time.perf_counter(), _Attempts()
        reply = await self._execute(call, attempts)
        if reply.fault is not None:
            fault = ToolFault(f"The tool {call.name} failed: {reply.fault.message}", reply.fault.hint)
            fault.__cause__ = reply.fault
            return fault
        text, truncated = self._truncated(reply.text)
        outcome = ToolOutcome(call.id, call.name, reply.status, text, truncated, time.perf_counter() - start_s)
        cost = self._by_name[call.name].traits.cost * attempts.count if attempts.count else 0.0
        return replace(outcome, cost=cost, retried=attempts.count > 1)

    async def _execute(self, call: ToolCall, attempts: _Attempts) -> _Reply:
        tool = self._by_name.get(call.name)
        if tool is None:
            known = ", ".join(self._by_name) or "none"
            return _Reply(ToolStatus.UNKNOWN_TOOL, f"Error: there is no tool {call.name!r}. Tools: {known}.")
        try:
            arguments = await tool.check_bounded(call.arguments)
        except ArgumentError as error:
            return _Reply(ToolStatus.BAD_ARGUMENTS, as_text(f"Error: {error}."))
        return await self._within_deadline(tool, arguments, attempts)

    async def _within_deadline(self, tool: Tool, arguments: Mapping[str, object], attempts: _Attempts) -> _Reply:
        timeout_s = self.limits.deadline_s(tool)
        work: asyncio.Task[_Reply] | None = None
        try:
            with suppress(TimeoutError):
                async with call_timeout(timeout_s):
                    work = asyncio.get_running_loop().create_task(_run(tool, arguments, attempts))
                    await asyncio.wait({work})
            if work is not None and work.done():
                return work.result()
        finally:
            if work is not None:
                work.cancel()
        return _Reply(ToolStatus.TIMED_OUT, f"Error: {tool.name} took longer than {timeout_s:g} s.")

    def _truncated(self, text: str) -> tuple[str, bool]:
        """Return the text, without its middle if it is too long, and whether it was truncated."""
        bound = self.limits.max_output
        if len(text) <= bound:
            return text, False
        note = f"\n... {len(text) - bound} characters left out ...\n"
        head = bound * 2 // 3
        return text[:head] + note + text[len(text) - (bound - head) :], True


def tool_message(outcome: ToolOutcome) -> Message:
    """Return the message that shows an outcome to the model."""
    name = outcome.tool or "error"
    return Message(role="tool", content=outcome.output, tool_call_id=outcome.call_id, name=name)


def as_text(output: object) -> str:
    """Return a tool's result as valid UTF-8 text: bytes are decoded, lone surrogates replaced."""
    text = output.decode("utf-8", "replace") if isinstance(output, bytes | bytearray) else str(output)
    return text.encode("utf-8", "replace").decode("utf-8").replace("\x00", "�")


def describe_error(error: BaseException) -> str:
    """Return the type and message of an exception as valid text; of a `ToolError` only the message."""
    if isinstance(error, ToolError):
        return as_text(error)
    try:
        message = as_text(error)
    except BaseException:  # boundary: `str` of a foreign exception may raise
        message = ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


async def _run(tool: Tool, arguments: Mapping[str, object], attempts: _Attempts) -> _Reply:
    """Run a call, and retry it once if its infrastructure failed and the tool is idempotent. Never raises."""
    reply = await _try(tool, arguments, attempts)
    if reply.fault is not None and tool.traits.idempotent:
        reply = await _try(tool, arguments, attempts)
    return reply


async def _try(tool: Tool, arguments: Mapping[str, object], attempts: _Attempts) -> _Reply:
    try:
        async with tool.slot():
            attempts.count += 1
            if not tool.is_async:
                return await asyncio.wrap_future(run_in_thread(f"tool-{tool.name}", partial(_reply, tool, arguments)))
            output: object = await tool.function(**arguments)  # type: ignore[misc]
            return _Reply(ToolStatus.OK, as_text(output))
    except BaseException as error:  # boundary: exceptions of a tool are observations
        return _error_reply(error)


def _error_reply(error: BaseException) -> _Reply:
    fault = error if isinstance(error, WorldError | EngineError) else None
    return _Reply(ToolStatus.RAISED, f"Error: {describe_error(error)}", fault)


def _reply(tool: Tool, arguments: Mapping[str, object]) -> _Reply:
    try:
        output: object = tool.function(**arguments)
        if inspect.iscoroutine(output):
            output.close()
            raise TypeError(f"{tool.name} returned a coroutine, but is not declared async")
        return _Reply(ToolStatus.OK, as_text(output))
    except BaseException as error:  # boundary: a tool that raises SystemExit must not end the trainer
        return _error_reply(error)
