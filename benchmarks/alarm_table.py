"""Train small runs with planted faults and healthy ones, and tabulate which alarms are raised and when.

    python benchmarks/alarm_table.py --out .bench/alarms                 all runs of alarm_table.toml, an hour
    python benchmarks/alarm_table.py --out .bench/alarms --only entropy_bonus
    python benchmarks/alarm_table.py --out .bench/alarms --page docs/experiments/alarm_table.md

Finished runs in the output folder are not trained again. A run is damaged at the first step from which on its held-out
success stays at most half of its best value before, or its training success is 0 for three steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludus.diagnostics.alarms import alarms_by_step, rules
from ludus.diagnostics.trackers import MetricsRow, read_metrics
from pages import fill

HERE = Path(__file__).parent
LEVELS = ("warn", "pause", "stop")


@dataclass(frozen=True)
class AlarmRun:
    """A trained run: the first step of each alarm, the step of the damage (None without), and the steps trained."""

    name: str
    spec: Mapping[str, Any]
    first: Mapping[str, int]
    damage: int | None
    steps: int

    def before(self, alarm: str) -> int | None:
        """Return the steps from a raised alarm to the damage, None without damage."""
        return None if self.damage is None else self.damage - self.first[alarm]


def train(name: str, spec: Mapping[str, Any], common: Mapping[str, object], out: Path) -> AlarmRun:
    """Train a run unless it exists."""
    folder = out / name
    if not (folder / "done").is_file():
        model = {}
        if "sft" in spec:
            start = out / f"{name}-sft"
            run_ludus(start, ["sft", spec["recipe"]], {**spec["sft"], "run.threads": 1, "run.dir": str(start)})
            model = {"model.path": str(max((start / "checkpoints").glob("step-*")))}
        settings = {**common, **spec.get("settings", {}), **model, "run.dir": str(folder)}
        run_ludus(folder, ["train", spec["recipe"]], settings)
        if "resumed" in spec:
            run_ludus(folder, ["train", "--resume", str(folder)], spec["resumed"])
        (folder / "done").touch()
    rows = read_metrics(folder / "metrics.jsonl")
    raised = alarms_by_step((row.step, row.metrics) for row in rows)
    first = {one.name: steps[0] for one, steps in sorted(raised, key=lambda pair: pair[1][0])}
    return AlarmRun(name, spec, first, damage_step(rows), len(rows))


def run_ludus(folder: Path, command: Sequence[str], settings: Mapping[str, object]) -> None:
    """Run a command of Ludus, with a log beside its run folder. Exit if there are no metrics."""
    words = [word for key, value in settings.items() for word in (f"--{key}", setting(value))]
    with folder.with_suffix(".log").open("a") as log:
        done = subprocess.run([sys.executable, "-m", "ludus", *command, *words], stdout=log, stderr=log, cwd=HERE)
    if not (folder / "metrics.jsonl").is_file():
        raise SystemExit(f"{folder.name} did not train (exit code {done.returncode}): see {log.name}")


def setting(value: object) -> str:
    """Return a value for the command line."""
    return value if isinstance(value, str) else json.dumps(value)


def damage_step(rows: Sequence[MetricsRow]) -> int | None:
    """Return the first step of the damage, or None."""
    found = [zero_step(rows)]
    names = {name for row in rows for name in row.metrics if name.startswith("eval/") and name.endswith("/success")}
    for name in names:
        points = [(row.step, row.metrics[name]) for row in rows if name in row.metrics]
        for i, (step, _) in enumerate(points):
            best = max((value for _, value in points[:i]), default=0.0)
            if best > 0 and all(value <= best / 2 for _, value in points[i:]):
                found.append(step)
                break
    return min((step for step in found if step is not None), default=None)


def zero_step(rows: Sequence[MetricsRow]) -> int | None:
    """Return the first of three steps without training success, or None."""
    success = [row.metrics.get("success/mean", 1.0) for row in rows]
    return next((rows[i].step for i in range(len(rows) - 2) if not any(success[i : i + 3])), None)


def planted_lines(runs: Sequence[AlarmRun]) -> Iterator[str]:
    """Yield the table of the planted runs."""
    yield "| cause | expected alarm | raised at step | damage at step | steps before the damage | other alarms |"
    yield "|---|---|---|---|---|---|"
    for run in runs:
        others = ", ".join(f"{name} ({step})" for name, step in run.first.items() if name not in run.spec["expected"])
        for i, name in enumerate(run.spec["expected"]):
            step = run.first.get(name)
            before = "" if step is None or run.damage is None else str(run.before(name))
            texts = ("" if i else run.spec["cause"], f"`{name}`", "missed" if step is None else str(step))
            yield f"| {' | '.join(texts)} | {run.damage or 'none'} | {before} | {'' if i else others} |"


def alarm_lines(runs: Sequence[AlarmRun]) -> Iterator[str]:
    """Yield the table of all alarms with the planted runs that raised them, the earliest before the damage first."""
    yield "| alarm | planted run | raised at step | damage at step | steps before the damage | also raised in |"
    yield "|---|---|---|---|---|---|"
    for name in rules():
        raised = sorted((run for run in runs if name in run.first), key=lambda run: -(run.before(name) or 0))
        if not raised:
            yield f"| `{name}` | never raised | | | | |"
            continue
        first, before = raised[0], raised[0].before(name)
        numbers = f"{first.first[name]} | {first.damage or 'none'} | {'' if before is None else before}"
        others = ", ".join(f"{run.name} ({run.first[name]})" for run in raised[1:])
        yield f"| `{name}` | {first.name} | {numbers} | {others} |"


def healthy_lines(runs: Sequence[AlarmRun]) -> Iterator[str]:
    """Yield the table of the healthy runs."""
    yield "| run | steps | false alarms | notes |"
    yield "|---|---|---|---|"
    for run in runs:
        raised = [(rules()[name].action in LEVELS, f"`{name}` ({step})") for name, step in run.first.items()]
        texts = [", ".join(text for loud, text in raised if loud is wanted) for wanted in (True, False)]
        yield f"| {run.name} | {run.steps} | {' | '.join(text or 'none' for text in texts)} |"


TABLES = {"planted": {"planted": planted_lines, "each": alarm_lines}, "healthy": {"healthy": healthy_lines}}
"""The tables of a page by the kind of their runs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--only", nargs="+", help="names of runs")
    parser.add_argument("--page", type=Path, help="page with places for the tables")
    args = parser.parse_args()
    specs = tomllib.loads((HERE / "alarm_table.toml").read_text())
    args.out.mkdir(parents=True, exist_ok=True)
    out = args.out.resolve()
    tables = {}
    for kind, tabulated in TABLES.items():
        chosen = {name: spec for name, spec in specs[kind].items() if not args.only or name in args.only}
        runs = [train(name, spec, specs["common"], out) for name, spec in chosen.items()]
        for place, lines in tabulated.items() if runs else ():
            tables[place] = "\n".join(lines(runs))
            print(tables[place], end="\n\n", flush=True)
    for kind, text in tables.items() if args.page and not args.only else ():
        fill(args.page, f"alarms {kind}", text)


if __name__ == "__main__":
    main()
