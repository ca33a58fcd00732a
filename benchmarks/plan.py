"""Compare the predictions of the cost model and the simulator with measured runs.

    python benchmarks/plan.py --page docs/use/planning.md
    python benchmarks/plan.py --model tiny --steps 4 --fit-steps 3 --latency 0.02    # a quick check

The costs are fitted to two small synchronous runs (`ludus.simulator.fit`). A third run, asynchronous, measures
the `overlap`: the speed of learner and engine while both work (1: as if alone; 0.5: one core for both), unless
`--overlap` sets it. Its tools take a tenth of the time, so that learner and engine are the bottleneck. These
costs predict runs with another mode, number of groups, concurrency or tools, which are then measured with the
real model.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import async_work
from closed_form import estimate
from ludus.cli.commands.plan import cost_lines
from ludus.diagnostics.trackers import read_metrics
from ludus.simulator.costs import Costs, RunLayout
from ludus.simulator.fit import fit
from ludus.simulator.simulate import simulate
from ludus.training.rl.build import train
from ludus.training.run.run_dir import RunFolder, lock_run, new_run
from ludus.training.run.session import open_session
from pages import check_place, fill
from slow_tools import Latency, Sizes
from watching import Watch

SYNC = RunLayout(mode="sync", groups=1, max_staleness=0)
FITTED_GROUPS = (1, 6)
FASTER = 0.1
"""Tool latency of the run that measures the overlap, relative to the fitted runs."""
LEAST_OVERLAP = 0.2
BISECTIONS = 8


@dataclass(frozen=True)
class Seen:
    """Means over the middle of a run: seconds per step, idle fractions, age."""

    step_s: float
    learner_idle: float
    engine_idle: float
    age: float

    def cells(self) -> list[str]:
        """Return the table cells."""
        return [f"{self.step_s:.2f}", f"{self.learner_idle:.0%}", f"{self.engine_idle:.0%}", f"{self.age:.1f}"]


def make(setup: RunLayout, latency: Latency, model: str, folder: Path) -> Seen:
    """Train a real run of this layout and return its measurements."""
    config, watch = async_work.settings(setup, Sizes(), latency, model, folder), Watch()
    torch.set_num_threads(1)
    with lock_run(new_run(config, "plan", "rl")):
        train(open_session(config), RunFolder(folder / "run"), watch)
    ends = [watch.began, *watch.ends]
    edge = min(setup.max_staleness + 1, (setup.steps - 1) // 3) if setup.mode == "async" else 1
    middle = slice(edge, setup.steps - (edge if setup.mode == "async" else 0))
    timings = [row.metrics for row in read_metrics(folder / "run" / "timings.jsonl")][middle]
    metrics = [row.metrics for row in read_metrics(folder / "run" / "metrics.jsonl")][middle]
    seconds = sum(t["time/step_s"] for t in timings)
    return Seen(
        (ends[middle.stop] - ends[middle.start]) / len(timings),
        sum(t["idle/learner"] * t["time/step_s"] for t in timings) / seconds,
        sum(t["idle/engine"] * t["time/step_s"] for t in timings) / seconds,
        sum(m.get("staleness/mean", 0.0) for m in metrics) / len(metrics),
    )


def predict(costs: Costs, setup: RunLayout) -> Seen:
    """Simulate a run of this layout; return the means over a few seeds."""
    runs = [simulate(costs, replace(setup, seed=seed)) for seed in range(5)]
    return Seen(
        sum(r.step_s for r in runs) / len(runs),
        sum(r.learner_idle for r in runs) / len(runs),
        sum(r.engine_idle for r in runs) / len(runs),
        sum(r.age for r in runs) / len(runs),
    )


def slower(costs: Costs, times: float) -> Costs:
    """Return the costs with tool calls that take `times` as long."""
    return replace(costs, tool=replace(costs.tool, median_s=costs.tool.median_s * times))


def measured_overlap(costs: Costs, setup: RunLayout, step_s: float) -> float:
    """Return, by bisection, the overlap at which the simulated run has this time per step."""
    low, high = LEAST_OVERLAP, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        too_slow = predict(replace(costs, overlap=middle), setup).step_s > step_s
        low, high = (middle, high) if too_slow else (low, middle)
    return (low + high) / 2


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=tuple(async_work.SHAPES), default="small")
    parser.add_argument("--latency", type=float, default=0.2, help="median seconds of a tool call in the fitted runs")
    parser.add_argument("--overlap", type=float, help="default: measured")
    parser.add_argument("--steps", type=int, default=16, help="steps of a predicted run")
    parser.add_argument("--fit-steps", type=int, default=6, help="steps of a fitted run")
    parser.add_argument("--page", type=Path, help="insert the table into this page")
    args = parser.parse_args(arguments)
    if args.page:
        check_place(args.page, "plan")
    return args


def fitted(args: argparse.Namespace, root: Path) -> tuple[Costs, str]:
    """Return the costs fitted to small runs, and a sentence that describes the fit."""
    sync, latency = replace(SYNC, steps=args.fit_steps), Latency(args.latency)
    for number, groups in enumerate(FITTED_GROUPS):
        seen = make(replace(sync, groups=groups), latency, args.model, root / f"fit-{number}")
        print(f"fit-{number}: {seen}", flush=True)
    found = fit([RunFolder(root / f"fit-{number}" / "run") for number, _ in enumerate(FITTED_GROUPS)])
    overlap, source = args.overlap, "as given"
    if overlap is None:
        setup = RunLayout(steps=args.steps, groups=3, max_staleness=5, in_flight=48)
        seen = make(setup, Latency(args.latency * FASTER), args.model, root / "overlap")
        overlap = measured_overlap(slower(found.costs, FASTER), setup, seen.step_s)
        source = "so a third run, async, says"
        print(f"overlap {overlap:.2f}: {seen}", flush=True)
    costs = replace(found.costs, overlap=overlap)
    groups = " and ".join(map(str, FITTED_GROUPS))
    text = f"Model {args.model}, {found.num_steps} steps of two runs ({groups} groups of {sync.members}). "
    text += "Fitted costs: " + "; ".join(cost_lines(costs)) + "."
    text += f" Rms error: engine {found.engine_error:.0%}, learner {found.learner_error:.0%}."
    return costs, text + f" Learner and engine go at {overlap:.0%} while both work ({source})."


def rows_of(args: argparse.Namespace, costs: Costs, root: Path) -> Iterator[str]:
    """Yield table rows of runs that were not fitted: the measurement and the predictions."""
    stream = RunLayout(steps=args.steps, groups=2, max_staleness=5)
    for title, setup, times in (
        ("sync, 4 groups, tools twice as slow", replace(SYNC, groups=4, steps=max(2, args.steps // 2)), 2.0),
        ("async, 2 groups, 24 in flight", replace(stream, in_flight=24), 1.0),
        ("async, 4 groups, 96 in flight", replace(stream, groups=4, in_flight=96), 1.0),
        ("async, 2 groups, found by measurement, tools twice as slow", stream, 2.0),
    ):
        own = slower(costs, times)
        said, bound = predict(own, setup), estimate(own, setup)
        seen = make(setup, Latency(args.latency * times), args.model, root / title.replace(" ", "-"))
        closed = Seen(bound.step_s, bound.learner_idle, bound.engine_idle, bound.age)
        yield f"| {title} | measured | {' | '.join(seen.cells())} | |"
        for name, one in (("simulated", said), ("closed form", closed)):
            yield f"| | {name} | {' | '.join(one.cells())} | {one.step_s / seen.step_s - 1:+.0%} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit the costs, predict runs, measure them, and print the table."""
    args = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        costs, text = fitted(args, Path(folder))
        rows = [
            "| run | | step, s | learner idle | engine idle | mean age | step is off by |",
            "|---|---|---:|---:|---:|---:|---:|",
        ]
        for row in rows_of(args, costs, Path(folder)):
            print(row, flush=True)
            rows.append(row)
    print(text)
    if args.page:
        fill(args.page, "plan", "\n".join([*rows, "", text]))


if __name__ == "__main__":
    main()
