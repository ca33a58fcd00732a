"""A calculator: exact arithmetic on expressions, in bounded time and memory, without running any code.

It knows whole numbers and decimals, `+ - * / // % **`, brackets, and the functions of `FUNCTIONS`. Values are
fractions: 1 / 3 is 1/3, and 0.1 + 0.2 is 3/10.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction

MAX_CHARACTERS = 400
MAX_BITS = 4_000
"""No value, and no value on the way, has a numerator or denominator of more bits."""
MAX_COUNT = 10_000
"""The largest argument of `isprime` and `primes`."""
MAX_ORDERED = 400
"""The largest argument of `factorial`, `comb` and `perm`."""


class CalculationError(ValueError):
    """What cannot be worked out, in words for whoever typed it."""


def calculate(expression: str) -> Fraction:
    """The value of the expression. Raises CalculationError for what is none, or is too large."""
    if len(expression) > MAX_CHARACTERS:
        raise CalculationError(f"the expression is longer than {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise CalculationError(f"{expression!r} is no expression") from None
    return _value(tree)


def show(value: Fraction | int) -> str:
    """A value as the calculator (and Python's `Fraction`) writes it: 7, -7 or 7/3."""
    return str(Fraction(value))


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            return _bounded(_constant(node))
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand)
        case ast.UnaryOp(op=ast.UAdd()):
            return _value(node.operand)
        case ast.BinOp(op=ast.Pow()):
            return _power(_value(node.left), _value(node.right))
        case ast.BinOp() if type(node.op) in _OPERATORS:
            return _operate(_OPERATORS[type(node.op)], _value(node.left), _value(node.right))
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in FUNCTIONS:
            return _call(name, [_value(argument) for argument in node.args])
    raise CalculationError(f"{ast.unparse(node)[:60]!r} is not something that it can work out")


def _constant(node: ast.Constant) -> Fraction:
    text = ast.unparse(node)
    if isinstance(node.value, float) and math.isinf(node.value):
        raise CalculationError("a number is too large")
    return Fraction(text)


def _operate(
    operation: Callable[[Fraction, Fraction], Fraction], left: Fraction, right: Fraction
) -> Fraction:
    try:
        return _bounded(Fraction(operation(left, right)))
    except ZeroDivisionError:
        raise CalculationError("division by zero") from None


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise CalculationError("the exponent is no whole number; there is sqrt()")
    bits = max(abs(base.numerator), base.denominator).bit_length()
    if bits > 1 and abs(exponent) * bits > MAX_BITS:
        raise CalculationError("the power is too large")
    if base == 0 and exponent < 0:
        raise CalculationError("division by zero")
    return base ** (int(exponent) % 2 if bits <= 1 else int(exponent))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise CalculationError("a value on the way is too large")
    return value


def _call(name: str, given: list[Fraction]) -> Fraction:
    function, least, most = FUNCTIONS[name]
    if not least <= len(given) <= most:
        raise CalculationError(f"{name} does not take {len(given)} values")
    return _bounded(Fraction(function(*given)))


def _whole(value: Fraction, most: int | None = None) -> int:
    if value.denominator != 1 or (most is not None and not 0 <= value <= most):
        raise CalculationError(
            f"{show(value)[:30]} is not a whole number" + (f" up to {most}" if most else "")
        )
    return int(value)


def _root(value: Fraction) -> Fraction:
    if value < 0:
        raise CalculationError("the root of a negative number")
    up, down = math.isqrt(value.numerator), math.isqrt(value.denominator)
    if (up * up, down * down) != (value.numerator, value.denominator):
        raise CalculationError(f"the root of {show(value)[:30]} is no fraction")
    return Fraction(up, down)


def _factorial(n: Fraction) -> int:
    return math.factorial(_whole(n, MAX_ORDERED))


def _choices(n: Fraction, k: Fraction) -> int:
    return math.comb(_whole(n, MAX_ORDERED), _whole(k, MAX_ORDERED))


def _orders(n: Fraction, k: Fraction) -> int:
    return math.perm(_whole(n, MAX_ORDERED), _whole(k, MAX_ORDERED))


def _is_prime(n: Fraction) -> int:
    whole = _whole(n, MAX_COUNT)
    return int(whole > 1 and all(whole % d for d in range(2, math.isqrt(whole) + 1)))


def _num_primes(n: Fraction) -> int:
    sieve = bytearray([1]) * (_whole(n, MAX_COUNT) + 1)
    sieve[:2] = bytes(len(sieve[:2]))
    for d in range(2, math.isqrt(len(sieve)) + 1):
        if sieve[d]:
            sieve[d * d :: d] = bytes(len(sieve[d * d :: d]))
    return sum(sieve)


_OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
FUNCTIONS: Mapping[str, tuple[Callable[..., Fraction | int], int, int]] = {
    "abs": (abs, 1, 1),
    "min": (min, 2, 9),
    "max": (max, 2, 9),
    "sqrt": (_root, 1, 1),
    "gcd": (lambda *given: math.gcd(*map(_whole, given)), 2, 9),
    "lcm": (lambda *given: math.lcm(*map(_whole, given)), 2, 9),
    "factorial": (_factorial, 1, 1),
    "comb": (_choices, 2, 2),
    "perm": (_orders, 2, 2),
    "isprime": (_is_prime, 1, 1),
    "primes": (_num_primes, 1, 1),
}
"""Name -> function, and how few and how many values it takes. `primes(n)` counts the primes up to n."""
