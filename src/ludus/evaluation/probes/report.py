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
        low, high = (format(bound, form) for bound in (self.interval.low, self.interval.high))
        return f"{format(self.value, form)} [{low}, {high}]"

    def to_json(self) -> JSON:
        return {"value": self.value, "low": self.interval.low, "high": self.interval.high, "text": str(self)}


Cell = str | int | float | Measured | None


@dataclass(frozen=True)
class ProbeReport:
    """Rows with equal keys, and sentences about them."""

    kind: str
    title: str
    rows: Sequence[Mapping[str, Cell]]
    notes: Sequence[str] = ()
    failed: bool = False

    def to_json(self) -> dict[str, JSON]:
        rows: list[JSON] = [
            {name: cell.to_json() if isinstance(cell, Measured) else cell for name, cell in row.items()}
            for row in self.rows
        ]
        return {"kind": self.kind, "title": self.title, "rows": rows, "notes": list(self.notes)}

    def to_markdown(self) -> str:
        names = list(self.rows[0])
        cells = [["" if cell is None else str(cell).replace("|", "\\|") for cell in row.values()] for row in self.rows]
        lines = ["| " + " | ".join(one).replace("\n", " ") + " |" for one in (names, ["---"] * len(names), *cells)]
        return "\n".join([f"# {self.title}", "", *lines, "", *(f"{note}\n" for note in self.notes)])


@dataclass(frozen=True)
class StoredReport:
    """A report that `ludus probe --run` has stored, with the cells as text."""

    title: str
    rows: Sequence[Mapping[str, str]]
    notes: Sequence[str]


def stored_reports(folder: Path) -> dict[str, StoredReport]:
    """Return the stored reports of a folder by name."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text("utf-8"))
        rows = [{name: _text(cell) for name, cell in row.items()} for row in data["rows"]]
        found[path.stem] = StoredReport(data["title"], rows, data["notes"])
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


def check_tasks_suffice(tasks: Sequence[object]) -> None:
    """Raise UserError for fewer than 2 tasks, which have no interval."""
    if len(tasks) < 2:
        raise UserError(f"The probe has {len(tasks)} usable tasks, too few for an interval.", "Increase --tasks.")
