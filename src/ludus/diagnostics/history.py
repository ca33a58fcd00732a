"""The metrics of a run so far, values of a metric in them, and the stages of its curriculum."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean
from typing import Final

from ludus.config.sections.curriculum import CurriculumConfig

Row = Mapping[str, float]
History = Sequence[Row]

SUCCESS: Final = "success/mean"
COLLAPSE: Final = "collapse/"
"""Prefix of the metrics of template collapse, which only the measured steps have."""
_FIRST, _LAST = 40, 60
"""Rows at the beginning and at the end of a run that `MetricsHistory` keeps: more than any alarm compares."""


class MetricsHistory:
    """The metrics of a run that alarms need, in bounded memory.

    Kept are the first and the last steps, and of those between each with an evaluation, a new maximum of
    `success/mean`, or one of the first successes or measurements of template collapse.
    """

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._kept: list[Row] = []
        self._last: deque[tuple[Row, bool]] = deque()
        self._num = self._successes = self._measured = 0
        self._record = 0.0
        for row in rows:
            self.append(row)

    def append(self, row: Row) -> None:
        """Add the metrics of a step."""
        success = row.get(SUCCESS, 0.0)
        is_measured = any(name.startswith(COLLAPSE) for name in row)
        counts = [self._num] + [self._successes] * (success > 0) + [self._measured] * is_measured
        is_early = min(counts) < _FIRST
        stays = is_early or success > self._record or any(name.startswith("eval/") for name in row)
        self._num, self._successes = self._num + 1, self._successes + (success > 0)
        self._measured += is_measured
        self._record = max(self._record, success)
        self._last.append((row, stays))
        if len(self._last) > _LAST:
            oldest, stays = self._last.popleft()
            if stays:
                self._kept.append(oldest)

    @property
    def rows(self) -> list[Row]:
        """The rows, oldest first."""
        return [*self._kept, *(row for row, _ in self._last)]


STAGE: Final = "curriculum/stage"
"""Metric: the stage of the curriculum in which a step was sampled, from 1."""
GATE: Final = "curriculum/gate_success"
"""Metric: the mean success that the gate of the stage compares."""


@dataclass(frozen=True, slots=True)
class PassedGate:
    """The end of a stage of a curriculum after `step`, at the mean success of its last groups."""

    stage: str
    following: str
    step: int
    success: float
    rule: str

    def __str__(self) -> str:
        return f"stage {self.stage} ended after step {self.step} at success {self.success:.3g} ({self.rule})"


def passed_gates(rows: Iterable[tuple[int, Row]], settings: CurriculumConfig) -> list[PassedGate]:
    """Return the gates that a run passed, from its metrics by step."""
    found, before = list[PassedGate](), None
    names, stages = list(settings.stages), list(settings.stages.values())
    for step, row in rows:
        if STAGE not in row:
            continue
        if before is not None and row[STAGE] > before[1][STAGE]:
            number = int(before[1][STAGE])
            stage = stages[number - 1] if stages else None
            least = settings.success if stage is None or stage.success is None else stage.success
            most = (stage.steps if stage is not None else None) or settings.steps
            rule = f"success > {least:g} over {settings.groups} groups" + (f", or {most} steps" if most else "")
            own, following = (names[number - 1], names[number]) if names else (str(number), str(number + 1))
            found.append(PassedGate(own, following, before[0], before[1][GATE], rule))
        before = (step, row)
    return found


def last_values(history: History, name: str, steps: int) -> list[float]:
    """Return the newest values, of steps with the metric; an empty list if there are fewer or the newest lacks it."""
    if not history or name not in history[-1]:
        return []
    values = list(islice((row[name] for row in reversed(history) if name in row), steps))[::-1]
    return values if len(values) == steps else []


def first_mean(history: History, name: str, steps: int, last: int) -> float | None:
    """Return the mean of the first `steps` values, or None if the rows before the `last` ones have fewer."""
    values = [row[name] for row in history[: len(history) - last] if name in row][:steps]
    return fmean(values) if len(values) == steps else None
