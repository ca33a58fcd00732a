"""What the cost model and the simulation say of a run, beside what the run then does.

    python benchmarks/plan.py --page docs/use/planning.md
    python benchmarks/plan.py --model tiny --steps 4 --fit-steps 3 --latency 0.02    to see that it works

Two small synchronous runs are measured and fitted (`ludus.simulator.fit`). A third, asynchronous one says how
fast learner and engine each go while both work: the `overlap` with which the simulation takes its time,
unless `--overlap` gives it (1: each as if alone; 0.5: one core for both). Its tools take a tenth of the
time, so that it is learner and engine that it waits for. From these costs alone, other runs are predicted:
another mode, other group numbers, other episodes in flight, other tools. Then these runs are made, with the
real model, and stand beside what was predicted.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import async_work
from ludus.cli.commands.plan import cost_lines
from ludus.diagnostics.trackers import read_metrics
from ludus.simulator.costs import Costs, RunLayout
from ludus.simulator.fit import estimate, fit
from ludus.simulator.simulate import simulate
from ludus.training.rl.build import train
from ludus.training.run.run_dir import RunFolder, lock_run, new_run
from ludus.training.run.session import open_session
from rollout import check_place, fill
from slow_tools import Latency, Sizes
from watching import Watch

SYNC = RunLayout(mode="sync", groups=1, max_staleness=0)
FITTED_GROUPS = (1, 6)
FASTER = 0.1
"""What a call takes, of the fitted runs' seconds, where the overlap is measured."""
LEAST_OVERLAP = 0.2
BISECTIONS = 8


@dataclass(frozen=True)
class Seen:
    """Of a run's middle: seconds of a step, idle shares, mean age."""

    step_s: float
    learner_idle: float
    engine_idle: float
    age: float

    def cells(self) -> list[str]:
        """As a table has them."""
        return [f"{self.step_s:.2f}", f"{self.learner_idle:.0%}", f"{self.engine_idle:.0%}", f"{self.age:.1f}"]


def make(setup: RunLayout, latency: Latency, model: str, folder: Path) -> Seen:
    """Train a real run of this layout, and look at the clock."""
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
    """The simulation's word: mean over a few seeds."""
    runs = [simulate(costs, replace(setup, seed=seed)) for seed in range(5)]
    return Seen(
        sum(r.step_s for r in runs) / len(runs),
        sum(r.learner_idle for r in runs) / len(runs),
        sum(r.engine_idle for r in runs) / len(runs),
        sum(r.age for r in runs) / len(runs),
    )


def slower(costs: Costs, times: float) -> Costs:
    """The same costs, with calls that take `times` as long."""
    return replace(costs, tool=replace(costs.tool, median_s=costs.tool.median_s * times))


def measured_overlap(costs: Costs, setup: RunLayout, step_s: float) -> float:
    """The overlap with which a run of this layout is simulated to take so long a step, by bisection."""
    low, high = LEAST_OVERLAP, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        too_slow = predict(replace(costs, overlap=middle), setup).step_s > step_s
        low, high = (middle, high) if too_slow else (low, middle)
    return (low + high) / 2


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=tuple(async_work.SHAPES), default="small")
    parser.add_argument("--latency", type=float, default=0.2, help="median seconds of a call, in the fitted runs")
    parser.add_argument("--overlap", type=float, help="not measured, but this")
    parser.add_argument("--steps", type=int, default=16, help="of the runs that are predicted")
    parser.add_argument("--fit-steps", type=int, default=6, help="of the runs that are fitted")
    parser.add_argument("--page", type=Path, help="fill the table into this page")
    args = parser.parse_args(arguments)
    if args.page:
        check_place(args.page, "plan")
    return args


def fitted(args: argparse.Namespace, root: Path) -> tuple[Costs, str]:
    """The costs that three small runs say, and a sentence about them."""
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
    """Runs that were not fitted: what each did, and what was said of it, as rows of a table."""
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
    """Fit, predict, measure."""
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
