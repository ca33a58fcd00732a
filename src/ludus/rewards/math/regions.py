"""Canonical sets of real numbers: intervals, inequalities and their unions, for comparison.

`[0, oo)`, `x >= 0` and `0 <= x` are the same region. Endpoints stay expressions; they are ordered by their float
values, and endpoints that floats cannot distinguish are treated as equal.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ludus.rewards.math.notation import ExpressionNode, NotationError

_TOLERANCE = 1e-9
_FLIPPED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤", "=": "=", "≠": "≠"}
_INFINITE = ExpressionNode("constant", (), "infty")
_MAX_SPANS = 50
_FUNCTIONS: dict[str, Callable[[complex], complex]] = {
    **{name: vars(cmath)[name] for name in ("sin", "cos", "tan", "exp")},
    **{f"arc{name}": vars(cmath)[f"a{name}"] for name in ("sin", "cos", "tan")},
    "ln": cmath.log,
}
_OPERATIONS: dict[str, Callable[[list[complex]], complex]] = {
    "neg": lambda args: -args[0] if args[0].imag else complex(-args[0].real),
    "add": sum,
    "mul": math.prod,
    "div": lambda args: args[0] / args[1],
    "pow": lambda args: args[0] ** args[1],
    "root": lambda args: args[0] ** (1 / args[1]),
    "abs": lambda args: abs(args[0]),
}


@dataclass(frozen=True, slots=True)
class RealInterval:
    """Interval between two endpoints, each open or closed; an infinite endpoint is always open."""

    low: ExpressionNode
    high: ExpressionNode
    low_closed: bool
    high_closed: bool


@dataclass(frozen=True, slots=True)
class Region:
    """Union of ordered intervals, and the variable named in the text, if any."""

    intervals: tuple[RealInterval, ...]
    variable: str = ""


_MINUS_INFINITE = ExpressionNode("neg", (_INFINITE,))
_REGIONS = frozenset(("relation", "pair", "set", "domain", "union", "intersection", "difference", "list"))
_LINE = RealInterval(_MINUS_INFINITE, _INFINITE, False, False)


def region_of(node: ExpressionNode) -> Region | None:
    """Return the region of a tree; None if the tree is not a region or its endpoints cannot be ordered."""
    try:
        return _region(node)
    except (NotationError, ArithmeticError, ValueError):
        return None


def approximate(node: ExpressionNode) -> float:
    """Return the value of a constant as a float. Raises NotationError if it is unknown or not real."""
    value = _value(node)
    if abs(value.imag) > _TOLERANCE * max(1.0, abs(value.real)) or math.isnan(value.real):
        raise NotationError("not real")
    return value.real


def _region(node: ExpressionNode) -> Region:
    match node.op:
        case "relation":
            return _relation_region(node)
        case "pair" if len(node.args) == 2 and len(node.name) == 2:
            return Region((_span(*node.args, node.name[0] == "[", node.name[1] == "]"),))
        case "set":
            return _unite([Region((_point(arg),)) for arg in node.args])
        case "domain" if node.name == "R":
            return Region((_LINE,))
        case "union":
            return _unite([_region(arg) for arg in node.args])
        case "intersection":
            return _intersect([_region(arg) for arg in node.args])
        case "difference":
            first, second = node.args
            removed = _region(second if second.op in _REGIONS else ExpressionNode("set", (second,)))
            return _intersect([_region(first), Region(tuple(_complement(removed.intervals)))])
        case "list" if node.name in ("or", "and") and all(arg.op == "relation" for arg in node.args):
            return (_unite if node.name == "or" else _intersect)([_region(arg) for arg in node.args])
    raise NotationError("not a region")


def _relation_region(node: ExpressionNode) -> Region:
    sides, signs = node.args, node.name
    if len(sides) == 2 and sides[0].op == "name" and signs == "∈":
        return Region(_region(sides[1]).intervals, sides[0].name)
    if len(sides) == 2 and sides[1].op in ("name", "abs") and sides[0].op not in ("name", "abs"):
        sides, signs = sides[::-1], _FLIPPED.get(signs, "?")
    if len(sides) == 3 and sides[1].op == "name" and set(signs) <= {">", "≥"}:
        sides, signs = sides[::-1], "".join(_FLIPPED[sign] for sign in signs[::-1])
    if len(sides) == 3 and sides[1].op == "name" and set(signs) <= {"<", "≤"}:
        span = _span(sides[0], sides[2], signs[0] == "≤", signs[1] == "≤")
        return Region((span,), _check_bounds(sides[1].name, sides[0], sides[2]))
    if len(sides) == 2 and sides[0].op == "abs" and signs in set("<>≤≥"):
        return _distance_region(sides[0].args[0], signs, sides[1])
    if len(sides) != 2 or sides[0].op != "name" or signs not in _FLIPPED:
        raise NotationError("not a region")
    end, name = sides[1], _check_bounds(sides[0].name, sides[1])
    below = RealInterval(_MINUS_INFINITE, end, False, signs == "≤")
    above = RealInterval(end, _INFINITE, signs == "≥", False)
    spans = {"<": (below,), "≤": (below,), ">": (above,), "≥": (above,), "≠": (below, above)}
    return Region(spans.get(signs) or (_point(end),), name)


def _distance_region(inner: ExpressionNode, sign: str, distance: ExpressionNode) -> Region:
    """Return the region of `|x - a| < b` and similar relations."""
    terms = inner.args if inner.op == "add" else (inner,)
    if len(terms) > 2 or terms[0].op != "name" or distance.names() or approximate(distance) <= 0:
        raise NotationError("not a distance")
    centre = [ExpressionNode("neg", (term,)) for term in terms[1:]]
    low = ExpressionNode("add", (*centre, ExpressionNode("neg", (distance,))))
    high = ExpressionNode("add", (*centre, distance))
    name = _check_bounds(terms[0].name, *terms[1:])
    if sign in "<≤":
        return Region((_span(low, high, sign == "≤", sign == "≤"),), name)
    ends = RealInterval(_MINUS_INFINITE, low, False, sign == "≥"), RealInterval(high, _INFINITE, sign == "≥", False)
    return Region(ends, name)


def _check_bounds(name: str, *ends: ExpressionNode) -> str:
    if any(name in end.names() for end in ends):
        raise NotationError("a variable in its own bound")
    return name


def _span(low: ExpressionNode, high: ExpressionNode, low_closed: bool, high_closed: bool) -> RealInterval:
    span = RealInterval(low, high, low_closed and not _is_infinite(low), high_closed and not _is_infinite(high))
    if not low.names() and not high.names() and approximate(low) > approximate(high) - _TOLERANCE:
        raise NotationError("an interval without width")
    return span


def _point(node: ExpressionNode) -> RealInterval:
    return RealInterval(node, node, True, True)


def _is_infinite(node: ExpressionNode) -> bool:
    return node in (_INFINITE, _MINUS_INFINITE)


def _unite(regions: Sequence[Region]) -> Region:
    spans = sorted((span for region in regions for span in region.intervals), key=lambda s: approximate(s.low))
    if len(spans) > _MAX_SPANS:
        raise NotationError("too many intervals")
    found: list[RealInterval] = []
    for span in spans:
        last = found[-1] if found else None
        if last is None or not _touch(last, span):
            found.append(span)
            continue
        low_closed = last.low_closed or (span.low_closed and _are_near(span.low, last.low))
        end = span if approximate(span.high) > approximate(last.high) + _TOLERANCE else last
        high_closed = end.high_closed or (span.high_closed and _are_near(span.high, last.high))
        found[-1] = RealInterval(last.low, end.high, low_closed, high_closed)
    return Region(tuple(found), _shared_variable(regions))


def _touch(first: RealInterval, second: RealInterval) -> bool:
    if _are_near(second.low, first.high):
        return second.low_closed or first.high_closed
    return approximate(second.low) - approximate(first.high) < 0


def _intersect(regions: Sequence[Region]) -> Region:
    spans: Sequence[RealInterval] = regions[0].intervals
    for region in regions[1:]:
        found = [both for one in spans for other in region.intervals if (both := _intersect_spans(one, other))]
        if len(found) > _MAX_SPANS:
            raise NotationError("too many intervals")
        spans = found
    return Region(tuple(spans), _shared_variable(regions))


def _intersect_spans(one: RealInterval, other: RealInterval) -> RealInterval | None:
    first, second = (one, other) if approximate(one.low) >= approximate(other.low) else (other, one)
    low_closed = first.low_closed and (second.low_closed or not _are_near(first.low, second.low))
    low = first.low
    first, second = (one, other) if approximate(one.high) <= approximate(other.high) else (other, one)
    high_closed = first.high_closed and (second.high_closed or not _are_near(first.high, second.high))
    high = first.high
    if _are_near(low, high):
        return RealInterval(low, high, True, True) if low_closed and high_closed else None
    return RealInterval(low, high, low_closed, high_closed) if approximate(low) < approximate(high) else None


def _complement(spans: Sequence[RealInterval]) -> list[RealInterval]:
    found, low, closed = [], _MINUS_INFINITE, False
    for span in spans:
        if not _is_infinite(span.low):
            found.append(RealInterval(low, span.low, closed, not span.low_closed))
        low, closed = span.high, not span.high_closed
    if not _is_infinite(low) or not spans:
        found.append(RealInterval(low, _INFINITE, closed, False))
    return found


def _are_near(one: ExpressionNode, other: ExpressionNode) -> bool:
    first, second = approximate(one), approximate(other)
    return math.isclose(first, second, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def _shared_variable(regions: Sequence[Region]) -> str:
    names = {region.variable for region in regions} - {""}
    if len(names) > 1:
        raise NotationError("two variables")
    return min(names, default="")


def _value(node: ExpressionNode) -> complex:
    if node.op == "number" and node.value is not None:
        return complex(node.value)
    if node.op == "constant":
        return {"pi": math.pi, "e": math.e, "i": 1j, "infty": math.inf}[node.name]
    if node.op == "name":
        raise NotationError("a variable")
    args = [_value(arg) for arg in node.args]
    if node.op == "call" and node.name in _FUNCTIONS and len(args) == 1:
        return _FUNCTIONS[node.name](args[0])
    if node.op not in _OPERATIONS:
        raise NotationError("an unknown value")
    return complex(_OPERATIONS[node.op](args))
