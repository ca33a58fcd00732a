"""Variety of the tasks, and the success of baselines that do not use the tools.

*No tool* understands every question and writes its query with the plain names of the question; if the value
is asked for, it answers with the most frequent one. *Majority* answers with the most frequent answer of
training tasks of the same kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from generators.reports.shared import TaskShape, variety
from ludus.envs.base import World
from ludus.worlds.sql.grader import is_right, make_truth
from ludus.worlds.sql.questions import LEVELS, SqlQuestion
from ludus.worlds.sql.world import SqlWorld

Guess = Callable[[SqlQuestion], str]


def answer_text(question: SqlQuestion) -> str:
    """Return the right answer as text."""
    return question.sql if question.kind == "query" else str(question.rows[0][0])


def task_shapes(questions: Sequence[SqlQuestion]) -> list[TaskShape]:
    """Return what distinguishes each question."""
    return [TaskShape(str(one.level), one.data["text"], one.data["shape"]) for one in questions]


def majority(train: Sequence[SqlQuestion]) -> Guess:
    """Return a baseline: the most frequent answer of training tasks of the kind, of equally frequent ones the first."""
    counts = {kind: Counter(answer_text(q) for q in train if q.kind == kind) for kind in ("query", "value")}
    return lambda question: next((text for text, _ in counts[question.kind].most_common(1)), "")


def no_tool(train: Sequence[SqlQuestion]) -> Guess:
    """Return a baseline that answers without looking at the database."""
    most_frequent = majority(train)
    return lambda question: question.data["queries"][1] if question.kind == "query" else most_frequent(question)


def success_by_level(questions: Sequence[SqlQuestion], guess: Guess) -> Mapping[int, float]:
    """Return the fraction of right answers by level."""
    right: dict[int, list[bool]] = {}
    for question in questions:
        right.setdefault(question.level, []).append(is_right(guess(question), make_truth(question)))
    return {level: sum(found) / len(found) for level, found in sorted(right.items())}


def report(world: World) -> str:
    """Return a table by level: tasks, distinct shapes, and the success of the baselines on the split `test`."""
    assert isinstance(world, SqlWorld)
    splits = world.questions
    every = list(chain.from_iterable(splits.values()))
    found = variety(task_shapes(every))
    blind = success_by_level(splits["test"], no_tool(splits["train"]))
    common = success_by_level(splits["test"], majority(splits["train"]))
    lines = ["level  tasks  shapes  no tool  majority"]
    for level in LEVELS:
        rates = f"{blind.get(level, 0.0):8.1%} {common.get(level, 0.0):9.1%}"
        own = found.get(str(level))
        if own is not None:
            lines.append(f"{level:5} {own.num_tasks:6} {own.num_shapes:7} {rates}")
    lines.append(", ".join(f"{split} {len(questions)}" for split, questions in splits.items()))
    return "\n".join(lines)
