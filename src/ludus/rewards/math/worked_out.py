r"""Measure how far an expression is simplified: its size, and the operations that are not evaluated.

`2 + 3`, `6/8`, `\sqrt{16}`, `x + x`, `-(x + 1)` and `5!` have an unevaluated operation; `2\sqrt{3}`,
`\frac{3}{4}` and `5 \cdot 10^3` do not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction

from ludus.rewards.math.notation import ExpressionNode

_POLYNOMIAL = frozenset(("number", "name", "constant", "add", "neg", "mul", "div", "pow", "root"))
_ONE = Fraction(1)


def is_worked_out(answer: ExpressionNode, gold: ExpressionNode) -> bool:
    """Return whether an answer is at most as large as the gold one and has no additional unevaluated operation.

    Of an equation with a label on one side, or a chain of equations, only the last side counts.
    """
    answer_side, gold_side = answer, gold
    if gold.op != "relation" or gold.args[0].op == "name" or gold.args[0].name == "applied":
        answer_side, gold_side = _last_side(answer), _last_side(gold)
    additional = unfinished(answer_side) - unfinished(gold_side)
    if not _is_expanded(gold_side):
        del additional["product of a sum"]
    return not additional and size(answer_side) <= size(gold_side)


def unfinished(node: ExpressionNode) -> Counter[str]:
    """Return the number of unevaluated operations by kind."""
    return Counter(_find_unfinished(node))


def size(node: ExpressionNode) -> int:
    """Count the names and numbers; a coefficient counts as one, a variable alone on a side of a relation as none."""
    match node.op:
        case "number" | "name" | "based":
            return 1
        case "constant":
            return int(node.name != "infty")
        case "neg" | "percent" | "degree" | "plusminus":
            return size(node.args[0])
        case "mul" | "div":
            return _product_size(node)
        case "pow":
            return 1 if _is_surd(node) else size(node.args[0]) + (_rational(node.args[1]) != -1) * size(node.args[1])
        case "root":
            return 1 if _is_surd(node) else size(node.args[0]) + 1
        case "call" | "abs" | "factorial":
            return 1 + sum(map(size, node.args))
        case "relation":
            return sum(size(arg) for arg in node.args if arg.op != "name")
    return sum(map(size, node.args))


def _last_side(node: ExpressionNode) -> ExpressionNode:
    if node.op == "relation" and set(node.name) <= {"=", "≈", "∈"}:
        return node.args[-1]
    if node.op in ("list", "set"):
        return ExpressionNode("list", tuple(map(_last_side, node.args)))
    return node


def _is_expanded(node: ExpressionNode) -> bool:
    """Return whether an expression is a sum of terms that contain only names, roots and numbers."""
    sums = node.op == "add" or (node.op == "div" and node.args[0].op == "add")
    return sums and all(one.op in _POLYNOMIAL and not (one.op == "pow" and one.args[1].names()) for one in node.walk())


def _find_unfinished(node: ExpressionNode) -> Iterator[str]:
    for arg in node.args:
        yield from _find_unfinished(arg)
    match node.op:
        case "number" if node.name == "unreduced":
            yield "fraction"
        case "neg" if (inner := node.args[0]).op == "neg" or (inner.op in ("mul", "div") and inner.args[0].op == "neg"):
            yield "double sign"
        case "neg" if node.args[0].op == "add":
            yield "product of a sum"
        case "add":
            yield from _scan_sum(node.args)
        case "mul" | "div":
            yield from _scan_product(node)
        case "pow":
            yield from _scan_power(*node.args)
        case "root":
            yield from _scan_root(*node.args)
        case "call" if not any(arg.names() for arg in node.args):
            yield "function of a number"
        case "factorial" | "abs":
            yield node.op


def _scan_sum(terms: Sequence[ExpressionNode]) -> Iterator[str]:
    for num in Counter(map(_term_key, terms)).values():
        if num > 1:
            yield "like terms"
    if any(_drop_sign(term).op == "add" for term in terms):
        yield "product of a sum"
    if any(_rational(_drop_sign(term)) == 0 for term in terms):
        yield "zero term"


def _scan_product(node: ExpressionNode) -> Iterator[str]:
    above, below = _factors(node)
    numbers = [value for factor in above if (value := _rational(factor)) is not None]
    divisors = [value for factor in below if (value := _rational(factor)) is not None]
    if len(numbers) > 1 or len(divisors) > 1 or sum(map(_is_surd, above)) > 1 or sum(map(_is_surd, below)) > 1:
        yield "product of numbers"
    if divisors:
        top, bottom = (math.prod(values, start=_ONE) for values in (numbers, divisors))
        integers = top.denominator == 1 and bottom.denominator == 1
        if not integers or abs(bottom) == 1 or math.gcd(int(top), int(bottom)) != 1:
            yield "fraction"
    if node.op == "div" and node.name != "frac" and node.args[1].op == "neg":
        yield "fraction"  # 15 / (-184) is unevaluated, \frac{15}{-184} is a number
    if any(abs(value) == 1 for value in numbers) and len(above) > 1 and not divisors:
        yield "factor of one"
    if sum(factor.op == "neg" for factor in (*above, *below)) > 1:
        yield "double sign"
    if len(above) > 1 and any(_base(factor).op == "add" for factor in above):
        yield "product of a sum"


def _scan_power(base: ExpressionNode, exponent: ExpressionNode) -> Iterator[str]:
    power = _constant(exponent)
    if power in (0, 1):
        yield "power of one"
    if base.op in ("pow", "root") and power is not None:
        yield "power of a power"
    if base.op == "constant" and base.name == "i" and power is not None:
        yield "power of a number"
    if base.op == "add" and power is not None and power > 1:
        yield "product of a sum"
    value = _rational(base)
    if value is None or power is None:
        return
    if power.denominator == 1 or _has_rational_root(value, power.denominator):
        yield "power of a number"


def _scan_root(inner: ExpressionNode, degree: ExpressionNode) -> Iterator[str]:
    value, order = _rational(inner), _rational(degree)
    if value is not None and order is not None and order.denominator == 1 and _has_rational_root(value, int(order)):
        yield "root of a number"


def _has_rational_root(value: Fraction, order: int) -> bool:
    return order > 0 and all(_is_power(part, order) for part in (abs(value.numerator), value.denominator))


def _is_power(number: int, order: int) -> bool:
    if number.bit_length() > 4_000 or order > 4_000:
        return False
    low, high = 0, 1 << (number.bit_length() // order + 1)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if middle**order < number else (low, middle)
    return bool(low**order == number)


def _factors(node: ExpressionNode) -> tuple[list[ExpressionNode], list[ExpressionNode]]:
    if node.op == "mul":
        found = [_factors(arg) for arg in node.args]
        return [f for above, _ in found for f in above], [f for _, below in found for f in below]
    if node.op == "div":
        (above, below), (under, over) = (_factors(arg) for arg in node.args)
        return [*above, *over], [*below, *under]
    if node.op == "neg" and node.args[0].op in ("mul", "div"):
        return _factors(node.args[0])
    return [node], []


def _rational(node: ExpressionNode) -> Fraction | None:
    if node.op == "number":
        return node.value
    if node.op == "neg" and node.args[0].op == "number" and node.args[0].value is not None:
        return -node.args[0].value
    return None


def _is_surd(node: ExpressionNode) -> bool:
    if node.op == "neg":
        return _is_surd(node.args[0])
    if node.op == "root":
        return _rational(node.args[0]) is not None
    power = _constant(node.args[1]) if node.op == "pow" and _rational(node.args[0]) is not None else None
    return power is not None and power.denominator != 1


def _constant(node: ExpressionNode) -> Fraction | None:
    """Return the value of a number or of a fraction of numbers, with an optional sign."""
    if node.op == "neg" and (value := _constant(node.args[0])) is not None:
        return -value
    if node.op != "div":
        return _rational(node)
    numerator, denominator = map(_rational, node.args)
    return numerator / denominator if numerator is not None and denominator else None


def _product_size(node: ExpressionNode) -> int:
    above, below = _factors(node)
    factors = [*above, *below]
    others = [factor for factor in factors if _rational(factor) is None and not _is_surd(factor)]
    units = all(abs(_rational(f) or 0) == 1 for f in factors if f not in others)
    coefficient = len(others) < len(factors) and not (units and others)
    return int(coefficient) + sum(map(size, others))


def _drop_sign(node: ExpressionNode) -> ExpressionNode:
    return node.args[0] if node.op in ("neg", "plusminus") else node


def _base(node: ExpressionNode) -> ExpressionNode:
    if node.op == "neg":
        return _base(node.args[0])
    return node.args[0] if node.op in ("pow", "root") else node


def _term_key(term: ExpressionNode) -> str:
    """Return a key that is equal for like terms: all factors except the coefficient."""
    above, below = _factors(_drop_sign(term))
    sides = (sorted(_key(factor) for factor in side if _rational(factor) is None) for side in (above, below))
    return "/".join("*".join(side) for side in sides)


def _key(node: ExpressionNode) -> str:
    """Return a key that is equal for identical factors, up to the order of sums and products and a leading sign."""
    node = _drop_sign(node)
    inner = [_key(arg) for arg in node.args]
    if node.op in ("add", "mul"):
        inner.sort()
    return f"{node.op}:{node.name}:{node.value}({','.join(inner)})"
