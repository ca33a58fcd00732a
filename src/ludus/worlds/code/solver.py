"""Who knows the solution shows it: the shown tests first, then the program. Or a step is forgotten."""

from __future__ import annotations

import json
import random

from ludus.types import FunctionCall, Message, MessageToolCall
from ludus.worlds.code.grader import CodeTruth
from ludus.worlds.code.problems import Chain, CodeProblem
from ludus.worlds.code.tools import told_of_success


def solve(truth: CodeTruth, with_tools: bool = True) -> list[Message]:
    """The messages of a solution."""
    cases = truth.chosen("visible")
    tried = _tried(truth.reference, told_of_success(cases, truth)) if cases and with_tools else []
    return [*tried, said(truth.reference)]


def forget(problem: CodeProblem, rng: random.Random) -> list[Message]:
    """A program that leaves a step out, handed in without a try; of a single step, one that gives its
    argument back."""
    chain = problem.chain
    fitting = [less for place in range(len(chain.steps)) if (less := chain.without(place)) is not None]
    if len(chain.steps) > 1 and not fitting:
        fitting = [Chain(chain.steps[:-1], chain.numbers[:-1])]
    if fitting:
        flawed = CodeProblem(rng.choice(fitting), problem.style, problem.level, problem.examples)
        return [said(flawed.solution)]
    name = problem.names[0]
    if problem.style == "stdin":
        return [said("print(input())\n")]
    return [said(f"def {problem.signature}:\n    return {name}\n")]


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
