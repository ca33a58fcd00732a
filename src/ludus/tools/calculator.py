"""`calculator`: exact arithmetic if possible, without `eval`.

Integers and decimals are evaluated as fractions by `+ - * / // % **`, brackets and integer functions:
0.1 + 0.2 is 3/10. Irrational values (`sqrt(2)`, `log(3)`, `pi`) and results computed from them are floats.
Bounded sizes ensure short calls.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Final

from ludus.tools.base import Tool, ToolError, Traits, tool

MAX_CHARACTERS: Final = 500  # maximum number of characters of an expression
MAX_BITS: Final = 4096  # maximum number of bits of a numerator or denominator, including intermediate results
_MAX_COMBINATORIC: Final = 400  # largest argument of `factorial`, `comb` and `perm`
_MAX_PRIME: Final = 10_000  # largest argument of `isprime` and `primes`
_MAX_ARGUMENTS: Final = 500
_TOO_MANY_BITS = f"a number has more than {MAX_BITS} bits"

Number = Fraction | float

_BINARY: Final[Mapping[type[ast.operator], Callable[[Number, Number], Number]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: lambda base, exponent: _power(base, exponent),
}
_NAMES: Final[Mapping[str, float]] = {"pi": math.pi, "e": math.e}


def calculate(expression: str) -> Fraction:
    """Return the exact value. Raises ToolError with a message for the model if invalid or inexact."""
    value = evaluate(expression)
    if isinstance(value, float):
        raise ToolError(f"the value of {expression[:60]!r} is no fraction")
    return value


def evaluate(expression: str) -> Number:
    """Evaluate an arithmetic expression. Raises ToolError with a message for the model if invalid."""
    if len(expression) > MAX_CHARACTERS:
        raise ToolError(f"the expression is longer than {MAX_CHARACTERS} characters: split it")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        return _check_bounds(_value(tree.body))
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


def show(value: Fraction | int) -> str:
    """Return a fraction as text: 7, -7 or 7/3."""
    return str(Fraction(value))


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            if math.isinf(number):
                raise ToolError("a number is too large")
            return _check_bounds(Fraction(repr(number)))
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _value(inner)
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _BINARY:
            return _check_bounds(_BINARY[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=given, keywords=[]) if name in FUNCTIONS:
            function, least, most = FUNCTIONS[name]
            values = [_value(one) for one in given]
            if not least <= len(values) <= most:
                raise ToolError(f"{name} does not take {len(values)} values")
            return _check_bounds(function(*values))
    raise ToolError(_refusal(node))


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        if exponent.denominator == 1:
            bits = max(abs(base.numerator), base.denominator).bit_length()
            if bits <= 1 and base:
                return base ** (int(exponent) % 2)
            if abs(exponent) * bits > MAX_BITS and base:
                raise ToolError(_TOO_MANY_BITS)
            return Fraction(base ** int(exponent))
        if exponent == Fraction(1, 2):
            return _root(base)
    result: object = float(base) ** float(exponent)
    if not isinstance(result, float):
        raise ToolError("a root of a negative number")
    return result


def _check_bounds(value: Number | int) -> Number:
    """Return the value. Raises ToolError if it is too large, infinite or NaN."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ToolError("a number is too large or not a number")
        return value
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ToolError(_TOO_MANY_BITS)
    return Fraction(value)


def _refusal(node: ast.expr) -> str:
    match node:
        case ast.BinOp(op=ast.BitXor()):
            return "^ is not an operator here: write ** for a power"
        case ast.Name(id=name):
            return f"there is no name {name!r}; names: {', '.join(_NAMES)}"
        case ast.Call():
            return f"there is no function {ast.unparse(node.func)!r}; functions: {', '.join(FUNCTIONS)}"
    return f"{ast.unparse(node)!r} is not arithmetic; use numbers, + - * / // % **, brackets and functions"


def _root(value: Number) -> Number:
    if value < 0:
        raise ValueError("it is the root of a negative number")
    if isinstance(value, Fraction):
        up, down = math.isqrt(value.numerator), math.isqrt(value.denominator)
        if (up * up, down * down) == (value.numerator, value.denominator):
            return Fraction(up, down)
    return math.sqrt(value)


def _round(value: Number, digits: Number = Fraction(0)) -> Number:
    if digits != int(digits) or not -MAX_CHARACTERS <= digits <= MAX_CHARACTERS:
        raise ToolError("round takes a small whole number of digits")
    return value.__round__(int(digits)) if digits else Fraction(round(value))


def _wrap_float(function: Callable[..., float]) -> Callable[..., Number]:
    """Wrap a function of floats; integers are not converted, since `log` accepts them beyond the float range."""
    return lambda *given: function(
        *(int(value) if isinstance(value, Fraction) and value.denominator == 1 else float(value) for value in given)
    )


def _wrap_integer(name: str, function: Callable[..., int], most: int | None = None) -> Callable[..., Number]:
    def wrapped(*given: Number) -> Number:
        for value in given:
            is_whole = isinstance(value, Fraction) and value.denominator == 1
            if not is_whole or (most is not None and not 0 <= value <= most):
                raise ToolError(f"{name} takes whole numbers{'' if most is None else f' from 0 to {most}'}")
        return Fraction(function(*map(int, given)))

    return wrapped


def _is_prime(n: int) -> int:
    return int(n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1)))


FUNCTIONS: Final[Mapping[str, tuple[Callable[..., Number], int, int]]] = {
    "abs": (abs, 1, 1),
    "min": (min, 2, _MAX_ARGUMENTS),
    "max": (max, 2, _MAX_ARGUMENTS),
    "round": (_round, 1, 2),
    "floor": (lambda value: Fraction(math.floor(value)), 1, 1),
    "ceil": (lambda value: Fraction(math.ceil(value)), 1, 1),
    "sqrt": (_root, 1, 1),
    "exp": (_wrap_float(math.exp), 1, 1),
    "log": (_wrap_float(math.log), 1, 2),
    **{
        name: (_wrap_float(vars(math)[name]), 1, 1)
        for name in ("log2", "log10", "sin", "cos", "tan", "asin", "acos", "atan")
    },
    "gcd": (_wrap_integer("gcd", math.gcd), 2, _MAX_ARGUMENTS),
    "lcm": (_wrap_integer("lcm", math.lcm), 2, _MAX_ARGUMENTS),
    "factorial": (_wrap_integer("factorial", math.factorial, _MAX_COMBINATORIC), 1, 1),
    "comb": (_wrap_integer("comb", math.comb, _MAX_COMBINATORIC), 2, 2),
    "perm": (_wrap_integer("perm", math.perm, _MAX_COMBINATORIC), 2, 2),
    "isprime": (_wrap_integer("isprime", _is_prime, _MAX_PRIME), 1, 1),
    "primes": (_wrap_integer("primes", lambda n: sum(map(_is_prime, range(2, n + 1))), _MAX_PRIME), 1, 1),
}
"""Function, minimum and maximum number of arguments by name. `primes(n)` counts the primes up to n."""


def calculator_tool() -> Tool:
    """Create the tool `calculator(expression)`, which returns decimals."""

    async def calculator(expression: str) -> str:
        """Compute an arithmetic expression such as `(3 + 4) * sqrt(2) ** 3`.

        Args:
            expression: numbers, + - * / // % **, brackets, pi, e and functions such as sqrt, log and round.
        """
        value = evaluate(expression)
        try:
            is_whole = isinstance(value, Fraction) and value.denominator == 1
            return str(value) if is_whole else format(float(value), ".15g")  # 15 digits
        except OverflowError:
            raise ToolError("a number is too large") from None

    return tool(traits=Traits(latency="instant", idempotent=True))(calculator)


def exact_calculator_tool() -> Tool:
    """Create the tool `calculator(expression)`, which returns fractions and rejects inexact values."""

    async def calculator(expression: str) -> str:
        """Work out an expression exactly, like (3 + 4) * 5 / 2.

        Args:
            expression: numbers, + - * / // % **, brackets, and functions like gcd, comb, factorial, sqrt,
                primes.
        """
        return show(calculate(expression))

    return tool(traits=Traits(latency="instant", idempotent=True))(calculator)
