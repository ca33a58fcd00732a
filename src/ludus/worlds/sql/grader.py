"""Grading of queries by their rows on two databases, one of them hidden, and of values."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice, permutations
from typing import cast

from ludus.rewards import truth_records
from ludus.rewards.base import truth_of
from ludus.rewards.code.sql_rows import Rows, same_rows
from ludus.rewards.code.turns import Progress, made_calls
from ludus.rewards.exact_match import ExpectedAnswers
from ludus.rewards.extract import fenced_block
from ludus.rewards.math.numeric import Quantity
from ludus.tools.sql import Database, SqlError, SqlLimits
from ludus.types import Task, ToolStatus, Trajectory
from ludus.worlds.sql.questions import SqlQuestion

PlainRow = tuple[int | float | str | None, ...]
TOLERANCE = 1e-6
"""Tolerance of numbers in rows: absolute, relative above 1."""
MAX_EXTRA = 2
"""Maximum additional columns in a result with the gold rows."""
MAX_CHOICES = 720
"""Maximum number of column selections that are compared."""
CENT = 0.005
"""Tolerance of a value; questions request two decimals."""


@dataclass(frozen=True)
class SqlTruth:
    """Ground truth of a task. `value` is None if the answer is a query."""

    query: str
    rows: Rows
    hidden_rows: Rows
    value: ExpectedAnswers | Quantity | None
    image: bytes = field(repr=False)
    hidden: bytes = field(repr=False)


def make_truth(question: SqlQuestion) -> SqlTruth:
    """Return the truth of a question."""
    ordered = question.data["ordered"]
    rows, hidden = (Rows(found, ordered, tolerance=TOLERANCE) for found in (question.rows, question.hidden_rows))
    value: ExpectedAnswers | Quantity | None = None
    if question.kind == "value":
        cell = question.rows[0][0]
        if isinstance(cell, str) or cell is None:
            value = ExpectedAnswers((str(cell),))
        else:
            value = Quantity(cell, absolute=CENT + TOLERANCE if isinstance(cell, float) else 0.0, relative=0.0)
    return SqlTruth(question.sql, rows, hidden, value, question.pair.image, question.pair.hidden)


def is_right(answer: str, truth: SqlTruth) -> bool:
    """Return whether the answer is right; a query must be right on both databases."""
    if truth.value is not None:
        return truth_records.is_right(answer, truth.value)
    return returns_rows(answer, truth.image, truth.rows) and returns_rows(answer, truth.hidden, truth.hidden_rows)


@lru_cache(maxsize=256)
def returns_rows(answer: str, image: bytes, due: Rows) -> bool:
    """Return whether the answer is a query that returns these rows on a database, within the limits of the tool.

    A Markdown fence and a final semicolon are removed. Results are cached, because two rewards need them.
    """
    rows = _rows_of(fenced_block(answer), image, len(due.rows) + 1)
    return rows is not None and same_rows(rows, due)


def _rows_of(query: str, image: bytes, enough: int) -> list[PlainRow] | None:
    """Return the first rows of a query within the limits, or None if it fails or returns bytes."""
    try:
        database = Database(image, limits=SqlLimits(counted=enough))
        result = database.query(query.rstrip().rstrip(";"), keep=enough)
    except SqlError:
        return None
    has_bytes = any(isinstance(cell, bytes) for row in result.rows for cell in row)
    return None if has_bytes else [cast("PlainRow", row) for row in result.rows]


def contains_gold(query: str, truth: SqlTruth) -> bool:
    """Return whether a query returns the gold rows on both databases, with at most `MAX_EXTRA` additional columns.

    Constants and copies of the shown rows do not match, because the hidden database has other rows.
    """
    pairs = ((truth.image, truth.rows), (truth.hidden, truth.hidden_rows))
    tables = [_rows_of(query, image, len(due.rows) + 1) or [] for image, due in pairs]
    if any(not rows or len(rows) != len(due.rows) for rows, (_, due) in zip(tables, pairs, strict=True)):
        return False
    gold, width = len(truth.rows.rows[0]), len(tables[0][0])
    if width > gold + MAX_EXTRA:
        return False
    return any(
        all(
            same_rows([tuple(row[column] for column in columns) for row in rows], due)
            for rows, (_, due) in zip(tables, pairs, strict=True)
        )
        for columns in islice(permutations(range(width), gold), MAX_CHOICES)
    )


def gold_rows_found(task: Task, trajectory: Trajectory) -> Progress:
    """Turn verifier with one milestone: a call whose query returns the gold rows (`contains_gold`)."""
    truth = truth_of(task, SqlTruth)
    reached: list[set[str]] = [set() for _ in range(trajectory.num_turns)]
    for call in made_calls(task, trajectory):
        query = call.arguments.get("query")
        if call.outcome.status is not ToolStatus.OK or not isinstance(query, str):
            continue
        if contains_gold(query, truth):
            reached[call.turn].add("gold rows")
            break
    return Progress(reached, 1)


def paraphrases(truth: SqlTruth) -> tuple[str, ...]:
    """Return other forms of the right answer: another query with the same rows, or the value in another notation."""
    if isinstance(truth.value, Quantity):
        number = truth.value.value
        whole = number == int(number)
        return (f"The answer is {number:,.0f}" if whole else f"It is \\boxed{{{number:.2f}}}",)
    if truth.value is not None:
        text = truth.value.accepted[0]
        return f" {text.upper()}.", f"The answer is {text}.", f"It is \\boxed{{{text}}}."
    query = truth.query.rstrip().rstrip(";")
    fenced_query = f"```sql\n{query};\n```"
    if truth.rows.ordered:
        return fenced_query, f"SELECT * FROM ({query}) LIMIT -1 OFFSET 0"
    return fenced_query, f"WITH answer AS ({query}) SELECT * FROM answer"


def result_set(task: Task, trajectory: Trajectory) -> float:
    """Return 1 if the final answer is right, else 0."""
    return float(is_right(trajectory.answer, truth_of(task, SqlTruth)))


def shown_rows(task: Task, trajectory: Trajectory) -> float:
    """Return 1 if the answer is right on the shown database, else 0. Reported only."""
    truth = truth_of(task, SqlTruth)
    if truth.value is not None:
        return result_set(task, trajectory)
    return float(returns_rows(trajectory.answer, truth.image, truth.rows))


def was_run(task: Task, trajectory: Trajectory) -> float:
    """Return 1 if the answer is a query that a call executed without an error, else 0."""
    answer = fenced_block(trajectory.answer)
    fine = {one.call_id for one in trajectory.outcomes if one.status is ToolStatus.OK}
    made = [call for message in trajectory.messages for call in message.get("tool_calls", [])]
    ran = [json.loads(call["function"]["arguments"]) for call in made if call["id"] in fine]
    return float(bool(answer) and any(str(one.get("query", "")).strip() == answer for one in ran))
