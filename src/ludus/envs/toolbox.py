"""Runs tool calls: in parallel, each with a deadline, every failure an observation.

Takes the calls of one action. Gives one `ToolOutcome` per call, in the order of the calls, malformed ones
included. Waits for the slowest call, at most its deadline. Never raises for what a call does, and never
waits for a thread that hangs: a plain function that outlives its deadline goes on in its thread, unheard.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Thread

from ludus.tools.base import ArgumentError, Tool
from ludus.types import Action, CallError, ToolCall, ToolOutcome, ToolStatus


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """Bounds on one call: seconds to wait, and characters of output that the model sees."""

    timeout_s: float = 20.0
    max_output: int = 2000


@dataclass
class Toolbox:
    """The tools of one episode."""

    tools: Sequence[Tool]
    limits: ToolLimits = ToolLimits()
    _by_name: Mapping[str, Tool] = field(init=False)
    _slots: dict[str, asyncio.Semaphore] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._by_name = {tool.name: tool for tool in self.tools}

    async def run(self, action: Action) -> tuple[ToolOutcome, ...]:
        """Run all calls of an action at once; malformed ones come back as outcomes with the reason."""
        called = await asyncio.gather(*(self._call(call) for call in action.calls))
        outcomes = [*called, *map(_malformed, action.errors)]
        order = {call["id"]: i for i, call in enumerate(action.message.get("tool_calls", []))}
        return tuple(sorted(outcomes, key=lambda outcome: order.get(outcome.call_id, len(order))))

    async def _call(self, call: ToolCall) -> ToolOutcome:
        tool = self._by_name.get(call.name)
        if tool is None:
            known = ", ".join(self._by_name) or "none"
            text = f"Error: there is no tool {call.name!r}. Tools: {known}."
            return ToolOutcome(call.id, call.name, ToolStatus.UNKNOWN_TOOL, self._cut(text)[0])
        try:
            arguments = tool.check(call.arguments)
        except ArgumentError as error:
            text = self._cut(f"Error: {error}.")[0]
            return ToolOutcome(call.id, call.name, ToolStatus.BAD_ARGUMENTS, text)
        start = time.perf_counter()
        status, text = await self._guarded(tool, arguments)
        text, truncated = self._cut(text)
        return ToolOutcome(call.id, call.name, status, text, truncated, time.perf_counter() - start)

    async def _guarded(self, tool: Tool, arguments: Mapping[str, object]) -> tuple[ToolStatus, str]:
        timeout_s = tool.timeout_s if tool.timeout_s is not None else self.limits.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                async with self._slot(tool):
                    output: object = await _invoke(tool, arguments)
        except TimeoutError:
            return ToolStatus.TIMED_OUT, f"Error: {tool.name} took longer than {timeout_s:g} s."
        except Exception as error:  # boundary: whatever a tool raises is an observation for the model
            return ToolStatus.RAISED, f"Error: {type(error).__name__}: {error}"
        return ToolStatus.OK, as_text(output)

    def _slot(self, tool: Tool) -> asyncio.Semaphore:
        return self._slots.setdefault(tool.name, asyncio.Semaphore(tool.concurrency or 1_000_000))

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


def _malformed(error: CallError) -> ToolOutcome:
    return ToolOutcome(error.id, "", ToolStatus.MALFORMED, f"Error: {error.reason}")


async def _invoke(tool: Tool, arguments: Mapping[str, object]) -> object:
    if tool.is_async:
        return await tool.function(**arguments)  # type: ignore[misc]
    return await asyncio.wrap_future(_in_thread(tool, arguments))


def _in_thread(tool: Tool, arguments: Mapping[str, object]) -> Future[object]:
    """Run a plain function in a daemon thread of its own: one that hangs blocks nothing, not even exit."""
    future: Future[object] = Future()

    def work() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result: object = tool.function(**arguments)
        except Exception as error:  # boundary: handed to the waiting side as the call's error
            future.set_exception(error)
        except BaseException as error:  # boundary: a tool that calls exit must not end the trainer
            future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
        else:
            future.set_result(result)

    Thread(target=work, name=f"tool-{tool.name}", daemon=True).start()
    return future
