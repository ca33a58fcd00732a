"""Compare evaluations over the same tasks: the paired difference B - A, its interval, and McNemar's test.

    ludus compare runs/a runs/b
    ludus compare runs/a-1 runs/a-2 runs/a-3 --against runs/b-1 runs/b-2 runs/b-3    several training seeds
    ludus compare A.json B.json --boundary                pass@k of A (base) and B (trained) for k = 1, 2, 4, ...
    ludus compare runs/a runs/b --target 0.7              steps and tokens to a success rate

A and B are .json files that `ludus eval` wrote, or run folders. For folders, the newest evaluation of each split,
temperature and number of attempts is compared. To compare a run with its initial model, name two files:
RUN/evaluations/step-000000-test-greedy.json and the last one. If one of them has tasks that the other lacks, those of
both are compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

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
    mean_square,
    newest_evaluations,
)
from ludus.evaluation.stats import Interval, PairedDifference, detectable_difference, tasks_needed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("a", metavar="A", nargs="+", type=Path, help="a .json file of an evaluation, or a run folder")
    parser.add_argument("--against", metavar="B", nargs="+", type=Path, help="runs or files of B, if A are several")
    parser.add_argument("--power", metavar="D", type=float, help="print the tasks needed to detect a difference D")
    parser.add_argument("--boundary", action="store_true", help="compare pass@k for k = 1, 2, 4, ...")
    parser.add_argument("--target", metavar="RATE", type=float, help="steps and tokens until this success rate")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the comparison."""
    all_a, all_b = check_arguments(args)
    if len(all_a) + len(all_b) > 2:
        from ludus.cli.evaluate.compare_seeds import print_seeds

        print_seeds(all_a, all_b, args.power)
    elif args.target is not None:
        from ludus.cli.evaluate.boundary import print_target

        print_target(all_a[0], all_b[0], args.target)
    else:
        print_comparison(find_pairs(all_a[0], all_b[0]), args)
    return 0


def check_arguments(args: argparse.Namespace) -> tuple[list[Path], list[Path]]:
    """Return the paths of A and of B. Raises UserError for arguments that exclude each other or are out of range."""
    both = (args.a, args.against) if args.against else (args.a[:1], args.a[1:])
    several = sum(map(len, both)) > 2
    for name, value in (("--power", args.power), ("--target", args.target)):
        if value is not None and not 0 < value <= 1:
            raise UserError(f"{name} is {value:g}.", "It is above 0 and at most 1, for example 0.05 for 5 %.")
    checks = (
        (not args.against and len(args.a) != 2, "Without --against, name A and B.", "Example: ludus compare A B"),
        (several and args.boundary, "--boundary compares one A with one B.", "Name one of each."),
        (several and args.target is not None, "--target compares one A with one B.", "Name one of each."),
        (args.boundary and args.target is not None, "--boundary and --target exclude each other.", "Remove one."),
    )
    for broken, message, hint in checks:
        if broken:
            raise UserError(message, hint)
    return both


def print_comparison(pairs: Sequence[Pair], args: argparse.Namespace) -> None:
    """Print the table, the verdicts and the notes of one A and one B."""
    differences = [compare(a.result, b.result) for a, b in pairs]
    console = make_console()
    a_path, b_path = (args.a[0], args.against[0]) if args.against else args.a
    print_line(console, f"A: {a_path}\nB: {b_path}")
    for a, b in pairs:
        print_text(console, f"paired: {a.name} of A with {b.name} of B")
    if args.boundary:
        from ludus.cli.evaluate.boundary import print_boundary

        print_boundary(console, pairs)
    else:
        table = comparison_table(pairs, differences)
        console.print(table)
        if table.shows("detectable", console.width):
            print_text(console, f"detectable: the smallest difference over these tasks that {DETECTED}.")
        for (a, b), found in zip(pairs, differences, strict=True):
            square = mean_square(*common_scores(a.result, b.result))
            least = detectable_difference(square, found.num_tasks)
            print_text(console, f"{a.name}: {verdict(found.difference, found.interval, found.num_tasks, least)}")
            if args.power is not None:
                print_text(console, power_text(args.power, square))
    for a, b in pairs:
        if len(a.result.task_ids) != len(b.result.task_ids):
            sizes = f"{len(a.result.task_ids)} tasks in A and {len(b.result.task_ids)} in B"
            print_text(console, f"note: {a.name} and {b.name} have {sizes}; those of both are compared", "yellow")
    for text in dict.fromkeys(text for pair in pairs for text in differing_conditions(pair[0].result, pair[1].result)):
        print_text(console, f"note: {text}", "yellow")


def verdict(difference: float, interval: Interval, num_tasks: int, least: float) -> str:
    """Return the result of a comparison as a sentence. `least` is the detectable difference."""
    if least == 0:
        return "no difference seen; all runs have the same scores."
    if 0 in interval:
        return f"no difference seen; these {num_tasks} tasks show differences above {100 * least:.1f} points."
    bounds = sorted(abs(100 * bound) for bound in (interval.low, interval.high))
    better = "B" if difference > 0 else "A"
    return f"{better} is better by {100 * abs(difference):.1f} points [{bounds[0]:.1f}, {bounds[1]:.1f}]."


def power_text(difference: float, square: float) -> str:
    """Return a sentence with the number of tasks that a difference needs."""
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
