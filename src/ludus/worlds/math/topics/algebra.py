"""Linear and quadratic equations, systems, sequences and values of polynomials."""

from __future__ import annotations

import random
from fractions import Fraction

from ludus.worlds.math.problems import ProblemDraft, ProblemKind, WorkedSteps, nonzero, signed, term


def _name(rng: random.Random) -> str:
    return rng.choice("abcmnpqtxyz")


def added(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """x + a = b."""
    x, a, name = rng.randint(2, 60 * level), nonzero(rng, 60), _name(rng)
    work.do(f"{x + a} - {a}" if a > 0 else f"{x + a} + {-a}")
    return ProblemDraft(f"Solve for {name}: {name} {signed(a)} = {x + a}", x)


def multiplied(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """a x = b."""
    x, a, name = nonzero(rng, 30 * level), rng.randint(2, 15), _name(rng)
    work.do(f"{a * x} / {a}")
    return ProblemDraft(f"Solve for {name}: {a}{name} = {a * x}", x)


def linear(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """a x + b = c; from level 3 on with x on both sides, at level 4 with brackets."""
    x, a, b, name = nonzero(rng, 30), rng.randint(2, 12), nonzero(rng, 40), _name(rng)
    if level == 2:
        rest = work.do(f"{a * x + b} - ({b})")
        work.do(f"{rest} / {a}")
        return ProblemDraft(f"Solve for {name}: {a}{name} {signed(b)} = {a * x + b}", x)
    c = rng.choice([k for k in range(1, 13) if k != a])
    k = rng.randint(2, 6) if level > 3 else 1
    d = k * (a * x + b) - c * x
    right = f"{term(c, name)} {signed(d)}" if d else term(c, name)
    left = f"{k}({a}{name} {signed(b)})" if k > 1 else f"{a}{name} {signed(b)}"
    if k * a == c:
        return linear(rng, level, work)
    up = work.do(f"{d} - {k} * ({b})" if k > 1 else f"{d} - ({b})")
    down = work.do(f"{k} * {a} - {c}" if k > 1 else f"{a} - {c}")
    work.do(f"{up} / {down}")
    return ProblemDraft(f"Solve for {name}: {left} = {right}", x)


def quadratic(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """The larger or smaller solution; from level 4 on with a leading factor and fractions."""
    name, a = _name(rng), 1 if level == 3 else rng.randint(2, 6)
    p, q = rng.sample([n for n in range(-12, 13) if n], 2)
    b, c = -(a * q + p), p * q  # (a x - p)(x - q)
    if not b or Fraction(p, a) == q:
        return quadratic(rng, level, work)
    ends, want = (Fraction(p, a), Fraction(q)), rng.choice(("larger", "smaller"))
    root = work.do(f"sqrt({f'({b})'} ** 2 - 4 * {a} * ({c}))")
    sign = "+" if want == "larger" else "-"
    work.do(f"({-b} {sign} {root}) / (2 * {a})")
    left = f"{term(a, name)}^2 {signed(b) if abs(b) > 1 else '+ ' if b > 0 else '- '}{name} {signed(c)}"
    return ProblemDraft(f"What is the {want} solution of {left} = 0?", max(ends) if want == "larger" else min(ends))


def discriminant(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """That of a quadratic polynomial."""
    a, b, c = rng.randint(2, 5 * level), rng.randint(2, 20), nonzero(rng, 15)
    square, rest = work.do(f"{b} ** 2"), work.do(f"4 * {a} * ({c})")
    work.do(f"{square} - {rest}")
    return ProblemDraft(f"What is the discriminant of {a}x^2 + {b}x {signed(c)}?", sum([b] * b) - 4 * c * a)


def roots(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """The sum of the squares (or the product of the sum and the product) of two roots, by Vieta."""
    p, q = rng.sample([n for n in range(-5 * level, 5 * level) if n], 2)
    if p + q in (-1, 0, 1):
        return roots(rng, level, work)
    total, product = -(p + q), p * q
    question = f"Let r and s be the solutions of x^2 {signed(total)}x {signed(product)} = 0. "
    if rng.random() < 0.5:
        work.do(f"({total}) ** 2 - 2 * ({product})")
        return ProblemDraft(question + "What is r^2 + s^2?", p * p + q * q)
    work.do(f"{-total} / ({product})")
    return ProblemDraft(question + "What is 1/r + 1/s?", Fraction(1, p) + Fraction(1, q))


def system(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """Two equations with two unknowns by Cramer's rule."""
    x, y = nonzero(rng, 4 * level), nonzero(rng, 4 * level)
    a, b, c, d = (nonzero(rng, 9) for _ in range(4))
    if a * d == b * c or 1 in map(abs, (b, d)):
        return system(rng, level, work)
    e, f = a * x + b * y, c * x + d * y
    down = work.do(f"{a} * ({d}) - ({b}) * ({c})")
    want = rng.choice(("x", "y") if level < 4 else ("x", "y", "x + y", "x * y"))
    found = {"x": x, "y": y, "x + y": x + y, "x * y": x * y}[want]
    question = f"{term(a, 'x')} {signed(b)}y = {e} and {term(c, 'x')} {signed(d)}y = {f}. What is {want}?"
    first = "" if want == "y" else work.do(f"(({e}) * ({d}) - ({b}) * ({f})) / {down}")
    second = "" if want == "x" else work.do(f"({a} * ({f}) - ({e}) * ({c})) / {down}")
    if len(want) > 1:
        work.do(want.replace("x", first).replace("y", second))
    return ProblemDraft(question, found)


def three_unknowns(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """Three sums of two unknowns each."""
    x, y, z = (rng.randint(1, 9 * level) for _ in range(3))
    names = ["x", "y", "z"]
    rng.shuffle(names)
    a, b, c = names
    values = dict(zip(names, (x, y, z), strict=True))
    double = work.do(f"{x + y} + {y + z} + {x + z}")
    half = work.do(f"{double} / 2")
    work.do(f"{half} - {y + z}")
    sums = f"{a} + {b} = {x + y}, {b} + {c} = {y + z} and {a} + {c} = {x + z}"
    return ProblemDraft(f"{sums}. What is {a}?", values[a])


def polynomial(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """The value of a polynomial at a place."""
    factors, x = [nonzero(rng, 9) for _ in range(level + 1)], nonzero(rng, 3 + level)
    factors = [f + (abs(f) == 1) * f for f in factors]
    text = " ".join([str(factors[0])] + [f"{signed(f)}x^{i + 1}" for i, f in enumerate(factors[1:])])
    shown = " + ".join([str(factors[0])] + [f"({f}) * ({x}) ** {i + 1}" for i, f in enumerate(factors[1:])])
    value = 0
    for factor in reversed(factors):  # Horner
        value = value * x + factor
    work.do(shown)
    return ProblemDraft(f"What is the value of {text.replace('x^1', 'x')} at x = {x}?", value)


def nested(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """Two linear functions in each other."""
    a, b, c, d, x = (rng.randint(2, 9) for _ in range(5))
    functions = {"f": (a, b), "g": (c, d)}
    order = [rng.choice("fg") for _ in range(level - 1)]
    mark, value = str(x), x
    for name in reversed(order):
        factor, shift = functions[name]
        mark, value = work.do(f"{factor} * {mark} + {shift}"), factor * value + shift
    asked = "".join(f"{name}(" for name in order) + str(x) + ")" * len(order)
    return ProblemDraft(f"Let f(x) = {a}x + {b} and g(x) = {c}x + {d}. What is {asked}?", value)


def nth_term(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """A term of a sequence with a constant difference, or from level 3 on a constant ratio."""
    first, gap, n = rng.randint(1, 30), nonzero(rng, 12), rng.randint(8, 40)
    if level < 3 or rng.random() < 0.5:
        listed = [first + gap * i for i in range(3)]
        step = work.do(f"{listed[1]} - {listed[0]}")
        work.do(f"{first} + {n - 1} * {step}")
        value: Fraction | int = [first + gap * i for i in range(n)][-1]
    else:
        ratio, n = rng.randint(2, 4), rng.randint(5, 8)
        listed = [first * ratio**i for i in range(3)]
        step = work.do(f"{listed[1]} / {listed[0]}")
        work.do(f"{first} * {step} ** {n - 1}")
        value = first
        for _ in range(n - 1):
            value *= ratio
    kind = "constant difference" if listed[1] - listed[0] == listed[2] - listed[1] else "constant ratio"
    shown = ", ".join(map(str, listed))
    return ProblemDraft(f"The sequence {shown}, ... has a {kind}. What is its term number {n}?", value)


KINDS: tuple[ProblemKind, ...] = (
    ProblemKind("added", (1,), added),
    ProblemKind("multiplied", (1,), multiplied),
    ProblemKind("linear", (2, 3, 4), linear),
    ProblemKind("nth_term", (2, 3), nth_term),
    ProblemKind("polynomial", (2, 3, 4), polynomial),
    ProblemKind("discriminant", (2, 3), discriminant),
    ProblemKind("nested", (3, 4, 5), nested),
    ProblemKind("system", (3, 4), system),
    ProblemKind("quadratic", (3, 4, 5), quadratic),
    ProblemKind("three_unknowns", (4, 5), three_unknowns),
    ProblemKind("roots", (4, 5), roots),
)
