"""Area under the ROC curve of scores against binary outcomes, with an interval for clustered data."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from ludus.evaluation.stats import Estimate, Interval

_Z = 1.959963984540054
"""Quantile of the normal distribution of a 95 % interval."""


def auc(scores: Sequence[float], positive: Sequence[bool]) -> float | None:
    """Return the probability that a positive scores above a negative, ties half; None unless both exist."""
    high, low = _split(scores, positive)
    return float(_placements(high, low).mean()) if high.size and low.size else None


def clustered_auc(scores: Sequence[float], positive: Sequence[bool], clusters: Sequence[Hashable]) -> Estimate | None:
    """Return the AUC with its 95 % interval over clusters, such as tasks; None unless both outcomes exist.

    The variance is that of Obuchowski (1997, Biometrics 53, 567) for outcomes that are correlated within clusters; with
    one item per cluster it is that of DeLong et al. (1988). The interval is symmetric on the logit scale. It is [0, 1]
    if the variance cannot be estimated: fewer than two clusters of either outcome, or scores that separate perfectly.
    """
    high, low = _split(scores, positive)
    if not high.size or not low.size:
        return None
    of_high, of_low = _placements(high, low), 1 - _placements(low, high)
    area = float(of_high.mean())
    names = {name: i for i, name in enumerate(dict.fromkeys(clusters))}
    index, is_high = np.array([names[name] for name in clusters]), np.array(positive, bool)
    num = len(names)
    sums = [
        np.bincount(index[which], values - area, minlength=num)
        for which, values in ((is_high, of_high), (~is_high, of_low))
    ]
    counts = [len(set(index[which].tolist())) for which in (is_high, ~is_high)]
    if min(counts) < 2 or area in (0.0, 1.0):
        return Estimate(area, Interval(0.0, 1.0))
    sizes = (high.size, low.size)
    variance = 2 * num / (num - 1) * float(sums[0] @ sums[1]) / (sizes[0] * sizes[1])
    for total, count, size in zip(sums, counts, sizes, strict=True):
        variance += count / (count - 1) * float(total @ total) / size**2
    half = _Z * math.sqrt(max(variance, 0.0)) / (area * (1 - area))
    logit = math.log(area / (1 - area))
    return Estimate(area, Interval(_expit(logit - half), _expit(logit + half)))


def _split(scores: Sequence[float], positive: Sequence[bool]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    values, is_high = np.asarray(scores, np.float64), np.asarray(positive, bool)
    return values[is_high], values[~is_high]


def _placements(values: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return for each value the share of `others` below it, equal ones half."""
    ordered = np.sort(others)
    return (np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")) / (2 * len(ordered))


def _expit(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0
