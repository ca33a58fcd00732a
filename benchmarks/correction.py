"""Measure off-policy correction with very stale rollouts: the search recipe with `tis` and with `none`.

    python benchmarks/correction.py --page docs/use/async_training.md

Asynchronous training with a large bound on staleness and three seeds per arm; other settings are equal. Runs
are kept in --folder and not repeated. The table has the success of the episodes that end in each quarter of a
run, with intervals over seeds (t-distribution), and the difference paired over seeds.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from ludus.config.load import load_config
from ludus.diagnostics.trackers import read_metrics
from ludus.evaluation.stats import t_interval
from ludus.training.rl.build import train
from ludus.training.run.run_dir import RunFolder, lock_run, new_run
from ludus.training.run.session import open_session
from pages import check_place, fill
from watching import Watch

ARMS = ("tis", "none")
SEEDS = (0, 1, 2)
PARTS = 4
SHOWN = {
    "success": "sampled/success",
    "age": "staleness/mean",
    "effective sample size": "is/ess",
    "truncated share": "is/clip_frac",
}
Rows = list[Mapping[str, float]]
T = TypeVar("T")


def run(args: argparse.Namespace, arm: str, seed: int) -> Rows:
    """Return the metrics of each step of one run; train it if missing."""
    kept = args.folder / f"{arm}-{args.bound}-{args.rate:g}-{args.steps}-seed{seed}.json"
    if not kept.is_file():
        folder = kept.with_suffix("")
        shutil.rmtree(folder, ignore_errors=True)
        words = {
            "training.mode": "async",
            "training.steps": args.steps,
            "training.learning_rate": args.rate,
            "training.prompts_per_step": 4,
            "algorithm.correction": arm,
            "staleness.max_staleness": args.bound,
            "staleness.max_concurrent_rollouts": 128,
            "staleness.min_ess": 0,
            "run.dir": folder,
            "run.seed": seed,
            "run.threads": 1,
            "run.save_rollouts": "false",
            "evaluation.splits": "[]",
            "evaluation.every": 10**6,
        }
        config = load_config("search", [w for key, value in words.items() for w in (f"--{key}", str(value))])
        with lock_run(new_run(config, "correction", "rl")):
            train(open_session(config), RunFolder(folder), Watch())
        rows = [dict(row.metrics) for row in read_metrics(folder / "metrics.jsonl")]
        kept.write_text(json.dumps(rows))
        shutil.rmtree(folder)
    found: Rows = json.loads(kept.read_text())
    return found


def part_of(rows: Rows, part: int, name: str) -> float:
    """Return the mean of a metric over a quarter of the steps; a missing value counts as 0."""
    size = len(rows) // PARTS
    own = rows[part * size : (part + 1) * size]
    return sum(row.get(name, 0.0) for row in own) / len(own)


def report(found: Mapping[str, Sequence[Rows]], args: argparse.Namespace) -> str:
    """Return the table, by quarter and arm."""
    size = args.steps // PARTS
    lines = [
        f"| steps | arm | {' | '.join(SHOWN)} | less `none`, in points |",
        "|---|---|" + "---:|" * (len(SHOWN) + 1),
    ]
    for part in range(PARTS):
        for arm in ARMS:
            values = {s: [part_of(rows, part, name) for rows in found[arm]] for s, name in SHOWN.items()}
            success = values.pop("success")
            cells = [over(success, 100.0, "")] + [f"{sum(v) / len(v):.2f}" for v in values.values()]
            plain = [part_of(rows, part, SHOWN["success"]) for rows in found["none"]]
            gaps = [a - b for a, b in zip(success, plain, strict=True)]
            cells.append("" if arm == "none" else over(gaps, 100.0, "+"))
            lines.append(f"| {part * size + 1} to {(part + 1) * size} | `{arm}` | {' | '.join(cells)} |")
    return "\n".join(lines) + (
        f"\n\nThe search recipe, `max_staleness` {args.bound}, learning rate {args.rate:g}, 4 groups a step, "
        f"{len(SEEDS)} seeds; success of the episodes that end, in per cent, with 95 % intervals over seeds."
    )


def over(values: Sequence[float], scale: float, sign: str) -> str:
    """Return the mean and its interval as text."""
    found = t_interval([scale * value for value in values])
    low, high = found.interval.low, found.interval.high
    return f"{found.mean:{sign}.1f} [{low:{sign}.1f}, {high:{sign}.1f}]"


def compare(
    parser: argparse.ArgumentParser,
    place: str,
    arms: Iterable[str],
    run: Callable[[argparse.Namespace, str, int], T],
    report: Callable[[Mapping[str, Sequence[T]], argparse.Namespace], str],
    arguments: Sequence[str] | None,
) -> None:
    """Run each arm with each seed, print the table, and insert it into the page if one is set."""
    parser.add_argument("--page", type=Path, help="insert the table into this page")
    args = parser.parse_args(arguments)
    if args.page:
        check_place(args.page, place)
    args.folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[T]] = {arm: [] for arm in arms}
    for seed in SEEDS:
        for arm, results in found.items():
            results.append(run(args, arm, seed))
    text = report(found, args)
    print(text)
    if args.page:
        fill(args.page, place, text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the missing runs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(".bench/correction"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--bound", type=int, default=8, help="max_staleness")
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate")
    compare(parser, "correction", ARMS, run, report, arguments)


if __name__ == "__main__":
    main()
