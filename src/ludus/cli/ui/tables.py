"""Evaluations as tables: success with intervals, families, stop reasons, pass@k."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from ludus.evaluation.evaluate import Evaluation, EvaluationPlan
from ludus.types import Trajectory


@dataclass(frozen=True)
class EvaluatedEpisodes:
    """An evaluation with its trajectories."""

    result: Evaluation
    trajectories: Sequence[Trajectory]

    @property
    def title(self) -> str:
        """Split and way of sampling, as the head of a column."""
        plan = self.result.plan
        return f"{plan.split}, {how_sampled(plan)}"


def sampling(temperature: float) -> str:
    """The temperature in words."""
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def how_sampled(plan: EvaluationPlan) -> str:
    """The temperature in words, and the number of attempts where there are several."""
    how = sampling(plan.temperature)
    return how if plan.samples == 1 else f"{how}, {plan.samples} attempts"


def rate(result: Evaluation) -> str:
    """A success rate with its interval, in per cent."""
    return f"{result.rate:.1%} [{result.interval.low:.1%}, {result.interval.high:.1%}]"


def print_evaluations(console: Console, played: Sequence[EvaluatedEpisodes], outcomes: Sequence[str]) -> None:
    """All tables. `outcomes` names the reward parts that say success, which need no column of their own."""
    console.print(success_table(played, outcomes))
    if any(one.result.worlds for one in played):
        console.print(world_table([one.result for one in played]))
    several = [one for one in played if one.result.plan.samples > 1]
    if several:
        console.print(attempts_table(several))
    if any(len(one.result.by_family()) > 1 for one in played):
        for split in dict.fromkeys(one.result.plan.split for one in played):
            console.print(family_table(split, [one for one in played if one.result.plan.split == split]))
    console.print(stop_table(played))


def success_table(played: Sequence[EvaluatedEpisodes], outcomes: Sequence[str] = ()) -> Table:
    """One row an evaluation: success, the smallest difference to be seen, other reward parts, failures."""
    table = Table(title="Held-out success, with 95 % intervals")
    parts = list(dict.fromkeys(part for one in played for part in one.result.parts if part not in outcomes))
    for column in ("split", "sampling", "tasks", "success", "detectable", *parts, "failed episodes"):
        table.add_column(column)
    for one in played:
        result = one.result
        values = [f"{result.parts[part]:.3f}" if part in result.parts else "" for part in parts]
        number, least = str(len(result.task_ids)), f"{result.detectable:.1%}"
        told = (result.plan.split, how_sampled(result.plan), number, rate(result), least)
        table.add_row(*told, *values, str(result.failed))
    return table


def world_table(results: Sequence[Evaluation]) -> Table:
    """Success in each world of a mixture, and the average in which each world counts the same."""
    table = Table(title="Held-out success by world, with 95 % intervals")
    for column in ("split", "sampling", "world", "tasks", "success"):
        table.add_column(column)
    for result in results:
        split, how = result.plan.split, how_sampled(result.plan)
        for name, one in result.by_world().items():
            told = f"{one.rate:.1%} [{one.interval.low:.1%}, {one.interval.high:.1%}]"
            table.add_row(split, how, name, str(one.num_tasks), told)
        table.add_row(split, how, "average of the worlds", "", f"{result.macro:.1%}")
    return table


def attempts_table(played: Sequence[EvaluatedEpisodes]) -> Table:
    """pass@k (one of k attempts succeeds) and pass^k (all do), for powers of two and all attempts."""
    table = Table(title="pass@k: one of k attempts succeeds; pass^k: all k do")
    for column in ("split", "sampling", "k", "pass@k", "pass^k"):
        table.add_column(column)
    for one in played:
        plan = one.result.plan
        for k in powers_of_two(plan.samples):
            values = (f"{one.result.pass_at(k):.1%}", f"{one.result.pass_hat(k):.1%}")
            table.add_row(plan.split, how_sampled(plan), str(k), *values)
    return table


def powers_of_two(last: int) -> list[int]:
    """1, 2, 4, ... below `last`, and `last`."""
    return [*(2**i for i in range((last - 1).bit_length())), last]


def family_table(split: str, played: Sequence[EvaluatedEpisodes]) -> Table:
    """Success by family of tasks, one column an evaluation."""
    table = Table(title=f"{split}: success by family")
    table.add_column("family")
    table.add_column("tasks")
    for one in played:
        table.add_column(how_sampled(one.result.plan))
    families = [one.result.by_family() for one in played]
    for family in sorted({name for found in families for name in found}):
        number = next(found[family][1] for found in families if family in found)
        rates = [f"{found[family][0]:.1%}" if family in found else "" for found in families]
        table.add_row(family, str(number), *rates)
    return table


def stop_table(played: Sequence[EvaluatedEpisodes]) -> Table:
    """Why the episodes ended, as shares."""
    table = Table(title="Why episodes ended")
    table.add_column("stop reason")
    counts = [Counter(t.stop_reason for t in one.trajectories) for one in played]
    for one in played:
        table.add_column(one.title)
    for reason in dict.fromkeys(reason for count in counts for reason, _ in count.most_common()):
        shares = [f"{count[reason] / max(1, count.total()):.1%}" for count in counts]
        table.add_row(str(reason), *shares)
    return table
