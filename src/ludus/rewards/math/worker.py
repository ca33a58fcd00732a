"""Compare expressions with sympy, in a resource-limited process (`ludus.untrusted.worker`).

| kind | 1 | -1 |
|---|---|---|
| `equal` | both are equal at all points at which both are real | |
| `rounded` | the answer is a decimal and the gold number, rounded to its digits | |
| `ratio` | the gold expression is a positive multiple of the answer | a negative one |

Any other result is 0. Equality is proved by exact transformations of the difference; numeric evaluation only
refutes it. A comparison is limited in CPU time, since wall-clock time would make verdicts depend on the load of
the machine. The kernel enforces the limit, since a Python signal handler cannot interrupt an operation on one
large integer.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial

import sympy
from sympy import Expr

from ludus.rewards.math.notation import ExpressionNode

MAX_BITS = 20_000
"""Maximum bits of a computed power of numbers."""
MAX_FACTORIAL = 500
DIGITS = 40
"""Significant digits of numeric evaluation."""
_POINTS = ((13, 7), (29, 17), (5, 11))
"""Numerators and denominators of the points at which expressions are compared before a proof."""


class ExpressionRejected(ValueError):
    """The expression has no finite value or exceeds the bounds."""


def warm_up() -> None:
    """Run a first comparison, for which sympy loads more modules."""
    logging.disable()
    two = ExpressionNode("number", value=Fraction(2))
    judge("equal", ExpressionNode("root", (two, two)), two)


def judge(kind: str, gold: ExpressionNode, answer: ExpressionNode) -> int:
    """Compare two trees; return 1, -1 or 0."""
    try:
        compare = {"ratio": _ratio, "rounded": _is_rounded, "equal": _are_equal}[kind]
        return int(compare(_expression(gold), _expression(answer)))
    except Exception:  # boundary: an expression on which sympy fails is not the answer
        return 0


def _are_equal(first: Expr, second: Expr) -> bool:
    if first == second:
        return True
    difference = first - second
    if not difference.free_symbols:
        return _is_zero(difference)
    return _agree_at_points(first, second) and _is_identity(difference)


def _is_zero(number: Expr) -> bool:
    """Return whether a constant is 0: refuted numerically, otherwise proved."""
    value = number.evalf(DIGITS)
    if not value.is_number or value.has(sympy.nan, sympy.zoo, sympy.oo):
        return False
    if value.is_comparable and abs(value) > sympy.Float(10) ** -(DIGITS // 2):
        return False
    proofs: tuple[Callable[[Expr], Expr], ...] = (
        sympy.expand,
        lambda e: sympy.expand_log(e, force=False),
        sympy.radsimp,
        sympy.sqrtdenest,
        sympy.simplify,
        lambda e: sympy.expand_log(sympy.simplify(e)),
    )
    if any(proof(number) == 0 for proof in proofs):
        return True
    if number.is_algebraic:
        x = sympy.Dummy("x")
        return bool(sympy.minimal_polynomial(number, x) == x)
    return number.equals(0) is True


def _agree_at_points(first: Expr, second: Expr) -> bool:
    """Return whether two expressions have equal values at the sample points at which both are real.

    With up to 3 names the points have all signs, with more all positive, all negative and mixed ones.
    """
    names = sorted(first.free_symbols | second.free_symbols, key=str)
    num = len(names)
    every = list(itertools.product((1, -1), repeat=num)) if num <= 3 else []
    for n, (up, down) in enumerate(_POINTS):
        mixed = tuple(1 if (i + n) % 2 else -1 for i in range(num))
        for signs in every or ((1,) * num, (-1,) * num, mixed):
            point = _point(names, signs, up, down)
            values = [one.subs(point).evalf(DIGITS) for one in (first, second)]
            if not all(value.is_number and value.is_finite for value in values):
                continue
            reals = [value.is_real or abs(value.as_real_imag()[1]) < 1e-20 for value in values]
            if not all(reals) and min(signs, default=1) < 0:
                continue  # roots and logarithms of negative numbers
            if abs(values[0] - values[1]) > 1e-15 * (1 + abs(values[0])):
                return False
    return True


def _point(names: Sequence[Expr], signs: Sequence[int], up: int, down: int) -> dict[Expr, Expr]:
    return {
        name: sign * sympy.Rational(up + 3 * i, down + i)
        for i, (name, sign) in enumerate(zip(names, signs, strict=True))
    }


def _is_identity(difference: Expr) -> bool:
    """Return whether a difference is 0 for all positive values of its variables, by exact transformations."""
    positive = {name: sympy.Dummy(str(name), positive=True) for name in difference.free_symbols}
    found = difference.subs(positive)
    proofs: tuple[Callable[[Expr], Expr], ...] = (
        sympy.expand,
        sympy.cancel,
        lambda e: sympy.expand(e, force=True),
        lambda e: sympy.expand_log(e, force=True),
        sympy.trigsimp,
        sympy.simplify,
        lambda e: sympy.simplify(sympy.expand_trig(e)),
        lambda e: sympy.simplify(e.rewrite(sympy.exp)),
    )
    return any(proof(found) == 0 for proof in proofs)


def _is_rounded(number: Expr, decimal: Expr) -> bool:
    """Return whether `decimal` is the irrational `number`, rounded to the digits of `decimal`."""
    if number.is_rational or number.free_symbols or not decimal.is_Rational:
        return False
    digits = next(n for n in itertools.count() if 10**n % int(decimal.q) == 0)
    value = number.evalf(digits + DIGITS)
    return bool(value.is_real) and bool(abs(value - decimal) * 2 * sympy.Integer(10) ** digits <= 1)


def _ratio(first: Expr, second: Expr) -> int:
    """Return the sign of the ratio of two expressions with variables; 0 if it is not constant, or 0."""
    if not first.free_symbols or first.free_symbols != second.free_symbols:
        return 0
    names = sorted(first.free_symbols, key=str)
    for up, down in _POINTS:
        point = _point(names, [1] * len(names), up, down)
        one, other = (side.subs(point).evalf(DIGITS) for side in (first, second))
        if one.is_comparable and other.is_comparable and abs(one) > 1e-15 and abs(other) > 1e-15:
            ratio = sympy.nsimplify(first.subs(point) / second.subs(point), rational=False)
            break
    else:
        return 0
    if not ratio.is_comparable or not _are_equal(first, ratio * second):
        return 0
    return 1 if ratio > 0 else -1


def _expression(node: ExpressionNode) -> Expr:
    """Convert a tree to sympy. Raises ExpressionRejected for infinities and operations that exceed the bounds."""
    if node.op == "number":
        return sympy.Rational(node.value)
    if node.op == "name":
        return sympy.Symbol(node.name, real=True)
    if node.op == "constant":
        constants = {"pi": sympy.pi, "e": sympy.E, "i": sympy.I}
        if node.name not in constants:
            raise ExpressionRejected(node.name)
        return constants[node.name]
    operations: dict[str, Callable[..., Expr]] = {
        "neg": lambda inner: -inner,
        "add": sympy.Add,
        "mul": sympy.Mul,
        "div": _quotient,
        "pow": _power,
        "root": _root,
        "percent": lambda inner: inner / 100,
        "degree": lambda inner: inner * sympy.pi / 180,
        "abs": sympy.Abs,
        "factorial": _factorial,
        "call": partial(_call_function, node.name),
    }
    if node.op not in operations:
        raise ExpressionRejected(node.op)
    found = operations[node.op](*map(_expression, node.args))
    if found.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo):
        raise ExpressionRejected("no finite value")
    return found


def _quotient(above: Expr, below: Expr) -> Expr:
    if below.is_zero or below.equals(0):
        raise ExpressionRejected("a division by zero")
    return above / below


def _power(base: Expr, exponent: Expr) -> Expr:
    if base.is_Rational and exponent.is_Rational:
        bits = max(abs(int(base.p)), int(base.q)).bit_length()
        if bits * abs(exponent) > MAX_BITS or (base == 0 and exponent <= 0):
            raise ExpressionRejected("a power beyond the bounds")
    elif not exponent.free_symbols and abs(exponent.evalf(15)) > MAX_BITS:
        raise ExpressionRejected("a power beyond the bounds")
    return base**exponent


def _root(inner: Expr, degree: Expr) -> Expr:
    if degree.is_Integer and degree % 2 == 1 and inner.is_negative:
        return -((-inner) ** (sympy.Integer(1) / degree))
    if degree == 0:
        raise ExpressionRejected("a root of order 0")
    return inner ** (1 / degree)


def _factorial(number: Expr) -> Expr:
    if number.is_number and not (number.is_Integer and 0 <= number <= MAX_FACTORIAL):
        raise ExpressionRejected("a factorial beyond the bounds")
    return sympy.factorial(number)


def _call_function(name: str, *args: Expr) -> Expr:
    """Apply a function. `log` without a base has a symbolic base, which cancels in ratios of logarithms."""
    names = {"arcsin": sympy.asin, "arccos": sympy.acos, "arctan": sympy.atan, "ln": sympy.log, "ceil": sympy.ceiling}
    own = ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "exp", "floor")
    names |= {key: vars(sympy)[key] for key in own}
    if name in names and len(args) == 1:
        return names[name](args[0])
    if name in ("log", "lg") and len(args) == 1:
        base = sympy.Symbol("base of log", positive=True) if name == "log" else sympy.Integer(10)
        return sympy.log(args[0]) / sympy.log(base)
    if name == "log_" and len(args) == 2:
        return sympy.log(args[0]) / sympy.log(args[1])
    if name in ("max", "min") and len(args) > 1:
        return (sympy.Max if name == "max" else sympy.Min)(*args)
    if name in ("gcd", "lcm") and len(args) > 1 and all(arg.is_Integer for arg in args):
        return sympy.Integer((sympy.igcd if name == "gcd" else sympy.ilcm)(*map(int, args)))
    if name == "binom" and len(args) == 2:
        if any(arg.is_number and not (arg.is_Integer and abs(arg) <= MAX_FACTORIAL) for arg in args):
            raise ExpressionRejected("a binomial beyond the bounds")
        return sympy.binomial(*args)
    raise ExpressionRejected(name)
