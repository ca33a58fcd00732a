"""Compare evaluations over the same tasks: the paired difference B - A, its interval, and McNemar's test."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console

from ludus.cli.arguments import raise_first
from ludus.cli.ui.fitted_table import FittedTable, TableColumn, make_table
from ludus.cli.ui.tables import DETECTED
from ludus.cli.ui.terminal import make_console, print_line, print_text
from ludus.diagnostics.trackers import MetricsRow, read_metrics
from ludus.errors import UserError
from ludus.evaluation import comparison
from ludus.evaluation.comparison import Pair, StoredEvaluation
from ludus.evaluation.evaluate import Evaluation, EvaluationPlan
from ludus.evaluation.stats import PairedDifference, SeedsDifference, seeds_difference, tasks_needed
from ludus.evaluation.tables import format_rate, format_sampling
from ludus.training.run.run_dir import RunFolder


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the comparison."""
    all_a, all_b = check_arguments(args)
    if len(all_a) + len(all_b) > 2:
        _print_seeds(all_a, all_b, args.power)
    elif args.target is not None:
        print_target(all_a[0], all_b[0], args.target)
    else:
        _print_comparison(find_pairs(all_a[0], all_b[0]), args)
    return 0


def check_arguments(args: argparse.Namespace) -> tuple[list[Path], list[Path]]:
    """Return the paths of A and of B. Raises UserError for arguments that exclude each other or are out of range."""
    both = (args.a, args.against) if args.against else (args.a[:1], args.a[1:])
    several = sum(map(len, both)) > 2
    for name, value in (("--power", args.power), ("--target", args.target)):
        if value is not None and not 0 < value <= 1:
            raise UserError(f"{name} is {value:g}.", "It is above 0 and at most 1, for example 0.05 for 5 %.")
    two = "Without --against, name two runs or evaluations, A and B."
    raise_first(
        (not args.against and len(args.a) != 2, two, "Example: ludus compare runs/a runs/b."),
        (several and args.boundary, "--boundary compares one A with one B.", "Name one of each."),
        (several and args.target is not None, "--target compares one A with one B.", "Name one of each."),
        (args.boundary and args.target is not None, "--boundary and --target exclude each other.", "Remove one."),
    )
    return both


def _print_comparison(pairs: Sequence[Pair], args: argparse.Namespace) -> None:
    differences = [comparison.compare(a.result, b.result) for a, b in pairs]
    console = make_console()
    a_path, b_path = (args.a[0], args.against[0]) if args.against else args.a
    print_line(console, f"A: {a_path}\nB: {b_path}")
    for a, b in pairs:
        print_text(console, f"paired: {a.name} of A with {b.name} of B")
    if args.boundary:
        print_boundary(console, pairs)
    else:
        table = _comparison_table(pairs, differences)
        console.print(table)
        if table.shows("detectable", console.width):
            print_text(console, f"detectable: the smallest difference over these tasks that {DETECTED}.")
        for (a, b), found in zip(pairs, differences, strict=True):
            square = comparison.mean_square(*comparison.common_scores(a.result, b.result))
            print_text(console, f"{a.name}: {comparison.paired_verdict(a.result, b.result, found)}")
            if args.power is not None:
                print_text(console, _power_text(args.power, square))
    for a, b in pairs:
        if len(a.result.task_ids) != len(b.result.task_ids):
            sizes = f"{len(a.result.task_ids)} tasks in A and {len(b.result.task_ids)} in B"
            print_text(console, f"note: {a.name} and {b.name} have {sizes}; only common tasks are compared", "yellow")
    differing = (text for a, b in pairs for text in comparison.differing_conditions(a.result, b.result))
    for text in dict.fromkeys(differing):
        print_text(console, f"note: {text}", "yellow")


def _power_text(difference: float, square: float) -> str:
    num = tasks_needed(difference, square)
    discordance = f"a mean square difference of {square:.3f} per task (for one attempt: the share of discordant tasks)"
    return f"A difference of {100 * difference:g} points needs {num} tasks: it {DETECTED}, with {discordance}."


def find_pairs(a: Path, b: Path) -> list[Pair]:
    """Return the pairs of comparable evaluations. Raises UserError if there are none."""
    for path in (a, b):
        if not path.exists():
            raise UserError(f"{path} is neither an evaluation nor a run.", "Check the path; runs are under runs/.")
    if a.resolve() == b.resolve():
        raise UserError(f"A and B are both {a}.", "Name two folders, or two files of one folder's evaluations/.")
    if a.is_dir() != b.is_dir():
        kinds = ("a folder", "a file") if a.is_dir() else ("a file", "a folder")
        raise UserError(f"{a} is {kinds[0]}, and {b} is {kinds[1]}.", "Name two files or two folders.")
    if not a.is_dir():
        return [(comparison.load_stored(a), comparison.load_stored(b))]
    in_a, in_b = comparison.newest_of_any_size(a), comparison.newest_of_any_size(b)
    pairs = [(in_a[key], in_b[key]) for key in sorted(in_a) if key in in_b]
    if not pairs:
        text = f"{a} and {b} have no evaluation of the same split and sampling."
        plan = max((stored.result.plan for stored in in_a.values()), key=lambda plan: plan.num_tasks)
        settings = f"--evaluation.splits '[\"{plan.split}\"]' --evaluation.temperatures '[{plan.temperature}]'"
        numbers = f"--evaluation.samples {plan.samples} --evaluation.tasks {plan.num_tasks}"
        hint = (
            f"\nEvaluate one like the other: ludus eval --run {b} {settings} {numbers}\nOr name two .json files of the "
            "same split in their evaluations/."
        )
        raise UserError(f"{text}\n  {a}: {_listing(in_a.values())}\n  {b}: {_listing(in_b.values())}", hint)
    return pairs


def _listing(found: Iterable[StoredEvaluation]) -> str:
    plans = [stored.result.plan for stored in found]
    return "; ".join(f"{plan.split}, {format_sampling(plan)}, {plan.num_tasks} tasks" for plan in plans)


def _comparison_table(pairs: Sequence[Pair], differences: Sequence[PairedDifference]) -> FittedTable:
    details = (TableColumn("detectable", 4), TableColumn("only A", 3), TableColumn("only B", 3))
    columns = ("split", "sampling", TableColumn("tasks", 2), "A", "B", "B - A", *details, TableColumn("p (McNemar)", 1))
    rows = []
    for (a, b), found in zip(pairs, differences, strict=True):
        plan = a.result.plan
        rates = [f"{sum(scores.values()) / len(scores):.1%}" for scores in comparison.common_scores(a.result, b.result)]
        row = (plan.split, format_sampling(plan), found.num_tasks, *rates)
        difference = format_rate(found.difference, found.interval, "+.1%")
        detectable = None if found.detectable is None else f"{found.detectable:.1%}"
        p_value = None if found.p_value is None else f"{found.p_value:.3g}"
        rows.append((*row, difference, detectable, found.only_b, found.only_a, p_value))
    return make_table(columns, rows, "Success by task, paired, with a 95 % interval of the difference")


_REACH = 2.8
"""Sum of the normal quantiles 0.975 and 0.8: a detectable difference in standard errors."""


class SeedsRow(NamedTuple):
    """Comparison of one split and sampling: B minus A, both rates, and the mean square difference per task."""

    plan: EvaluationPlan
    found: SeedsDifference
    rates: tuple[float, float]
    square: float


def _print_seeds(all_a: Sequence[Path], all_b: Sequence[Path], power: float | None) -> None:
    rows = [compare_seeds(a, b) for a, b in matching(all_a, all_b)]
    console = make_console()
    print_line(console, f"A: {', '.join(map(str, all_a))}\nB: {', '.join(map(str, all_b))}")
    console.print(_seeds_table(rows))
    print_text(console, "The interval covers seeds and tasks: the sum of their variances less their interaction.")
    for plan, found, _, square in rows:
        least = min(1.0, _REACH * math.hypot(found.error_tasks, found.error_seeds))
        text = comparison.verdict(found.difference, found.interval, found.num_tasks, least)
        print_text(console, f"{plan.split}, {format_sampling(plan)}: {text}")
        if power is not None:
            print_text(console, f"{_power_text(power, square)} More tasks do not reduce the error of the seeds.")


def matching(
    all_a: Sequence[Path], all_b: Sequence[Path]
) -> list[tuple[list[StoredEvaluation], list[StoredEvaluation]]]:
    """Return the comparable evaluations of all runs. Raises UserError if there are none or a path is named twice."""
    paths = [*all_a, *all_b]
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError("A run or file is named twice.", "Name each once: a repeated run is not another seed.")
    pairs = {path: find_pairs(paths[0], path) for path in paths[1:]}  # checks that all exist and match the first
    if not paths[0].is_dir():
        first = pairs[paths[1]][0][0]
        found = [[first, *(pairs[path][0][1] for path in paths[1:])]]
    else:
        stored = [comparison.newest_evaluations(path) for path in paths]
        found = [[one[key] for one in stored] for key in stored[0] if all(key in one for one in stored)]
    if not found:
        raise UserError("No evaluation exists in all runs.", "Evaluate all with the same splits, sampling and tasks.")
    return [(row[: len(all_a)], row[len(all_a) :]) for row in found]


def compare_seeds(a: Sequence[StoredEvaluation], b: Sequence[StoredEvaluation]) -> SeedsRow:
    """Return B minus A over seeds and the tasks of the first run. Raises UserError if the tasks differ."""
    first = a[0].result
    scores_a, scores_b = (np.array([_scores(first, one) for one in side]) for side in (a, b))
    if scores_a.shape[1] < 2:
        raise UserError("A single task cannot be compared.", "Use evaluations of 2 tasks or more.")
    found = seeds_difference(scores_b, scores_a)
    square = float(((scores_b[:, None] - scores_a[None]) ** 2).mean())
    return SeedsRow(first.plan, found, (float(scores_a.mean()), float(scores_b.mean())), square)


def _scores(first: Evaluation, other: StoredEvaluation) -> list[float]:
    ours, theirs = comparison.common_scores(first, other.result)
    if ours.keys() != theirs.keys() or len(ours) != len(first.task_ids):
        text = f"{other.name} does not have the {len(first.task_ids)} tasks of the first run."
        raise UserError(text, "Compare evaluations of the same split, tasks and world settings.")
    return [theirs[task] for task in first.scores]


def _seeds_table(rows: Sequence[SeedsRow]) -> FittedTable:
    errors = (TableColumn("error of tasks", 1), TableColumn("error of seeds", 1))
    columns = ("split", "sampling", TableColumn("tasks", 2), TableColumn("runs", 2), "A", "B", "B - A", *errors)
    cells = []
    for plan, found, rates, _ in rows:
        runs = f"{found.num_seeds[1]} / {found.num_seeds[0]}"
        difference = format_rate(found.difference, found.interval, "+.1%")
        numbers = (*(f"{rate:.1%}" for rate in rates), difference)
        components = (f"{found.error_tasks:.1%}", f"{found.error_seeds:.1%}")
        cells.append((plan.split, format_sampling(plan), found.num_tasks, runs, *numbers, *components))
    return make_table(columns, cells, "Success over seeds and tasks, with a 95 % interval of the difference")


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
        points = comparison.boundary(a.result, b.result)
        console.print(_boundary_table(points, f"{a.result.plan.split}, {format_sampling(a.result.plan)}: pass@k"))
        print_text(console, f"{a.name}: {VERDICTS[comparison.curve_shape(points)]}")
    print_text(console, "95 % intervals over tasks, each for its k alone; k beyond half of the attempts is noisy.")


def _boundary_table(points: Sequence[comparison.BoundaryPoint], title: str) -> FittedTable:
    rows = []
    for one in points:
        rates = (format_rate(one.base, one.base_interval), format_rate(one.trained, one.trained_interval))
        rows.append((one.k, *rates, format_rate(one.trained - one.base, one.difference, "+.1%")))
    return make_table(("k", "A", "B", "B - A"), rows, title)


def print_target(a: Path, b: Path, target: float) -> None:
    """Print a table of the steps, episodes and tokens until the evaluations during training reach a rate."""
    runs = [RunFolder(path) for path in (a, b)]
    for folder in runs:
        if not folder.metrics.is_file():
            raise UserError(f"{folder.path} has no metrics.jsonl.", "--target compares two run folders.")
    rows = [read_metrics(folder.metrics) for folder in runs]
    evaluated = [{name for row in own for name in row.metrics if name.startswith("eval/")} for own in rows]
    metrics = sorted(name for name in set.intersection(*evaluated) if name.endswith("/success"))
    if not metrics:
        text = "The runs have no evaluation during training in common."
        raise UserError(text, "Set evaluation.every and train again.")
    console = make_console()
    print_line(console, f"A: {a}\nB: {b}")
    console.print(_target_table(rows, metrics, target))
    print_text(console, "Linear interpolation between the first evaluation at the target and the one before it.")


def _target_table(rows: Sequence[Sequence[MetricsRow]], metrics: Sequence[str], target: float) -> FittedTable:
    cells: list[tuple[object, ...]] = []
    for metric in metrics:
        for name, own in zip("AB", rows, strict=True):
            found = comparison.time_to_target(own, metric, target)
            numbers: tuple[object, ...] = ("not reached", None, None)
            if found.at is not None:
                step, episodes, tokens = found.at
                numbers = (f"{step:.1f}", f"{episodes:,.0f}", f"{tokens:,.0f}")
            cells.append((metric.removesuffix("/success"), name, *numbers, f"{found.best:.1%}"))
    details = (TableColumn("episodes", 2), TableColumn("sampled tokens", 1), TableColumn("best", 3))
    return make_table(("evaluation", "run", "step", *details), cells, f"Until {target:.0%} success")
