"""Who knows the solution shows it: the shown tests first, then the program. Or a step is forgotten."""

from __future__ import annotations

import json
import random

from ludus.types import FunctionCall, Message, MessageToolCall
from ludus.worlds.code.grader import CodeTruth
from ludus.worlds.code.problems import CodeProblem
from ludus.worlds.code.tools import told_of_success


def solve(truth: CodeTruth, with_tools: bool = True) -> list[Message]:
    """The messages of a solution."""
    cases = truth.chosen("visible")
    tried = _tried(truth.reference, told_of_success(cases, truth)) if cases and with_tools else []
    return [*tried, said(truth.reference)]


def forget(problem: CodeProblem, rng: random.Random) -> list[Message]:
    """Return a program that leaves a step out, handed in without a try."""
    return [said(rng.choice(problem.flawed) if len(problem.steps) > 1 else problem.flawed[0])]


def said(program: str) -> Message:
    """The program as an answer."""
    return Message(role="assistant", content=f"```python\n{program}```")


def _tried(program: str, output: str) -> list[Message]:
    """A call of `run_tests` with its result, worked out here and not run (a test compares them)."""
    function = FunctionCall(name="run_tests", arguments=json.dumps({"code": program}))
    call = MessageToolCall(id="call_0_0", type="function", function=function)
    return [
        Message(role="assistant", content="", tool_calls=[call]),
        Message(role="tool", content=output, tool_call_id=call["id"], name="run_tests"),
    ]
