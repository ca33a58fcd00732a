"""Sums, products, expressions with brackets, series and means."""

from __future__ import annotations

import random
from fractions import Fraction

from ludus.worlds.math.problems import NamedQuantity, Phrase, ProblemDraft, ProblemKind, WorkedSteps, phrase


def _largest(level: int) -> int:
    return (0, 50, 99, 200, 300, 500)[level]


def plus(rng: random.Random, level: int, work: WorkedSteps) -> Phrase:
    """A sum."""
    a, b = (rng.randint(2, _largest(level)) for _ in range(2))
    text = rng.choice((f"{a} + {b}", f"the sum of {a} and {b}", f"{a} plus {b}"))
    return phrase(text, work.do(f"{a} + {b}"), sum((a, b)))


def minus(rng: random.Random, level: int, work: WorkedSteps) -> Phrase:
    """A difference."""
    a, b = (rng.randint(2, _largest(level)) for _ in range(2))
    text = rng.choice((f"{a} - {b}", f"the result of taking {b} from {a}", f"{a} minus {b}"))
    return phrase(text, work.do(f"{a} - {b}"), a + -b)


def times(rng: random.Random, level: int, work: WorkedSteps) -> Phrase:
    """A product."""
    a, b = rng.randint(2, _largest(level)), rng.randint(2, 30)
    text = rng.choice((f"{a} * {b}", f"the product of {a} and {b}", f"{a} times {b}"))
    return phrase(text, work.do(f"{a} * {b}"), sum([a] * b))


def expression(rng: random.Random, level: int, work: WorkedSteps) -> Phrase:
    """An expression with `level` to `level + 1` operations; from level 4 on with powers."""
    text, value, _ = _tree(rng, level + rng.randint(0, level > 1), level)
    return phrase(text, work.do(text), value)


def _tree(rng: random.Random, operations: int, level: int) -> tuple[str, Fraction, int]:
    """Text, value, and how tightly the outermost operation binds (4: a number)."""
    if operations == 0:
        number = rng.randint(2, 20)
        return str(number), Fraction(number), 4
    if level > 3 and rng.random() < 0.2:
        base, exponent = rng.randint(2, 9), rng.randint(2, 3)
        text, value, _ = _tree(rng, operations - 1, level)
        return f"{base} ** {exponent} + {text}", base**exponent + value, 1
    left = rng.randrange(operations)
    sign = rng.choice("+-*")
    one, other = _tree(rng, left, level), _tree(rng, operations - 1 - left, level)
    binds = 2 if sign == "*" else 1
    shown = one[0] if one[2] >= binds else f"({one[0]})"
    second = other[0] if other[2] > binds else f"({other[0]})"
    value = {"+": one[1] + other[1], "-": one[1] - other[1], "*": one[1] * other[1]}[sign]
    return f"{shown} {sign} {second}", value, binds


def difference_of_products(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """By how much one product is larger than another."""
    a, b, c, d = (rng.randint(3, 12 * level) for _ in range(4))
    (a, b), (c, d) = sorted(((a, b), (c, d)), key=lambda pair: -pair[0] * pair[1])
    first, second = work.do(f"{a} * {b}"), work.do(f"{c} * {d}")
    work.do(f"{first} - {second}")
    return ProblemDraft(f"By how much is {a} times {b} larger than {c} times {d}?", sum([a] * b) - sum([c] * d))


def mean(rng: random.Random, level: int, work: WorkedSteps) -> Phrase:
    """The mean of several numbers."""
    values = [rng.randint(2, 40 * level) for _ in range(level + 1)]
    total = work.do(" + ".join(map(str, values)))
    text = f"the mean of {', '.join(map(str, values[:-1]))} and {values[-1]}"
    return phrase(text, work.do(f"{total} / {len(values)}"), Fraction(sum(values), len(values)))


def missing_value(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """A number, given the others and the mean."""
    known = [rng.randint(2, 60) for _ in range(level)]
    missing = rng.randint(2, 60)
    whole = sum(known) + missing
    missing += -whole % (level + 1)
    average = (sum(known) + missing) // (level + 1)
    total, have = work.do(f"{average} * {level + 1}"), work.do(" + ".join(map(str, known)))
    work.do(f"{total} - {have}")
    listed = ", ".join(map(str, known))
    return ProblemDraft(
        f"The mean of {level + 1} numbers is {average}. All but one are {listed}. What is the other one?", missing
    )


def series(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """The sum of an arithmetic sequence."""
    first, gap, num = rng.randint(1, 20), rng.randint(2, 9), rng.randint(6, 8 * level)
    last = work.do(f"{first} + {num - 1} * {gap}")
    ends = work.do(f"{first} + {last}")
    work.do(f"{num} * {ends} / 2")
    question = f"A sequence begins with {first}, and each term is {gap} more than the one before. "
    return ProblemDraft(
        question + f"What is the sum of its first {num} terms?", sum(first + gap * i for i in range(num))
    )


KINDS: tuple[ProblemKind | NamedQuantity, ...] = (
    NamedQuantity("plus", (1, 2), plus),
    NamedQuantity("minus", (1, 2), minus),
    NamedQuantity("times", (1, 2), times),
    NamedQuantity("expression", (1, 2, 3, 4, 5), expression),
    ProblemKind("difference_of_products", (2, 3), difference_of_products),
    NamedQuantity("mean", (2, 3, 4), mean),
    ProblemKind("missing_value", (3, 4, 5), missing_value),
    ProblemKind("series", (3, 4, 5), series),
)
