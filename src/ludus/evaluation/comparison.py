"""Pair the evaluations of two runs and compare them task by task."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from ludus.errors import UserError
from ludus.evaluation.evaluate import Evaluation, load_evaluation
from ludus.evaluation.stats import PairedDifference, paired_difference


class StoredEvaluation(NamedTuple):
    """An evaluation and the name of its file."""

    name: str
    result: Evaluation


Pair = tuple[StoredEvaluation, StoredEvaluation]
"""Two evaluations to compare, A and B."""


Key = tuple[str, float, int, int]
"""Split, temperature, attempts and number of tasks."""


def load_stored(path: Path) -> StoredEvaluation:
    """Load an evaluation with the name of its file. Raises UserError for any other file."""
    return StoredEvaluation(path.stem, load_evaluation(path))


def newest_evaluations(folder: Path) -> dict[Key, StoredEvaluation]:
    """Return the newest evaluation of each kind in a folder; those of the run's own weights take precedence."""
    evaluations = folder / "evaluations"
    files = sorted(evaluations.glob("*.json")) or sorted(folder.glob("step-*.json"))
    if not files:
        raise UserError(f"There are no evaluations in {folder}.", f"Create some: ludus eval --run {folder}")
    loaded = [(stored, stored.result.plan) for stored in map(load_stored, files)]
    keyed = [((plan.split, plan.temperature, plan.samples, plan.num_tasks), stored) for stored, plan in loaded]
    by_rank = sorted(keyed, key=lambda pair: (not pair[1].result.plan.policy, pair[1].result.plan.step))
    return dict(keyed) | dict(by_rank)


def compare(a: Evaluation, b: Evaluation) -> PairedDifference:
    """Return B minus A by task. Raises UserError for fewer than two tasks, or if each has tasks the other lacks."""
    check_worlds(a, b)
    in_a, in_b = common_scores(a, b)
    if len(in_a) < 2:
        raise UserError("A single task cannot be compared.", "Use evaluations of 2 tasks or more.")
    try:
        return paired_difference(in_b, in_a)
    except ValueError as error:
        text = f"{a.plan.name} and {b.plan.name} cannot be compared: {error}."
        raise UserError(text, "Compare evaluations of the same split, tasks and world settings.") from error


def check_worlds(a: Evaluation, b: Evaluation) -> None:
    """Raise UserError if evaluations of different worlds have no task in common."""
    in_a, in_b = a.plan.conditions, b.plan.conditions
    if in_a and in_b and in_a.world != in_b.world and a.scores.keys().isdisjoint(b.scores):
        text = f"A is an evaluation in {in_a.world} and B in {in_b.world}: different worlds have no common task."
        raise UserError(text, "Compare evaluations in the same world.")


def common_scores(a: Evaluation, b: Evaluation) -> tuple[dict[str, float], dict[str, float]]:
    """Return the scores by task, restricted to the smaller evaluation if the larger one has all of its tasks."""
    in_a, in_b = a.scores, b.scores
    if in_a.keys() <= in_b.keys() or in_b.keys() <= in_a.keys():
        common = in_a.keys() & in_b.keys()
        in_a, in_b = ({task: scores[task] for task in scores if task in common} for scores in (in_a, in_b))
    return in_a, in_b


def mean_square(a: dict[str, float], b: dict[str, float]) -> float:
    """Return the mean square of the differences by task plus two pseudo-tasks of size 1 in `len + 4`, never 0."""
    return (sum((a[task] - b[task]) ** 2 for task in a) + 2) / (len(a) + 4)


def differing_conditions(a: Evaluation, b: Evaluation) -> list[str]:
    """Return a sentence for each difference of the plans other than step and policy."""
    plan_a, plan_b = asdict(a.plan), asdict(b.plan)
    plan_a |= plan_a.pop("conditions") or {}
    plan_b |= plan_b.pop("conditions") or {}
    expected = {"step", "policy", "num_tasks"}
    return [
        f"{name} is {plan_a[name]} in A and {plan_b[name]} in B"
        for name in plan_a
        if name in plan_b and name not in expected and plan_a[name] != plan_b[name]
    ]
