"""What is right: numbers, expressions, short answers, or what a foreign generator accepts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Protocol

from ludus.rewards import truth_records
from ludus.rewards.base import Reward
from ludus.rewards.exact_match import ExpectedAnswers, well_formed
from ludus.rewards.json_match import MatchState, Schema, Value
from ludus.rewards.math.math_verify import Expression, is_equal
from ludus.rewards.math.numeric import Quantity, is_close
from ludus.rewards.multiple_choice import Choice
from ludus.rewards.shaping import citation_support, either, only_if
from ludus.tools.calculator import show
from ludus.types import Message, Task, Trajectory
from ludus.worlds.math.problems import MathProblem

SYSTEM = (
    "Solve the problem. End with the answer alone: a number, a fraction in lowest terms like 3/4, or an expression."
)
_CLOSE = 1e-9
"""How far off, relatively, an answer may be that is no whole number."""


class MathGrader(Protocol):
    """Judges an answer by itself."""

    def accepts(self, answer: str) -> bool:
        """Whether the answer is right."""
        ...


@dataclass(frozen=True, slots=True)
class Solution:
    """The truth of a generated task: what is right, and the problem that it comes from."""

    right: Quantity | Expression
    problem: MathProblem


def is_right(answer: str, right: object) -> bool:
    """Whether the answer is right and worked out, by the verifier that fits the truth.

    Raises TypeError for no truth.
    """
    match right:
        case Quantity():
            return is_close(answer, right, reduced=True)
        case Expression():
            return is_equal(answer, replace(right, evaluated=True))
        case ExpectedAnswers() | Choice() | Value() | Schema() | MatchState():
            return truth_records.is_right(answer, right)
    raise TypeError(f"{type(right).__name__} is no truth of this world")


def solved(task: Task, trajectory: Trajectory) -> float:
    """1 if the final answer is right, else 0."""
    truth = task.truth
    if isinstance(truth, Solution):
        return float(is_right(trajectory.answer, truth.right))
    if isinstance(truth, Foreign):
        return float(truth.judge.accepts(trajectory.answer))
    return float(is_right(trajectory.answer, truth))


@dataclass(frozen=True)
class Foreign:
    """The truth of a task that its own generator judges; `answer` is the one that it stores."""

    judge: MathGrader
    answer: str


def math_rewards(well_formed_weight: float) -> tuple[Reward, ...]:
    """The outcome, and a little for form.

    Form is an episode without a failed call whose answer is right or stands in what a call gave.
    """
    return (
        Reward("solved", solved, outcome=True),
        Reward("well_formed", only_if(well_formed, either(citation_support, solved)), weight=well_formed_weight),
    )


def opening(question: str, truth: object = None) -> tuple[Message, ...]:
    """System message and question; the message says what kind of answer the truth is for."""
    match truth:
        case Choice():
            system = "Answer the question. End with the letter of the right option alone."
        case Value() | Schema() | MatchState():
            system = "Do what is asked. End with JSON alone."
        case _:
            system = SYSTEM
    return Message(role="system", content=system), Message(role="user", content=question)


def as_task(problem: MathProblem, split: str, number: int) -> Task:
    """The task of a problem."""
    answer = problem.answer
    right = quantity(answer, problem) if isinstance(answer, Fraction) else answer
    tags = {"split": split, "family": problem.topic, "kind": problem.kind, "level": str(problem.level)}
    return Task(f"{split}:{number}", opening(problem.question), Solution(right, problem), tags, seed=number)


def quantity(value: Fraction, problem: MathProblem | None = None) -> Quantity:
    """A number as a truth: exact where it is whole."""
    units = problem.units if problem else {}
    if value.denominator == 1:
        return Quantity(int(value), relative=0.0, units=units)
    return Quantity(float(value), relative=_CLOSE, units=units)


def other_words(problem: MathProblem) -> tuple[str, ...]:
    """The right answer in other writings: in a box, in LaTeX, in a sentence, with separators or a point."""
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
    """The right answer as it is written."""
    return show(problem.answer) if isinstance(problem.answer, Fraction) else problem.answer.gold
