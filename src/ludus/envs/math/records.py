"""Problems of somebody's own: JSON lines with a question and an answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

from ludus.envs.math.grading import opening, quantity
from ludus.errors import UserError
from ludus.rewards.answers import Answers
from ludus.rewards.final import candidates
from ludus.rewards.maths import Expression, require_math
from ludus.rewards.numbers import Quantity, read_quantity
from ludus.types import JSON, Task

SPLITS = ("train", "validation", "test")
TYPES = ("number", "expression", "text")
_HINT = 'A line is {"question", "answer"}, with "split" and "type" (number, expression or text) if you like.'


class _Fault(Exception):
    """What is wrong with a record."""


def load_problems(path: Path) -> dict[str, tuple[Task, ...]]:
    """The tasks of a file by split.

    `answer` is a text or a number; of a text that reasons, what follows "####" or stands in a box. Without
    "type" an answer that reads as a number is one, and anything else an expression. Without "split" a hash
    of the question decides, 8 : 1 : 1. Raises UserError, with the line, for a record that is none and for a
    question that was there before, and where an expression needs an extra that is not installed.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
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
        record: JSON = json.loads(text)
    except json.JSONDecodeError as error:
        raise _Fault(f"it is no JSON ({error})") from None
    if not isinstance(record, dict):
        raise _Fault("it is no JSON object")
    return record


def _task(record: Mapping[str, JSON], line: int) -> tuple[str, Task]:
    question, answer = record.get("question"), record.get("answer")
    if not isinstance(question, str) or not question.strip():
        raise _Fault('"question" is not a text')
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise _Fault('"answer" is neither a text nor a number')
    split = record.get("split", _by_hash(question))
    if split not in SPLITS:
        raise _Fault(f'"split" is {split!r}, not one of {", ".join(SPLITS)}')
    truth = _truth(str(answer), record.get("type"))
    family = str(record.get("family", type(truth).__name__.lower()))
    tags = {"split": str(split), "family": family}
    return str(split), Task(f"{split}:line-{line}", opening(question), truth, tags, seed=line)


def _truth(text: str, type_: JSON) -> Quantity | Expression | Answers:
    found = candidates(text)
    if len(found) != 1:
        raise _Fault('"answer" holds no single answer')
    (answer,) = found
    value = read_quantity(answer, Quantity(0.0))
    if type_ not in (*TYPES, None):
        raise _Fault(f'"type" is {type_!r}, not one of {", ".join(TYPES)}')
    if type_ == "text":
        return Answers((answer,))
    if type_ == "expression" or (type_ is None and value is None):
        require_math()
        return Expression(answer)
    if value is None:
        raise _Fault(f"{answer[:60]!r} is no number")
    return quantity(Fraction(value))


def _by_hash(question: str) -> str:
    share = hashlib.sha256(question.encode()).digest()[0] / 256
    return "train" if share < 0.8 else "validation" if share < 0.9 else "test"
