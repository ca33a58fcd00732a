"""Tables of evaluations: success with intervals, tags, stop reasons, pass@k, cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Console

from ludus.cli.ui.fitted_table import FittedTable, TableColumn, make_table
from ludus.cli.ui.terminal import print_text
from ludus.evaluation.evaluate import Evaluation, powers_of_two
from ludus.evaluation.probes.common import MeanEstimate, ProbeReport
from ludus.evaluation.tables import format_rate, format_sampling, format_success

DETECTED = "is detected with a power of 80 % at the 5 % level"
"""Explanation of the column `detectable`, as the end of a sentence."""
SUCCESS_TITLE = "Held-out success, with 95 % intervals"
MAX_VALUES = 30
"""Maximum number of values of a tag in a table; files contain all."""


def print_evaluations(console: Console, results: Sequence[Evaluation], outcomes: Sequence[str]) -> None:
    """Print all tables. `outcomes` names the reward parts that define success, which get no separate column."""
    for table in evaluation_tables(results, outcomes):
        console.print(table)
        if table.title == SUCCESS_TITLE:
            print_text(console, f"detectable: the smallest difference to a run over other tasks that {DETECTED}.")


def evaluation_tables(results: Sequence[Evaluation], outcomes: Sequence[str]) -> Iterator[FittedTable]:
    """Yield the tables of evaluations that are not empty."""
    yield _success_table(results, outcomes)
    if any(result.worlds for result in results):
        yield _world_table(results)
    if several := [result for result in results if result.plan.samples > 1]:
        yield _attempts_table(several)
    for split in dict.fromkeys(result.plan.split for result in results):
        by_tag = tag_table(split, [result for result in results if result.plan.split == split])
        if by_tag.rows:
            yield by_tag
    yield _stop_table(results)
    yield _cost_table(results)


def _success_table(results: Sequence[Evaluation], outcomes: Sequence[str] = ()) -> FittedTable:
    parts = list(dict.fromkeys(part for one in results for part in one.parts if part not in outcomes))
    ranks = {"detectable": 2, **dict.fromkeys(parts, 3), "failed episodes": 1}
    columns = [TableColumn(name, ranks.get(name, 0)) for name in ("split", "sampling", "tasks", "success", *ranks)]
    rows = []
    for result in results:
        values = [f"{result.parts[part]:.3f}" if part in result.parts else "" for part in parts]
        numbers = (len(result.task_ids), format_success(result), f"{result.detectable:.1%}")
        rows.append((result.plan.split, format_sampling(result.plan), *numbers, *values, result.failed))
    return make_table(columns, rows, SUCCESS_TITLE)


def _world_table(results: Sequence[Evaluation]) -> FittedTable:
    rows: list[tuple[object, ...]] = []
    for result in results:
        plan = (result.plan.split, format_sampling(result.plan))
        rows += [(*plan, name, one.num_tasks, format_success(one)) for name, one in result.by_world().items()]
        rows.append((*plan, "average of the worlds", "", f"{result.macro:.1%}"))
    columns = ("split", "sampling", TableColumn("world", wrap=True), TableColumn("tasks", 1), "success")
    return make_table(columns, rows, "Held-out success by world, 95 % intervals")


def _attempts_table(results: Sequence[Evaluation]) -> FittedTable:
    rows = []
    for result in results:
        for k in powers_of_two(result.plan.samples):
            rates = zip((result.pass_at(k), result.pass_hat(k)), result.attempt_intervals(k), strict=True)
            rows.append((result.plan.split, format_sampling(result.plan), k, *(format_rate(*pair) for pair in rates)))
        if result.best_of:
            best = f"best of {result.plan.samples} by reward model", format_rate(*result.best_of_rate), ""
            rows.append((result.plan.split, format_sampling(result.plan), *best))
    columns = ("split", "sampling", "k", "pass@k", "pass^k")
    return make_table(columns, rows, "pass@k: one of k succeeds; pass^k: all k succeed; 95 % intervals")


def tag_table(split: str, results: Sequence[Evaluation]) -> FittedTable:
    """Return a table of success by tag and value, with one column per evaluation; single values are left out."""
    found = [result.by_tag() for result in results]
    rows = []
    for tag, values in found[0].items():
        if not 1 < len(values) <= MAX_VALUES:
            continue
        for value, one in values.items():
            shown = (format_success(other[tag][value]) for other in found if value in other.get(tag, {}))
            rows.append((f"{tag} {value}", one.num_tasks, *shown))
    rates = (TableColumn(format_sampling(result.plan), wrap=True) for result in results)
    columns = (TableColumn("tag", wrap=True), TableColumn("tasks", 1), *rates)
    return make_table(columns, rows, f"{split}: success by tag, with 95 % intervals")


def _cost_table(results: Sequence[Evaluation]) -> FittedTable:
    rows = []
    for result in results:
        if result.cost is None:
            continue
        plan = (result.plan.split, format_sampling(result.plan))
        for unit, num in (("task", result.cost.num_tasks), ("solved task", result.cost.num_solved)):
            rows.append((*plan, unit, *map(format_cost, result.cost.per(num).values())))
    details = (TableColumn("calls", 1), TableColumn("turns", 1), TableColumn("seconds", 2))
    priced = any(result.cost is not None and "money" in result.cost.totals for result in results)
    money = ("money",) if priced else ()
    columns = ("split", "sampling", "per", "tokens in", "tokens out", *details, *money)
    return make_table(columns, rows, "Cost; -: not reported")


def format_cost(number: float | None) -> str:
    """Format an amount with three significant digits, or a dash if it is unknown."""
    if number is None:
        return "-"
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def _stop_table(results: Sequence[Evaluation]) -> FittedTable:
    counts = [Counter(result.stop_reasons) for result in results]
    reasons = dict.fromkeys(reason for count in counts for reason, _ in count.most_common())
    rows = ((reason, *(f"{count[reason] / max(1, count.total()):.1%}" for count in counts)) for reason in reasons)
    titles = (f"{result.plan.split}, {format_sampling(result.plan)}" for result in results)
    return make_table(("stop reason", *titles), rows, "Stop reasons")


def report_table(report: ProbeReport) -> FittedTable:
    """Return the rows as a table; with 3 or more columns of intervals, these are on a second line."""
    measured = {name for row in report.rows for name, cell in row.items() if isinstance(cell, MeanEstimate)}
    between = "\n[" if len(measured) > 2 else " ["
    cells = [
        [str(cell).replace(" [", between) if isinstance(cell, MeanEstimate) else cell for cell in row.values()]
        for row in report.rows
    ]
    return make_table([TableColumn(name, wrap=True) for name in report.rows[0]], cells, report.title)
