"""Two questions about training: does it add capability (pass@k for large k), and how soon does it reach a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ludus.diagnostics.trackers import MetricsRow
from ludus.evaluation.evaluate import Evaluation
from ludus.evaluation.stats import Interval, clustered_interval, difference_interval, pass_at_k

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
            np.array([pass_at_k(one.plan.samples, counts[task], k) for task in tasks])
            for one, counts in zip((base, trained), solved, strict=True)
        )
        intervals = (clustered_interval(first.tolist()), clustered_interval(second.tolist()))
        gaps = difference_interval(second - first)
        points.append(BoundaryPoint(k, float(first.mean()), float(second.mean()), *intervals, gaps))
    return points


def curve_shape(points: Sequence[BoundaryPoint]) -> Shape:
    """Return the relation of the curves.

    `cross`: the trained model is better at the smallest k with a difference, and worse at the largest. `apart`: it is
    better at the largest k. `together`: it is better at a smaller k, and the interval at the largest contains 0.
    """
    signs = [(one.difference.low > 0) - (one.difference.high < 0) for one in points]
    first = next((sign for sign in signs if sign), 0)
    if first > 0:
        return "apart" if signs[-1] > 0 else "cross" if signs[-1] < 0 else "together"
    return "unclear"


@dataclass(frozen=True)
class TargetReached:
    """Training step, episodes and sampled tokens at which success first reached a target; None if never.

    Between the evaluation before and the first at the target, they are interpolated linearly.
    """

    step: float | None
    episodes: float | None
    tokens: float | None
    best: float


def time_to_target(rows: Sequence[MetricsRow], metric: str, target: float) -> TargetReached:
    """Return when `metric` first reaches `target`. Raises ValueError if no row has the metric.

    Episodes and tokens are those of all steps up to the row, from `episodes/count` and `response_length/mean`.
    """
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
        return TargetReached(None, None, None, best)
    before, after = points[max(0, at - 1)], points[at]
    share = 1.0 if at == 0 else (target - before[0]) / (after[0] - before[0])
    step, num, sampled = (x + share * (y - x) for x, y in zip(before[1:], after[1:], strict=True))
    return TargetReached(step, num, sampled, best)
