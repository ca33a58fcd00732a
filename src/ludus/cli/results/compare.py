"""Compare two evaluations over the same tasks: the paired difference B - A, its interval, and McNemar's test.

A and B are .json files that `ludus eval` wrote, or run folders. For folders, the newest evaluation of each split,
temperature and number of attempts is compared. To compare a run with its initial model, name two files:
RUN/evaluations/step-000000-test-greedy.json and the last one. If one of them has tasks that the other lacks, those of
both are compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ludus.cli.arguments import no_settings
from ludus.cli.ui.fitted_table import FittedTable, TableColumn, make_table
from ludus.cli.ui.tables import DETECTED, format_sampling
from ludus.cli.ui.terminal import make_console, print_line, print_text
from ludus.errors import UserError
from ludus.evaluation.comparison import (
    Key,
    Pair,
    StoredEvaluation,
    common_scores,
    compare,
    differing_conditions,
    load_stored,
    newest_evaluations,
)
from ludus.evaluation.stats import PairedDifference


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("a", metavar="A", type=Path, help="a .json file of an evaluation, or a run folder")
    parser.add_argument("b", metavar="B", type=Path, help="another file or run folder")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the comparison."""
    no_settings(overrides, "compare")
    pairs = find_pairs(args.a, args.b)
    differences = [compare(a.result, b.result) for a, b in pairs]
    console = make_console()
    print_line(console, f"A: {args.a}\nB: {args.b}")
    for a, b in pairs:
        print_text(console, f"paired: {a.name} of A with {b.name} of B")
    console.print(comparison_table(pairs, differences))
    if any(found.detectable is not None for found in differences):
        print_text(console, f"detectable: the smallest difference over these tasks that {DETECTED}.")
    for a, b in pairs:
        if len(a.result.task_ids) != len(b.result.task_ids):
            sizes = f"{len(a.result.task_ids)} tasks in A and {len(b.result.task_ids)} in B"
            print_text(console, f"note: {a.name} and {b.name} have {sizes}; those of both are compared", "yellow")
    for text in dict.fromkeys(text for pair in pairs for text in differing_conditions(pair[0].result, pair[1].result)):
        print_text(console, f"note: {text}", "yellow")
    return 0


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
        return [(load_stored(a), load_stored(b))]
    in_a, in_b = newest_evaluations(a), newest_evaluations(b)
    pairs = [(in_a[key], in_b[key]) for key in in_a if key in in_b]
    if not pairs:
        text = f"{a} and {b} have no evaluation of the same split, sampling and number of tasks."
        raise UserError(f"{text}\n  {a}: {_listing(in_a)}\n  {b}: {_listing(in_b)}", f"\n{_advice(in_a, b)}")
    return pairs


def _listing(found: dict[Key, StoredEvaluation]) -> str:
    plans = [stored.result.plan for stored in found.values()]
    return "; ".join(f"{plan.split}, {format_sampling(plan)}, {plan.num_tasks} tasks" for plan in plans)


def _advice(found: dict[Key, StoredEvaluation], other: Path) -> str:
    """Return the command that evaluates another run like the evaluation with the most tasks, and the alternative."""
    split, temperature, samples, tasks = max(found, key=lambda key: key[3])
    settings = {"splits": f"'[\"{split}\"]'", "temperatures": f"'[{temperature}]'", "samples": samples, "tasks": tasks}
    words = " ".join(f"--evaluation.{name} {value}" for name, value in settings.items())
    return (
        f"Evaluate one like the other: ludus eval --run {other} {words}\n"
        "Or name two .json files of the same split in their evaluations/: the tasks of the smaller one are compared."
    )


def comparison_table(pairs: Sequence[Pair], differences: Sequence[PairedDifference]) -> FittedTable:
    """Return a table with one row per pair of evaluations."""
    details = (TableColumn("detectable", 4), TableColumn("only A", 3), TableColumn("only B", 3))
    columns = ("split", "sampling", TableColumn("tasks", 2), "A", "B", "B - A", *details, TableColumn("p (McNemar)", 1))
    rows = []
    for (a, b), found in zip(pairs, differences, strict=True):
        low, high = found.interval.low, found.interval.high
        plan = a.result.plan
        rates = [f"{sum(scores.values()) / len(scores):.1%}" for scores in common_scores(a.result, b.result)]
        row = (plan.split, format_sampling(plan), found.num_tasks, *rates)
        difference = f"{found.difference:+.1%} [{low:+.1%}, {high:+.1%}]"
        detectable = None if found.detectable is None else f"{found.detectable:.1%}"
        p_value = None if found.p_value is None else f"{found.p_value:.3g}"
        rows.append((*row, difference, detectable, found.only_b, found.only_a, p_value))
    return make_table(columns, rows, "Success by task, paired, with a 95 % interval of the difference")
