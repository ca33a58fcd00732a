"""Whoever knows the steps shows them: one call a step, and then the answer. Or it guesses, out of habit."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

from ludus.tools.calculator import show
from ludus.types import FunctionCall, Message, MessageToolCall
from ludus.worlds.math.grader import answer_text
from ludus.worlds.math.problems import MathProblem, worked
from ludus.worlds.math.tools import ToolName, as_program


def solve(problem: MathProblem, tool: ToolName) -> list[Message]:
    """The messages of a solution; without a tool the answer alone."""
    if tool == "none":
        return [_said(answer_text(problem))]
    return [*_calls(problem, tool), _said(answer_text(problem))]


def guess(problem: MathProblem, tool: ToolName, rng: random.Random) -> list[Message]:
    """A flawed solution: of several steps the first one, whose result is taken for the answer; of one step
    none, and a number that is wrong nearly always."""
    calls = _calls(problem, tool) if tool != "none" else []
    if len(calls) > 2:
        return [*calls[:2], _said(calls[1]["content"])]
    return [_said(str(rng.randint(2, 99)))]


def _calls(problem: MathProblem, tool: ToolName) -> Sequence[Message]:
    """Calls with their results, worked out here and not run (a test compares them with the tools)."""
    messages: list[Message] = []
    for number, (expression, value) in enumerate(worked(problem.steps)):
        given = {"expression": expression} if tool == "calculator" else {"code": as_program(expression)}
        call = MessageToolCall(
            id=f"call_{number}_0", type="function", function=FunctionCall(name=tool, arguments=json.dumps(given))
        )
        messages.append(Message(role="assistant", content="", tool_calls=[call]))
        messages.append(Message(role="tool", content=show(value), tool_call_id=call["id"], name=tool))
    return messages


def _said(text: str) -> Message:
    return Message(role="assistant", content=text)
