"""`calculator`: arithmetic without `eval`. Numbers stay small, so that a call always ends at once."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Final

from ludus.tools.base import Tool, ToolError, Traits, tool

MOST_CHARACTERS: Final = 500
"""Of an expression."""
MOST_BITS: Final = 4096
"""Of an integer on the way or at the end."""
_MOST_FACTORIAL: Final = 400

Number = int | float

_BINARY: Final[Mapping[type[ast.operator], Callable[[Number, Number], Number]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_NAMES: Final[Mapping[str, float]] = {"pi": math.pi, "e": math.e}


def _factorial(value: Number) -> Number:
    if not isinstance(value, int) or not 0 <= value <= _MOST_FACTORIAL:
        raise ToolError(f"factorial takes a whole number from 0 to {_MOST_FACTORIAL}")
    return math.factorial(value)


def _round(value: Number, digits: Number = 0) -> Number:
    if not isinstance(digits, int) or abs(digits) > MOST_CHARACTERS:
        raise ToolError("round takes a small whole number of digits")
    return round(value, digits) if digits else round(value)


def _whole(function: Callable[..., int]) -> Callable[..., Number]:
    def of_whole(*values: Number) -> Number:
        if not all(isinstance(value, int) for value in values):
            raise ToolError("gcd and lcm take whole numbers")
        return function(*values)

    return of_whole


_FUNCTIONS: Final[Mapping[str, Callable[..., Number]]] = {
    "abs": abs,
    "min": min,
    "max": max,
    "round": _round,
    "floor": math.floor,
    "ceil": math.ceil,
    "sqrt": math.sqrt,
    "exp": math.exp,
    "log": math.log,
    "log2": math.log2,
    "log10": math.log10,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "asin": math.asin,
    "acos": math.acos,
    "atan": math.atan,
    "gcd": _whole(math.gcd),
    "lcm": _whole(math.lcm),
    "factorial": _factorial,
}


def evaluate(expression: str) -> Number:
    """The value of an arithmetic expression. Raises ToolError, in words for the model, for anything else."""
    if len(expression) > MOST_CHARACTERS:
        raise ToolError(f"the expression is longer than {MOST_CHARACTERS} characters: split it")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        return _bounded(_value(tree.body))
    except SyntaxError as error:
        raise ToolError(f"{expression!r} is no expression: {error.msg}") from None
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError("a number is too large") from None
    except (TypeError, ValueError) as error:
        raise ToolError(f"{expression!r} has no value: {error}") from None
    except (RecursionError, MemoryError):
        raise ToolError("the expression is nested too deeply") from None


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _value(inner)
        case ast.BinOp(op=ast.Pow(), left=left, right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _BINARY:
            return _bounded(_BINARY[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=given, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*map(_value, given)))
    raise ToolError(_refusal(node))


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0:
        if base.bit_length() * exponent > MOST_BITS and abs(base) > 1:
            raise ToolError(f"a number has more than {MOST_BITS} bits")
        return int(base**exponent)
    result: object = base**exponent
    if not isinstance(result, int | float):
        raise ToolError("a root of a negative number")
    return _bounded(result)


def _bounded(value: Number) -> Number:
    """The value, unless it is too large, infinite or no number."""
    if isinstance(value, int):
        if value.bit_length() > MOST_BITS:
            raise ToolError(f"a number has more than {MOST_BITS} bits")
    elif not math.isfinite(value):
        raise ToolError("a number is too large or not a number")
    return value


def _refusal(node: ast.expr) -> str:
    match node:
        case ast.BinOp(op=ast.BitXor()):
            return "^ is no operator here: write ** for a power"
        case ast.Name(id=name):
            return f"there is no name {name!r}; names: {', '.join(_NAMES)}"
        case ast.Call():
            return f"there is no function {ast.unparse(node.func)!r}; functions: {', '.join(_FUNCTIONS)}"
    return f"{ast.unparse(node)!r} is no arithmetic; use numbers, + - * / // % **, brackets and functions"


def calculator_tool() -> Tool:
    """The tool `calculator(expression)`."""

    async def calculator(expression: str) -> str:
        """Compute an arithmetic expression such as `(3 + 4) * sqrt(2) ** 3`.

        Args:
            expression: numbers, + - * / // % **, brackets, pi, e and functions such as sqrt, log and round.
        """
        value = evaluate(expression)
        return str(value) if isinstance(value, int) else format(value, ".15g")

    return tool(traits=Traits(latency="instant", idempotent=True))(calculator)
