"""Compare the evaluations of two runs: task by task, by pass@k for large k (does training add capability), and by how
soon they reach a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from ludus.diagnostics.trackers import MetricsRow
from ludus.errors import UserError
from ludus.evaluation import stats
from ludus.evaluation.evaluate import Evaluation, load_evaluation
from ludus.evaluation.stats import Interval, PairedDifference


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
    by_rank = sorted(keyed, key=lambda pair: _rank(pair[1]))
    return dict(keyed) | dict(by_rank)


def _rank(stored: StoredEvaluation) -> tuple[bool, int, int]:
    plan = stored.result.plan
    return not plan.policy, plan.step, plan.num_tasks


def newest_of_any_size(folder: Path) -> dict[tuple[str, float, int], StoredEvaluation]:
    """Return the newest evaluation by split, temperature and attempts; of those of one step, that of the most tasks."""
    found = newest_evaluations(folder)
    return {key[:3]: found[key] for key in sorted(found, key=lambda key: _rank(found[key]))}


def compare(a: Evaluation, b: Evaluation) -> PairedDifference:
    """Return B minus A by task. Raises UserError for fewer than two tasks, or if each has tasks the other lacks."""
    first, second = a.plan.conditions, b.plan.conditions
    if first and second and first.world != second.world and a.scores.keys().isdisjoint(b.scores):
        text = f"A is an evaluation in {first.world} and B in {second.world}: different worlds have no common task."
        raise UserError(text, "Compare evaluations in the same world.")
    in_a, in_b = common_scores(a, b)
    if len(in_a) < 2:
        raise UserError("A single task cannot be compared.", "Use evaluations of 2 tasks or more.")
    try:
        return stats.paired_difference(in_b, in_a)
    except ValueError as error:
        text = f"{a.plan.name} and {b.plan.name} cannot be compared: {error}."
        raise UserError(text, "Compare evaluations of the same split, tasks and world settings.") from error


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


def verdict(difference: float, interval: Interval, num_tasks: int, least: float) -> str:
    """Return the result of a comparison as a sentence. `least` is the detectable difference."""
    if least == 0:
        return "no difference seen; all runs have the same scores."
    if 0 in interval:
        return f"no difference seen; these {num_tasks} tasks show differences above {100 * least:.1f} points."
    bounds = sorted(abs(100 * bound) for bound in (interval.low, interval.high))
    better = "B" if difference > 0 else "A"
    return f"{better} is better by {100 * abs(difference):.1f} points [{bounds[0]:.1f}, {bounds[1]:.1f}]."


def paired_verdict(a: Evaluation, b: Evaluation, found: PairedDifference) -> str:
    """Return the result of `compare` as a sentence."""
    least = stats.detectable_difference(mean_square(*common_scores(a, b)), found.num_tasks)
    return verdict(found.difference, found.interval, found.num_tasks, least)


def differing_conditions(a: Evaluation, b: Evaluation) -> list[str]:
    """Return a sentence for each difference of the plans other than step and policy."""
    plan_a, plan_b = asdict(a.plan), asdict(b.plan)
    plan_a |= plan_a.pop("conditions") or {}
    plan_b |= plan_b.pop("conditions") or {}
    expected = {"step", "policy", "num_tasks"}
    names = [name for name in plan_a if name in plan_b and name not in expected and plan_a[name] != plan_b[name]]
    return [f"{name} is {plan_a[name]} in A and {plan_b[name]} in B" for name in names]


MAX_K = 256
Shape = Literal["cross", "apart", "together", "unclear"]


@dataclass(frozen=True)
class BoundaryPoint:
    """pass@k of the base and of the trained model over the same tasks, and trained minus base, with 95 % intervals."""

    k: int
    base: float
    trained: float
    base_interval: Interval
    trained_interval: Interval
    difference: Interval


def boundary(base: Evaluation, trained: Evaluation) -> list[BoundaryPoint]:
    """Return the curves for k = 1, 2, 4, ... up to the attempts of both and at most `MAX_K`.

    pass@k is unbiased (Chen et al., arXiv:2107.03374); the intervals are over tasks and hold for each k alone. The
    comparison at large k follows Yue et al. (arXiv:2504.13837). Raises ValueError for fewer than 2 common tasks.
    """
    solved = [dict(zip(one.task_ids, one.successes, strict=True)) for one in (base, trained)]
    tasks = [task for task in solved[0] if task in solved[1]]
    most = min(base.plan.samples, trained.plan.samples, MAX_K)
    points = []
    for k in (2**i for i in range(most.bit_length())):
        first, second = (
            np.array([stats.pass_at_k(one.plan.samples, counts[task], k) for task in tasks])
            for one, counts in zip((base, trained), solved, strict=True)
        )
        intervals = (stats.clustered_interval(first.tolist()), stats.clustered_interval(second.tolist()))
        gaps = stats.difference_interval(second - first)
        points.append(BoundaryPoint(k, float(first.mean()), float(second.mean()), *intervals, gaps))
    return points


def curve_shape(points: Sequence[BoundaryPoint]) -> Shape:
    """Return the relation of the curves, by whether the trained model is better where they first differ.

    Then it is worse (`cross`) or better (`apart`) at the largest k, or the interval there contains 0 (`together`).
    """
    signs = [(one.difference.low > 0) - (one.difference.high < 0) for one in points]
    first = next((sign for sign in signs if sign), 0)
    if first > 0:
        return "apart" if signs[-1] > 0 else "cross" if signs[-1] < 0 else "together"
    return "unclear"


@dataclass(frozen=True)
class TargetReached:
    """Interpolated step, episodes and sampled tokens when success first reached a target, if ever; the best success."""

    at: tuple[float, float, float] | None
    best: float


def time_to_target(rows: Sequence[MetricsRow], metric: str, target: float) -> TargetReached:
    """Return when `metric` first reaches `target`, with all episodes and tokens so far. ValueError without it."""
    points: list[tuple[float, float, float, float]] = []
    episodes = tokens = 0.0
    for row in rows:
        count = row.metrics.get("episodes/count", 0.0)
        episodes += count
        tokens += count * row.metrics.get("response_length/mean", 0.0)
        if metric in row.metrics:
            points.append((row.metrics[metric], row.step, episodes, tokens))
    if not points:
        raise ValueError(f"no step has the metric {metric}")
    best = max(point[0] for point in points)
    at = next((i for i, point in enumerate(points) if point[0] >= target), None)
    if at is None:
        return TargetReached(None, best)
    before, after = points[max(0, at - 1)], points[at]
    share = 1.0 if at == 0 else (target - before[0]) / (after[0] - before[0])
    step, num, sampled = (x + share * (y - x) for x, y in zip(before[1:], after[1:], strict=True))
    return TargetReached((step, num, sampled), best)
