"""Problems of somebody's own: JSON lines with a question and an answer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from ludus.errors import UserError
from ludus.rewards.extract import NotJson, read_json
from ludus.rewards.truth_records import TYPES, question_text, read_truth
from ludus.tools.fetch import json_lines
from ludus.types import JSON, Task
from ludus.worlds.math.grader import opening

SPLITS = ("train", "validation", "test")
_HINT = f'A line is {{"question", "answer"}}, with "split" and "type" ({", ".join(TYPES)}) if you like.'


class _Fault(Exception):
    """What is wrong with a record."""


def load_problems(path: Path) -> dict[str, tuple[Task, ...]]:
    """The tasks of a file by split.

    `answer` is what its type asks for (`ludus.rewards.truth_records`); of a text that reasons, what follows
    "####" or stands in a box. Without "split" a hash of the question decides, 8 : 1 : 1. Raises UserError,
    with the line, for a record that is none and for a question that was there before, and where a verifier
    needs an extra that is not installed.
    """
    try:
        lines = json_lines(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}.", "Check env.settings.data.") from error
    tasks: dict[str, list[Task]] = {split: [] for split in SPLITS}
    seen: dict[str, int] = {}
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            split, task = _task(_record(text), number)
            question = task.prompt[-1]["content"]
            if question in seen:
                raise _Fault(f"its question is that of line {seen[question]}")
        except _Fault as fault:
            raise UserError(f"{path}, line {number}, is not a problem: {fault}.", _HINT) from None
        seen[question] = number
        tasks[split].append(task)
    if not seen:
        raise UserError(f"{path} holds no problems.", _HINT)
    return {split: tuple(found) for split, found in tasks.items()}


def _record(text: str) -> Mapping[str, JSON]:
    try:
        record = read_json(text)
    except NotJson as error:
        raise _Fault(f"it is no JSON ({error})") from None
    if not isinstance(record, dict):
        raise _Fault("it is no JSON object")
    return record


def _task(record: Mapping[str, JSON], line: int) -> tuple[str, Task]:
    question = record.get("question")
    if not isinstance(question, str) or not question.strip():
        raise _Fault('"question" is not a text')
    try:
        truth = read_truth(record)
    except ValueError as error:
        raise _Fault(str(error)) from None
    split = record.get("split", _by_hash(question))
    if split not in SPLITS:
        raise _Fault(f'"split" is {split!r}, not one of {", ".join(SPLITS)}')
    family = str(record.get("family", type(truth).__name__.lower()))
    tags = {"split": str(split), "family": family}
    prompt = opening(question_text(question, truth), truth)
    return str(split), Task(f"{split}:line-{line}", prompt, truth, tags, seed=line)


def _by_hash(question: str) -> str:
    share = hashlib.sha256(question.encode()).digest()[0] / 256
    return "train" if share < 0.8 else "validation" if share < 0.9 else "test"
