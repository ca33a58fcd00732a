"""Problems: a question, the steps that solve it, and the answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from ludus.rewards.math.math_verify import Expression
from ludus.tools.calculator import calculate, show


@dataclass(frozen=True, slots=True)
class MathProblem:
    """A question, the steps that solve it (expressions of the calculator, in which `{0}` stands for the result
    of the first step), and the answer. `units` maps each unit that a number may carry to its size; `links` are the
    pairs of parts that follow each other, in problems composed of parts."""

    kind: str
    topic: str
    level: int
    question: str
    steps: tuple[str, ...]
    answer: Fraction | Expression
    units: Mapping[str, float] = field(default_factory=dict)
    links: frozenset[tuple[str, str]] = frozenset()

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
        expression = fill_in(step, [value for _, value in found])
        found.append((expression, calculate(expression)))
    return found


def fill_in(step: str, results: Sequence[Fraction]) -> str:
    """Return a step with the results of earlier steps, in brackets unless they are whole numbers >= 0."""
    return step.format(*(text if (text := show(value)).isdigit() else f"({text})" for value in results))
