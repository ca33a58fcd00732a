"""`ludus compare A1 A2 --against B1 B2`: several training seeds of each side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ludus.cli.evaluate.compare import find_pairs, power_text, verdict
from ludus.cli.ui.fitted_table import FittedTable, TableColumn, make_table
from ludus.cli.ui.tables import format_sampling
from ludus.cli.ui.terminal import make_console, print_line, print_text
from ludus.errors import UserError
from ludus.evaluation.comparison import StoredEvaluation, common_scores, newest_evaluations
from ludus.evaluation.evaluate import Evaluation, EvaluationPlan
from ludus.evaluation.stats import SeedsDifference, seeds_difference

_REACH = 2.8
"""Sum of the normal quantiles 0.975 and 0.8: a detectable difference in standard errors."""


class SeedsRow(NamedTuple):
    """Comparison of one split and sampling: B minus A, both rates, and the mean square difference per task."""

    plan: EvaluationPlan
    found: SeedsDifference
    rates: tuple[float, float]
    square: float


def print_seeds(all_a: Sequence[Path], all_b: Sequence[Path], power: float | None) -> None:
    """Print a table with a row for each kind of evaluation that all runs have, and the verdicts."""
    rows = [compare_seeds(a, b) for a, b in matching(all_a, all_b)]
    console = make_console()
    print_line(console, f"A: {', '.join(map(str, all_a))}\nB: {', '.join(map(str, all_b))}")
    console.print(seeds_table(rows))
    print_text(console, "The interval covers seeds and tasks: the sum of their variances less their interaction.")
    for plan, found, _, square in rows:
        least = min(1.0, _REACH * math.hypot(found.error_tasks, found.error_seeds))
        text = verdict(found.difference, found.interval, found.num_tasks, least)
        print_text(console, f"{plan.split}, {format_sampling(plan)}: {text}")
        if power is not None:
            print_text(console, f"{power_text(power, square)} More tasks do not reduce the error of the seeds.")


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
        stored = [newest_evaluations(path) for path in paths]
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
    ours, theirs = common_scores(first, other.result)
    if ours.keys() != theirs.keys() or len(ours) != len(first.task_ids):
        text = f"{other.name} does not have the {len(first.task_ids)} tasks of the first run."
        raise UserError(text, "Compare evaluations of the same split, tasks and world settings.")
    return [theirs[task] for task in first.scores]


def seeds_table(rows: Sequence[SeedsRow]) -> FittedTable:
    """Return a table with one row per kind of evaluation."""
    errors = (TableColumn("error of tasks", 1), TableColumn("error of seeds", 1))
    columns = ("split", "sampling", TableColumn("tasks", 2), TableColumn("runs", 2), "A", "B", "B - A", *errors)
    cells = []
    for plan, found, rates, _ in rows:
        runs = f"{found.num_seeds[1]} / {found.num_seeds[0]}"
        difference = f"{found.difference:+.1%} [{found.interval.low:+.1%}, {found.interval.high:+.1%}]"
        numbers = (*(f"{rate:.1%}" for rate in rates), difference)
        components = (f"{found.error_tasks:.1%}", f"{found.error_seeds:.1%}")
        cells.append((plan.split, format_sampling(plan), found.num_tasks, runs, *numbers, *components))
    return make_table(columns, cells, "Success over seeds and tasks, with a 95 % interval of the difference")
