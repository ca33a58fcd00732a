"""Difficulty report: the variety of the tasks, and the success of baselines without skill."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction

from generators.reports.shared import TaskShape, rate_lines, variety_lines
from ludus.envs.base import World
from ludus.rewards.base import truth_of
from ludus.types import Task
from ludus.worlds.math.grader import Solution, answer_text, is_right
from ludus.worlds.math.problems import MathProblem, worked


def task_shapes(tasks: Sequence[Task]) -> list[TaskShape]:
    """Return what distinguishes each task."""
    problems = [truth_of(task, Solution).problem for task in tasks]
    return [TaskShape(str(one.level), _form(one), _shape(one)) for one in problems]


def _form(problem: MathProblem) -> str:
    """Return the question without numbers and names."""
    return re.sub(r"\b[A-Z][a-z]+\b", "X", re.sub(r"\d+(?:\.\d+)?", "N", problem.question))


def _shape(problem: MathProblem) -> str:
    """Return the steps without numbers."""
    return " ; ".join(re.sub(r"(?<!\{)\b\d+(?:\.\d+)?\b(?!\})", "N", step) for step in problem.steps)


def majority_rate(train: Sequence[Task], tasks: Sequence[Task]) -> float:
    """Return the success of the most frequent training answer of the same kind and level (of the same level if
    training lacks the kind)."""
    common = _most_frequent(train)
    return sum(_is_right(task, common[_key(task)] or common[task.tags["level"]]) for task in tasks) / len(tasks)


def copied_rate(train: Sequence[Task], tasks: Sequence[Task]) -> float:
    """Return the success of copying a number of the question, at the place (first, second, ..., last) that is right
    most often in training for the same kind and level."""
    places: dict[str, Counter[int]] = defaultdict(Counter)
    for task in train:
        for place in range(-3, 3):
            places[_key(task)][place] += _is_right(task, _number_at(task, place))
    return sum(_is_right(task, _number_at(task, _best(places[_key(task)]))) for task in tasks) / len(tasks)


def head_rate(tasks: Sequence[Task]) -> float:
    """Return the success of mental arithmetic with known steps: only steps whose results are whole numbers below
    100 are right."""
    return sum(_is_mental(truth_of(task, Solution).problem) for task in tasks) / len(tasks)


def _is_mental(problem: MathProblem) -> bool:
    values = [value for _, value in worked(problem.steps)]
    easy = all(value.denominator == 1 and abs(value) < 100 for value in values)
    return easy and isinstance(problem.answer, Fraction)


def _best(places: Counter[int]) -> int:
    return places.most_common(1)[0][0] if places else -1


def _most_frequent(train: Sequence[Task]) -> Mapping[str, str]:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for task in train:
        answer = answer_text(truth_of(task, Solution).problem)
        counts[_key(task)][answer] += 1
        counts[task.tags["level"]][answer] += 1
    common: dict[str, str] = defaultdict(str)
    return common | {key: counter.most_common(1)[0][0] for key, counter in counts.items()}


def _key(task: Task) -> str:
    return f"{task.tags['kind']}/{task.tags['level']}"


def _number_at(task: Task, place: int) -> str:
    numbers: list[str] = re.findall(r"\d+", task.prompt[-1]["content"])
    return numbers[place] if -len(numbers) <= place < len(numbers) else ""


def _is_right(task: Task, answer: str) -> bool:
    return bool(answer) and is_right(answer, truth_of(task, Solution).right)


def report(world: World) -> str:
    """Return the report on the generated problems of a world."""
    splits = {split: tasks for split in world.splits if (tasks := world.tasks(split))}
    table = variety_lines(((split, task_shapes(tasks)) for split, tasks in splits.items()), "questions")
    train = splits.get("train", ())
    rates = (
        (split, (head_rate(tasks), majority_rate(train, tasks), copied_rate(train, tasks)))
        for split, tasks in splits.items()
    )
    return "\n".join([*table, "", *rate_lines(("no tool", "majority", "copied"), rates)])
