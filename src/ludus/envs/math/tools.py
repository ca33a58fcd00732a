"""The world's tools: a calculator, or Python in a sandbox; and steps as Python programs."""

from __future__ import annotations

import ast
from typing import Literal

from ludus.envs.math.calculator import calculate, show
from ludus.sandbox import Limits, Sandbox, open_sandbox
from ludus.tools.base import Tool, tool

ToolName = Literal["python", "calculator", "none"]
_LIMITS = Limits(wall_s=5.0, cpu_s=5.0)
_IMPORTED = ("comb", "factorial", "gcd", "lcm", "perm")
_PRIMES = "def primes(n):\n    return sum(all(k % d for d in range(2, k)) for k in range(2, n + 1))"


class ProgramError(Exception):
    """A program that failed; the text is the last line of what it wrote about that."""


def make_tools(name: ToolName) -> tuple[Tool, ...]:
    """The tools of an episode."""
    match name:
        case "python":
            return (python_tool(),)
        case "calculator":
            return (CALCULATOR,)
        case "none":
            return ()


@tool(name="calculator")
def _calculator(expression: str) -> str:
    """Work out an expression exactly, like (3 + 4) * 5 / 2.

    Args:
        expression: numbers, + - * / // % **, brackets, and functions like gcd, comb, factorial, sqrt, primes.
    """
    return show(calculate(expression))


CALCULATOR = _calculator


def python_tool(sandbox: Sandbox | None = None) -> Tool:
    """Runs each program afresh in a sandbox (the default backend) and gives what it prints."""
    inside = sandbox or open_sandbox()

    async def run(code: str) -> str:
        outcome = await inside.run(code, limits=_LIMITS)
        if outcome.timed_out or outcome.memory_exceeded:
            raise ProgramError("the program ran out of time" if outcome.timed_out else "out of memory")
        if not outcome.ok:
            raise ProgramError((outcome.error_text.strip().splitlines() or ["no reason given"])[-1])
        return outcome.text.rstrip("\n")

    @tool
    async def python(code: str) -> str:
        """Run a Python program and see what it prints.

        Args:
            code: the program; it shares nothing with earlier ones.
        """
        return await run(code)

    return python


def as_program(expression: str) -> str:
    """A Python program that prints the value of an expression of the calculator, exactly."""
    tree = _Exact().visit(ast.parse(expression, mode="eval"))
    text = ast.unparse(ast.fix_missing_locations(tree))
    used = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    lines = ["from fractions import Fraction"] if "Fraction" in used else []
    if names := sorted(used & {*_IMPORTED, "isqrt"}):
        lines.append(f"from math import {', '.join(names)}")
    lines += [_PRIMES] if "primes" in used else []
    return "\n".join([*lines, f"print({text})"])


class _Exact(ast.NodeTransformer):
    """Division makes fractions, and roots are whole."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Div):
            return node
        return ast.Call(ast.Name("Fraction", ast.Load()), [node.left, node.right], [])

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Name("isqrt", node.ctx) if node.id == "sqrt" else node
