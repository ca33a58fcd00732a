"""What the cost model and the simulation say of a run, beside what the run then does.

    python benchmarks/plan.py --page docs/scaling.md

Two small synchronous runs are measured and fitted (`ludus.planning.fit`). From their costs alone, other runs
are predicted: another mode, other group numbers, other episodes in flight, other tools. Then these runs are
made, with the real model, and stand beside what was predicted. `--overlap` says how fast learner and engine
each go while both work: 0.5 on one core, 1 on two with nothing else to do.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import async_work
from async_work import Latency, Sizes
from ludus.cli.plan import cost_lines
from ludus.diagnostics.trackers import read_metrics
from ludus.planning.costs import Costs, Setup
from ludus.planning.estimate import estimate
from ludus.planning.fit import fit
from ludus.planning.simulate import simulate
from ludus.training.run import RunFolder, locked, new_run
from ludus.training.start import train
from rollout import fill
from watching import Watch


@dataclass(frozen=True)
class Seen:
    """Of a run's middle: seconds of a step, idle shares, mean age."""

    step_s: float
    learner_idle: float
    engine_idle: float
    age: float

    def cells(self) -> list[str]:
        """As a table has them."""
        return [
            f"{self.step_s:.2f}",
            f"{self.learner_idle:.0%}",
            f"{self.engine_idle:.0%}",
            f"{self.age:.1f}",
        ]


def make(setup: Setup, latency: Latency, model: str, folder: Path) -> Seen:
    """Train a real run of this layout, and look at the clock."""
    sizes = Sizes()
    config = async_work.settings(setup, sizes, folder)
    torch.set_num_threads(1)
    session, watch = async_work.session(config, sizes, latency, async_work.SHAPES[model]), Watch()
    with locked(new_run(config, "plan", "rl")):
        train(session, RunFolder(folder), watch)
    ends = [watch.began, *watch.ends]
    edge = min(setup.max_staleness + 1, (setup.steps - 1) // 3) if setup.mode == "async" else 1
    middle = slice(edge, setup.steps - (edge if setup.mode == "async" else 0))
    timings = [row.metrics for row in read_metrics(folder / "timings.jsonl")][middle]
    metrics = [row.metrics for row in read_metrics(folder / "metrics.jsonl")][middle]
    seconds = sum(t["time/step_s"] for t in timings)
    return Seen(
        (ends[middle.stop] - ends[middle.start]) / len(timings),
        sum(t["idle/learner"] * t["time/step_s"] for t in timings) / seconds,
        sum(t["idle/engine"] * t["time/step_s"] for t in timings) / seconds,
        sum(m.get("staleness/mean", 0.0) for m in metrics) / len(metrics),
    )


def predict(costs: Costs, setup: Setup) -> Seen:
    """The simulation's word: mean over a few seeds."""
    runs = [simulate(costs, replace(setup, seed=seed)) for seed in range(5)]
    return Seen(
        sum(r.step_s for r in runs) / len(runs),
        sum(r.learner_idle for r in runs) / len(runs),
        sum(r.engine_idle for r in runs) / len(runs),
        sum(r.age for r in runs) / len(runs),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit, predict, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=tuple(async_work.SHAPES), default="tiny")
    parser.add_argument(
        "--latency", type=float, default=0.1, help="median seconds of a call, in the fitted runs"
    )
    parser.add_argument("--overlap", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=16, help="of the runs that are predicted")
    parser.add_argument("--page", type=Path, help="fill the table into this page")
    args = parser.parse_args(arguments)
    root = Path(tempfile.mkdtemp())
    sync = Setup(mode="sync", steps=6, groups=1, max_staleness=0)
    for number, groups in enumerate((1, 6)):
        seen = make(replace(sync, groups=groups), Latency(args.latency), args.model, root / f"fit-{number}")
        print(f"fit-{number}: {seen}", flush=True)
    found = fit([RunFolder(root / "fit-0"), RunFolder(root / "fit-1")])
    print(found, flush=True)
    costs = replace(found.costs, overlap=args.overlap)
    rows = ["| run | | step, s | learner idle | engine idle | mean age |", "|---|---|---:|---:|---:|---:|"]
    stream = Setup(steps=args.steps, groups=2, max_staleness=5)
    for title, setup, slower in (
        ("sync, 4 groups, tools twice as slow", replace(sync, groups=4, steps=8), 2.0),
        ("async, 2 groups, 24 in flight", replace(stream, in_flight=24), 1.0),
        ("async, 4 groups, 96 in flight", replace(stream, groups=4, in_flight=96), 1.0),
        ("async, 2 groups, found by measurement, tools twice as slow", stream, 2.0),
    ):
        own = replace(costs, tool=replace(costs.tool, median_s=costs.tool.median_s * slower))
        seen = make(setup, Latency(args.latency * slower), args.model, root / title.replace(" ", "-"))
        rows.append(f"| {title} | measured | {' | '.join(seen.cells())} |")
        rows.append(f"| | simulated | {' | '.join(predict(own, setup).cells())} |")
        bound = estimate(own, setup)
        closed = Seen(bound.step_s, bound.learner_idle, bound.engine_idle, bound.age)
        rows.append(f"| | closed form | {' | '.join(closed.cells())} |")
        print("\n".join(rows[-3:]), flush=True)
    shutil.rmtree(root)
    text = "\n".join(
        [*rows, "", f"Model {args.model}, {found.num_steps} steps of two runs (1 and 6 groups of 8)."]
    )
    text += "\nFitted costs: " + "; ".join(cost_lines(costs)) + "."
    text += f" Rms error: engine {found.engine_error:.0%}, learner {found.learner_error:.0%}."
    text += f" Learner and engine go at {args.overlap:.0%} while both work."
    print(text)
    if args.page:
        fill(args.page, "plan", text)


if __name__ == "__main__":
    main()
