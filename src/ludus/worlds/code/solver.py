"""Scripted solutions: the visible tests and the program, or a program that leaves out a step."""

from __future__ import annotations

import random

from ludus.envs.messages import assistant, tool_turn
from ludus.types import Message
from ludus.worlds.code.grader import CodeTruth
from ludus.worlds.code.problems import CodeProblem
from ludus.worlds.code.tools import RUN_TESTS, success_text


def solve(truth: CodeTruth, with_tools: bool = True) -> list[Message]:
    """Return the messages of a solution; the tool output is computed without running (a test compares it)."""
    cases = truth.chosen("visible")
    if not (cases and with_tools):
        return [program_message(truth.reference)]
    tested = tool_turn(0, RUN_TESTS, {"code": truth.reference}, success_text(cases, truth))
    return [*tested, program_message(truth.reference)]


def solve_without_a_step(problem: CodeProblem, rng: random.Random) -> list[Message]:
    """Return an untested program that leaves out a step."""
    return [program_message(rng.choice(problem.flawed) if len(problem.steps) > 1 else problem.flawed[0])]


def program_message(program: str) -> Message:
    """Return the program as an answer."""
    return assistant(f"```python\n{program}```")
