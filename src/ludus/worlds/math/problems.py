"""The shipped problems, which `python -m generators.math` draws."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, get_args

from ludus.envs.task_archive import in_turn
from ludus.rewards.math.math_verify import Expression
from ludus.tools.calculator import calculate, show

LEVELS = (1, 2, 3, 4, 5)
Topic = Literal["arithmetic", "ratios", "algebra", "numbers", "counting", "geometry", "expressions", "stories", "links"]
"""`stories` are word problems of several steps, `links` combine numbers of several topics."""
TOPICS: tuple[Topic, ...] = get_args(Topic)
DEFAULT_TOPICS = tuple(topic for topic in TOPICS if topic != "expressions")
RECIPE = ((1,), ("arithmetic", "ratios", "algebra", "geometry"))
"""Levels and topics of the recipe, whose problems are separate."""


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


def read_problems(
    split: str, levels: Sequence[int], topics: Sequence[str], lines: Callable[[str], Iterator[bytes]]
) -> Iterator[MathProblem]:
    """Yield the problems of a split (or of `demonstrations`), levels and topics in turn.

    `lines` yields the lines of a member of the archive.
    """
    folder = f"recipe/{split}" if (tuple(levels), tuple(topics)) == RECIPE else split

    def problems(level: int, topic: str) -> Iterator[MathProblem]:
        return (_problem(level, topic, line) for line in lines(f"{folder}/{level}/{topic}"))

    return in_turn(in_turn(problems(level, one) for one in dict.fromkeys(topics)) for level in dict.fromkeys(levels))


def _problem(level: int, topic: str, line: bytes) -> MathProblem:
    """Return the problem of a line: kind, question, steps, answer and the notations of its unit."""
    kind, question, steps, text, units = json.loads(line)
    answer = Expression(text) if topic == "expressions" else Fraction(text)
    return MathProblem(kind, topic, level, question, tuple(steps), answer, dict.fromkeys(units, 1.0))


def worked(steps: tuple[str, ...]) -> list[tuple[str, Fraction]]:
    """Return each step with the results of earlier steps filled in, and its value."""
    found: list[tuple[str, Fraction]] = []
    for step in steps:
        expression = fill_in(step, [value for _, value in found])
        found.append((expression, calculate(expression)))
    return found


def fill_in(step: str, results: Sequence[Fraction]) -> str:
    """Return a step with the results of earlier steps, in brackets unless they are whole numbers >= 0."""
    return step.format(*(text if (text := show(value)).isdigit() else f"({text})" for value in results))
