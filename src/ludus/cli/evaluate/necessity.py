"""Measure which tasks need tools, from two evaluations."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from ludus.cli.evaluate.compare import find_pairs
from ludus.cli.ui.fitted_table import make_table
from ludus.cli.ui.terminal import make_console, print_text
from ludus.errors import UserError
from ludus.evaluation import comparison
from ludus.evaluation.evaluate import Evaluation
from ludus.evaluation.tables import format_rate
from ludus.rewards.tool_results import Necessity, write_necessity

BOUNDS = (-0.5, 0.0, 0.25, 0.5, 0.75, 1.0)
"""Values of necessity at which the table counts tasks."""
_NO_ACCESS = '"access": "none"'
"""Setting of worlds with their own evaluation without tools (`ludus eval --baseline none`)."""


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the necessity of the tasks, and write it if a file is given."""
    pairs = find_pairs(args.with_tools, args.without_tools)
    if len(pairs) > 1:
        raise UserError(f"The folders have {len(pairs)} comparable evaluations.", "Name two .json files.")
    with_tools, without_tools = (stored.result for stored in pairs[0])
    found = tool_necessity(with_tools, without_tools)
    console = make_console()
    difference = comparison.compare(without_tools, with_tools)
    console.print(
        make_table(("necessity at least", "tasks"), _counts(found), "Tasks by success with minus without tools")
    )
    rate = format_rate(difference.difference, difference.interval, "+.1%")
    print_text(console, f"Mean necessity of {len(found)} tasks: {rate}.")
    if args.out is not None:
        write_necessity(args.out, found)
        print_text(console, f"Written to {args.out}.")
    return 0


def tool_necessity(with_tools: Evaluation, without_tools: Evaluation) -> dict[str, Necessity]:
    """Return the success rates of the common tasks, in order.

    Raises UserError without common tasks, and unless only the second evaluation is without tools.
    """
    for name, result, expected in (("WITH", with_tools, False), ("WITHOUT", without_tools, True)):
        conditions = result.plan.conditions
        is_without = conditions is not None and (conditions.hide_tools or _NO_ACCESS in conditions.world_settings)
        if is_without != expected:
            text = f"{name} is an evaluation {'without' if is_without else 'with'} tools."
            raise UserError(text, "Name first the evaluation with tools, then that with --rollout.hide_tools true.")
    rates = without_tools.scores
    found = {task: Necessity(rate, rates[task]) for task, rate in with_tools.scores.items() if task in rates}
    if not found:
        raise UserError("The evaluations have no task in common.", "Evaluate the same split with the same settings.")
    return found


def _counts(found: Mapping[str, Necessity]) -> list[tuple[str, int]]:
    return [(f"{bound:g}", sum(one.value >= bound for one in found.values())) for bound in BOUNDS]
