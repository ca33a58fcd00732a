"""Demonstrations (one call per step and then the answer, or a guess), and steps as Python programs."""

from __future__ import annotations

import ast
import random
from collections.abc import Sequence
from typing import Literal

from ludus.envs.messages import assistant, tool_turn
from ludus.tools.calculator import show
from ludus.types import Message
from ludus.worlds.math.grader import answer_text
from ludus.worlds.math.problems import MathProblem, worked

ToolName = Literal["python", "calculator", "none"]
_IMPORTED = ("comb", "factorial", "gcd", "lcm", "perm")
_PRIMES = "def primes(n):\n    return sum(all(k % d for d in range(2, k)) for k in range(2, n + 1))"


def solve(problem: MathProblem, tool: ToolName) -> list[Message]:
    """Return the messages of a solution; without a tool the answer alone."""
    return [*_calls(problem, tool), assistant(answer_text(problem))]


def guess(problem: MathProblem, tool: ToolName, rng: random.Random) -> list[Message]:
    """Return a flawed solution: the result of the first of several steps as the answer; for a problem of one step
    a random number without a call."""
    calls = _calls(problem, tool)
    if len(calls) > 2:
        return [*calls[:2], assistant(calls[1]["content"])]
    return [assistant(str(rng.randint(2, 99)))]


def _calls(problem: MathProblem, tool: ToolName) -> Sequence[Message]:
    """Return calls with their results, computed without the tool (a test compares them)."""
    if tool == "none":
        return []
    messages: list[Message] = []
    for number, (expression, value) in enumerate(worked(problem.steps)):
        arguments = {"expression": expression} if tool == "calculator" else {"code": as_program(expression)}
        messages += tool_turn(number, tool, arguments, show(value))
    return messages


def as_program(expression: str) -> str:
    """Return a Python program that prints the exact value of an expression of the calculator."""
    tree = _ExactDivision().visit(ast.parse(expression, mode="eval"))
    text = ast.unparse(ast.fix_missing_locations(tree))
    used = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    lines = ["from fractions import Fraction"] if "Fraction" in used else []
    if names := sorted(used & {*_IMPORTED, "isqrt"}):
        lines.append(f"from math import {', '.join(names)}")
    lines += [_PRIMES] if "primes" in used else []
    return "\n".join([*lines, f"print({text})"])


class _ExactDivision(ast.NodeTransformer):
    """Replaces divisions with fractions, and `sqrt` with `isqrt`."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Div):
            return node
        return ast.Call(ast.Name("Fraction", ast.Load()), [node.left, node.right], [])

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Name("isqrt", node.ctx) if node.id == "sqrt" else node
