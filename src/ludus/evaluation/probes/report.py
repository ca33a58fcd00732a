"""The result of a probe: rows of named values, with intervals over tasks, and notes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ludus.errors import UserError
from ludus.evaluation import stats
from ludus.evaluation.stats import Interval
from ludus.evaluation.tables import ReportTable, format_rate
from ludus.types import JSON

Scores = Mapping[str, float]
"""A number by task id."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A mean with its 95 % interval. `signed`: a difference; `percent`: a share, not a number of nats or tokens."""

    value: float
    interval: Interval
    signed: bool = False
    percent: bool = True

    def __str__(self) -> str:
        form = f"{'+' if self.signed else ''}{'.1%' if self.percent else '.3f'}"
        return format_rate(self.value, self.interval, form)

    def to_json(self) -> JSON:
        return {"value": self.value, "low": self.interval.low, "high": self.interval.high, "text": str(self)}


Cell = str | int | float | Measured | None


@dataclass(frozen=True)
class ProbeReport:
    """Rows with equal keys, sentences about them, and sampled texts.

    A text has a name and spans, each with a note; a span without a note is not marked.
    """

    kind: str
    title: str
    rows: Sequence[Mapping[str, Cell]]
    notes: Sequence[str] = ()
    failed: bool = False
    texts: Sequence[tuple[str, Sequence[tuple[str, str]]]] = ()

    def to_json(self) -> dict[str, JSON]:
        rows: list[JSON] = [
            {name: cell.to_json() if isinstance(cell, Measured) else cell for name, cell in row.items()}
            for row in self.rows
        ]
        texts: list[JSON] = [{"name": name, "spans": [list(span) for span in spans]} for name, spans in self.texts]
        return {"kind": self.kind, "title": self.title, "rows": rows, "notes": list(self.notes), "texts": texts}

    @property
    def table(self) -> ReportTable:
        """The report as text."""
        rows = [["" if cell is None else str(cell) for cell in row.values()] for row in self.rows]
        return ReportTable(self.title, list(self.rows[0]), rows, "\n\n".join(self.notes))


def stored_reports(folder: Path) -> dict[str, ReportTable]:
    """Return the reports that `ludus probe --run` has stored in a folder, as text by name."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text("utf-8"))
        rows = [[_text(cell) for cell in row.values()] for row in data["rows"]]
        columns = list(data["rows"][0]) if rows else []
        found[path.stem] = ReportTable(data["title"], columns, rows, "\n\n".join(data["notes"]))
    return found


def _text(cell: JSON) -> str:
    return str(cell["text"]) if isinstance(cell, dict) else "" if cell is None else str(cell)


def mean_over_tasks(scores: Scores, *, percent: bool = True, seed: int = 0) -> Measured:
    """Return the mean over tasks. Raises UserError for fewer than 2.

    0/1 scores have Wilson's interval, other shares `stats.clustered_interval`, nats and tokens a bootstrap interval.
    """
    values = list(scores.values())
    check_tasks_suffice(values)
    if percent and all(value in (0, 1) for value in values):
        return Measured(sum(values) / len(values), stats.wilson(round(sum(values)), len(values)))
    if percent:
        return Measured(math.fsum(values) / len(values), stats.clustered_interval(values))
    found = stats.bootstrap_mean(values, seed=seed)
    return Measured(found.mean, found.interval, percent=False)


def difference(after: Scores, before: Scores, *, percent: bool = True) -> Measured:
    """Return the paired `after - before`; nats have Student's interval. Raises UserError for fewer than 2 tasks."""
    check_tasks_suffice(list(after))
    if not percent:
        gaps = stats.t_interval([after[task] - before[task] for task in before])
        return Measured(gaps.mean, gaps.interval, signed=True, percent=False)
    found = stats.paired_difference(after, before)
    return Measured(found.difference, found.interval, signed=True, percent=percent)


def compared(after: Scores, before: Scores | None, name: str = "difference") -> dict[str, Cell]:
    """Return the cells of a success, and of its paired difference to another one."""
    return {"success": mean_over_tasks(after), name: None if before is None else difference(after, before)}


def check_tasks_suffice(tasks: Sequence[object]) -> None:
    """Raise UserError for fewer than 2 tasks, which have no interval."""
    if len(tasks) < 2:
        raise UserError(f"The probe has {len(tasks)} usable tasks, too few for an interval.", "Increase --tasks.")
