"""Kinds of values, and steps: functions from kinds to a kind, with a sentence that describes them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Draw = Callable[[random.Random, int], object]
"""Draws a value of about a given size; 0 is the smallest."""


@dataclass(frozen=True, eq=False)
class StepKind:
    """A kind of values: its type annotation, its description, and a function that draws one.

    `layout` names its format as text, for programs that read and print; empty if it has none.
    """

    name: str
    annotation: str
    words: str
    draw: Draw
    layout: str = ""


@dataclass(frozen=True, eq=False)
class CodeStep:
    """A function from one or more kinds to another; further arguments are numbers drawn from `draws`."""

    name: str
    family: str
    takes: tuple[StepKind, ...]
    gives: StepKind
    points: int
    says: str
    function: Callable[..., object] = field(repr=False)
    draws: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def step(
    takes: StepKind | tuple[StepKind, ...], gives: StepKind, points: int, **draws: tuple[int, int]
) -> Callable[[Callable[..., object]], CodeStep]:
    """Make a step of a function; its docstring is the task text, with `{name}` for drawn numbers."""
    kinds = takes if isinstance(takes, tuple) else (takes,)

    def make(function: Callable[..., object]) -> CodeStep:
        says = " ".join((function.__doc__ or "").split())
        family = function.__module__.rpartition(".")[2]
        return CodeStep(function.__name__, family, kinds, gives, points, says, function, draws)

    return make


VOWELS = "aeiou"
_LETTERS = "aabcdeeefghiiklmnooprsttuvw"


def _number(rng: random.Random, size: int) -> int:
    return rng.randint(0, 9) if size < 3 else rng.randint(1, 40 * size)


def _numbers(rng: random.Random, size: int) -> list[int]:
    span = rng.choice((3, 9, 20))
    low = rng.choice((-span, 0, 1))
    return [rng.randint(low, span) for _ in range(size)]


def _word(rng: random.Random, longest: int = 7) -> str:
    letters = rng.choice((_LETTERS, "abc", "aeinrst"))
    word = "".join(rng.choices(letters, k=rng.randint(1, longest)))
    return word + word[::-1] if rng.random() < 0.15 else word


def _words(rng: random.Random, size: int) -> list[str]:
    pool = [_word(rng) for _ in range(max(1, size))]
    pool += ["".join(rng.sample(word, len(word))) for word in pool[:2]]
    return [rng.choice(pool) for _ in range(size)]


def _text(rng: random.Random, size: int) -> str:
    parts = [rng.choice((_word(rng), _word(rng), str(rng.randint(0, 99)))) for _ in range(size)]
    return " ".join(parts).replace(" ", ", ", rng.randint(0, 1))


def _table(rng: random.Random, size: int) -> dict[str, int]:
    return {_word(rng): rng.randint(-9 if rng.random() < 0.2 else 0, 30) for _ in range(size)}


def _spans(rng: random.Random, size: int) -> list[list[int]]:
    spans = []
    for _ in range(size):
        start = rng.randint(0, 3 * size + 4)
        spans.append([start, start + rng.randint(1, 8)])
    return spans


def _edges(rng: random.Random, size: int) -> list[list[int]]:
    names = rng.sample(range(1, 3 * size + 6), max(2, size))
    edges = {tuple(rng.sample(names, 2)) for _ in range(size)}
    return [list(edge) for edge in sorted(edges) if edge[::-1] not in edges or edge[0] < edge[1]]


def _roads(rng: random.Random, size: int) -> list[list[int]]:
    return [[*edge, rng.randint(1, 12)] for edge in _edges(rng, size)]


def _grid(rng: random.Random, size: int) -> list[list[int]]:
    rows, columns = rng.randint(1, max(1, size)), rng.randint(1, max(1, size))
    span = rng.choice((1, 4, 9))
    return [[rng.randint(0, span) for _ in range(columns)] for _ in range(min(rows, 8))]


def _maze(rng: random.Random, size: int) -> list[str]:
    rows, columns = rng.randint(1, max(2, size)), rng.randint(2, max(2, size))
    walls = rng.choice((0.15, 0.3, 0.4))
    cells = [["#" if rng.random() < walls else "." for _ in range(columns)] for _ in range(min(rows, 8))]
    cells[0][0] = "."
    return ["".join(row) for row in cells]


INT = StepKind("int", "int", "a whole number, 0 or more", _number, "number")
INTS = StepKind("ints", "list[int]", "a list of whole numbers, possibly empty", _numbers, "numbers")
WORDS = StepKind("words", "list[str]", "a list of words in lower case, possibly empty", _words, "words")
TEXT = StepKind("text", "str", "a text of words in lower case and numbers, possibly empty", _text, "text")
TABLE = StepKind("table", "dict[str, int]", "whole numbers by name, possibly none", _table, "table")
SPANS = StepKind(
    "spans",
    "list[list[int]]",
    "a list of intervals [start, end] with start < end, in no order, possibly empty",
    _spans,
    "rows",
)
EDGES = StepKind(
    "edges",
    "list[list[int]]",
    "a list of pairs [a, b] of different numbers, each pair an edge between two nodes of a graph, "
    "possibly empty",
    _edges,
    "rows",
)
ROADS = StepKind(
    "roads",
    "list[list[int]]",
    "a list of triples [a, b, w]: a road of length w between the towns a and b, both ways; possibly empty",
    _roads,
    "rows",
)
GRID = StepKind(
    "grid", "list[list[int]]", "a rectangular grid of whole numbers, at least one cell", _grid, "rows"
)
MAZE = StepKind(
    "maze",
    "list[str]",
    "a rectangular maze, '#' is a wall and '.' is free; the first cell is free",
    _maze,
    "words",
)
