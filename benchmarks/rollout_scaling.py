"""Measure generated tokens/s of rollouts against batch size, turns and context.

    python benchmarks/rollout_scaling.py --page docs/understand/performance.md \
        --plot docs/understand/performance.svg

Ludus and the naive way of `rollout.py` run the same workload at each point, each in a new process, interleaved
over the repetitions. A run longer than --limit seconds is stopped; the table notes it, and the system skips the
larger points of the axis.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import rollout
import rollout_models
from pages import fill
from rollout_work import Work
from rollout_worker import Job

SYSTEMS = ("ours", "naive")
BATCHES = (1, 4, 16, 64, 256)
TURNS = (1, 2, 4, 8, 16, 32)
CONTEXTS = (256, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Axis:
    """A varied quantity: its name, its title with the fixed quantities, and the work at each size."""

    name: str
    title: str
    points: tuple[tuple[int, Work], ...]


@dataclass(frozen=True)
class Measured:
    """Generated tokens per second of both systems at one size; None if a run took too long."""

    size: int
    ours: float | None
    naive: float | None


def axes(vocab: int, largest: float) -> list[Axis]:
    """Return the three axes without sizes above `largest` times the full range."""
    base = Work(vocab=vocab)
    batch = [(n, replace(base, prompts=max(1, n // 8), members=min(n, 8))) for n in BATCHES]
    short = replace(base, prompts=1, new=16, new_limit=48, observation=(20, 100))
    turns = [(n, replace(short, turns=n)) for n in TURNS]
    alone = replace(base, prompts=4, members=1, system=0, new_limit=64)
    context = [(n, replace(alone, question=(n - 64, n - 64))) for n in CONTEXTS]
    found = [
        Axis("batch size", "episodes at once, 3 turns", tuple(batch)),
        Axis("turns", "turns, 8 episodes of one group", tuple(turns)),
        Axis("context", "prompt tokens, 4 episodes with nothing in common, 3 turns", tuple(context)),
    ]
    return [
        replace(axis, points=tuple(p for p in axis.points if p[0] <= largest * axis.points[-1][0])) for axis in found
    ]


def measure(axis: Axis, job: Job, args: argparse.Namespace) -> list[Measured]:
    """Measure both systems at all sizes of an axis."""
    found: list[Measured] = []
    over: set[str] = set()
    for size, work in axis.points:
        speeds: dict[str, list[float]] = {name: [] for name in SYSTEMS}
        for repeat in range(args.repeats):
            for name in SYSTEMS if repeat % 2 else reversed(SYSTEMS):
                if name in over:
                    continue
                python = Path(sys.executable)
                result = rollout.run(replace(job, system=name, work=work), python, args.limit)
                if isinstance(result, str):
                    print(f"{axis.name} {size}, {name}: {result}", file=sys.stderr)
                    over.add(name)
                else:
                    speeds[name].append(result.tokens / rollout.seconds(result, args.clock))
        typical = [median(s) if len(s) == args.repeats else None for s in speeds.values()]
        found.append(Measured(size, *typical))
        print(axis.name, found[-1], file=sys.stderr, flush=True)
    return found


def table(axis: Axis, found: Sequence[Measured], limit_s: float) -> str:
    """Return the results of an axis as a table in Markdown."""
    lines = [f"| {axis.title} | Ludus, tokens/s | naive, tokens/s | ratio |", "|---:|---:|---:|---:|"]
    for point in found:
        ratio = f"{point.ours / point.naive:.1f}" if point.ours and point.naive else ""
        cells = [f"{v:,.0f}" if v else f"over {limit_s:g} s" for v in (point.ours, point.naive)]
        lines.append(f"| {point.size:,} | {cells[0]} | {cells[1]} | {ratio} |")
    return "\n".join(lines)


def plot(path: Path, results: Sequence[tuple[Axis, list[Measured]]]) -> None:
    """Plot one panel per axis with logarithmic scales. Needs matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "ludus"
    from matplotlib import pyplot
    from matplotlib.ticker import ScalarFormatter

    figure, panels = pyplot.subplots(1, len(results), figsize=(11, 3.6), sharey=True, layout="constrained")
    for panel, (axis, found) in zip(panels, results, strict=True):
        for name, speeds, marker in (
            ("Ludus", [(p.size, p.ours) for p in found if p.ours], "o"),
            ("naive", [(p.size, p.naive) for p in found if p.naive], "s"),
        ):
            panel.plot(*zip(*speeds, strict=True), marker=marker, label=name)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.xaxis.set_major_formatter(ScalarFormatter())
        panel.set_xticks([p.size for p in found])
        panel.set_xlabel(axis.name)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("generated tokens/s")
    panels[0].legend()
    figure.savefig(path, metadata={"Date": None})


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=(*rollout_models.SHAPES, rollout_models.SMOLLM2), default="small")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--limit", type=float, default=300.0, help="maximum seconds of one run, loading included")
    parser.add_argument("--largest", type=float, default=1.0, help="fraction of the range of each axis")
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    parser.add_argument("--folder", type=Path, default=Path(".bench"), help="models")
    parser.add_argument("--page", type=Path, help="insert the tables into this page")
    parser.add_argument("--plot", type=Path, help="write the plot here, as SVG; needs matplotlib")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all axes, print the tables, and write the page and the plot."""
    args = parse(arguments)
    model = str(rollout.model_folder(args.model, args.folder / "models").resolve())
    chosen = axes(rollout_models.vocabulary(args.model), args.largest)
    job = Job("ours", model, args.threads, chosen[0].points[0][1])
    results = [(axis, measure(axis, job, args)) for axis in chosen]
    text = "\n\n".join(table(axis, found, args.limit) for axis, found in results)
    print(text)
    if args.page:
        fill(args.page, "scaling", text)
    if args.plot:
        plot(args.plot, results)


if __name__ == "__main__":
    main()
