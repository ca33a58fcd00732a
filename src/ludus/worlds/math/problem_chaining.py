"""Problems that combine several numbers."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from fractions import Fraction

from ludus.worlds.math.problems import NamedQuantity, Phrase, WorkedSteps

HELD_OUT = frozenset({("numbers", "counting"), ("counting", "geometry"), ("ratios", "numbers")})
"""Pairs of consecutive topics that only the split `composition` has."""
_ENDS: Mapping[int, Sequence[str]] = {
    2: ("a + b", "a - b", "a * b", "gcd", "larger"),
    3: ("a + b + c", "a * b - c", "(a + b) * c", "a - b + c", "a + b * c"),
    4: ("a + b + c + d", "a * b + c * d", "(a - b) * (c + d)", "a * b - c - d", "(a + b + c) * d"),
}


def link(
    rng: random.Random, level: int, work: WorkedSteps, parts: Mapping[str, Sequence[NamedQuantity]]
) -> tuple[str, Fraction, frozenset[tuple[str, str]]]:
    """Combine `level - 1` numbers of the topics in `parts`; a number may depend on the previous one.

    Returns the question, its answer, and the pairs of consecutive topics.
    """
    topics = [rng.choice(list(parts)) for _ in range(level - 1)]
    told: list[str] = []
    made: list[tuple[str, Fraction]] = []
    for name, topic in zip("abcd", topics, strict=False):
        kind = rng.choice(parts[topic])
        part = kind.make(rng, min(kind.levels), work)
        mark, value, text = part.mark, part.value, part.text
        if made and rng.random() < 0.4:
            mark, value, text = _built(rng, work, part, *made[-1], "abcd"[len(made) - 1])
        told.append(f"Let {name} be {text}.")
        made.append((mark, value))
    asked, found = _end(rng, work, made)
    return f"{' '.join(told)} {asked}", found, frozenset(itertools.pairwise(topics))


def _built(
    rng: random.Random, work: WorkedSteps, part: Phrase, mark: str, value: Fraction, name: str
) -> tuple[str, Fraction, str]:
    """Return a number computed from a part and from the previous number."""
    times = rng.randint(2, 5)
    text = f"{times} times {name} plus the following: {part.text}"
    return work.do(f"{times} * {mark} + {part.mark}"), times * value + part.value, text


def _end(rng: random.Random, work: WorkedSteps, made: Sequence[tuple[str, Fraction]]) -> tuple[str, Fraction]:
    marks, values = [mark for mark, _ in made], [value for _, value in made]
    end = rng.choice(_ENDS[len(made)])
    if end == "gcd" and all(value.denominator == 1 and value > 0 for value in values):
        work.do(f"gcd({marks[0]}, {marks[1]})")
        divisor = math.gcd(*(value.numerator for value in values))
        return "What is the greatest common divisor of a and b?", Fraction(divisor)
    if end == "larger":
        work.do(f"max({marks[0]}, {marks[1]})")
        return "What is the larger one of a and b?", max(values)
    end = "a + b" if end == "gcd" else end
    named = dict(zip("abcd", made, strict=False))
    work.do("".join(named[c][0] if c in named else c for c in end))
    return f"What is {end}?", _value(end, values)


def _value(end: str, values: Sequence[Fraction]) -> Fraction:
    a, b, *more = values
    c, d = (*more, Fraction(0), Fraction(0))[:2]
    return {
        "a + b": a + b,
        "a - b": a - b,
        "a * b": a * b,
        "a + b + c": a + b + c,
        "a * b - c": a * b - c,
        "(a + b) * c": a * c + b * c,
        "a - b + c": a - b + c,
        "a + b * c": a + b * c,
        "a + b + c + d": a + b + c + d,
        "a * b + c * d": a * b + c * d,
        "(a - b) * (c + d)": (a - b) * c + (a - b) * d,
        "a * b - c - d": a * b - c - d,
        "(a + b + c) * d": (a + b + c) * d,
    }[end]
