"""Combinatorics and small probabilities."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from fractions import Fraction
from functools import cache

from ludus.worlds.math.problems import NamedQuantity, Phrase, ProblemDraft, ProblemKind, WorkedSteps, phrase

_THINGS = ("books", "songs", "flags", "stamps", "lamps", "tiles", "photos", "cards")


def orders(rng: random.Random, level: int, work: WorkedSteps) -> Phrase:
    """All orders of different things."""
    n = rng.randint(3, 5 + level)
    things = rng.choice(_THINGS)
    text = f"the number of ways to put {n} different {things} in a row"
    return phrase(text, work.do(f"factorial({n})"), math.prod(range(1, n + 1)))


def choices(rng: random.Random, level: int, work: WorkedSteps) -> Phrase:
    """Choices without order."""
    n, things = rng.randint(5, 9 + level), rng.choice(_THINGS)
    k = rng.randint(2, min(n - 2, 4))
    found = sum(1 for _ in itertools.combinations(range(n), k))
    return phrase(f"the number of ways to choose {k} of {n} {things}", work.do(f"comb({n}, {k})"), found)


def places(rng: random.Random, level: int, work: WorkedSteps) -> Phrase:
    """Choices with order."""
    n, things = rng.randint(4, 10 + 3 * level), rng.choice(_THINGS)
    k = rng.randint(2, 3)
    text = f"the number of ways to put {k} of {n} different {things} in a row"
    return phrase(text, work.do(f"perm({n}, {k})"), math.prod(range(n - k + 1, n + 1)))


def handshakes(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """Pairs of people."""
    n = rng.randint(4, 40 * level)
    work.do(f"comb({n}, 2)")
    return ProblemDraft(
        f"{n} people all shake hands with each other once. How many handshakes are there?", sum(range(n))
    )


def outfits(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """One of each kind."""
    numbers = [rng.randint(2, 18 // level) for _ in range(2 + (level > 1))]
    words = [f"{n} {w}" for n, w in zip(numbers, ("shirts", "hats", "scarves"), strict=False)]
    work.do(" * ".join(map(str, numbers)))
    listed = ", ".join(words[:-1]) + " and " + words[-1]
    question = f"Someone has {listed}. How many outfits with one of each are there?"
    return ProblemDraft(question, math.prod(numbers))


def committee(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """So many of one group and so many of another; from level 4 on with at least one of a group."""
    a, b = rng.randint(3, 4 + level), rng.randint(3, 4 + level)
    if level < 4:
        k, j = rng.randint(1, 2), rng.randint(2, 3)
        first, second = work.do(f"comb({a}, {k})"), work.do(f"comb({b}, {j})")
        work.do(f"{first} * {second}")
        question = f"A committee takes {k} of {a} teachers and {j} of {b} pupils. How many are possible?"
        return ProblemDraft(question, math.comb(a, k) * math.comb(b, j))
    k = rng.randint(2, 3)
    all_, none = work.do(f"comb({a + b}, {k})"), work.do(f"comb({b}, {k})")
    work.do(f"{all_} - {none}")
    found = sum(min(group) < a for group in itertools.combinations(range(a + b), k))
    question = f"A committee of {k} is chosen of {a} teachers and {b} pupils. "
    return ProblemDraft(question + "How many have at least one teacher?", found)


def letters(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """Arrangements of a word with repeated letters."""
    word = "".join(rng.choice("AEILNRST") for _ in range(level + 2))
    counts = Counter(word)
    repeated = [n for n in counts.values() if n > 1]
    if not repeated or len(counts) < 2:
        return letters(rng, level, work)
    all_ = work.do(f"factorial({len(word)})")
    work.do(f"{all_} / ({' * '.join(f'factorial({n})' for n in repeated)})")
    found = _num_words(tuple(sorted(counts.values())))
    return ProblemDraft(f"In how many different orders can the letters of {word} be written?", found)


@cache
def _num_words(counts: tuple[int, ...]) -> int:
    """By the first letter of a word."""
    if not any(counts):
        return 1
    less = (tuple(n - (i == j) for j, n in enumerate(counts)) for i, n in enumerate(counts) if n)
    return sum(_num_words(tuple(sorted(one))) for one in less)


def paths(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """Ways on a grid; from level 4 on through a point."""
    right, up = rng.randint(2, 4 + level), rng.randint(2, 4 + level)
    question = f"A path on a grid goes from (0, 0) to ({right}, {up}) in unit steps to the right and up"
    if level < 4:
        work.do(f"comb({right + up}, {up})")
        return ProblemDraft(f"{question}. How many such paths are there?", _num_paths(right, up))
    x, y = rng.randint(1, right - 1), rng.randint(1, up - 1)
    first, second = work.do(f"comb({x + y}, {y})"), work.do(f"comb({right + up - x - y}, {up - y})")
    work.do(f"{first} * {second}")
    found = _num_paths(x, y) * _num_paths(right - x, up - y)
    return ProblemDraft(f"{question}, by way of ({x}, {y}). How many such paths are there?", found)


def _num_paths(right: int, up: int) -> int:
    row = [1] * (right + 1)
    for _ in range(up):
        row = list(itertools.accumulate(row))
    return row[-1]


def same_colour(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """Two balls without putting back: of one colour (level 3), of the same or of different colours."""
    numbers = {"red": rng.randint(2, 9), "blue": rng.randint(2, 9)}
    if level > 4:
        numbers["green"] = rng.randint(2, 9)
    total = sum(numbers.values())
    listed = " and ".join(f"{n} {colour}" for colour, n in numbers.items())
    balls = [colour for colour, n in numbers.items() for _ in range(n)]
    pairs = list(itertools.combinations(balls, 2))
    wanted = ["red"] if level < 4 else list(numbers)
    good = work.do(" + ".join(f"comb({numbers[colour]}, 2)" for colour in wanted))
    mark, found = work.do(f"{good} / comb({total}, 2)"), [a == b and a in wanted for a, b in pairs]
    words = "both are red" if level < 4 else "both have the same colour"
    value = Fraction(sum(found), len(pairs))
    if level > 3 and rng.random() < 0.5:
        work.do(f"1 - {mark}")
        words, value = "they have different colours", 1 - value
    question = f"A bag holds {listed} balls. Two are taken without putting back. "
    return ProblemDraft(question + f"What is the probability that {words}?", value)


def equal_things(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """Stars and bars, each person getting any number or at least one."""
    n, people = rng.randint(4, 4 + 2 * level), rng.randint(3, 4)
    least = rng.randint(0, 1)
    left = work.do(f"{n} - {people} * {least}") if least else str(n)
    work.do(f"comb({left} + {people} - 1, {people} - 1)")
    found = _num_gifts(n, people, least)
    rule = " so that each gets at least one" if least else ""
    return ProblemDraft(f"In how many ways can {n} equal coins be given to {people} children{rule}?", found)


@cache
def _num_gifts(coins: int, people: int, least: int) -> int:
    """By what the first one gets."""
    if people == 1:
        return int(coins >= least)
    return sum(_num_gifts(coins - first, people - 1, least) for first in range(least, coins + 1))


KINDS: tuple[ProblemKind | NamedQuantity, ...] = (
    NamedQuantity("orders", (1,), orders),
    ProblemKind("outfits", (1, 2), outfits),
    NamedQuantity("choices", (2, 3), choices),
    NamedQuantity("places", (2, 3), places),
    ProblemKind("handshakes", (2,), handshakes),
    ProblemKind("committee", (3, 4, 5), committee),
    ProblemKind("paths", (3, 4, 5), paths),
    ProblemKind("letters", (3, 4, 5), letters),
    ProblemKind("same_colour", (3, 4, 5), same_colour),
    ProblemKind("equal_things", (4, 5), equal_things),
)
