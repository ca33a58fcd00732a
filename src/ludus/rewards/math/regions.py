"""Canonical sets of real numbers: intervals, inequalities and their unions, for comparison.

`[0, oo)`, `x >= 0` and `0 <= x` are the same region. Endpoints stay expressions; they are ordered by their float
values, and endpoints that floats cannot distinguish are treated as equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from ludus.rewards.math.notation import ExpressionNode, NotationError

_TOLERANCE = 1e-9
_FLIPPED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤", "=": "=", "≠": "≠"}
_INFINITE = ExpressionNode("constant", (), "infty")
_MAX_SPANS = 50
_FUNCTIONS: dict[str, Callable[[float], float]] = {
    **{name: vars(math)[name] for name in ("sin", "cos", "tan", "exp")},
    **{f"arc{name}": vars(math)[f"a{name}"] for name in ("sin", "cos", "tan")},
    "ln": math.log,
}
_OPERATIONS: dict[str, Callable[[list[float]], float]] = {
    "neg": lambda args: -args[0],
    "add": sum,
    "mul": math.prod,
    "div": lambda args: args[0] / args[1],
    "pow": lambda args: math.pow(args[0], args[1]),
    "root": lambda args: math.pow(args[0], 1 / args[1]),
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
    """Return the value of a constant. Raises ValueError or ArithmeticError if it is unknown or not real."""
    if node.op == "number" and node.value is not None:
        return float(node.value)
    if node.op == "constant" and node.name != "i":
        return {"pi": math.pi, "e": math.e, "infty": math.inf}[node.name]
    args = [approximate(arg) for arg in node.args]
    if node.op == "call" and node.name in _FUNCTIONS and len(args) == 1:
        value = _FUNCTIONS[node.name](args[0])
    elif node.op in _OPERATIONS:
        value = _OPERATIONS[node.op](args)
    else:
        raise NotationError("an unknown value")
    if math.isnan(value):
        raise NotationError("not a number")
    return value


def _region(node: ExpressionNode) -> Region:
    match node.op:
        case "relation":
            return _relation_region(node)
        case "pair" if len(node.args) == 2 and len(node.name) == 2:
            return Region((_span(*node.args, node.name[0] == "[", node.name[1] == "]"),))
        case "set":
            return _combine([Region((_point(arg),)) for arg in node.args], any)
        case "domain" if node.name == "R":
            return Region((_LINE,))
        case "union":
            return _combine([_region(arg) for arg in node.args], any)
        case "intersection":
            return _combine([_region(arg) for arg in node.args], all)
        case "difference":
            first, second = node.args
            removed = _region(second if second.op in _REGIONS else ExpressionNode("set", (second,)))
            return _combine([_region(first), Region(removed.intervals)], lambda found: found[0] and not found[1])
        case "list" if node.name in ("or", "and") and all(arg.op == "relation" for arg in node.args):
            return _combine([_region(arg) for arg in node.args], any if node.name == "or" else all)
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
    if _is_infinite(end) and (signs, end) not in (("<", _INFINITE), (">", _MINUS_INFINITE)):
        raise NotationError("an infinite bound")
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
    if _is_infinite(node):
        raise NotationError("an infinite point")
    return RealInterval(node, node, True, True)


def _is_infinite(node: ExpressionNode) -> bool:
    return node in (_INFINITE, _MINUS_INFINITE)


def _combine(regions: Sequence[Region], holds: Callable[[list[bool]], bool]) -> Region:
    """Return the region of the numbers whose memberships in the regions satisfy `holds`."""
    spans = [span for region in regions for span in region.intervals]
    if len(spans) > _MAX_SPANS:
        raise NotationError("too many intervals")
    ends: list[ExpressionNode] = []
    place: dict[ExpressionNode, int] = {}  # odd for endpoints, even for the gaps between them
    for end in sorted((end for span in spans for end in (span.low, span.high)), key=approximate):
        if not ends or not _are_near(ends[-1], end):
            ends.append(end)
        place[end] = 2 * len(ends) - 1

    def contains(span: RealInterval, at: int) -> bool:
        low, high = place[span.low], place[span.high]
        return low < at < high or (at == low and span.low_closed) or (at == high and span.high_closed)

    inside = [
        holds([any(contains(span, at) for span in region.intervals) for region in regions])
        for at in range(2 * len(ends) + 1)
    ]
    runs = [list(run) for is_inside, run in groupby(range(len(inside)), inside.__getitem__) if is_inside]
    found = (
        RealInterval(ends[(run[0] - 1) // 2], ends[run[-1] // 2], run[0] % 2 == 1, run[-1] % 2 == 1) for run in runs
    )
    names = {region.variable for region in regions} - {""}
    if len(names) > 1:
        raise NotationError("two variables")
    return Region(tuple(found), min(names, default=""))


def _are_near(one: ExpressionNode, other: ExpressionNode) -> bool:
    first, second = approximate(one), approximate(other)
    return math.isclose(first, second, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
