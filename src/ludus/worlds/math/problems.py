"""What a problem is: a question, the steps that solve it, and the answer, which was found in another way.

A step is an expression of the calculator. `{0}` in it stands for the result of the first step, and so on. The
answer does not come from the steps: generators work it out by themselves, and a test compares the two.
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
    """One problem. `units` are those that a number may carry, each with its size; `answer` is a number or
    an expression. `links` are the pairs of parts that follow each other, for problems made of parts."""

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
        """The steps without numbers: what is worked out from what."""
        return " ; ".join(re.sub(r"(?<!\{)\b\d+(?:\.\d+)?\b(?!\})", "N", step) for step in self.steps)


@dataclass(slots=True)
class WorkedSteps:
    """Steps in the making."""

    steps: list[str] = field(default_factory=list)

    def do(self, expression: str) -> str:
        """Add a step; the mark that stands for its result."""
        self.steps.append(expression)
        return f"{{{len(self.steps) - 1}}}"


@dataclass(frozen=True, slots=True)
class Phrase:
    """A number in words ("the sum of 3 and 4"): its value, and the mark of its result."""

    text: str
    mark: str
    value: Fraction
    units: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProblemDraft:
    """A whole question that a generator wrote, its value, and the units that an answer may carry."""

    question: str
    value: Value | Expression
    units: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProblemKind:
    """A generator of whole questions: its name, its levels, and what writes one."""

    name: str
    levels: tuple[int, ...]
    make: Callable[[random.Random, int, WorkedSteps], ProblemDraft]

    def draft(self, rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
        """A question."""
        return self.make(rng, level, work)


@dataclass(frozen=True, slots=True)
class NamedQuantity:
    """A generator of numbers in words, which can be asked for or be a part of something larger."""

    name: str
    levels: tuple[int, ...]
    make: Callable[[random.Random, int, WorkedSteps], Phrase]

    def draft(self, rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
        """A question for the number."""
        made = self.make(rng, level, work)
        question = rng.choice(("What is {}?", "Work out {}.", "Find {}.")).format(made.text)
        return ProblemDraft(question, made.value, made.units)


def worked(steps: tuple[str, ...]) -> list[tuple[str, Fraction]]:
    """Each step with the results of earlier ones put in, and its value by the calculator."""
    found: list[tuple[str, Fraction]] = []
    for step in steps:
        expression = step.format(*(_operand(value) for _, value in found))
        found.append((expression, calculate(expression)))
    return found


def _operand(value: Fraction) -> str:
    """A value as it stands in an expression: in brackets unless it is a plain number."""
    text = show(value)
    return text if text.isdigit() else f"({text})"


def phrase(text: str, mark: str, value: Value, **units: float) -> Phrase:
    """A phrase whose value is made a fraction."""
    return Phrase(text, mark, Fraction(value), units)


def signed(value: int) -> str:
    """A term that is added: `+ 3` or `- 3`."""
    return f"+ {value}" if value >= 0 else f"- {-value}"


def term(factor: int, name: str) -> str:
    """A multiple of a variable: x, -x or 3x."""
    return {1: name, -1: f"-{name}"}.get(factor, f"{factor}{name}")


def nonzero(rng: random.Random, most: int) -> int:
    """A whole number other than 0 between -most and most."""
    return rng.choice((-1, 1)) * rng.randint(1, most)
