"""`ludus compare --boundary` and `--target`: pass@k curves of two models, and the steps to a success rate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ludus.cli.ui.fitted_table import FittedTable, TableColumn, make_table
from ludus.cli.ui.tables import format_sampling
from ludus.cli.ui.terminal import make_console, print_line, print_text
from ludus.diagnostics.trackers import MetricsRow, read_metrics
from ludus.errors import UserError
from ludus.evaluation.comparison import BoundaryPoint, Pair, boundary, curve_shape, time_to_target
from ludus.evaluation.stats import Interval
from ludus.training.run.run_dir import RunFolder

VERDICTS = {
    "cross": "the curves cross: B is better with few attempts and A with many, so training sharpened the policy.",
    "apart": "the curves stay apart up to this k: B also solves tasks that A does not solve with many attempts.",
    "together": "the curves meet: at the largest k no difference is seen, so training only sharpened the policy.",
    "unclear": "B is not better at the smallest k with a difference; the boundary cannot be judged.",
}


def print_boundary(console: Console, pairs: Sequence[Pair]) -> None:
    """Print curves and verdict of each pair with several attempts. Raises UserError if there is none."""
    several = [(a, b) for a, b in pairs if min(a.result.plan.samples, b.result.plan.samples) > 1]
    if not several:
        text = "--boundary needs evaluations with several attempts per task."
        raise UserError(text, "Evaluate both with --evaluation.samples 64 and a temperature above 0.")
    for a, b in several:
        points = boundary(a.result, b.result)
        console.print(boundary_table(points, f"{a.result.plan.split}, {format_sampling(a.result.plan)}: pass@k"))
        print_text(console, f"{a.name}: {VERDICTS[curve_shape(points)]}")
    print_text(console, "95 % intervals over tasks, each for its k alone; k beyond half of the attempts is noisy.")


def boundary_table(points: Sequence[BoundaryPoint], title: str) -> FittedTable:
    """Return a table with a row for each k."""

    def cell(rate: float, interval: Interval, sign: str = "") -> str:
        bounds = ", ".join(f"{bound:{sign}.1%}" for bound in (interval.low, interval.high))
        return f"{rate:{sign}.1%} [{bounds}]"

    rows = []
    for one in points:
        rates = (cell(one.base, one.base_interval), cell(one.trained, one.trained_interval))
        rows.append((one.k, *rates, cell(one.trained - one.base, one.difference, "+")))
    return make_table(("k", "A", "B", "B - A"), rows, title)


def print_target(a: Path, b: Path, target: float) -> None:
    """Print a table of the steps, episodes and tokens until the evaluations during training reach a rate."""
    runs = [RunFolder(path) for path in (a, b)]
    for folder in runs:
        if not folder.metrics.is_file():
            raise UserError(f"{folder.path} has no metrics.jsonl.", "--target compares two run folders.")
    rows = [read_metrics(folder.metrics) for folder in runs]
    metrics = _common_metrics(rows)
    if not metrics:
        raise UserError(
            "The runs have no evaluation during training in common.", "Set evaluation.every and train again."
        )
    console = make_console()
    print_line(console, f"A: {a}\nB: {b}")
    console.print(target_table(rows, metrics, target))
    print_text(console, "Linear interpolation between the first evaluation at the target and the one before it.")


def _common_metrics(rows: Sequence[Sequence[MetricsRow]]) -> list[str]:
    """Return the success metrics of evaluations that all runs have, sorted."""
    names = [{name for row in own for name in row.metrics if name.startswith("eval/")} for own in rows]
    return sorted(name for name in set.intersection(*names) if name.endswith("/success"))


def target_table(rows: Sequence[Sequence[MetricsRow]], metrics: Sequence[str], target: float) -> FittedTable:
    """Return a table with a row for each metric and run."""
    cells: list[tuple[object, ...]] = []
    for metric in metrics:
        for name, own in zip("AB", rows, strict=True):
            found = time_to_target(own, metric, target)
            if found.step is None or found.episodes is None or found.tokens is None:
                numbers: tuple[object, ...] = ("not reached", None, None)
            else:
                numbers = (f"{found.step:.1f}", f"{found.episodes:,.0f}", f"{found.tokens:,.0f}")
            cells.append((metric.removesuffix("/success"), name, *numbers, f"{found.best:.1%}"))
    details = (TableColumn("episodes", 2), TableColumn("sampled tokens", 1), TableColumn("best", 3))
    return make_table(("evaluation", "run", "step", *details), cells, f"Until {target:.0%} success")
