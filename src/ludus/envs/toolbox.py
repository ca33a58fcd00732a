"""Runs tool calls: in parallel, each with a deadline, every failure an observation.

Takes the calls of one action. Gives one `ToolOutcome` for each: the well-formed calls in their order, then
the malformed ones in theirs. Waits for the slowest call, at most its deadline, in which the wait for a free
place of the tool counts, and that for one of a sandbox does not. Never waits for one that hangs: a thread
that outlives its deadline, or a coroutine that refuses to be cancelled, goes on unheard. A coroutine that
blocks without awaiting holds up the event loop; what blocks belongs into a plain function. Never raises for
what a call does, but for one thing: a tool that raises WorldError or EngineError says that its infrastructure
failed. Such a call of an idempotent tool is sent once more, within the same deadline; where that fails too,
and for every other tool at once, all calls of the action come to their ends and `ToolFault` is raised.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from threading import Thread

from ludus.errors import EngineError, ToolFault, UserError, WorldError
from ludus.sandbox.local.pausable_timeout import PausableClock, under
from ludus.tools.base import PATIENCE, ArgumentError, Tool, ToolError
from ludus.types import Action, CallError, ToolCall, ToolOutcome, ToolStatus


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """Bounds on one call: seconds to wait, and characters of output that the model sees.

    What is left out of a longer output is replaced by a note that says how much it was.
    """

    timeout_s: float = 20.0
    max_output: int = 2000

    def deadline_s(self, tool: Tool) -> float:
        """Seconds that a call of this tool may take: its own deadline, or that of its latency class."""
        return self.timeout_s * PATIENCE[tool.traits.latency] if tool.timeout_s is None else tool.timeout_s


@dataclass(frozen=True, slots=True)
class _Reply:
    """How a call ended, and its whole output; or that it did not, by the fault of the infrastructure."""

    status: ToolStatus
    text: str
    fault: WorldError | EngineError | None = None


@dataclass(slots=True)
class _Begun:
    """How often the function of a call was begun."""

    times: int = 0


@dataclass
class ToolExecutor:
    """The tools of one episode. Raises UserError where two share a name."""

    tools: Sequence[Tool]
    limits: ToolLimits = ToolLimits()
    _by_name: Mapping[str, Tool] = field(init=False)

    def __post_init__(self) -> None:
        self._by_name = {tool.name: tool for tool in self.tools}
        if len(self._by_name) < len(self.tools):
            names = ", ".join(tool.name for tool in self.tools)
            raise UserError(f"Two tools share a name: {names}.", "Give each a name: @tool(name=...).")

    async def run(self, action: Action) -> tuple[ToolOutcome, ...]:
        """Run all calls of an action at once; malformed ones come back as outcomes with the reason.

        Raises ToolFault, with the words of the first tool whose infrastructure failed.
        """
        called = await asyncio.gather(*(self._call(call) for call in action.calls))
        for outcome in called:
            if isinstance(outcome, ToolFault):
                raise outcome
        outcomes = [outcome for outcome in called if isinstance(outcome, ToolOutcome)]
        return (*outcomes, *map(self._malformed, action.errors))

    async def _call(self, call: ToolCall) -> ToolOutcome | ToolFault:
        begin, begun = time.perf_counter(), _Begun()
        reply = await self._answer(call, begun)
        if reply.fault is not None:
            fault = ToolFault(f"The tool {call.name} failed: {reply.fault.message}", reply.fault.hint)
            fault.__cause__ = reply.fault
            return fault
        text, truncated = self._cut(reply.text)
        outcome = ToolOutcome(call.id, call.name, reply.status, text, truncated, time.perf_counter() - begin)
        cost = self._by_name[call.name].traits.cost * begun.times if begun.times else 0.0
        return replace(outcome, cost=cost, retried=begun.times > 1)

    def _malformed(self, error: CallError) -> ToolOutcome:
        text, truncated = self._cut(as_text(f"Error: {error.reason}"))
        return ToolOutcome(error.id, "", ToolStatus.MALFORMED, text, truncated)

    async def _answer(self, call: ToolCall, begun: _Begun) -> _Reply:
        tool = self._by_name.get(call.name)
        if tool is None:
            known = ", ".join(self._by_name) or "none"
            return _Reply(ToolStatus.UNKNOWN_TOOL, f"Error: there is no tool {call.name!r}. Tools: {known}.")
        try:
            arguments = await tool.check_bounded(call.arguments)
        except ArgumentError as error:
            return _Reply(ToolStatus.BAD_ARGUMENTS, as_text(f"Error: {error}."))
        return await self._within_deadline(tool, arguments, begun)

    async def _within_deadline(self, tool: Tool, arguments: Mapping[str, object], begun: _Begun) -> _Reply:
        timeout_s = self.limits.deadline_s(tool)
        clock = PausableClock(timeout_s)
        with under(clock):
            work = asyncio.get_running_loop().create_task(_run(tool, arguments, begun))
        try:
            while not work.done() and (left_s := clock.left_s) > 0:
                await asyncio.wait({work}, timeout=left_s)
            if work.done():
                return work.result()
        finally:
            work.cancel()
        return _Reply(ToolStatus.TIMED_OUT, f"Error: {tool.name} took longer than {timeout_s:g} s.")

    def _cut(self, text: str) -> tuple[str, bool]:
        """Keep head and tail of an output that is too long."""
        bound = self.limits.max_output
        if len(text) <= bound:
            return text, False
        note = f"\n... {len(text) - bound} characters left out ...\n"
        head = bound * 2 // 3
        return text[:head] + note + text[len(text) - (bound - head) :], True


def as_text(output: object) -> str:
    """Whatever a tool returned, as valid UTF-8 text: bytes are decoded, lone surrogates replaced."""
    text = output.decode("utf-8", "replace") if isinstance(output, bytes | bytearray) else str(output)
    return text.encode("utf-8", "replace").decode("utf-8").replace("\x00", "�")


def describe_error(error: BaseException) -> str:
    """The type of an error and its words, as valid text; the type alone where it has no words to give.

    A `ToolError` is its words alone.
    """
    if isinstance(error, ToolError):
        return as_text(error)
    try:
        said = as_text(error)
    except BaseException:  # boundary: even the words of a foreign error may fail
        said = ""
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


async def _run(tool: Tool, arguments: Mapping[str, object], begun: _Begun) -> _Reply:
    """Run a call to its end, twice where that is allowed and helps. Never raises."""
    reply = await _try(tool, arguments, begun)
    if reply.fault is not None and tool.traits.idempotent:
        reply = await _try(tool, arguments, begun)
    return reply


async def _try(tool: Tool, arguments: Mapping[str, object], begun: _Begun) -> _Reply:
    try:
        async with tool.slot():
            begun.times += 1
            if not tool.is_async:
                return await asyncio.wrap_future(_in_thread(tool, arguments))
            output: object = await tool.function(**arguments)  # type: ignore[misc]
            return _Reply(ToolStatus.OK, as_text(output))
    except BaseException as error:  # boundary: whatever a tool raises is an observation for the model
        return _raised(error)


def _raised(error: BaseException) -> _Reply:
    fault = error if isinstance(error, WorldError | EngineError) else None
    return _Reply(ToolStatus.RAISED, f"Error: {describe_error(error)}", fault)


def _in_thread(tool: Tool, arguments: Mapping[str, object]) -> Future[_Reply]:
    """Run a plain function in a daemon thread of its own: one that hangs blocks nothing, not even exit."""
    future: Future[_Reply] = Future()

    def work() -> None:
        if future.set_running_or_notify_cancel():
            future.set_result(_reply(tool, arguments))

    Thread(target=work, name=f"tool-{tool.name}", daemon=True).start()
    return future


def _reply(tool: Tool, arguments: Mapping[str, object]) -> _Reply:
    try:
        output: object = tool.function(**arguments)
        if inspect.iscoroutine(output):
            output.close()
            raise TypeError(f"{tool.name} returned a coroutine, but is not declared async")
        return _Reply(ToolStatus.OK, as_text(output))
    except BaseException as error:  # boundary: a tool that fails or calls exit must not end the trainer
        return _raised(error)
