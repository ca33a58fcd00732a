"""The generated problems: a selection from the data files that `python -m generators.math` writes.

A file has a header of groups (split, level, topic, number of problems) and one line of JSON per problem.
"""

from __future__ import annotations

import json
import lzma
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from importlib.resources import files
from itertools import islice, zip_longest
from typing import TypedDict

from ludus.errors import ConfigError
from ludus.rewards.math.math_verify import Expression
from ludus.tools.calculator import calculate, show

SPLITS = ("train", "validation", "test", "composition")
LEVELS = (1, 2, 3, 4, 5)
DEFAULT_TOPICS = ("arithmetic", "ratios", "algebra", "numbers", "counting", "geometry", "stories", "links")
"""`stories` are word problems of several steps, `links` combine numbers of several topics."""
TOPICS = (*DEFAULT_TOPICS, "expressions")
RECIPE_LEVELS, RECIPE_TOPICS = (1,), ("arithmetic", "ratios", "algebra", "geometry")
"""The selection that has data files for itself: its tasks, and its demonstrations in several phrasings."""

Group = tuple[str, int, str]
"""Split, level and topic."""


class _Row(TypedDict):
    kind: str
    question: str
    steps: list[str]
    answer: int | str | dict[str, str]
    units: list[str]


@dataclass(frozen=True, slots=True)
class MathProblem:
    """A question, the steps that solve it (expressions of the calculator, in which `{0}` stands for the result
    of the first step), and the answer. `units` maps each unit that a number may carry to its size."""

    kind: str
    topic: str
    level: int
    question: str
    steps: tuple[str, ...]
    answer: Fraction | Expression
    units: Mapping[str, float] = field(default_factory=dict)

    @property
    def form(self) -> str:
        """The question without numbers and names."""
        return re.sub(r"\b[A-Z][a-z]+\b", "X", re.sub(r"\d+(?:\.\d+)?", "N", self.question))

    @property
    def shape(self) -> str:
        """The steps without numbers."""
        return " ; ".join(re.sub(r"(?<!\{)\b\d+(?:\.\d+)?\b(?!\})", "N", step) for step in self.steps)


def worked(steps: tuple[str, ...]) -> list[tuple[str, Fraction]]:
    """Return each step with the results of earlier steps filled in, and its value."""
    found: list[tuple[str, Fraction]] = []
    for step in steps:
        expression = step.format(*(_operand(value) for _, value in found))
        found.append((expression, calculate(expression)))
    return found


def _operand(value: Fraction) -> str:
    """Return a value as an operand, in brackets unless it is a whole number >= 0."""
    text = show(value)
    return text if text.isdigit() else f"({text})"


def select(split: str, num: int, levels: Sequence[int], topics: Sequence[str], seed: int) -> tuple[MathProblem, ...]:
    """Return `num` problems of a split, levels and topics in turn; fewer if a held-out split has fewer.

    Seeds other than 0 shuffle the problems first. Raises ConfigError if there are too few for training.
    """
    groups = _read(_file(levels, topics, "recipe"))

    def one_level(level: int) -> Iterator[MathProblem]:
        chosen = [(split, level, topic) for topic in dict.fromkeys(topics)]
        return _in_turn([_problems(groups.get(group, ()), group, seed) for group in chosen])

    found = tuple(islice(_in_turn([one_level(level) for level in dict.fromkeys(levels)]), num))
    if len(found) < num and split == "train":
        raise ConfigError(
            f"The levels and topics have {len(found)} different problems for training, not {num}.",
            "Lower env.settings.num_tasks, or add levels or topics.",
        )
    return found


def draw_forever(rng: random.Random, levels: Sequence[int], topics: Sequence[str]) -> Iterator[MathProblem]:
    """Yield training problems at random without end: levels in turn, topics and their kinds with equal probability.

    Raises ConfigError if the topics have no problems of the levels.
    """
    file = _file(levels, topics, "demonstrations")
    groups = [[group for topic in topics if (group := ("train", level, topic)) in _read(file)] for level in levels]
    groups = [of_level for of_level in groups if of_level]
    if not groups:
        raise ConfigError("The topics have no problems of these levels.", "Add topics or levels.")
    while True:
        for of_level in groups:
            group = rng.choice(of_level)
            yield _problem(rng.choice(rng.choice(_by_kind(file, group))), group)


def _in_turn(streams: Sequence[Iterator[MathProblem]]) -> Iterator[MathProblem]:
    return (problem for row in zip_longest(*streams) for problem in row if problem is not None)


def _problems(lines: Sequence[str], group: Group, seed: int) -> Iterator[MathProblem]:
    if seed:
        lines = random.Random(f"{seed}/{group}").sample(lines, len(lines))
    return (_problem(line, group) for line in lines)


def _file(levels: Sequence[int], topics: Sequence[str], of_recipe: str) -> str:
    recipe = tuple(levels) == RECIPE_LEVELS and tuple(topics) == RECIPE_TOPICS
    return f"{of_recipe if recipe else 'problems'}.jsonl.xz"


@cache
def _read(file: str) -> Mapping[Group, Sequence[str]]:
    """Return the lines of a data file by group."""
    packed = (files("ludus.worlds.math") / "data" / file).read_bytes()
    head, *lines = lzma.decompress(packed).decode().removesuffix("\n").split("\n")
    remaining = iter(lines)
    return {(split, level, topic): list(islice(remaining, num)) for split, level, topic, num in json.loads(head)}


@cache
def _by_kind(file: str, group: Group) -> Sequence[Sequence[str]]:
    kinds: dict[str, list[str]] = defaultdict(list)
    for line in _read(file)[group]:
        kinds[json.loads(line)["kind"]].append(line)
    return tuple(kinds.values())


def _problem(line: str, group: Group) -> MathProblem:
    row: _Row = json.loads(line)
    _, level, topic = group
    answer = row["answer"]
    return MathProblem(
        row["kind"],
        topic,
        level,
        row["question"],
        tuple(row["steps"]),
        Expression(answer["expression"]) if isinstance(answer, dict) else Fraction(answer),
        dict.fromkeys(row["units"], 1.0),
    )
