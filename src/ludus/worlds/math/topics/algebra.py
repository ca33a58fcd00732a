"""Equations, systems, sequences, polynomials, and answers that are expressions."""

from __future__ import annotations

from fractions import Fraction

from ludus.worlds.math.problems import Draft, signed, term


def added(d: Draft) -> str:
    """x + a = b."""
    x, a, name = d.randint(2, 60 * d.level), d.nonzero(60), d.word("letters")
    d.do(f"{x + a} {signed(-a)}")
    return f"Solve for {name}: {name} {signed(a)} = {x + a}"


def linear(d: Draft) -> str:
    """a x + b = c; from level 3 on with x on both sides, at level 4 with brackets."""
    x, a, b, name = d.nonzero(30), d.randint(2, 12), d.nonzero(40), d.word("letters")
    if d.level == 2:
        rest = d.do(f"{a * x + b} - ({b})")
        d.do(f"{rest} / {a}")
        return f"Solve for {name}: {a}{name} {signed(b)} = {a * x + b}"
    c = d.choice([k for k in range(1, 13) if k != a])
    k = d.randint(2, 6) if d.level > 3 else 1
    if k * a == c:
        return linear(d)
    shift = k * (a * x + b) - c * x
    up = d.do(f"{shift} - {k} * ({b})" if k > 1 else f"{shift} - ({b})")
    down = d.do(f"{k} * {a} - {c}" if k > 1 else f"{a} - {c}")
    d.do(f"{up} / {down}")
    left = f"{k}({a}{name} {signed(b)})" if k > 1 else f"{a}{name} {signed(b)}"
    return f"Solve for {name}: {left} = {term(c, name)}" + (f" {signed(shift)}" if shift else "")


def quadratic(d: Draft) -> str:
    """The larger or smaller solution of (a x - p)(x - q) = 0; from level 4 on with a > 1."""
    name, a = d.word("letters"), 1 if d.level == 3 else d.randint(2, 6)
    p, q = d.rng.sample([n for n in range(-12, 13) if n], 2)
    b, c = -(a * q + p), p * q
    if not b or Fraction(p, a) == q:
        return quadratic(d)
    want = d.choice(("larger", "smaller"))
    root = d.do(f"sqrt({f'({b})'} ** 2 - 4 * {a} * ({c}))")
    d.do(f"({-b} {'+' if want == 'larger' else '-'} {root}) / (2 * {a})")
    middle = f"{signed(b) if abs(b) > 1 else '+ ' if b > 0 else '- '}{name}"
    return f"What is the {want} solution of {term(a, name)}^2 {middle} {signed(c)} = 0?"


def discriminant(d: Draft) -> str:
    """The discriminant of a quadratic polynomial."""
    a, b, c = d.randint(2, 5 * d.level), d.randint(2, 20), d.nonzero(15)
    square, rest = d.do(f"{b} ** 2"), d.do(f"4 * {a} * ({c})")
    d.do(f"{square} - {rest}")
    return f"What is the discriminant of {a}x^2 + {b}x {signed(c)}?"


def roots(d: Draft) -> str:
    """The sum of the squares, or of the inverses, of two roots, by Vieta."""
    p, q = d.rng.sample([n for n in range(-5 * d.level, 5 * d.level) if n], 2)
    if p + q in (-1, 0, 1):
        return roots(d)
    question = f"Let r and s be the solutions of x^2 {signed(-p - q)}x {signed(p * q)} = 0. What is "
    if d.coin():
        d.do(f"({-p - q}) ** 2 - 2 * ({p * q})")
        return f"{question}r^2 + s^2?"
    d.do(f"{p + q} / ({p * q})")
    return f"{question}1/r + 1/s?"


def system(d: Draft) -> str:
    """Two equations with two unknowns by Cramer's rule."""
    x, y = d.nonzero(4 * d.level), d.nonzero(4 * d.level)
    a, b, c, e = (d.nonzero(9) for _ in range(4))
    if a * e == b * c or 1 in map(abs, (b, e)):
        return system(d)
    f, g = a * x + b * y, c * x + e * y
    down = d.do(f"{a} * ({e}) - ({b}) * ({c})")
    want = d.choice(("x", "y") if d.level < 4 else ("x", "y", "x + y", "x * y"))
    first = "" if want == "y" else d.do(f"(({f}) * ({e}) - ({b}) * ({g})) / {down}")
    second = "" if want == "x" else d.do(f"({a} * ({g}) - ({f}) * ({c})) / {down}")
    if len(want) > 1:
        d.do(want.replace("x", first).replace("y", second))
    return f"{term(a, 'x')} {signed(b)}y = {f} and {term(c, 'x')} {signed(e)}y = {g}. What is {want}?"


def three_unknowns(d: Draft) -> str:
    """Three sums of two unknowns each."""
    x, y, z = (d.randint(1, 9 * d.level) for _ in range(3))
    names = ["x", "y", "z"]
    d.rng.shuffle(names)
    a, b, c = names
    double = d.do(f"{x + y} + {y + z} + {x + z}")
    half = d.do(f"{double} / 2")
    d.do(f"{half} - {y + z}")
    return f"{a} + {b} = {x + y}, {b} + {c} = {y + z} and {a} + {c} = {x + z}. What is {a}?"


def polynomial(d: Draft) -> str:
    """The value of a polynomial at a point."""
    factors, x = [d.nonzero(9) for _ in range(d.level + 1)], d.nonzero(3 + d.level)
    first, *others = [f + (abs(f) == 1) * f for f in factors]
    d.do(" + ".join([str(first), *(f"({f}) * ({x}) ** {i}" for i, f in enumerate(others, 1))]))
    text = " ".join([str(first), *(f"{signed(f)}x^{i}" for i, f in enumerate(others, 1))])
    return f"What is the value of {text.replace('x^1', 'x')} at x = {x}?"


def nested(d: Draft) -> str:
    """The composition of two linear functions."""
    a, b, c, e, x = (d.randint(2, 9) for _ in range(5))
    functions = {"f": (a, b), "g": (c, e)}
    order = [d.choice("fg") for _ in range(d.level - 1)]
    mark = str(x)
    for factor, shift in (functions[name] for name in reversed(order)):
        mark = d.do(f"{factor} * {mark} + {shift}")
    asked = "".join(f"{name}(" for name in order) + str(x) + ")" * len(order)
    return f"Let f(x) = {a}x + {b} and g(x) = {c}x + {e}. What is {asked}?"


def nth_term(d: Draft) -> str:
    """A term of a sequence with a constant difference, or from level 3 on a constant ratio."""
    first, gap, n = d.randint(1, 30), d.nonzero(12), d.randint(8, 40)
    if d.level < 3 or d.coin():
        kind, values = "difference", [first + gap * i for i in range(3)]
        step = d.do(f"{values[1]} - {first}")
        d.do(f"{first} + {n - 1} * {step}")
    else:
        ratio, n = d.randint(2, 4), d.randint(5, 8)
        kind, values = "ratio", [first * ratio**i for i in range(3)]
        step = d.do(f"{values[1]} / {first}")
        d.do(f"{first} * {step} ** {n - 1}")
    return f"The sequence {', '.join(map(str, values))}, ... has a constant {kind}. What is its term number {n}?"


def derivative(d: Draft) -> str:
    """The derivative of a polynomial."""
    powers = sorted(d.rng.sample(range(2, 4 + d.level), d.level - 1), reverse=True)
    terms = [(d.choice((-1, 1)) * d.randint(2, 9), power) for power in powers]
    for factor, power in terms:
        d.do(f"{factor} * {power}")
    d.answer = _sum([f"{f * p}x^{{{p - 1}}}" for f, p in terms])
    return f"What is the derivative of {_sum([f'{f}x^{p}' for f, p in terms])} with respect to x?"


def _sum(terms: list[str]) -> str:
    return " ".join([terms[0], *(f"- {t[1:]}" if t[0] == "-" else f"+ {t}" for t in terms[1:])])


def line(d: Draft) -> str:
    """The line through two points."""
    x, y, gap, rise = d.nonzero(9), d.nonzero(9), d.randint(1, 6), d.nonzero(4 * d.level)
    slope = Fraction(rise, gap)
    mark = d.do(f"({y + rise} - ({y})) / ({x + gap} - ({x}))")
    d.do(f"{y} - {mark} * ({x})")
    d.answer = f"({slope})x + ({y - slope * x})"
    return f"A line goes through ({x}, {y}) and ({x + gap}, {y + rise}). Write y in terms of x."
