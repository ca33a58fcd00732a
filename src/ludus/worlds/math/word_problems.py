"""Word problems: a person has things, and several events change their number."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from ludus.worlds.math.problems import WorkedSteps

PEOPLE = ("Ana", "Boris", "Chidi", "Dora", "Emil", "Fatima", "Goran", "Hana", "Ivo", "Jia", "Kofi", "Lena", "Mateo")
THINGS = ("apples", "shells", "coins", "marbles", "stickers", "pencils", "beads", "buttons", "nuts", "stamps")


@dataclass(slots=True)
class WordProblem:
    """A story under construction: person, things, the placeholder and value of their number, and the sentences."""

    rng: random.Random
    work: WorkedSteps
    who: str
    things: str
    mark: str
    value: Fraction
    told: list[str]


def gain(s: WordProblem) -> None:
    """Add some."""
    n = s.rng.randint(2, 60)
    s.told.append(s.rng.choice((f"{s.who} buys {n} more.", f"{s.who} finds {n} more.")))
    s.mark, s.value = s.work.do(f"{s.mark} + {n}"), s.value + n


def lose(s: WordProblem) -> None:
    """Remove some."""
    n = s.rng.randint(1, int(s.value) - 1)
    s.told.append(s.rng.choice((f"{s.who} gives {n} away.", f"{s.who} loses {n} of them.")))
    s.mark, s.value = s.work.do(f"{s.mark} - {n}"), s.value - n


def multiply(s: WordProblem) -> None:
    """Multiply all."""
    n = s.rng.randint(2, 5)
    s.told.append(f"Then {s.who} gets so many more that there are {n} times as many as before.")
    s.mark, s.value = s.work.do(f"{s.mark} * {n}"), s.value * n


def packs(s: WordProblem) -> None:
    """Add several bags of the same size."""
    n, size = s.rng.randint(2, 9), s.rng.randint(3, 12)
    s.told.append(f"{s.who} buys {n} bags of {size} {s.things} each.")
    bought = s.work.do(f"{n} * {size}")
    s.mark, s.value = s.work.do(f"{s.mark} + {bought}"), s.value + sum([size] * n)


def share(s: WordProblem) -> None:
    """Share all equally and keep one share."""
    n = _divisor(s, (2, 3, 4, 5, 6))
    s.told.append(f"{s.who} shares them equally among {n} people, of whom {s.who} is one, and keeps one share.")
    s.mark, s.value = s.work.do(f"{s.mark} / {n}"), s.value / n


def percent(s: WordProblem) -> None:
    """Remove a percentage."""
    down = _divisor(s, (2, 4, 5, 10))
    p = 100 // down
    s.told.append(f"{s.who} sells {p}% of them.")
    sold = s.work.do(f"{s.mark} * {p} / 100")
    s.mark, s.value = s.work.do(f"{s.mark} - {sold}"), s.value - s.value / down


def fraction(s: WordProblem) -> None:
    """Remove a fraction."""
    down = _divisor(s, (3, 4, 5, 6, 7, 8))
    up = s.rng.randint(1, down - 1)
    s.told.append(f"{s.who} uses {up}/{down} of them.")
    used = s.work.do(f"{s.mark} * {up} / {down}")
    s.mark, s.value = s.work.do(f"{s.mark} - {used}"), s.value * Fraction(down - up, down)


def _divisor(s: WordProblem, numbers: tuple[int, ...]) -> int:
    fitting = [n for n in numbers if s.value % n == 0]
    if not fitting:
        n = s.rng.choice(numbers)
        extra = int(-s.value % n)
        s.told.append(f"{s.who} finds {extra} more.")
        s.mark, s.value = s.work.do(f"{s.mark} + {extra}"), s.value + extra
        return n
    return s.rng.choice(fitting)


EVENTS: dict[str, Callable[[WordProblem], None]] = {
    event.__name__: event for event in (gain, lose, multiply, packs, share, percent, fraction)
}
HELD_OUT = frozenset({("share", "packs"), ("percent", "multiply"), ("fraction", "lose"), ("multiply", "percent")})
"""Pairs of consecutive events that only the split `composition` has."""


def tell(rng: random.Random, level: int, work: WorkedSteps) -> tuple[str, Fraction, frozenset[tuple[str, str]]]:
    """Return the question of a story of `level` events, its answer, and the pairs of consecutive events."""
    start = rng.choice((12, 20, 24, 30, 36, 40, 48, 60, 72, 80, 90)) + rng.choice((0, 0, 0, 5, 7))
    story = WordProblem(rng, work, rng.choice(PEOPLE), rng.choice(THINGS), str(start), Fraction(start), [])
    names: list[str] = []
    for _ in range(level):
        few = story.value < 4
        options = [n for n in EVENTS if n != (names or [""])[-1] and not (few and n != "gain" and n != "packs")]
        names.append(rng.choice(options))
        EVENTS[names[-1]](story)
    told = " ".join([f"{story.who} has {start} {story.things}.", *story.told])
    question = f"{told} How many {story.things} does {story.who} have now?"
    return question, story.value, frozenset(itertools.pairwise(names))
