"""Terminal summary of a run: metric curves in block characters, and explanations of alarms, losses and timings."""

from __future__ import annotations

import math
import tomllib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from importlib import resources

from ludus.cli.ui.fitted_table import FittedTable, TableColumn, make_table
from ludus.config.schema import AlarmAction
from ludus.diagnostics.alarms import alarms_by_step
from ludus.diagnostics.timings import episode_shares
from ludus.diagnostics.trackers import MetricsRow

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 40
"""Maximum characters of a curve; longer series are averaged in bins."""


def find_curves(rows: Sequence[MetricsRow]) -> dict[str, dict[int, float]]:
    """Return the values by step of known metrics and of held-out success; later rows of a step override earlier ones.

    No curve is empty.
    """
    by_step: dict[int, dict[str, float]] = {}
    for row in rows:
        by_step.setdefault(row.step, {}).update(row.metrics)
    names = dict.fromkeys(name for metrics in by_step.values() for name in metrics)
    parts = {name: name.split("/") for name in names}
    success = [n for n, p in parts.items() if len(p) == 4 and p[0] == "eval" and p[3] == "success"]
    held_out = {n: f"held-out success, {parts[n][1]} {parts[n][2]}" for n in success}
    first, second, *others = tomllib.loads((resources.files(__package__) / "curves.toml").read_text("utf-8")).items()
    titles = dict((first, second)) | held_out | dict(others)
    steps = sorted(by_step)
    curves = {title: {s: by_step[s][name] for s in steps if name in by_step[s]} for name, title in titles.items()}
    return {title: curve for title, curve in curves.items() if curve}


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """Draw values as block characters between their minimum and maximum; `x` for a value that is not finite.

    A constant is drawn in the middle, and 0 as the lowest block.
    """
    size = max(1, math.ceil(len(values) / width))
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    finite = [value for value in means if math.isfinite(value)]
    if not finite:
        return "x" * len(means)
    low, span, top = min(finite), max(finite) - min(finite), len(BLOCKS) - 1
    shares = [(value - low) / span if span else 0.5 * bool(low) for value in means]
    return "".join(BLOCKS[min(top, int(s * len(BLOCKS)))] if math.isfinite(s) else "x" for s in shares)


def curve_table(curves: Mapping[str, Mapping[int, float]], available: int) -> FittedTable:
    """Return a table with one row per curve: first, last, minimum and maximum value, for a terminal of that width."""
    steps = {step for curve in curves.values() for step in curve}
    title = f"Steps {min(steps)} to {max(steps)}"
    ranks = {"first": 1, "last": 0, "min": 2, "max": 2}
    numbers = (TableColumn(name, rank, right=True) for name, rank in ranks.items())
    blocks = min(WIDTH, max(12, available // 2 - 20))
    rows = []
    for name, values in ((name, list(curve.values())) for name, curve in curves.items()):
        ends = (values[0], values[-1], min(values), max(values))
        rows.append((name, sparkline(values, blocks), *(f"{value:.4g}" for value in ends)))
    return make_table((TableColumn("metric", wrap=True), "curve", *numbers), rows, title)


NEAR_ZERO = 1e-6
"""Absolute loss up to which a loss counts as 0 up to rounding."""
PHASES = ("rollout", "train", "sync", "evaluate")
"""The phases of a step."""
_OUTCOMES = ("trained", "masked", "dropped", "failed")


def format_ledger(rows: Sequence[MetricsRow]) -> str:
    """Describe the outcomes of all rollouts with their reasons; return "" for a run without rollouts."""
    total: Counter[str] = Counter()
    for row in rows:
        total.update({n.removeprefix("ledger/"): int(v) for n, v in row.metrics.items() if n.startswith("ledger/")})
    if not total["started"]:
        return ""
    parts = []
    for outcome in _OUTCOMES:
        named = {n.partition("/")[2]: v for n, v in total.items() if n.startswith(f"{outcome}/") and v}
        shown = ", ".join(f"{count} {reason}" for reason, count in sorted(named.items()) if reason != outcome)
        parts.append(f"{total[outcome]} {outcome}" + (f" ({shown})" if shown else ""))
    text = f"{total['started']} rollouts started: {', '.join(parts)}."
    if limited := total["clock_limited"]:
        text += f" A wall-clock limit fired in {limited} of {len(rows)} steps: the run is not reproducible."
    return text


def format_alarms(rows: Sequence[MetricsRow], actions: Mapping[str, AlarmAction] = {}) -> list[str]:
    """Return each alarm of the run with its newest text and the number of steps at which it was raised."""
    found = alarms_by_step(((row.step, row.metrics) for row in rows), actions)
    return [f"{alarm.text} (at {len(own)} of {len(rows)} steps, last at step {own[-1]})" for alarm, own in found]


def explain_loss(rows: Sequence[MetricsRow]) -> str:
    """Explain a loss of 0, or a missing loss, at the last step; return "" otherwise."""
    if not rows:
        return ""
    step, last = rows[-1].step, rows[-1].metrics
    norm = last.get("optim/grad_norm", 0.0)
    if "ledger/started" in last and "loss/total" not in last:
        name = "missing"
    elif abs(last.get("loss/policy", last.get("loss/total", 1.0))) > NEAR_ZERO:
        return ""
    elif last.get("groups/zero_variance", 0.0) >= 1:
        name = "equal_rewards"
    else:
        name = "expected" if norm > 0 else "no_gradient"
    text: str = tomllib.loads((resources.files(__package__) / "loss_texts.toml").read_text("utf-8"))[name]
    return text.format(step=step, norm=norm)


def mean_timings(rows: Sequence[MetricsRow]) -> dict[str, float]:
    """Return the mean of each timing over the steps that report it, and the maximum of `scoring/slowest_s`.

    Only the last row of a step counts: a resumed run repeats steps.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for row in {row.step: row for row in rows}.values():
        for name, value in row.metrics.items():
            found[name].append(value)
    means = {name: sum(values) / len(values) for name, values in found.items()}
    return means | {name: max(values) for name, values in found.items() if name == "scoring/slowest_s"}


def format_times(timings: Mapping[str, float]) -> str:
    """Describe the time shares of a step and an episode, from `mean_timings`; return "" if no step was timed."""
    total_s = timings.get("time/step_s", 0.0)
    if not total_s:
        return ""
    phases = {name: timings.get(f"time/{name}_s", 0.0) for name in PHASES}
    named = ", ".join(f"{name} {seconds / total_s:.0%}" for name, seconds in phases.items() if seconds)
    text = f"Mean step time {total_s:.3g} s: {named}."
    if shares := episode_shares(timings):
        model, tools, scoring = shares["model"], shares["tools"], shares["scoring"]
        text += f" Episode time: model {model:.0%}, tools {tools:.0%}, rewards {scoring:.0%}."
    return text
