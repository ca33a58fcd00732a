"""Numbers with a tolerance: absolute, relative, percents, thousands separators, units."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache

from ludus.rewards.base import truth_of
from ludus.rewards.extract import candidates, plain_signs
from ludus.rewards.math.math_verify import exact
from ludus.rewards.math.notation import ExpressionNode, NotationError
from ludus.rewards.math.parser import read
from ludus.rewards.math.worked_out import unfinished
from ludus.types import Task, Trajectory

MAX_DIGITS = 400
"""Maximum digits of a numeral; the largest float has 309."""

_RELATIVE = 1e-6
"""Default relative tolerance of a truth that is not an integer."""
_ROUNDING = Fraction(1, 2**50)
_INTEGER_ROUNDING = Fraction(1, 10**9)
"""Tolerated rounding of a computed truth: relative, and absolute if it is an integer."""
_LEAD = re.compile(r"(?i)^(?:it\s+is|about|approximately|approx\.?|roughly|[a-z]\s*(?:=|≈)|≈|~|=)\s*")


@dataclass(frozen=True, slots=True)
class Quantity:
    """Truth of a question with a numeric answer.

    An answer is right within `absolute` or within `relative` times `value`, whichever is wider; without
    `relative` the tolerance is 0 for an integer and one millionth for any other number. `units` are the accepted
    units with their size in the unit of `value` (metres: m 1, cm 0.01); with `needs_unit` one is required. "%" is
    a hundredth unless `units` defines it. With `decimal_comma`, 1,5 is one and a half.
    """

    value: float
    absolute: float = 0.0
    relative: float | None = None
    units: Mapping[str, float] = field(default_factory=dict)
    needs_unit: bool = False
    decimal_comma: bool = False


def read_quantity(text: str, truth: Quantity, *, reduced: bool = False) -> Fraction | None:
    """Parse the whole text as a number and return its exact value in the unit of `truth`; None for any other text.

    With `reduced`, also None if it is not in lowest terms: 435/15 is not evaluated.
    """
    plain = _LEAD.sub("", _strip_latex(plain_signs(text)).strip())
    sizes = {"%": 0.01, "percent": truth.units.get("%", 0.01)} | dict(truth.units)
    unit, size, rest = _unit(plain, sizes)
    if truth.needs_unit and not unit:
        return None
    numeral = _number(rest, truth.decimal_comma)
    if numeral is None or (reduced and unfinished(numeral)):
        return None
    try:
        value = exact(numeral)
    except NotationError:
        return None
    return None if value is None else value * _to_fraction(size)


def close(value: Fraction, truth: Quantity) -> bool:
    """Return whether the value is within the tolerance; never for a truth that is NaN or infinite.

    Float rounding is tolerated: four units in the last place, and for an integer at most one billionth, since its
    neighbours are other answers.
    """
    if isinstance(truth.value, float) and not math.isfinite(truth.value):
        return False
    expected = _to_fraction(truth.value)
    is_integer = expected.denominator == 1
    relative = truth.relative if truth.relative is not None else 0.0 if is_integer else _RELATIVE
    tolerance = max(_to_fraction(truth.absolute), _to_fraction(relative) * abs(expected))
    rounding = abs(expected) * _ROUNDING
    return abs(value - expected) <= tolerance + (min(rounding, _INTEGER_ROUNDING) if is_integer else rounding)


def is_close(answer: str, truth: Quantity, *, reduced: bool = False) -> bool:
    """Return whether the answer (or each box, if it has several) is the number, within the tolerance.

    With `reduced` it must be in lowest terms.
    """
    values = [read_quantity(one, truth, reduced=reduced) for one in candidates(answer)]
    return bool(values) and all(value is not None and close(value, truth) for value in values)


def number_close(task: Task, trajectory: Trajectory) -> float:
    """Return 1 if the final answer is the number of the truth within its tolerance, else 0."""
    return float(is_close(trajectory.answer, truth_of(task, Quantity)))


def _strip_latex(text: str) -> str:
    bare = text.strip().removeprefix("\\(").removesuffix("\\)").removeprefix("\\[").removesuffix("\\]")
    if len(bare) > 1 and bare[0] == bare[-1] == "$":
        bare = bare.strip("$")
    bare = re.sub(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}", r" \1 ", bare)
    bare = re.sub(r"\\[,;:! ]|\{,\}", lambda m: "," if m[0] == "{,}" else " ", bare)
    return bare.replace("\\%", "%").replace("\\$", "$").replace("\\approx", "≈")


def _to_fraction(number: float) -> Fraction:
    """Return the number as written: 0.01 is a hundredth, not the nearest float."""
    return Fraction(str(number)) if isinstance(number, float) else Fraction(number)


def _unit(text: str, sizes: Mapping[str, float]) -> tuple[str, float, str]:
    """Return the unit before or after the number, its size, and the remaining text."""
    for unit in sorted(sizes, key=len, reverse=True):
        if text.endswith(unit) and not (unit[0].isalpha() and text[: -len(unit)][-1:].isalpha()):
            return unit, sizes[unit], text.removesuffix(unit).strip()
        if not unit[0].isalnum() and re.match(rf"-?\s*{re.escape(unit)}", text):
            return unit, sizes[unit], text.replace(unit, "", 1).strip()
    return "", 1.0, text


@lru_cache
def _number(text: str, decimal_comma: bool) -> ExpressionNode | None:
    """Return the numeral of a text: a number, or a fraction of integers, with an optional sign."""
    if sum(c.isdigit() for c in text) > MAX_DIGITS:
        return None
    if decimal_comma:
        text = text.translate(str.maketrans(",.", ".,"))
    try:
        node = read(re.sub(r"(?<=\d)_(?=\d{3})", ",", text), frozenset())
    except NotationError:
        return None
    return node if _is_numeral(node) else None


def _is_numeral(node: ExpressionNode) -> bool:
    if node.op == "neg":
        (inner,) = node.args
        is_signed = inner.op == "neg" or (inner.op == "div" and any(arg.op == "neg" for arg in inner.args))
        return not is_signed and _is_numeral(inner)
    if node.op != "div":
        return node.op == "number"
    bare = [arg.args[0] if arg.op == "neg" else arg for arg in node.args]
    return all(arg.op == "number" and arg.name == "whole" for arg in bare)
