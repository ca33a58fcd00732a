"""Read the data of a report from run folders, and summarise it as tables.

A report of several runs groups those that differ only in their seed. Rollouts are read for the first and the last
steps only.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Final

from ludus.config.load import load_config
from ludus.config.schema import Config
from ludus.config.toml import flat_settings
from ludus.diagnostics.alarms import alarms_by_step
from ludus.diagnostics.history import passed_gates
from ludus.diagnostics.trackers import read_metrics
from ludus.errors import UserError
from ludus.evaluation.comparison import StoredEvaluation, compare, load_stored, paired_verdict
from ludus.evaluation.evaluate import Evaluation
from ludus.evaluation.probes.common import stored_reports
from ludus.evaluation.run_findings import Finding, RunData, examine_run
from ludus.evaluation.tables import ReportTable, format_rate, format_sampling, format_success
from ludus.rollouts.rollout_files import RolloutRecord, read_rollouts
from ludus.training.run.run_dir import Kind, RunFolder, is_running, kind_of, recipe_of
from ludus.types import ToolStatus, grouped

STEPS: Final = 5
"""Steps whose rollouts are read, at each end of a run."""
_EPISODES: Final = 1000
"""Rollouts after which no further step is read."""
_SAME: Final = ("run.seed", "run.dir", "run.trackers", "run.threads")
"""Settings in which the runs of a group may differ."""

NUMBERS: Final[dict[str, Callable[[RolloutRecord], float]]] = {
    "reward": lambda record: record.trajectory.reward,
    "sampled tokens": lambda record: record.trajectory.num_action_tokens,
    "turns": lambda record: record.trajectory.num_turns,
    "tool calls": lambda record: len(record.trajectory.call_outcomes),
}
"""Numbers of an episode whose distributions are shown."""


@dataclass(frozen=True)
class ReportedRun:
    """Data of one run in a report. `early` and `late` are rollouts of the first and the last steps."""

    name: str
    folder: RunFolder
    kind: Kind
    config: Config
    settings: dict[str, str]
    metrics: dict[int, dict[str, float]]
    evaluations: tuple[StoredEvaluation, ...]
    early: tuple[RolloutRecord, ...]
    late: tuple[RolloutRecord, ...]
    findings: tuple[Finding, ...]
    alarms: tuple[tuple[str, tuple[int, ...]], ...]
    state: str

    @property
    def group(self) -> tuple[tuple[str, str], ...]:
        """The settings and the kind of run, without the seed and the folder."""
        return (("kind", self.kind), *sorted((k, v) for k, v in self.settings.items() if k not in _SAME))

    def series(self) -> dict[str, list[StoredEvaluation]]:
        """Return the evaluations of the run's own weights by split and sampling, in the order of steps."""
        own = (one for one in self.evaluations if not one.result.plan.policy)
        return grouped(sorted(own, key=lambda one: one.result.plan.step), lambda one: sampling(one.result))

    @property
    def missing(self) -> list[str]:
        """Missing data of the run, one sentence each."""
        tests = {
            "No step has finished yet.": not self.metrics,
            "One step only: curves are points.": len(self.metrics) == 1,
            "No evaluation is stored: held-out success is unknown.": not self.evaluations,
            "No rollouts are stored: distributions and transcripts are missing.": not self.late,
        }
        return [text for text, holds in tests.items() if holds]


def sampling(result: Evaluation) -> str:
    """Return split, temperature and number of attempts as text."""
    return f"{result.plan.split}, {format_sampling(result.plan)}"


def read_runs(folders: Sequence[Path]) -> list[ReportedRun]:
    """Return the runs of the folders. Raises UserError for a folder that is not a run folder or is named twice."""
    for path in folders:
        RunFolder(path).check()
    if len({path.resolve() for path in folders}) < len(folders):
        raise UserError("A run is named twice.", "Name each run once.")
    names = [path.resolve().name for path in folders]
    unique = len(set(names)) == len(names)
    runs = [_read_one(path, name if unique else str(path)) for path, name in zip(folders, names, strict=True)]
    if not any(run.metrics for run in runs):
        raise UserError("No run has a finished step.", "Wait for the first step, or read log.txt in the run folder.")
    return runs


def _read_one(path: Path, name: str) -> ReportedRun:
    folder = RunFolder(path)
    config = load_config(folder.config)
    metrics: dict[int, dict[str, float]] = {}
    rows = read_metrics(folder.metrics) if folder.metrics.is_file() else []
    for row in rows:
        metrics.setdefault(row.step, {}).update(row.metrics)
    evaluations = tuple(map(load_stored, sorted(folder.evaluations.glob("*.json"))))
    files = sorted(folder.rollouts.glob("step-*.jsonl.gz"))
    early, late = first_records(files[: max(1, len(files) - STEPS)]), first_records(files[::-1])
    data = RunData(config, list(metrics.values()), late, [one.result for one in evaluations])
    raised = alarms_by_step(metrics.items(), config.run.alarms.actions)
    return ReportedRun(
        name,
        folder,
        kind_of(folder),
        config,
        flat_settings(folder.config.read_text("utf-8")),
        dict(sorted(metrics.items())),
        evaluations,
        early,
        late,
        tuple(examine_run(data)) if metrics else (),
        tuple((alarm.name, tuple(starts(steps))) for alarm, steps in raised),
        _run_state(folder, config, max(metrics, default=0)),
    )


def first_records(files: Sequence[Path]) -> tuple[RolloutRecord, ...]:
    """Return the rollouts of the first `STEPS` files, or of fewer if these have `_EPISODES`."""
    found: list[RolloutRecord] = []
    for file in files[:STEPS]:
        found += read_rollouts(file)
        if len(found) >= _EPISODES:
            break
    return tuple(found)


def starts(steps: Sequence[int]) -> Iterator[int]:
    """Yield the first step of each unbroken sequence of steps."""
    known = set(steps)
    return (step for step in steps if step - 1 not in known)


def num_steps(kind: Kind, config: Config) -> int | None:
    """Return the number of steps of a finished run; None if it depends on the number of examples."""
    by_kind: dict[Kind, int | None] = {"sft": config.sft.steps, "rft": config.rft.rounds}
    by_kind |= {"preference": config.preference.steps, "reward-model": config.reward_model.steps}
    return by_kind.get(kind, config.training.steps)


def _run_state(folder: RunFolder, config: Config, done: int) -> str:
    """Return whether the run is finished, running or stopped, and the last error or warning of a stopped one."""
    total = num_steps(kind_of(folder), config)
    if total is not None and done >= total:
        return "finished"
    if is_running(folder):
        return "running"
    log = folder.path / "log.txt"
    lines = log.read_text("utf-8", errors="replace").splitlines() if log.is_file() else []
    reasons = [line for line in lines if " ERROR " in line or "interrupt" in line]
    ended = "ended" if total is None else "stopped, no reason in log.txt"
    return f"stopped: {reasons[-1].partition(': ')[2]}" if reasons else ended


def _heading(runs: Sequence[ReportedRun]) -> ReportTable:
    rows = []
    for run in runs:
        preset = run.config.algorithm.preset if run.kind == "rl" else run.kind
        model = run.config.model.path or "from scratch"
        steps = f"{max(run.metrics, default=0)} of {num_steps(run.kind, run.config) or 'unknown'}"
        timings = read_metrics(run.folder.timings) if run.folder.timings.is_file() else []
        seconds_by_step = {row.step: row.metrics.get("time/step_s", 0.0) for row in timings}
        minutes, seconds = divmod(round(sum(seconds_by_step.values())), 60)
        row = (run.name, recipe_of(run.folder) or "unknown", model, preset, steps, run.state)
        rows.append((*row, f"{minutes // 60}:{minutes % 60:02}:{seconds:02}", *_best_and_last(run)))
    columns = ("run", "recipe", "model", "algorithm", "steps", "state", "duration", "held-out", "best", "last")
    note = "Success with 95 % intervals. Best is the maximum, biased upwards."
    return ReportTable("Runs", columns, tuple(rows), note)


def _best_and_last(run: ReportedRun) -> tuple[str, str, str]:
    """Return the evaluation series with the most steps, its best and its last success."""
    series, splits = run.series(), run.config.evaluation.splits
    if not series:
        return "none", "", ""

    def rank(name: str) -> tuple[int, int]:
        split = series[name][0].result.plan.split
        return -len(series[name]), [*splits, split].index(split)

    name = min(series, key=rank)
    found = [one.result for one in series[name]]
    best, last = max(found, key=lambda one: one.rate), found[-1]
    texts = [f"{format_success(one)}, step {one.plan.step}" for one in (best, last)]
    return name, texts[0], texts[1]


def _evaluation_table(runs: Sequence[ReportedRun]) -> ReportTable:
    rows = []
    for run in runs:
        for name, result in run.evaluations:
            k = result.plan.samples
            several = (f"{result.pass_at(k):.1%}", f"{result.pass_hat(k):.1%}") if k > 1 else ("", "")
            row = (run.name, name, sampling(result), result.plan.policy or f"step {result.plan.step}")
            rows.append((*row, str(len(result.task_ids)), format_success(result), *several))
    columns = ("run", "evaluation", "split and sampling", "weights", "tasks", "pass@1", "pass@k", "pass^k")
    return ReportTable("Evaluations", columns, tuple(rows), "k is the number of attempts; 95 % intervals.")


def _comparison_table(runs: Sequence[ReportedRun]) -> ReportTable:
    """Return the newest evaluations of each two runs, paired by task."""
    rows = []
    for a, b in combinations([run for run in runs if run.evaluations], 2):
        in_a, in_b = a.series(), b.series()
        for name in (name for name in in_a if name in in_b):
            first, second = in_a[name][-1].result, in_b[name][-1].result
            difference = ""
            try:
                found = compare(first, second)
                difference = format_rate(found.difference, found.interval, "+.1%")
                text = paired_verdict(first, second, found)
            except UserError as error:
                text = f"not comparable: {error.message}"
            rows.append((a.name, b.name, name, f"{first.rate:.1%}", f"{second.rate:.1%}", difference, text))
    columns = ("A", "B", "split and sampling", "success of A", "success of B", "B - A", "verdict")
    return ReportTable("Comparison", columns, tuple(rows), "Paired by task on the last evaluation of each run.")


def _settings_table(runs: Sequence[ReportedRun]) -> ReportTable:
    keys = sorted({key for run in runs for key in run.settings} - {"run.dir"})
    values = {key: tuple(run.settings.get(key, "none") for run in runs) for key in keys}
    rows = tuple((key, *found) for key, found in values.items() if len(set(found)) > 1)
    return ReportTable("Configured differently", ("setting", *(run.name for run in runs)), rows)


def _gate_table(runs: Sequence[ReportedRun]) -> ReportTable:
    passed = (
        (run.name, one) for run in runs for one in passed_gates(run.metrics.items(), run.config.training.curriculum)
    )
    rows = tuple((name, g.stage, g.following, str(g.step), f"{g.success:.3f}", g.rule) for name, g in passed)
    columns = ("run", "stage", "next stage", "last step", "success", "gate")
    return ReportTable("Gates of the curriculum", columns, rows)


def _mean_parts(records: Sequence[RolloutRecord]) -> dict[str, float]:
    """Return the mean of each reward part over the records that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for name, value in record.trajectory.rewards.items():
            values[name].append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def probe_tables(runs: Sequence[ReportedRun]) -> Iterator[ReportTable]:
    """Yield the stored reports of `ludus probe`."""
    for run in runs:
        for name, table in stored_reports(run.folder.probes).items():
            yield replace(table, title=f"{table.title}: {run.name}, {name}")


def episode_tables(runs: Sequence[ReportedRun]) -> Iterator[ReportTable]:
    """Yield stop reasons, reward parts and tools of the first and the last steps."""
    reasons: list[tuple[str, ...]] = []
    parts: list[tuple[str, ...]] = []
    tools: list[tuple[str, ...]] = []
    for run in runs:
        ends = (run.early, run.late)
        counts = [Counter(str(r.trajectory.stop_reason) for r in records) for records in ends]
        for name in sorted(counts[0] | counts[1]):
            reasons += [(run.name, name, *(f"{c[name] / max(1, c.total()):.1%}" for c in counts))]
        means = [_mean_parts(records) for records in ends]
        for name in sorted(means[0].keys() | means[1].keys()):
            parts += [(run.name, name, *(f"{m[name]:.3f}" if name in m else "" for m in means))]
        calls = [[o for path in r.trajectory.attempts() for o in path.call_outcomes] for r in run.late]
        for tool in sorted({outcome.tool for own in calls for outcome in own}):
            found = [outcome for own in calls for outcome in own if outcome.tool == tool]
            errors = sum(outcome.status is not ToolStatus.OK for outcome in found) / len(found)
            unused = sum(all(outcome.tool != tool for outcome in own) for own in calls) / len(calls)
            tools.append((run.name, tool or "(malformed)", str(len(found)), f"{errors:.1%}", f"{unused:.1%}"))
    ends_of_run = ("first steps", "last steps")
    yield ReportTable("Stop reasons", ("run", "stop reason", *ends_of_run), tuple(reasons))
    note = "Means over episodes, before weights."
    yield ReportTable("Reward parts", ("run", "part", *ends_of_run), tuple(parts), note)
    columns = ("run", "tool", "calls", "errors", "episodes without a call")
    yield ReportTable("Tools, last steps", columns, tuple(tools))


def summary_tables(runs: Sequence[ReportedRun]) -> list[ReportTable]:
    """Return the tables of the short summary: runs, findings, evaluations, comparison and settings."""
    findings = ((run.name, f.severity, f.topic, f.text, f.remedy) for run in runs for f in run.findings)
    columns = ("run", "severity", "topic", "evidence", "remedy")
    tables = [_heading(runs), ReportTable("Findings", columns, tuple(findings)), _evaluation_table(runs)]
    tables += [gates] if (gates := _gate_table(runs)).rows else []
    return tables + ([_comparison_table(runs), _settings_table(runs)] if len(runs) > 1 else [])


def to_markdown(runs: Sequence[ReportedRun]) -> str:
    """Return the summary as Markdown."""
    notes = [f"- {run.name}: {text}" for run in runs for text in run.missing]
    blocks = ["# " + ", ".join(run.name for run in runs), *(table.to_markdown() for table in summary_tables(runs))]
    return "\n\n".join([*blocks, *(["\n".join(notes)] if notes else [])]) + "\n"


def to_json(runs: Sequence[ReportedRun]) -> str:
    """Return the summary as JSON: a list of objects per table, and the missing parts by run."""
    data: dict[str, object] = {one.title.lower().replace(" ", "_"): one.records for one in summary_tables(runs)}
    return json.dumps(data | {"missing": {run.name: run.missing for run in runs}}, indent=1) + "\n"
