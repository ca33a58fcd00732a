"""The world's tools: a calculator, or Python in a sandbox; and steps as Python programs."""

from __future__ import annotations

import ast
from typing import Literal

from ludus.sandbox import Limits, Sandbox
from ludus.tools.base import Tool
from ludus.tools.calculator import exact_calculator_tool
from ludus.tools.python import python_tool

ToolName = Literal["python", "calculator", "none"]
_LIMITS = Limits(wall_s=5.0, cpu_s=5.0, files_out=0)
_IMPORTED = ("comb", "factorial", "gcd", "lcm", "perm")
_PRIMES = "def primes(n):\n    return sum(all(k % d for d in range(2, k)) for k in range(2, n + 1))"


def make_tools(name: ToolName, sandbox: Sandbox) -> tuple[Tool, ...]:
    """The tools of an episode. Programs run in the sandbox."""
    match name:
        case "python":
            return (python_tool(sandbox, _LIMITS),)
        case "calculator":
            return (exact_calculator_tool(),)
        case "none":
            return ()


def as_program(expression: str) -> str:
    """A Python program that prints the value of an expression of the calculator, exactly."""
    tree = _Exact().visit(ast.parse(expression, mode="eval"))
    text = ast.unparse(ast.fix_missing_locations(tree))
    used = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
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
