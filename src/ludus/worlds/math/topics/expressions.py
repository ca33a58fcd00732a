"""Answers that are expressions."""

from __future__ import annotations

import random
from fractions import Fraction

from ludus.rewards.math.math_verify import Expression
from ludus.worlds.math.problems import ProblemDraft, ProblemKind, WorkedSteps, nonzero


def derivative(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """That of a polynomial."""
    powers = sorted(rng.sample(range(2, 4 + level), level - 1), reverse=True)
    factors = [rng.choice((-1, 1)) * rng.randint(2, 9) for _ in powers]
    made = [work.do(f"{f} * {p}") for f, p in zip(factors, powers, strict=True)]
    del made
    given = _joined([f"{f}x^{p}" for f, p in zip(factors, powers, strict=True)])
    found = _joined([f"{f * p}x^{{{p - 1}}}" for f, p in zip(factors, powers, strict=True)])
    return ProblemDraft(f"What is the derivative of {given} with respect to x?", Expression(found))


def composed(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """One linear function in another."""
    a, b, c, d = (rng.randint(2, 5 * level) for _ in range(4))
    work.do(f"{a} * {c}")
    work.do(f"{a} * {d} + {b}")
    question = f"Let f(x) = {a}x + {b} and g(x) = {c}x + {d}. Write f(g(x)) in terms of x."
    return ProblemDraft(question, Expression(f"{a * c}x + {a * d + b}"))


def circle(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """Area or circumference of a circle."""
    r = rng.randint(2, 40 * level)
    if rng.random() < 0.5:
        work.do(f"{r} ** 2")
        return ProblemDraft(f"What is the area of a circle of radius {r}, in terms of pi?", Expression(f"{r * r}\\pi"))
    work.do(f"2 * {r}")
    return ProblemDraft(
        f"What is the circumference of a circle of radius {r}, in terms of pi?", Expression(f"{2 * r}\\pi")
    )


def line(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """The line through two points."""
    x, y, gap = nonzero(rng, 9), nonzero(rng, 9), rng.randint(1, 6)
    rise = nonzero(rng, 4 * level)
    slope = Fraction(rise, gap)
    mark = work.do(f"({y + rise} - ({y})) / ({x + gap} - ({x}))")
    work.do(f"{y} - {mark} * ({x})")
    shift = y - slope * x
    question = f"A line goes through ({x}, {y}) and ({x + gap}, {y + rise}). Write y in terms of x."
    return ProblemDraft(question, Expression(f"({slope})x + ({shift})"))


def _joined(terms: list[str]) -> str:
    return " ".join([terms[0], *(f"- {t[1:]}" if t[0] == "-" else f"+ {t}" for t in terms[1:])])


KINDS: tuple[ProblemKind, ...] = (
    ProblemKind("circle", (2, 3), circle),
    ProblemKind("derivative", (2, 3, 4, 5), derivative),
    ProblemKind("composed", (3, 4), composed),
    ProblemKind("line", (4, 5), line),
)
