"""Trackers: destinations for the metrics of a run, selected by name.

`jsonl` writes `metrics.jsonl`, the run's own record: one line per step, in the order logged, flushed to disk before
`log` returns. `tensorboard` writes event files; it and the trackers of `service_trackers` need the extra of their name.
A plug-in is a class with `log` and `close` that is called with the run folder and the step to resume from
(docs/extend/plugins.md).
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import BytesIO, FileIO
from pathlib import Path
from typing import Protocol, cast

from ludus.diagnostics.service_trackers import ServiceTracker, import_extra
from ludus.errors import LudusError, StorageError, UserError
from ludus.plugins import check_result, find_plugin
from ludus.rollouts.rollout_files import replaced_file

METRICS_FILE = "metrics.jsonl"


class Tracker(Protocol):
    """Records the metrics of each step. Raises StorageError if they cannot be written."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step. The trainer calls this once per step, in increasing order."""
        ...

    def close(self) -> None:
        """Close the tracker; nothing can be logged afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class MetricsRow:
    """One line of a metrics file."""

    step: int
    metrics: Mapping[str, float]


class AppendedFile:
    """A file that grows; data is on disk when `append` returns. Raises StorageError if it cannot be opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = FileIO(path, "ab")
        except OSError as error:
            raise StorageError(f"{path} cannot be opened: {error.strerror or error}.") from error

    def append(self, data: bytes) -> None:
        """Append data. Raises StorageError, with the file unchanged, if the disk is full."""
        file, rest = self._file, memoryview(data)
        before = os.fstat(file.fileno()).st_size
        try:
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(file.fileno(), before)
            text = f"{self.path} could not be written: {error.strerror or error}."
            raise StorageError(text, "Free some space; earlier lines are unchanged.") from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class JsonLinesTracker(AppendedFile):
    """Tracker that writes one JSON object per line: `{"step": 3, "reward/mean": 0.25, ...}`, with exact numbers.

    NaN and infinities are the strings "NaN", "Infinity" and "-Infinity", so that each line is valid JSON.
    A line is on disk when `log` returns. An existing file is continued: a last line that a crash
    cut short is removed, and with `resume_step` all lines after that step too. The remaining lines are
    unchanged. Raises StorageError if writing fails, UserError for a file with other content.
    """

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        if path.exists():  # remove an incomplete last line, and the lines that the resumed run writes again
            content = _content(path, StorageError)
            kept = (line for row, line in _rows(content, path) if resume_step is None or row.step <= resume_step)
            if (remaining := b"".join(kept)) != content:
                with replaced_file(path) as file:
                    file.write(remaining)
        super().__init__(path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line. Raises StorageError, with the file unchanged, if the disk is full."""
        if "step" in metrics:
            raise ValueError('a metric may not be called "step": that is the key of the step itself')
        row = {"step": int(step)} | {name: _to_json(value) for name, value in metrics.items()}
        self.append(json.dumps(row, allow_nan=False).encode("ascii") + b"\n")


class TensorBoardTracker(AppendedFile):
    """Tracker that writes TensorBoard event files in a folder, a new one at each start of the run.

    TensorBoard stores float32. With `resume_step` a session log discards the steps after it. Raises
    UserError if the extra is missing, StorageError if writing fails.
    """

    def __init__(self, folder: Path, resume_step: int | None = None) -> None:
        self._events = import_extra("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summaries = import_extra("tensorboard.compat.proto.summary_pb2", "tensorboard")
        self._records = import_extra("tensorboard.summary.writer.record_writer", "tensorboard")
        number = len(list(folder.glob("events.out.tfevents.*")))  # TensorBoard reads the files in the order of names
        super().__init__(folder / f"events.out.tfevents.{number:010d}.ludus")
        self._write(file_version="brain.Event:2")
        if resume_step is not None:
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._write(step=resume_step + 1, session_log=start)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step as scalars. Raises StorageError if the disk is full."""
        values = [self._summaries.Summary.Value(tag=n, simple_value=float(v)) for n, v in metrics.items()]
        self._write(step=step, summary=self._summaries.Summary(value=values))

    def _write(self, **fields: object) -> None:
        buffer = BytesIO()
        event = self._events.Event(wall_time=time.time(), **fields)
        self._records.RecordWriter(buffer).write(event.SerializeToString())
        self.append(buffer.getvalue())


TrackerFactory = Callable[[Path, int | None], Tracker]

TRACKERS: dict[str, TrackerFactory] = {
    "jsonl": lambda folder, step: JsonLinesTracker(folder / METRICS_FILE, step),
    "tensorboard": lambda folder, step: TensorBoardTracker(folder / "tensorboard", step),
    **{name: partial(ServiceTracker, name) for name in ("wandb", "mlflow", "trackio")},
}
"""Tracker factories by name: functions of the run folder and the step to resume from (None for a new run)."""


def make_tracker(name: str, folder: Path, resume_step: int | None = None) -> Tracker:
    """Return the tracker of a name, writing into a run folder. Raises ConfigError for an unknown name or a result
    that is not a `Tracker`."""
    tracker = find_tracker(name)(folder, resume_step)
    check_result(f"run.trackers = {name}", tracker, Tracker)
    return tracker


def find_tracker(name: str) -> TrackerFactory:
    """Return a built-in tracker or a plug-in. Raises ConfigError if there is none."""
    if name in TRACKERS:
        return TRACKERS[name]
    return cast(TrackerFactory, find_plugin("trackers", name, "run.trackers", TRACKERS))


def read_metrics(path: Path) -> list[MetricsRow]:
    """Return all rows of a metrics file, in order. The file may still be written by a run.

    An incomplete last line is ignored. Any other line that does not parse raises UserError, with file and line.
    """
    return [row for row, _ in _rows(_content(path, UserError, "Check the path."), path)]


def _content(path: Path, failure: type[LudusError], hint: str = "") -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise failure(f"{path} cannot be read: {error.strerror or error}.", hint) from error


def _rows(content: bytes, path: Path) -> list[tuple[MetricsRow, bytes]]:
    """Return each row with its line, newline included. A last line that does not parse is ignored as incomplete."""
    lines = content.splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            data = json.loads(line)
            if not isinstance(data, dict) or not isinstance(data.get("step"), int):
                raise ValueError("it is not a JSON object with a step")
            row = MetricsRow(data.pop("step"), {name: _from_json(value) for name, value in data.items()})
            rows.append((row, line + b"\n"))
        except (ValueError, TypeError) as error:
            if number == len(lines):
                break
            text = f"{path}, line {number}, is not a row of metrics: {error}."
            raise UserError(text, "Repair or remove the line, or move the file away.") from error
    return rows


def _to_json(value: float) -> float | str:
    number = float(value)
    return number if math.isfinite(number) else json.dumps(number)


def _from_json(value: object) -> float:
    if not isinstance(value, int | float | str) or isinstance(value, bool):
        raise TypeError(f"{value!r} is not a number")
    return float(value)  # a text is NaN, Infinity or -Infinity
