"""The HTML page of a report: one file without network access; all text of models and tools is escaped."""

from __future__ import annotations

import base64
import hashlib
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from itertools import groupby
from typing import Final

from jinja2 import Environment

from ludus.evaluation.stats import t_interval
from ludus.evaluation.tables import message_lines
from ludus.report import data
from ludus.report.data import NUMBERS, ReportedRun
from ludus.report.svg import BOX, POINTS, Chart, Drawn, downsample, histogram, line_chart, style
from ludus.rollouts.ledger import RolloutOutcome
from ludus.rollouts.rollout_files import RolloutRecord, read_rollouts
from ludus.types import Message, grouped

_FOLDED_POINTS: Final = 120
_SHORT: Final = 600
"""Characters above which a message is folded."""
_LONGEST: Final = 20_000

Groups = Sequence[Sequence[ReportedRun]]


def render(runs: Sequence[ReportedRun]) -> str:
    """Return the page."""
    groups = list(grouped(runs, lambda run: run.group).values())
    names = ("report.html", "report.css", "report.js", "panels.toml")
    page, css, script, panels = (resources.files(__package__).joinpath(name).read_text("utf-8") for name in names)
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(page)
    titles = tomllib.loads(panels)
    return template.render(
        title=", ".join(run.name for run in runs),
        css=css,
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        runs=runs,
        tables=[*data.summary_tables(runs), *data.probe_tables(runs)],
        legend=[(style(number), _legend(group)) for number, group in enumerate(groups)],
        curves=curves(groups, titles),
        most_points=POINTS,
        folded=folded(groups, titles),
        distributions=distributions(groups),
        episode_tables=[table for table in data.episode_tables(runs) if table.rows],
        transcripts=transcripts(runs),
        box=BOX,
        text_of=message_text,
        short=_SHORT,
        longest=_LONGEST,
    )


def _legend(group: Sequence[ReportedRun]) -> str:
    names = ", ".join(run.name for run in group)
    return f"{names} (mean of {len(group)} seeds, 95 % interval)" if len(group) > 1 else names


def curves(groups: Groups, titles: Mapping[str, str]) -> list[Chart | None]:
    """Return the charts of held-out success and of the metrics with a title."""
    alarms: dict[str, list[int]] = {}
    for run in (run for group in groups for run in group):
        for name, steps in run.alarms:
            alarms.setdefault(f"{run.name}: {name}", []).extend(steps)
    panels = [line_chart(title, drawn(groups, name, POINTS), alarms) for name, title in titles.items()]
    return [*held_out(groups, alarms), *panels]


def folded(groups: Groups, titles: Mapping[str, str]) -> Iterator[tuple[str, list[Chart | None], list[str]]]:
    """Yield the first part of the names of the other metrics, their charts, and the values of constant ones."""
    rows = [row for group in groups for run in group for row in run.metrics.values()]
    names = {name for row in rows for name in row if name not in titles and not name.startswith("eval/")}
    for prefix, members in groupby(sorted(names), key=lambda name: name.partition("/")[0]):
        values = {name: {row[name] for row in rows if name in row} for name in members}
        constant = [f"{name} = {next(iter(found)):g}" for name, found in values.items() if len(found) == 1]
        varying = [name for name, found in values.items() if len(found) > 1]
        yield prefix, [line_chart(name, drawn(groups, name, _FOLDED_POINTS)) for name in varying], constant


def drawn(groups: Groups, name: str, most: int) -> list[Drawn]:
    """Return a curve per group that has the metric: of a run, or the mean over seeds; only finite values count."""
    found = []
    for number, group in enumerate(groups):
        rows = [[(step, row[name]) for step, row in run.metrics.items() if name in row] for run in group]
        series = [[point for point in points if math.isfinite(point[1])] for points in rows]
        series = [points for points in series if points]
        if len(series) == 1:
            found.append(Drawn(number, downsample(series[0], most)))
        elif series:
            found.append(over_seeds(number, series, most))
    return found


def over_seeds(number: int, series: Sequence[Sequence[tuple[int, float]]], most: int) -> Drawn:
    """Return the mean at the steps that two or more seeds have, with Student's interval."""
    by_step: dict[int, list[float]] = {}
    for points in series:
        for step, value in points:
            by_step.setdefault(step, []).append(value)
    steps = sorted(step for step, values in by_step.items() if len(values) > 1)
    steps = steps[:: math.ceil(len(steps) / most)] if steps else []
    estimates = [(step, t_interval(by_step[step])) for step in steps]
    upper = [(step, one.interval.high) for step, one in estimates]
    lower = [(step, one.interval.low) for step, one in reversed(estimates)]
    means = [(step, one.mean) for step, one in estimates]
    return Drawn(number, means, [downsample(points, most // 2) for points in series], [*upper, *lower])


def held_out(groups: Groups, alarms: Mapping[str, Sequence[int]]) -> Iterator[Chart | None]:
    """Yield a chart of held-out success for each split and sampling, with 95 % intervals.

    The intervals are over the tasks of a run, or over the seeds of a group.
    """
    names = dict.fromkeys(name for group in groups for run in group for name in run.series())
    for name in names:
        points = []
        for number, group in enumerate(groups):
            results = [[one.result for one in run.series().get(name, [])] for run in group]
            results = [own for own in results if own]
            if len(results) > 1:
                points.append(over_seeds(number, [[(o.plan.step, o.rate) for o in own] for own in results], POINTS))
                continue
            for own in results:
                bars = [(one.plan.step, one.interval.low, one.interval.high) for one in own]
                points.append(Drawn(number, [(one.plan.step, one.rate) for one in own], bars=bars))
        yield line_chart(f"held-out success, {name}", points, alarms)


def distributions(groups: Groups) -> Iterator[tuple[str, list[Chart]]]:
    """Yield a heading and histograms of the first and the last steps of each run."""
    for number, run in ((n, run) for n, group in enumerate(groups) for run in group if run.early and run.late):
        ends = (run.early, run.late)
        figures = []
        for name, value in NUMBERS.items():
            first, last = ([value(record) for record in records] for records in ends)
            means = f"mean {sum(first) / len(first):.3g}, then {sum(last) / len(last):.3g}"
            figures.append(histogram(f"{name}: {means}", first, last, number))
        spans = [f"{min(r.step for r in part)} to {max(r.step for r in part)}" for part in ends]
        yield f"{run.name}, steps {spans[0]} and {spans[1]}", figures


def transcripts(runs: Sequence[ReportedRun]) -> Iterator[tuple[str, list[RolloutRecord]]]:
    """Yield the two worst and the two best episodes of each run, and a task at its first and last evaluation."""
    for run in runs:
        finished = [record for record in run.late if record.outcome is not RolloutOutcome.FAILED]
        ordered = sorted(finished, key=lambda record: record.trajectory.reward)
        if chosen := ordered if len(ordered) < 4 else [*ordered[:2], *ordered[-2:]]:
            yield f"Worst and best episodes of the last steps: {run.name}", chosen
        if pair := _first_and_last(run):
            yield f"The same task at the first and the last evaluation: {run.name}", pair


def _first_and_last(run: ReportedRun) -> list[RolloutRecord]:
    """Return the rollouts of one task, preferably one whose success rose, at two evaluations; empty without them."""
    for found in run.series().values():
        first, last = found[0], found[-1]
        files = [run.folder.evaluations / f"{one.name}.jsonl.gz" for one in (first, last)]
        before, after = first.result.scores, last.result.scores
        common = sorted((task for task in before if task in after), key=lambda task: before[task] - after[task])
        if len(found) > 1 and common and all(file.is_file() for file in files):
            records = (next((r for r in read_rollouts(file) if r.group == common[0]), None) for file in files)
            return [record for record in records if record is not None]
    return []


def message_text(message: Message) -> str:
    """Return the role, reasoning, content and calls of a message."""
    return f"{message['role']}: " + "\n".join(message_lines(message, "({})", "-> {}"))
