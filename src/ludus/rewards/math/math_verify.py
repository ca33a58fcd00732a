"""Mathematics verifier: symbolic comparison of an answer in LaTeX or plain text with an expression.

The whole answer must be the expression: extra words, a second candidate, an unexpected unit, or a false equation
make it wrong. `ludus.rewards.math.parser` parses both into trees. Rational numbers, lists,
intervals and relations are compared here; sympy compares other expressions in a process with limits on time
and memory (`ludus.rewards.math.worker`).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, lru_cache, partial

from ludus.errors import WorldError
from ludus.rewards.base import truth_of
from ludus.rewards.exact_match import normalise
from ludus.rewards.extract import candidates
from ludus.rewards.math.notation import ExpressionNode, NotationError, letters_of, plain_text, spellings, text_words
from ludus.rewards.math.parser import read
from ludus.rewards.math.regions import region_of
from ludus.rewards.math.worked_out import is_worked_out
from ludus.types import Task, Trajectory
from ludus.untrusted.worker import LimitedProcess, LimitExceeded, ProcessKilled

CPU_S = 4.0
"""CPU time limit of one comparison, seconds."""
ROUNDED_DECIMALS = 6
"""Minimum decimals of an accepted rounded answer to a number without a finite decimal expansion."""
MAX_BITS = 20_000
"""Maximum number of bits of powers and decimals computed here."""

_BEFORE_UNIT = re.compile(r"(?P<body>.*[\d)}\]])\s*(?P<unit>[a-zA-Z]+(?:(?:\s*/\s*|\s+)[a-zA-Z]+)*(?:\^\{?[23]\}?)?)")
_STRUCTURES = frozenset(("pair", "matrix", "row", "union", "intersection", "difference", "domain", "based"))
_SMALL_WORDS = frozenset(["yes", "no", "true", "false", "none", "odd", "even", "neither", "both", "undefined"])


@dataclass(frozen=True, slots=True)
class Expression:
    """Truth of a mathematics question: LaTeX or plain text; `units` may follow an answer.

    If `evaluated`, an answer that is equal but unevaluated is wrong: it may not be larger than the gold
    expression nor leave operations undone that the gold expression does not (`ludus.rewards.math.worked_out`).
    This rejects the formula in the question as an answer.
    """

    gold: str
    units: tuple[str, ...] = ()
    evaluated: bool = False


@dataclass(frozen=True, slots=True)
class _Gold:
    """A gold answer: its plain text, its unit, and its tree (None for words and text outside the grammar)."""

    plain: str
    unit: str
    tree: ExpressionNode | None


def is_equal(answer: str, truth: Expression) -> bool:
    """Return whether the answer (if it has several boxes, each of them) equals the expression.

    Raises ValueError for an unreadable gold answer, WorldError if the comparison process fails.
    """
    gold = _gold(truth.gold, truth.units)
    found = candidates(answer)
    return bool(found) and all(_is_correct(one, gold, truth) for one in found)


def mathematics(task: Task, trajectory: Trajectory) -> float:
    """Return 1 if the final answer equals the expression of the truth, else 0."""
    return float(is_equal(trajectory.answer, truth_of(task, Expression)))


@lru_cache(maxsize=4_096)
def _gold(text: str, units: tuple[str, ...], expected: str = "") -> _Gold:
    try:
        plain, unit = _split_unit(text, units, expected)
    except NotationError as error:
        raise ValueError(f"the gold answer {text[:80]!r} cannot be read: {error}") from error
    tree = None
    if not _is_words(text, plain):
        with suppress(NotationError):
            tree = _drop_degrees(read(plain))
    return _Gold(plain, unit, tree)


def _is_words(text: str, plain: str) -> bool:
    """Return whether a gold answer is text: set in \\text, a known word, or with a word of four or more letters."""
    words = plain.split() if re.fullmatch(r"[^\W\d_]+(?:[\s'-]+[^\W\d_]+)*", plain) else []
    return any(len(w) > 3 or w.lower() in _SMALL_WORDS or (len(w) > 1 and w in text_words(text)) for w in words)


def _is_correct(text: str, gold: _Gold, truth: Expression) -> bool:
    try:
        plain, unit = _split_unit(text, truth.units, gold.unit)
    except NotationError:
        return False
    if unit and not gold.unit:
        gold = _gold(truth.gold, truth.units, unit)
    if unit not in ("", gold.unit):
        return False
    if gold.tree is None:  # compare the words, or the characters without spaces
        given_text, gold_text = (
            normalise(one) if re.fullmatch(r"[\w\s'.-]+", one) else "".join(one.split()) for one in (plain, gold.plain)
        )
        return bool(normalise(plain)) and given_text == gold_text
    if plain == gold.plain:
        return True
    try:
        given = _drop_degrees(read(plain, gold.tree.names() | letters_of(gold.plain)))
        worked = not truth.evaluated or is_worked_out(given, gold.tree)
        return worked and same(gold.tree, given)
    except NotationError:
        return False


def _split_unit(text: str, units: tuple[str, ...], expected: str = "") -> tuple[str, str]:
    """Return the plain text without its unit, and the unit's usual spelling.

    Any of `units` is removed. A word after a number is a unit if it is known or set as text; a single letter
    is one only if a unit is `expected`. Raises NotationError, as `plain_text` does.
    """
    plain = plain_text(text)
    for unit in sorted(units, key=len, reverse=True):
        if plain.endswith(unit) and not plain.removesuffix(unit).strip()[-1:].isalpha():
            return plain.removesuffix(unit).strip(), ""
    match = _BEFORE_UNIT.fullmatch(plain)
    if match is None:
        return plain, ""
    word = re.sub(r"\s*/\s*", "/", match["unit"]).replace("{", "").replace("}", "")
    name = spellings("units").get(word, word)
    known = word in spellings("units") and (len(word) > 1 or bool(expected))
    if known or name == expected or set(re.split(r"[\s/^\d]+", word)) - {""} <= text_words(text):
        return match["body"].strip(), name
    return plain, ""


def _drop_degrees(node: ExpressionNode) -> ExpressionNode:
    """Remove the degree signs of whole answers: 90° is 90."""
    if node.op == "degree":
        return node.args[0]
    if node.op in ("list", "set", "relation", "neg"):
        return replace(node, args=tuple(map(_drop_degrees, node.args)))
    return node


def same(gold: ExpressionNode, given: ExpressionNode) -> bool:
    """Return whether two trees are equivalent. Raises NotationError for numbers beyond the bounds."""
    if gold == given:
        return True
    ops = {gold.op, given.op}
    if ops & {"list", "set"} or _has_plus_minus(gold) or _has_plus_minus(given):
        return _same_items(gold, given) or _same_regions(gold, given)
    if gold.op == "relation":
        return _same_relations(gold, given)
    if given.op == "relation":
        return _same_regions(gold, given) or _holds(gold, given)
    if ops == {"pair"} or ops == {"matrix"} or ops == {"row"}:
        return gold.name == given.name and _pairwise(gold.args, given.args)
    if ops & _STRUCTURES:
        return _same_regions(gold, given)
    return _same_values(gold, given)


def _pairwise(first: Sequence[ExpressionNode], second: Sequence[ExpressionNode]) -> bool:
    return len(first) == len(second) and all(same(a, b) for a, b in zip(first, second, strict=True))


def _has_plus_minus(node: ExpressionNode) -> bool:
    return any(one.op == "plusminus" for one in node.walk())


def _same_items(gold: ExpressionNode, given: ExpressionNode) -> bool:
    """Return whether two lists or sets are equal as multisets; a single item counts as a list."""
    relations = (item.name for node in (gold, given) for item in node.args if item.op == "relation")
    if {gold.name, given.name} == {"or", "and"} and set("".join(relations)) - {"="}:
        return False
    labels, expected = _items(gold)
    others, left = _items(given)
    if len(expected) != len(left) or (labels != others and (len(labels) > 1 or len(others) > 1)):
        return False
    for item in expected:
        place = next((i for i, other in enumerate(left) if same(item, other)), None)
        if place is None:
            return False
        del left[place]
    return True


def _items(node: ExpressionNode) -> tuple[set[str], list[ExpressionNode]]:
    """Return the names of the items and the items, with both signs of ± expanded; a name shared by all is dropped."""
    if node.op == "relation" and node.name == "∈" and node.args[0].op == "name":
        node = node.args[1]  # x ∈ {1, 2} stands for 1, 2
    items = node.args if node.op in ("list", "set") else (node,)
    named = [_split_name(item) for item in items]
    labels = {label.partition("_")[0] for label, _ in named}
    if len(items) > 1 and len(labels) == 1:
        items, labels = tuple(value for _, value in named), set()
    signed = [[_replace_signs(item, sign) for sign in "±∓"] if _has_plus_minus(item) else [item] for item in items]
    return labels - {""}, [one for both in signed for one in both]


def _split_name(node: ExpressionNode) -> tuple[str, ExpressionNode]:
    """Return name and value of `x = 2`; an empty name for anything else."""
    if node.op == "relation" and node.name == "=" and node.args[0].op == "name":
        return node.args[0].name, node.args[1]
    return "", node


def _replace_signs(node: ExpressionNode, plus: str) -> ExpressionNode:
    args = tuple(_replace_signs(arg, plus) for arg in node.args)
    if node.op == "plusminus":
        return args[0] if node.name == plus else ExpressionNode("neg", args)
    return replace(node, args=args)


def _is_label(node: ExpressionNode) -> bool:
    """Return whether a node can be the left side of an assignment: `x`, `f(x)` or `(x, y)`."""
    if node.op == "pair":
        return all(arg.op == "name" for arg in node.args)
    return node.op == "name" or (node.op == "mul" and node.name == "applied")


def _holds(gold: ExpressionNode, given: ExpressionNode) -> bool:
    """Return whether every side of an answer's equation is the gold expression; the first may be a label."""
    sides = given.args[1:] if _is_label(given.args[0]) else given.args
    if set(given.name) - {"=", "≈"} and given.name != "∈":
        return False
    rounded = (side for sign, side in zip(given.name, given.args[1:], strict=True) if sign == "≈")
    if any(side.name != "decimal" for side in rounded):
        return False
    if len(set(sides)) < len(sides) or (given.name == "∈" and len(sides) > 1):
        return False  # 1 = 1 is trivial
    return all(same(gold, side) for side in sides)


def _same_relations(gold: ExpressionNode, given: ExpressionNode) -> bool:
    """Return whether a relation, or the value that it assigns to a label, is the gold relation."""
    label, value = gold.args[0], gold.args[-1]
    assigns_value = gold.name == "=" and _is_label(label)
    if given.op != "relation":
        return (assigns_value and same(value, given)) or _same_regions(gold, given)
    if assigns_value and given.args[0] == label:
        return _holds(value, given)
    if _same_regions(gold, given):
        return True
    if len(gold.args) != 2 or len(given.args) != 2 or not {gold.name, given.name} <= set("=<>≤≥"):
        return gold.name == given.name and _pairwise(gold.args, given.args)
    # one equation or inequality must be a multiple of the other
    sides = [ExpressionNode("add", (node.args[0], ExpressionNode("neg", (node.args[1],)))) for node in (gold, given)]
    if any("infty" in {one.name for one in side.walk()} for side in sides):
        return False
    sign = _compare("ratio", *sides)
    expected = gold.name if sign > 0 else gold.name.translate(str.maketrans("<>≤≥", "><≥≤"))
    return sign != 0 and given.name == expected


def _same_regions(gold: ExpressionNode, given: ExpressionNode) -> bool:
    expected, found = region_of(gold), region_of(given)
    if expected is None or found is None or len(expected.intervals) != len(found.intervals):
        return False
    if expected.variable and found.variable and expected.variable != found.variable:
        return False
    return all(
        (one.low_closed, one.high_closed) == (other.low_closed, other.high_closed)
        and same(one.low, other.low)
        and same(one.high, other.high)
        for one, other in zip(expected.intervals, found.intervals, strict=True)
    )


def _same_values(gold: ExpressionNode, given: ExpressionNode) -> bool:
    """Return whether two expressions are equal, or the given one is the gold one rounded to six or more decimals."""
    if any(one.op == "constant" and one.name == "infty" for node in (gold, given) for one in node.walk()):
        return False
    expected, found = exact(gold), exact(given)
    if expected is not None and found is not None:
        return expected == found or _is_rounded(expected, found, given)
    if found is not None and _decimals(found, given) >= ROUNDED_DECIMALS and not gold.names():
        return _compare("rounded", gold, given) > 0
    return _compare("equal", gold, given) > 0


def _is_rounded(expected: Fraction, found: Fraction, given: ExpressionNode) -> bool:
    """Return whether the decimal `found` is `expected` rounded, and `expected` has no finite decimal expansion."""
    decimals = _decimals(found, given)
    is_finite = 10 ** expected.denominator.bit_length() % expected.denominator == 0
    return decimals >= ROUNDED_DECIMALS and not is_finite and 2 * abs(expected - found) * 10**decimals <= 1


def _decimals(value: Fraction, given: ExpressionNode) -> int:
    """Return the number of decimal places of a plain decimal; 0 for any other notation."""
    plain = given.args[0] if given.op == "neg" else given
    if plain.op != "number" or plain.name != "decimal":
        return 0
    return next(num for num in range(MAX_BITS) if 10**num % value.denominator == 0)


def exact(node: ExpressionNode) -> Fraction | None:
    """Return the value of an expression of rational numbers; None for any other.

    Raises NotationError for a division by zero or a number beyond the bounds.
    """
    if node.op == "number":
        return node.value
    if node.op not in ("neg", "percent", "add", "mul", "div", "pow"):
        return None
    numbers = [value for arg in node.args if (value := exact(arg)) is not None]
    if len(numbers) < len(node.args):
        return None
    match node.op:
        case "neg":
            return -numbers[0]
        case "percent":
            return numbers[0] / 100
        case "add":
            return sum(numbers, start=Fraction(0))
        case "mul":
            return math.prod(numbers, start=Fraction(1))
        case "div" if numbers[1] == 0:
            raise NotationError("a division by zero")
        case "div":
            return numbers[0] / numbers[1]
    return _power(*numbers)


def _power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1:
        return None
    bits = max(abs(base.numerator), base.denominator).bit_length()
    if bits * abs(exponent) > MAX_BITS or (base == 0 and exponent <= 0):
        raise NotationError("a power beyond the bounds")
    return base ** int(exponent)


@lru_cache(maxsize=20_000)
def _compare(kind: str, gold: ExpressionNode, given: ExpressionNode) -> int:
    """Return the result of a comparison; 0 if it exceeds the limits."""
    try:
        return _process(os.getpid()).call(partial(_judge, kind, gold, given), CPU_S)
    except ProcessKilled as error:
        raise WorldError("The process that compares expressions was killed.", "Check the available memory.") from error
    except LimitExceeded:
        return 0


def _judge(kind: str, gold: ExpressionNode, given: ExpressionNode) -> int:
    from ludus.rewards.math.worker import judge  # imports sympy, which only that process needs

    return judge(kind, gold, given)


@cache
def _process(pid: int) -> LimitedProcess:
    """Return the comparison process of this process; a forked process starts a new one."""
    return LimitedProcess("ludus.rewards.math.worker:warm_up")
