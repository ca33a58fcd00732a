"""How varied the tasks are, and what is earned without the loop.

*No tool* understands every question and writes its query with the names that the question uses, without a
look at the database; asked for a value it gives the commonest one. *Majority* gives the answer that training
tasks of the same kind have most often.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from ludus.envs.difficulty_report import TaskShape, variety
from ludus.worlds.sql.grader import is_right, make_truth
from ludus.worlds.sql.solver import blind_query
from ludus.worlds.sql.tasks import LEVELS, SqlQuestion

if TYPE_CHECKING:
    from ludus.worlds.sql.world import SqlWorld

Guess = Callable[[SqlQuestion], str]


def answer_text(question: SqlQuestion) -> str:
    """The right answer as text."""
    return question.sql if question.kind == "query" else str(question.rows[0][0])


def looks(questions: Sequence[SqlQuestion]) -> list[TaskShape]:
    """What makes each question different."""
    return [TaskShape(str(one.level), one.text, one.shape) for one in questions]


def majority(train: Sequence[SqlQuestion]) -> Guess:
    """Answers with what training tasks of the kind have most often, of equally frequent answers the first."""
    counts = {kind: Counter(answer_text(q) for q in train if q.kind == kind) for kind in ("query", "value")}
    return lambda question: next((text for text, _ in counts[question.kind].most_common(1)), "")


def no_tool(train: Sequence[SqlQuestion]) -> Guess:
    """Answers without a look at the database."""
    commonest = majority(train)
    return lambda question: blind_query(question.plan) if question.kind == "query" else commonest(question)


def success_by_level(questions: Sequence[SqlQuestion], guess: Guess) -> Mapping[int, float]:
    """The share of right answers at each level that has questions."""
    right: dict[int, list[bool]] = {}
    for question in questions:
        right.setdefault(question.level, []).append(is_right(guess(question), make_truth(question)))
    return {level: sum(found) / len(found) for level, found in sorted(right.items())}


def report(world: SqlWorld) -> str:
    """A table by level: tasks, distinct shapes, and what the two baselines reach on the split `test`."""
    splits = world.questions
    every = list(chain.from_iterable(splits.values()))
    found = variety(looks(every))
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
