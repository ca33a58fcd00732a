"""Grading of numbers, expressions, typed records, and problems of reasoning-gym, which has its own graders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Protocol

from ludus.rewards import truth_records
from ludus.rewards.exact_match import ExpectedAnswers
from ludus.rewards.extract import candidates
from ludus.rewards.json_match import MatchState, Schema, Value
from ludus.rewards.math.math_verify import Expression, is_equal
from ludus.rewards.math.numeric import Quantity, is_close
from ludus.rewards.multiple_choice import Choice
from ludus.tools.calculator import show
from ludus.types import Message, Task, Trajectory
from ludus.worlds.math.problems import MathProblem

SYSTEM = (
    "Solve the problem. End with the answer alone: a number, a fraction in lowest terms like 3/4, or an expression."
)
_REL_TOLERANCE = 1e-9
"""Relative tolerance of answers that are not whole numbers."""
_MIN_SCORE = 0.99
"""Minimum score of a right answer of reasoning-gym."""


class Dataset(Protocol):
    """Interface of a reasoning-gym generator."""

    def __getitem__(self, index: int) -> dict[str, object]: ...

    def score_answer(self, answer: str | None, entry: dict[str, object]) -> float: ...


@dataclass(frozen=True)
class GymTruth:
    """Truth of a task of reasoning-gym, whose generator grades the answers."""

    dataset: Dataset
    entry: Mapping[str, object]

    @property
    def answer(self) -> str:
        """The stored answer."""
        return str(self.entry["answer"])

    def accepts(self, answer: str) -> bool:
        """Return whether the text or the answer extracted from it has the full score. Exceptions count as wrong."""
        return any(self._score(one) >= _MIN_SCORE for one in dict.fromkeys((answer.strip(), *candidates(answer)[:1])))

    def _score(self, answer: str) -> float:
        try:
            return float(self.dataset.score_answer(answer, dict(self.entry)))
        except Exception:  # boundary: third-party code may raise on any answer
            return 0.0


@dataclass(frozen=True, slots=True)
class Solution:
    """Truth of a generated task: the right answer and its problem."""

    right: Quantity | Expression
    problem: MathProblem


def is_right(answer: str, right: object) -> bool:
    """Return whether the answer is right and fully evaluated, by the verifier that fits the truth.

    Raises TypeError for any other type.
    """
    match right:
        case Quantity():
            return is_close(answer, right, reduced=True)
        case Expression():
            return is_equal(answer, replace(right, evaluated=True))
        case ExpectedAnswers() | Choice() | Value() | Schema() | MatchState():
            return truth_records.is_right(answer, right)
    raise TypeError(f"{type(right).__name__} is not a truth of this world")


def solved(task: Task, trajectory: Trajectory) -> float:
    """Return 1 if the final answer is right, else 0."""
    truth = task.truth
    if isinstance(truth, GymTruth):
        return float(truth.accepts(trajectory.answer))
    return float(is_right(trajectory.answer, truth.right if isinstance(truth, Solution) else truth))


def opening(question: str, truth: object = None) -> tuple[Message, ...]:
    """Return the system message, which depends on the type of the answer, and the question."""
    match truth:
        case Choice():
            system = "Answer the question. End with the letter of the right option alone."
        case Value() | Schema() | MatchState():
            system = "Do what is asked. End with JSON alone."
        case _:
            system = SYSTEM
    return Message(role="system", content=system), Message(role="user", content=question)


def as_task(problem: MathProblem, split: str, number: int) -> Task:
    """Return the task of a problem; a whole number must be exact."""
    right: Quantity | Expression
    if not isinstance(problem.answer, Fraction):
        right = problem.answer
    elif problem.answer.denominator == 1:
        right = Quantity(int(problem.answer), relative=0.0, units=problem.units)
    else:
        right = Quantity(float(problem.answer), relative=_REL_TOLERANCE, units=problem.units)
    tags = {"split": split, "family": problem.topic, "kind": problem.kind, "level": str(problem.level)}
    return Task(f"{split}:{number}", opening(problem.question), Solution(right, problem), tags, seed=number)


def paraphrases(problem: MathProblem) -> tuple[str, ...]:
    """Return the right answer in other notations: boxed, in LaTeX, in a sentence, with separators or a point."""
    answer = problem.answer
    if not isinstance(answer, Fraction):
        return rf"\boxed{{{answer.gold}}}", f"The answer is ${answer.gold}$."
    top, bottom = answer.numerator, answer.denominator
    if bottom == 1:
        return rf"So it is \boxed{{{top}}}.", f"The answer is {top:,}", f"{top}.0"
    sign = "-" if top < 0 else ""
    found = [rf"So it is \boxed{{{sign}\frac{{{abs(top)}}}{{{bottom}}}}}.", f"The answer is {top}/{bottom}."]
    exact = 10**6 % bottom == 0
    return (*found, str(top / bottom)) if exact else tuple(found)


def answer_text(problem: MathProblem) -> str:
    """Return the right answer as text."""
    return show(problem.answer) if isinstance(problem.answer, Fraction) else problem.answer.gold
