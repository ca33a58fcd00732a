"""Problems that need code: every public function is a kind; it adds the steps to a draft and returns the text.

In this order: arithmetic and ratios, algebra and expressions, numbers and counting, geometry.
"""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

from generators.math.drafts import Draft, listed, signed, term


def expression(d: Draft) -> str:
    """An expression with `level` to `level + 1` operations; from level 4 on with powers."""
    text, _ = _tree(d, d.level + d.randint(0, int(d.level > 1)))
    d.do(text)
    return text


def _tree(d: Draft, operations: int) -> tuple[str, int]:
    """Return an expression and the precedence of its outermost operation (4: a number)."""
    if operations == 0:
        return str(d.randint(2, 20)), 4
    if d.level > 3 and d.rng.random() < 0.2:
        base, exponent = d.randint(2, 9), d.randint(2, 3)
        return f"{base} ** {exponent} + {_tree(d, operations - 1)[0]}", 1
    left = d.rng.randrange(operations)
    sign = d.choice("+-*")
    (one, before), (other, after) = _tree(d, left), _tree(d, operations - 1 - left)
    binds = 2 if sign == "*" else 1
    return f"{one if before >= binds else f'({one})'} {sign} {other if after > binds else f'({other})'}", binds


def difference_of_products(d: Draft) -> str:
    """The difference of two products."""
    a, b, c, e = (d.randint(3, 12 * d.level) for _ in range(4))
    (a, b), (c, e) = sorted(((a, b), (c, e)), key=lambda pair: -pair[0] * pair[1])
    first, second = d.do(f"{a} * {b}"), d.do(f"{c} * {e}")
    d.do(f"{first} - {second}")
    return f"By how much is {a} times {b} larger than {c} times {e}?"


def mean(d: Draft) -> str:
    """The mean of several numbers."""
    values = [d.randint(2, 40 * d.level) for _ in range(d.level + 1)]
    total = d.do(" + ".join(map(str, values)))
    d.do(f"{total} / {len(values)}")
    return f"the mean of {listed(values)}"


def missing_value(d: Draft) -> str:
    """A number, given the others and the mean."""
    known = [d.randint(2, 60) for _ in range(d.level)]
    average = -(-(sum(known) + d.randint(2, 60)) // (d.level + 1))
    total, have = d.do(f"{average} * {d.level + 1}"), d.do(" + ".join(map(str, known)))
    d.do(f"{total} - {have}")
    others = ", ".join(map(str, known))
    return f"The mean of {d.level + 1} numbers is {average}. All but one are {others}. What is the other one?"


def fraction_sum(d: Draft) -> str:
    """Two or more fractions, added or subtracted, from level 3 on also multiplied or divided."""
    text = str(_fraction(d)) if d.level < 3 else f"({_fraction(d)})"
    for index in range(max(d.level - 1, 1)):
        sign, other = d.choice("+-" if d.level < 3 else "+-*/"), _fraction(d)
        text = f"({text})" if index else text
        text = f"{text} {sign} {other}" if d.level < 3 else f"{text} {sign} ({other})"
    d.do(text)
    return text


def _fraction(d: Draft) -> Fraction:
    down = d.randint(2, 12)
    return Fraction(d.choice([up for up in range(1, 2 * down) if up % down]), down)


def several_changes(d: Draft) -> str:
    """Successive changes in percent."""
    price, told = 100 * d.randint(2, 30), []
    mark = str(price)
    for _ in range(d.level - 1):
        share, up = 10 * d.randint(1, 6), d.coin()
        mark = d.do(f"{mark} * (100 {'+' if up else '-'} {share}) / 100")
        told.append(f"{'rises' if up else 'falls'} by {share}%")
    return f"A price of {price} {', then '.join(told)}. What is it in the end?"


def share_in_ratio(d: Draft) -> str:
    """One share of several in a ratio."""
    parts = [d.randint(1, 9) for _ in range(min(d.level, 4))]
    total, index = sum(parts) * d.randint(2, 30), d.rng.randrange(len(parts))
    whole = d.do(" + ".join(map(str, parts)))
    one = d.do(f"{total} / {whole}")
    d.do(f"{one} * {parts[index]}")
    ratio, place = " : ".join(map(str, parts)), ("first", "second", "third", "fourth")[index]
    return f"{total} coins are shared in the ratio {ratio}. How many coins are in the {place} share?"


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


_PRIMES = (2, 3, 5, 7, 11, 13)


def common_divisor(d: Draft) -> str:
    """The greatest common divisor of two numbers, from level 3 on of three."""
    shared = d.randint(2, 12 * d.level)
    values = [shared * d.randint(2, 20) for _ in range(2 if d.level < 3 else 3)]
    d.do(f"gcd({', '.join(map(str, values))})")
    return f"the greatest common divisor of {listed(values)}"


def common_multiple(d: Draft) -> str:
    """The least common multiple of two numbers, from level 3 on of three."""
    values = [d.randint(3, 12 * d.level) for _ in range(2 if d.level < 3 else 3)]
    d.do(f"lcm({', '.join(map(str, values))})")
    return f"the least common multiple of {listed(values)}"


def digit_sum(d: Draft) -> str:
    """The sum of the digits."""
    digits = [d.randint(1, 9), *(d.randint(0, 9) for _ in range(d.level + 1))]
    d.do(" + ".join(map(str, digits)))
    return f"the sum of the digits of {''.join(map(str, digits))}"


def num_multiples(d: Draft) -> str:
    """The number of multiples, up to a bound, of one number, of either of two, or of exactly one of two."""
    bound, a, b = d.randint(40, 300 * d.level), *d.rng.sample(range(2, 16), 2)
    question = f"How many of the whole numbers from 1 to {bound} are multiples of"
    first = d.do(f"{bound} // {a}")
    if d.level < 4:
        return f"{question} {a}?"
    second, both = d.do(f"{bound} // {b}"), d.do(f"{bound} // lcm({a}, {b})")
    exactly = d.coin()
    d.do(f"{first} + {second} - {'2 * ' if exactly else ''}{both}")
    return f"{question} {'exactly' if exactly else 'at least'} one of {a} and {b}?"


def num_divisors(d: Draft) -> str:
    """The number of divisors, or (level 5) their sum, from the prime factors."""
    primes = sorted(d.rng.sample(_PRIMES[: d.level + 1], 3 if d.level > 3 else 2))
    powers = {p: d.randint(1, 2 + (p < 5)) for p in primes}
    d.do(" * ".join(f"{p} ** {e}" for p, e in powers.items()))
    if d.level == 5:
        d.do(" * ".join(f"(({p} ** {e + 1} - 1) / ({p} - 1))" for p, e in powers.items()))
    else:
        d.do(" * ".join(f"({e} + 1)" for e in powers.values()))
    value = math.prod(p**e for p, e in powers.items())
    return f"the {'sum of all' if d.level == 5 else 'number of'} positive divisors of {value}"


def in_base(d: Draft) -> str:
    """The value of digits in another base."""
    base = d.choice([b for b in range(2, 10) if b != 8] if d.level < 4 else range(3, 10))
    digits = [d.randint(1, base - 1), *(d.rng.randrange(base) for _ in range(d.level))]
    d.do(" + ".join(f"{digit} * {base} ** {d.level - i}" for i, digit in enumerate(digits)))
    return f"the decimal value of {''.join(map(str, digits))} in base {base}"


def two_remainders(d: Draft) -> str:
    """The Chinese remainder theorem for a prime modulus: n = r + a ((s - r) a^(p-2) mod p)."""
    a, p = d.randint(4, 8 * d.level), int(d.word("moduli"))
    if a % p == 0:
        return two_remainders(d)
    r, s = d.rng.randrange(a), d.rng.randrange(p)
    inverse = d.do(f"{a} ** {p - 2} % {p}")
    times = d.do(f"({s} - {r}) * {inverse} % {p}")
    d.do(f"{r} + {a} * {times}")
    return f"What is the smallest whole number that leaves {r} when divided by {a} and {s} when divided by {p}?"


def outfits(d: Draft) -> str:
    """The number of combinations of one item of each kind of clothes."""
    numbers = [d.randint(2, 18 // d.level) for _ in range(2 + (d.level > 1))]
    d.do(" * ".join(map(str, numbers)))
    clothes = listed([f"{n} {word}" for n, word in zip(numbers, ("shirts", "hats", "scarves"), strict=False)])
    return f"Someone has {clothes}. How many outfits with one of each are there?"


def letters(d: Draft) -> str:
    """Arrangements of a word with repeated letters."""
    word = "".join(d.choice("AEILNRST") for _ in range(d.level + 2))
    counts = Counter(word).values()
    repeated = [f"factorial({n})" for n in counts if n > 1]
    if not repeated or len(counts) < 2:
        return letters(d)
    every = d.do(f"factorial({len(word)})")
    d.do(f"{every} / ({' * '.join(repeated)})")
    return f"In how many different orders can the letters of {word} be written?"


def same_colour(d: Draft) -> str:
    """Probability that two balls are both red (level 3), of the same or of different colours; no replacement."""
    numbers = {colour: d.randint(2, 9) for colour in ("red", "blue", "green")[: 3 if d.level > 4 else 2]}
    wanted = ["red"] if d.level < 4 else list(numbers)
    good = d.do(" + ".join(f"comb({numbers[colour]}, 2)" for colour in wanted))
    same = d.do(f"{good} / comb({sum(numbers.values())}, 2)")
    event = "both are red" if d.level < 4 else "both have the same colour"
    if d.level > 3 and d.coin():
        d.do(f"1 - {same}")
        event = "they have different colours"
    balls = " and ".join(f"{n} {colour}" for colour, n in numbers.items())
    return f"A bag holds {balls} balls. Two are taken without putting back. What is the probability that {event}?"


_TRIPLES = ((3, 4, 5), (5, 12, 13), (8, 15, 17), (7, 24, 25), (20, 21, 29), (9, 40, 41), (12, 35, 37))


def right_triangle(d: Draft) -> str:
    """The hypotenuse or a leg; from level 4 on the perimeter or the area."""
    scale = d.randint(1, 6)
    a, b, c = (scale * side for side in d.choice(_TRIPLES))
    a, b = d.rng.sample((a, b), 2)
    if d.coin():
        side = d.do(f"sqrt({a} ** 2 + {b} ** 2)")
        question, asked = f"The legs of a right triangle are {a} cm and {b} cm.", "hypotenuse"
        perimeter, legs = f"{a} + {b} + {side}", f"{a} * {b}"
    else:
        side = d.do(f"sqrt({c} ** 2 - {a} ** 2)")
        question, asked = f"A right triangle has a leg of {a} cm and a hypotenuse of {c} cm.", "other leg"
        perimeter, legs = f"{a} + {side} + {c}", f"{a} * {side}"
    d.unit = "cm"
    if d.level < 4:
        return f"{question} How many cm is the {asked}?"
    if d.coin():
        d.do(perimeter)
        return f"{question} How many cm is its perimeter?"
    d.do(f"{legs} / 2")
    d.unit = "cm^2"
    return f"{question} How many cm^2 is its area?"


def polygon(d: Draft) -> str:
    """The area of a triangle (level 4) or quadrilateral from its vertices."""
    quadrants = ((-1, -1), (1, -1), (1, 1), (-1, 1))[: 4 if d.level > 4 else 3]
    corners = [(_coordinate(d, x), _coordinate(d, y)) for x, y in quadrants]
    parts = [
        d.do(f"{x} * {_operand(v)} - {_operand(u)} * {_operand(y)}")
        for (x, y), (u, v) in zip(corners, [*corners[1:], corners[0]], strict=True)
    ]
    total = d.do(" + ".join(parts))
    d.do(f"abs({total}) / 2")
    return f"What is the area of the {'quadrangle' if d.level > 4 else 'triangle'} with corners {listed(corners)}?"


def _coordinate(d: Draft, sign: int) -> int:
    return d.randint(1, 4 * d.level) if sign > 0 else d.randint(-4 * d.level, -1)


def _operand(value: int) -> str:
    return f"({value})" if value < 0 else str(value)


def distance(d: Draft) -> str:
    """The distance of two points; at level 5 in three dimensions."""
    scale = d.randint(1, 5)
    gaps = [scale * side for side in d.rng.sample(d.choice(_TRIPLES)[:2], 2)]
    if d.level > 4:
        gaps = [2 * scale, 3 * scale, 6 * scale]
        d.rng.shuffle(gaps)
    start = [d.randint(-9, 9) for _ in gaps]
    end = [a + d.choice((-1, 1)) * gap for a, gap in zip(start, gaps, strict=True)]
    squares = [d.do(f"({b} - {_operand(a)}) ** 2") for a, b in zip(start, end, strict=True)]
    d.do(f"sqrt({' + '.join(squares)})")
    return f"What is the distance between {tuple(start)} and {tuple(end)}?"
