"""Problems in a user's file: JSON lines with a question and an answer."""

from __future__ import annotations

from pathlib import Path

from ludus.envs.task_files import Record, RecordError, load_tasks, split_by_hash, text_field
from ludus.rewards.truth_records import TYPES, question_text, read_truth
from ludus.types import Task
from ludus.worlds.math.grader import opening

_HINT = f'A line is {{"question", "answer"}}, optionally with "split" and "type" ({", ".join(TYPES)}).'


def load_problems(path: Path) -> dict[str, tuple[Task, ...]]:
    """Return the tasks of a file by split.

    `answer` depends on the type (`ludus.rewards.truth_records`); a text with reasoning has its answer after
    "####" or in a box. Without "split", a hash of the question decides, 8 : 1 : 1. Raises UserError, with the
    line, for an invalid record or a repeated question, and if a verifier needs an extra that is not installed.
    """
    return load_tasks(path, _task, _HINT, identity=lambda task: f"question {task.prompt[-1]['content']!r}")


def _task(record: Record, line: int) -> Task:
    question = text_field(record, "question")
    if not question.strip():
        raise RecordError('"question" is empty')
    try:
        truth = read_truth(record)
    except ValueError as error:
        raise RecordError(str(error)) from None
    split = str(record.get("split", split_by_hash(question)))
    tags = {"split": split, "family": str(record.get("family", type(truth).__name__.lower()))}
    return Task(f"{split}:line-{line}", opening(question_text(question, truth), truth), truth, tags, seed=line)
