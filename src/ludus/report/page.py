"""The HTML page of a report: one file without network access; all text of models and tools is escaped."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from itertools import groupby
from typing import Final

from ludus.evaluation.stats import t_interval
from ludus.report import data
from ludus.report.data import NUMBERS, ReportedRun, ReportTable
from ludus.report.svg import POINTS, Drawn, downsample, histogram, line_chart, style
from ludus.rollouts.ledger import RolloutOutcome
from ludus.rollouts.rollout_files import RolloutRecord, read_rollouts
from ludus.types import Message

PANELS: Final[Mapping[str, str]] = {
    "reward/mean": "reward",
    "success/mean": "success in training",
    "policy/entropy": "entropy, nats/token",
    "policy/kl_reference": "KL to the initial policy, nats/token",
    "optim/grad_norm": "gradient norm",
    "response_length/mean": "sampled tokens per episode",
    "turns/mean": "turns per episode",
    "episode/stop/truncated": "truncated episodes",
    "groups/reward_std": "standard deviation of rewards in a group",
    "groups/zero_variance": "groups without reward differences",
    "tools/calls_per_episode": "tool calls per episode",
    "tools/error_rate": "failed tool calls",
    "loss/total": "loss",
    "rft/kept": "rollouts kept for training",
    "preference/margin": "margin of chosen over rejected, nats",
    "preference/accuracy": "pairs ranked correctly",
    "held_out/accuracy": "held-out pairs ranked correctly",
    "held_out/auc": "held-out area under the curve",
    "held_out/error": "held-out error",
}
"""Titles of the metrics that are always visible; all others are folded."""
_FOLDED_POINTS: Final = 120
_SHORT: Final = 600
"""Characters above which a message is folded."""
_LONGEST: Final = 20_000

Groups = Sequence[Sequence[ReportedRun]]


def render(runs: Sequence[ReportedRun]) -> str:
    """Return the page."""
    by_group: dict[object, list[ReportedRun]] = {}
    for run in runs:
        by_group.setdefault(run.group, []).append(run)
    groups = list(by_group.values())
    css, script = (resources.files(__package__).joinpath(f"report.{end}").read_text("utf-8") for end in ("css", "js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    title = escape(", ".join(run.name for run in runs))
    tables = data.summary_tables(runs)
    body = [
        f"<h1>{title}</h1>",
        *(f'<p class="note">{escape(run.name)}: {escape(text)}</p>' for run in runs for text in run.missing),
        *map(_table_html, tables),
        *map(_table_html, data.probe_tables(runs)),
        "<h2>Curves</h2>",
        legend(groups),
        *curves(groups),
        *distributions(groups),
        *(_table_html(table) for table in data.episode_tables(runs) if table.rows),
        *transcripts(runs),
    ]
    head = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{css}</style></head><body>"
    )
    return f"{head}{''.join(body)}<script>{script}</script></body></html>\n"


def _table_html(table: ReportTable) -> str:
    if not table.rows:
        return f'<h2>{escape(table.title)}</h2><p class="note">None.</p>'
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    rows = ("".join(map(_cell, row)) for row in table.rows)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    text = f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
    return f"<h2>{escape(table.title)}</h2>{text}{note}"


def _cell(text: str) -> str:
    kind = f' class="{text}"' if text in ("fault", "warn") else ' class="rate"' if "% [" in text else ""
    return f"<td{kind}>{escape(text)}</td>"


def legend(groups: Groups) -> str:
    """Return the colours of the groups; a group of several seeds is a mean with its interval."""
    items = []
    for number, group in enumerate(groups):
        names = ", ".join(run.name for run in group)
        text = f"{names} (mean of {len(group)} seeds, 95 % interval)" if len(group) > 1 else names
        items.append(f'<span><i class="{style(number)}"></i>{escape(text)}</span>')
    return f'<p class="legend">{"".join(items)}</p>'


def curves(groups: Groups) -> Iterator[str]:
    """Yield held-out success, the visible metrics, and the others by the first part of their name."""
    runs = [run for group in groups for run in group]
    names = dict.fromkeys(name for run in runs for row in run.metrics.values() for name in row)
    alarms: dict[str, list[int]] = {}
    for run in runs:
        for name, steps in run.alarms:
            alarms.setdefault(f"{run.name}: {name}", []).extend(steps)
    figures = [*held_out(groups, alarms)]
    figures += [line_chart(PANELS[n], drawn(groups, n, POINTS), alarms) for n in PANELS if n in names]
    yield f'<div class="charts">{"".join(figures)}</div>'
    yield f'<p class="note">Curves of more than {POINTS} steps show the minimum and maximum of each range of steps. '
    yield "Triangles mark steps at which an alarm begins; further metrics are folded below.</p>"
    rest = sorted(name for name in names if name not in PANELS and not name.startswith("eval/"))
    for prefix, members in groupby(rest, key=lambda name: name.partition("/")[0]):
        plots, constant = [], []
        for name in members:
            values = {row[name] for run in runs for row in run.metrics.values() if name in row}
            if len(values) == 1:
                constant.append(f"{name} = {values.pop():g}")
            else:
                plots.append(line_chart(name, drawn(groups, name, _FOLDED_POINTS)))
        note = f'<p class="note">Constant: {escape(", ".join(constant))}</p>' if constant else ""
        yield f'<details><summary>{escape(prefix)}</summary><div class="charts">{"".join(plots)}</div>{note}</details>'


def drawn(groups: Groups, name: str, most: int) -> list[Drawn]:
    """Return a curve per group that has the metric: of a run, or the mean over seeds with its interval."""
    found = []
    for number, group in enumerate(groups):
        series = [[(s, row[name]) for s, row in run.metrics.items() if name in row] for run in group]
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
            if math.isfinite(value):
                by_step.setdefault(step, []).append(value)
    steps = sorted(step for step, values in by_step.items() if len(values) > 1)
    steps = steps[:: math.ceil(len(steps) / most)] if steps else []
    estimates = [(step, t_interval(by_step[step])) for step in steps]
    band = [(step, one.interval.low, one.interval.high) for step, one in estimates]
    means = [(step, one.mean) for step, one in estimates]
    return Drawn(number, means, [downsample(points, most // 2) for points in series], band)


def held_out(groups: Groups, alarms: Mapping[str, Sequence[int]]) -> Iterator[str]:
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


def distributions(groups: Groups) -> Iterator[str]:
    """Yield histograms of the first and the last steps of each run."""
    with_both = [(n, run) for n, group in enumerate(groups) for run in group if run.early and run.late]
    if not with_both:
        return
    yield '<h2>Distributions over episodes</h2><p class="note">Grey: first steps. Outlined: last steps.</p>'
    for number, run in with_both:
        figures = []
        for name, value in NUMBERS.items():
            first, last = ([value(record) for record in records] for records in (run.early, run.late))
            means = f"mean {sum(first) / len(first):.3g}, then {sum(last) / len(last):.3g}"
            figures.append(histogram(f"{name}: {means}", first, last, number))
        spans = [f"{min(r.step for r in part)} to {max(r.step for r in part)}" for part in (run.early, run.late)]
        yield f"<h3>{escape(run.name)}, steps {spans[0]} and {spans[1]}</h3>"
        yield f'<div class="charts">{"".join(figures)}</div>'


# Transcripts


def transcripts(runs: Sequence[ReportedRun]) -> Iterator[str]:
    """Yield the two worst and the two best episodes of each run, and a task at its first and last evaluation."""
    for run in runs:
        finished = [record for record in run.late if record.outcome is not RolloutOutcome.FAILED]
        ordered = sorted(finished, key=lambda record: record.trajectory.reward)
        if chosen := ordered if len(ordered) < 4 else [*ordered[:2], *ordered[-2:]]:
            yield f"<h2>Worst and best episodes of the last steps: {escape(run.name)}</h2>"
            yield f'<div class="talk">{"".join(map(episode, chosen))}</div>'
        if pair := _first_and_last(run):
            yield f"<h2>The same task at the first and the last evaluation: {escape(run.name)}</h2>"
            yield f'<div class="talk">{"".join(map(episode, pair))}</div>'


def _first_and_last(run: ReportedRun) -> list[RolloutRecord]:
    """Return the rollouts of one task, preferably one whose success rose, at two evaluations; empty without them."""
    for found in run.series().values():
        first, last = found[0], found[-1]
        files = [run.folder.evaluations / f"{one.name}.jsonl.gz" for one in (first, last)]
        before, after = first.result.scores, last.result.scores
        common = sorted(before.keys() & after.keys(), key=lambda task: before[task] - after[task])
        if len(found) > 1 and common and all(file.is_file() for file in files):
            records = (next((r for r in read_rollouts(file) if r.group == common[0]), None) for file in files)
            return [record for record in records if record is not None]
    return []


def episode(record: RolloutRecord) -> str:
    """Return a transcript with its task, reward and stop reason."""
    trajectory = record.trajectory
    parts = ", ".join(f"{name} {value:g}" for name, value in trajectory.rewards.items())
    title = f"{record.group}, step {record.step}: reward {trajectory.reward:g}, {trajectory.stop_reason}"
    talk = "".join(map(message_html, trajectory.messages))
    return f'<article><h3>{escape(title)}</h3><p class="note">{escape(parts)}</p>{talk}</article>'


def message_html(message: Message) -> str:
    """Return a message: role, reasoning, content and calls; a long one is folded, and cut after `_LONGEST`."""
    calls = [f"-> {c['function']['name']} {c['function']['arguments']}" for c in message.get("tool_calls", [])]
    thought = message.get("reasoning_content", "")
    lines = [f"({thought})" if thought else "", message["content"], *calls]
    text = f"{message['role']}: " + "\n".join(line for line in lines if line)
    kind = message["role"] if message["role"] in ("assistant", "tool") else "prompt"
    if len(text) <= _SHORT:
        return f'<pre class="{kind}">{escape(text)}</pre>'
    more = f"\n... {len(text) - _LONGEST:,} more characters" if len(text) > _LONGEST else ""
    body = f'<pre class="{kind}">{escape(text[:_LONGEST] + more)}</pre>'
    return f"<details><summary>{escape(text[:200])} ... ({len(text):,} characters)</summary>{body}</details>"
