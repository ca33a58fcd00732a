"""Numbers with a tolerance: absolute, relative, percents, thousands separators, units."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from ludus.rewards.base import truth_of
from ludus.rewards.final import candidates, plain_signs
from ludus.types import Task, Trajectory

MAX_DIGITS = 400
"""A numeral of more digits, or with a larger power of ten, is none: a float ends at 309 digits."""

_RELATIVE = 1e-6
"""The room of a truth that is no whole number and says nothing else."""
_LOST = Fraction(1, 2**50)
_LOST_OF_WHOLE = Fraction(1, 10**9)
"""What a truth that was computed may be off, relatively, and absolutely where it is whole."""
_POINT = r"(?:\d{1,3}(?:[, _]\d{3})+(?:\.\d*)?|\d+\.?\d*|\.\d+)"
_COMMA = r"(?:\d{1,3}(?:[. _]\d{3})+(?:,\d*)?|\d+,?\d*|,\d+)"
_POWER = r"(?:[eE]|\s*(?:[x×·*]|\\times|\\cdot)\s*10\s*(?:\^|\*\*))\s*\{?(?P<power>[+-]?\d{1,4})\}?"
_FRACTIONS = tuple(
    re.compile(form, re.ASCII)
    for form in (
        r"(?P<sign>[+-]?)(?:(?P<whole>\d+)\s+)?(?P<up>\d+)\s*/\s*(?P<down>\d+)",
        r"(?P<sign>[+-]?)(?P<whole>\d*)\s*\\[dtc]?frac\{(?P<up>\d+)\}\{(?P<down>\d+)\}",
        r"(?P<sign>[+-]?)(?P<whole>\d*)\s*\\[dtc]?frac(?P<up>\d)(?P<down>\d)",
        r"(?P<whole>)\\[dtc]?frac\{(?P<sign>-)(?P<up>\d+)\}\{(?P<down>\d+)\}",
    )
)
_RAISED = re.compile(r"(?<=\b10)([⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+)")
"""The power of a ten in raised digits."""
_LEAD = re.compile(r"(?i)^(?:it\s+is|about|approximately|approx\.?|roughly|[a-z]\s*(?:=|≈)|≈|~|=)\s*")


@dataclass(frozen=True, slots=True)
class Quantity:
    """The truth of a question for a number.

    An answer is right within `absolute` or within `relative` times `value`, whichever is wider; without
    `relative` a whole number has no such room, and any other a millionth. `units` are those that an answer
    may carry, each with its size in the unit of `value` (metres: m 1, cm 0.01); with `needs_unit` it must
    carry one. "%" is a hundredth unless `units` says otherwise. With `decimal_comma` 1,5 is one and a half.
    """

    value: float
    absolute: float = 0.0
    relative: float | None = None
    units: Mapping[str, float] = field(default_factory=dict)
    needs_unit: bool = False
    decimal_comma: bool = False


def read_quantity(text: str, truth: Quantity) -> Fraction | None:
    """The number that the whole text is, exactly, in the unit of `truth`; None where it is anything else."""
    plain = _LEAD.sub("", _without_latex(plain_signs(_with_powers(text))).strip())
    sizes = {"%": 0.01, "percent": truth.units.get("%", 0.01)} | dict(truth.units)
    unit, size, rest = _unit(plain, sizes)
    if truth.needs_unit and not unit:
        return None
    if rest.startswith("(") and rest.endswith(")"):
        rest = rest[1:-1].strip()
    value = _number(rest, truth.decimal_comma)
    return None if value is None else value * _as_written(size)


def close(value: Fraction, truth: Quantity) -> bool:
    """Whether the value is within the tolerance; to a truth that is NaN or infinite none is.

    What the arithmetic of floats may have lost is let pass: four units in the last place, and of a whole
    number, whose neighbours are other answers, a billionth at most.
    """
    if isinstance(truth.value, float) and not math.isfinite(truth.value):
        return False
    due = _as_written(truth.value)
    whole = due.denominator == 1
    relative = truth.relative if truth.relative is not None else 0.0 if whole else _RELATIVE
    reach = max(_as_written(truth.absolute), _as_written(relative) * abs(due))
    lost = abs(due) * _LOST
    return abs(value - due) <= reach + (min(lost, _LOST_OF_WHOLE) if whole else lost)


def is_close(answer: str, truth: Quantity) -> bool:
    """Whether the answer (all boxes of one with several) is the number, within the tolerance."""
    values = [read_quantity(one, truth) for one in candidates(answer)]
    return bool(values) and all(value is not None and close(value, truth) for value in values)


def number_close(task: Task, trajectory: Trajectory) -> float:
    """1 if the final answer is the number of the truth within its tolerance, else 0."""
    return float(is_close(trajectory.answer, truth_of(task, Quantity)))


def _with_powers(text: str) -> str:
    """With `^` before what is raised behind a ten."""
    return _RAISED.sub(lambda match: "^" + unicodedata.normalize("NFKC", match[1]), text)


def _without_latex(text: str) -> str:
    bare = text.strip().removeprefix("\\(").removesuffix("\\)").removeprefix("\\[").removesuffix("\\]")
    if len(bare) > 1 and bare[0] == bare[-1] == "$":
        bare = bare.strip("$")
    bare = re.sub(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}", r" \1 ", bare)
    bare = re.sub(r"\\[,;:! ]|\{,\}", lambda m: "," if m[0] == "{,}" else " ", bare)
    return bare.replace("\\%", "%").replace("\\$", "$").replace("\\approx", "≈")


def _as_written(number: float) -> Fraction:
    """The number that stands there: 0.01 is a hundredth, not the float next to it."""
    return Fraction(str(number)) if isinstance(number, float) else Fraction(number)


def _unit(text: str, sizes: Mapping[str, float]) -> tuple[str, float, str]:
    """The unit before or after the number, its size, and what is left of the text."""
    for unit in sorted(sizes, key=len, reverse=True):
        if text.endswith(unit) and not (unit[0].isalpha() and text[: -len(unit)][-1:].isalpha()):
            return unit, sizes[unit], text.removesuffix(unit).strip()
        if not unit[0].isalnum() and re.match(rf"-?\s*{re.escape(unit)}", text):
            return unit, sizes[unit], text.replace(unit, "", 1).strip()
    return "", 1.0, text


def _number(text: str, decimal_comma: bool) -> Fraction | None:
    if sum(c.isdigit() for c in text) > MAX_DIGITS:
        return None
    body = _COMMA if decimal_comma else _POINT
    match = re.fullmatch(rf"(?P<sign>[+-]?)\s*(?P<body>{body})(?:{_POWER})?", text, re.ASCII)
    if match is None:
        return _fraction(text)
    separators, point = (". _", ",") if decimal_comma else (", _", ".")
    digits = match["body"].translate({ord(c): None for c in separators}).replace(point, ".")
    power = int(match["power"] or 0)
    return Fraction(f"{match['sign']}{digits}e{power}") if abs(power) <= MAX_DIGITS else None


def _fraction(text: str) -> Fraction | None:
    """`a/b`, `a b/c`, `\\frac{a}{b}`, `\\frac{-a}{b}` and `\\frac12` of whole numbers."""
    match = next((found for form in _FRACTIONS if (found := form.fullmatch(text))), None)
    if match is None or int(match["down"]) == 0:
        return None
    value = int(match["whole"] or 0) + Fraction(int(match["up"]), int(match["down"]))
    return -value if match["sign"] == "-" else value
