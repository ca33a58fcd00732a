"""Fractions and percentages."""

from __future__ import annotations

import random
from fractions import Fraction

from ludus.worlds.math.problems import NamedQuantity, Phrase, ProblemDraft, ProblemKind, WorkedSteps, phrase

PERCENT = {"%": 1.0}
"""An answer in percent may carry the sign."""


def percent_of(rng: random.Random, level: int, work: WorkedSteps) -> Phrase:
    """A share in percent."""
    share, whole = 5 * rng.randint(1, 19), 20 * rng.randint(1, 15 * level)
    text = rng.choice((f"{share}% of {whole}", f"{share} percent of {whole}"))
    return phrase(text, work.do(f"{share} * {whole} / 100"), Fraction(share, 100) * whole)


def fraction_of(rng: random.Random, level: int, work: WorkedSteps) -> Phrase:
    """A fraction of a whole."""
    down = rng.randint(3, 9)
    up, whole = rng.randint(1, down - 1), down * rng.randint(2, 20 * level)
    return phrase(f"{up}/{down} of {whole}", work.do(f"{up} * {whole} / {down}"), whole // down * up)


def fraction_sum(rng: random.Random, level: int, work: WorkedSteps) -> Phrase:
    """Two fractions and more, which are added, taken away, and from level 3 on multiplied and divided."""
    value = _fraction(rng)
    text = str(value) if level < 3 else f"({value})"
    for index in range(max(level - 1, 1)):
        sign, other = rng.choice("+-" if level < 3 else "+-*/"), _fraction(rng)
        text = f"({text})" if index else text
        text = f"{text} {sign} {other}" if level < 3 else f"{text} {sign} ({other})"
        value = {"+": value + other, "-": value - other, "*": value * other, "/": value / other}[sign]
    return phrase(text, work.do(text), value)


def _fraction(rng: random.Random) -> Fraction:
    down = rng.randint(2, 12)
    return Fraction(rng.choice([up for up in range(1, 2 * down) if up % down]), down)


def what_percent(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """Which share in percent a part is."""
    whole = 4 * rng.randint(5, 25 * level)
    part = whole * rng.randrange(25, 200, 25) // 100
    work.do(f"100 * {part} / {whole}")
    return ProblemDraft(f"What percent of {whole} is {part}?", Fraction(part, whole) * 100, PERCENT)


def change(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """A change in percent."""
    before, share = 20 * rng.randint(2, 20 * level), 5 * rng.randint(1, 16)
    after = before + rng.choice((-1, 1)) * before * share // 100
    gap = work.do(f"{after} - {before}")
    work.do(f"100 * abs({gap}) / {before}")
    word = "rises" if after > before else "falls"
    question = f"A price {word} from {before} to {after}. By how many percent does it change?"
    return ProblemDraft(question, share, PERCENT)


def before_change(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """The value before a change in percent."""
    before, share = 20 * rng.randint(2, 15 * level), 5 * rng.randint(1, 12)
    up = rng.random() < 0.5
    after = before + (before * share // 100 if up else -(before * share // 100))
    left = work.do(f"100 + {share}" if up else f"100 - {share}")
    work.do(f"{after} * 100 / {left}")
    word = "rise" if up else "fall"
    return ProblemDraft(f"After a {word} of {share}% a price is {after}. What was it before?", before)


def several_changes(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """Changes in percent, one after the other."""
    price, told = 100 * rng.randint(2, 30), []
    mark, value = str(price), Fraction(price)
    for _ in range(level - 1):
        share, up = 10 * rng.randint(1, 6), rng.random() < 0.5
        mark = work.do(f"{mark} * (100 {'+' if up else '-'} {share}) / 100")
        value += value * share / 100 if up else -value * share / 100
        told.append(f"{'rises' if up else 'falls'} by {share}%")
    return ProblemDraft(f"A price of {price} {', then '.join(told)}. What is it in the end?", value)


def share_in_ratio(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """One share of several in a ratio."""
    parts = [rng.randint(1, 9) for _ in range(min(level, 4))]
    total, index = sum(parts) * rng.randint(2, 30), rng.randrange(len(parts))
    whole = work.do(" + ".join(map(str, parts)))
    one = work.do(f"{total} / {whole}")
    work.do(f"{one} * {parts[index]}")
    place = ("first", "second", "third", "fourth")[index]
    question = f"{total} coins are shared in the ratio {' : '.join(map(str, parts))}. "
    return ProblemDraft(question + f"How many coins are in the {place} share?", total * parts[index] // sum(parts))


KINDS: tuple[ProblemKind | NamedQuantity, ...] = (
    NamedQuantity("percent_of", (1, 2), percent_of),
    NamedQuantity("fraction_of", (1, 2), fraction_of),
    NamedQuantity("fraction_sum", (2, 3, 4), fraction_sum),
    ProblemKind("what_percent", (2, 3), what_percent),
    ProblemKind("change", (2, 3), change),
    ProblemKind("share_in_ratio", (2, 3, 4), share_in_ratio),
    ProblemKind("before_change", (3, 4), before_change),
    ProblemKind("several_changes", (3, 4, 5), several_changes),
)
