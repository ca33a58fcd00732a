"""Tables of evaluations: success with intervals, families, stop reasons, pass@k."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from ludus.cli.ui.fitted_table import FittedTable, TableColumn, make_table
from ludus.cli.ui.terminal import print_text
from ludus.evaluation.evaluate import Evaluation, EvaluationPlan, WorldResult
from ludus.types import Trajectory

DETECTED = "is detected with a power of 80 % at the 5 % level"
"""Explanation of the column `detectable`, as the end of a sentence."""


@dataclass(frozen=True)
class EvaluatedEpisodes:
    """An evaluation with its trajectories."""

    result: Evaluation
    trajectories: Sequence[Trajectory]


def format_temperature(temperature: float) -> str:
    """Describe a temperature."""
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def format_sampling(plan: EvaluationPlan) -> str:
    """Describe the temperature and, if above 1, the number of attempts."""
    how = format_temperature(plan.temperature)
    return how if plan.samples == 1 else f"{how}, {plan.samples} attempts"


def format_success(result: Evaluation | WorldResult) -> str:
    """Format a success rate with its interval in per cent."""
    return f"{result.rate:.1%} [{result.interval.low:.1%}, {result.interval.high:.1%}]"


def print_evaluations(console: Console, evaluated: Sequence[EvaluatedEpisodes], outcomes: Sequence[str]) -> None:
    """Print all tables. `outcomes` names the reward parts that define success, which get no separate column."""
    console.print(success_table(evaluated, outcomes))
    print_text(console, f"detectable: the smallest difference to a run over other tasks that {DETECTED}.")
    if any(one.result.worlds for one in evaluated):
        console.print(world_table([one.result for one in evaluated]))
    several = [one for one in evaluated if one.result.plan.samples > 1]
    if several:
        console.print(attempts_table(several))
    if any(len(one.result.by_family()) > 1 for one in evaluated):
        for split in dict.fromkeys(one.result.plan.split for one in evaluated):
            console.print(family_table(split, [one for one in evaluated if one.result.plan.split == split]))
    console.print(stop_table(evaluated))


def success_table(evaluated: Sequence[EvaluatedEpisodes], outcomes: Sequence[str] = ()) -> FittedTable:
    """Return a table of success, minimum detectable difference, other reward parts and failures."""
    parts = list(dict.fromkeys(part for one in evaluated for part in one.result.parts if part not in outcomes))
    details = (
        TableColumn("detectable", 2),
        *(TableColumn(part, 3) for part in parts),
        TableColumn("failed episodes", 1),
    )
    columns: tuple[str | TableColumn, ...] = ("split", "sampling", "tasks", "success", *details)
    rows = []
    for result in (one.result for one in evaluated):
        values = [f"{result.parts[part]:.3f}" if part in result.parts else "" for part in parts]
        numbers = (len(result.task_ids), format_success(result), f"{result.detectable:.1%}")
        rows.append((result.plan.split, format_sampling(result.plan), *numbers, *values, result.failed))
    return make_table(columns, rows, "Held-out success, with 95 % intervals")


def world_table(results: Sequence[Evaluation]) -> FittedTable:
    """Return a table of success in each world of a mixture, and its unweighted average."""
    rows: list[tuple[object, ...]] = []
    for result in results:
        plan = (result.plan.split, format_sampling(result.plan))
        rows += [(*plan, name, one.num_tasks, format_success(one)) for name, one in result.by_world().items()]
        rows.append((*plan, "average of the worlds", "", f"{result.macro:.1%}"))
    columns = ("split", "sampling", TableColumn("world", wrap=True), TableColumn("tasks", 1), "success")
    return make_table(columns, rows, "Held-out success by world, 95 % intervals")


def attempts_table(evaluated: Sequence[EvaluatedEpisodes]) -> FittedTable:
    """Return a table of pass@k (any of k succeeds) and pass^k (all succeed); k: powers of 2 and all attempts."""
    rows = []
    for result in (one.result for one in evaluated):
        for k in powers_of_two(result.plan.samples):
            values = (f"{result.pass_at(k):.1%}", f"{result.pass_hat(k):.1%}")
            rows.append((result.plan.split, format_sampling(result.plan), k, *values))
    columns = ("split", "sampling", "k", "pass@k", "pass^k")
    return make_table(columns, rows, "pass@k: one of k succeeds; pass^k: all k succeed")


def powers_of_two(last: int) -> list[int]:
    """Return 1, 2, 4, ... below `last`, and `last`."""
    return [*(2**i for i in range((last - 1).bit_length())), last]


def family_table(split: str, evaluated: Sequence[EvaluatedEpisodes]) -> FittedTable:
    """Return a table of success by task family, with one column per evaluation."""
    families = [one.result.by_family() for one in evaluated]
    rows = []
    for family in sorted({name for found in families for name in found}):
        number = next(found[family][1] for found in families if family in found)
        rows.append((family, number, *(f"{found[family][0]:.1%}" if family in found else "" for found in families)))
    columns: tuple[str | TableColumn, ...] = (
        "family",
        TableColumn("tasks", 1),
        *(format_sampling(one.result.plan) for one in evaluated),
    )
    return make_table(columns, rows, f"{split}: success by family")


def stop_table(evaluated: Sequence[EvaluatedEpisodes]) -> FittedTable:
    """Return a table of the shares of stop reasons."""
    counts = [Counter(t.stop_reason for t in one.trajectories) for one in evaluated]
    reasons = dict.fromkeys(reason for count in counts for reason, _ in count.most_common())
    rows = ((reason, *(f"{count[reason] / max(1, count.total()):.1%}" for count in counts)) for reason in reasons)
    titles = (f"{one.result.plan.split}, {format_sampling(one.result.plan)}" for one in evaluated)
    return make_table(("stop reason", *titles), rows, "Stop reasons")
