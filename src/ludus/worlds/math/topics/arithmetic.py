"""Expressions with brackets, means, fractions and percentages."""

from __future__ import annotations

from fractions import Fraction

from ludus.worlds.math.problems import Draft, listed


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
