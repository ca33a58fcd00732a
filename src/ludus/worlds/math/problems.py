"""Problems: a question, the steps that solve it, and the answer, computed in another way.

A step is an expression of the calculator; `{0}` in it stands for the result of the first step. The answer is
not computed from the steps, and a test compares the two.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from ludus.rewards.math.math_verify import Expression
from ludus.tools.calculator import calculate, show

Value = int | Fraction


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
        expression = step.format(*(_operand(value) for _, value in found))
        found.append((expression, calculate(expression)))
    return found


def _operand(value: Fraction) -> str:
    """Return a value as an operand, in brackets unless it is a whole number >= 0."""
    text = show(value)
    return text if text.isdigit() else f"({text})"


@dataclass(slots=True)
class WorkedSteps:
    """The steps of a problem under construction."""

    steps: list[str] = field(default_factory=list)

    def do(self, expression: str) -> str:
        """Add a step and return the placeholder of its result."""
        self.steps.append(expression)
        return f"{{{len(self.steps) - 1}}}"


@dataclass(frozen=True, slots=True)
class Phrase:
    """A number in words ("the sum of 3 and 4"), its value, and the placeholder of its result."""

    text: str
    mark: str
    value: Fraction
    units: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProblemDraft:
    """A whole question, its value, and the units that an answer may carry."""

    question: str
    value: Value | Expression
    units: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProblemKind:
    """A generator of whole questions with its name and levels."""

    name: str
    levels: tuple[int, ...]
    make: Callable[[random.Random, int, WorkedSteps], ProblemDraft]

    def draft(self, rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
        """Return a question."""
        return self.make(rng, level, work)


@dataclass(frozen=True, slots=True)
class NamedQuantity:
    """A generator of numbers in words, used as a question or as a part of a larger problem."""

    name: str
    levels: tuple[int, ...]
    make: Callable[[random.Random, int, WorkedSteps], Phrase]

    def draft(self, rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
        """Return a question for the number."""
        made = self.make(rng, level, work)
        question = rng.choice(("What is {}?", "Work out {}.", "Find {}.")).format(made.text)
        return ProblemDraft(question, made.value, made.units)


def phrase(text: str, mark: str, value: Value, **units: float) -> Phrase:
    """Return a phrase whose value is a fraction."""
    return Phrase(text, mark, Fraction(value), units)


def signed(value: int) -> str:
    """Return a term to be added: `+ 3` or `- 3`."""
    return f"+ {value}" if value >= 0 else f"- {-value}"


def term(factor: int, name: str) -> str:
    """Return a multiple of a variable: x, -x or 3x."""
    return {1: name, -1: f"-{name}"}.get(factor, f"{factor}{name}")


def nonzero(rng: random.Random, most: int) -> int:
    """Return a whole number other than 0 between -most and most."""
    return rng.choice((-1, 1)) * rng.randint(1, most)
