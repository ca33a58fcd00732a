"""pass@k and pass^k, confidence intervals, and paired comparisons.

Choice of interval: `wilson` for one 0/1 sample per task, `clustered_interval` over tasks with several samples each,
`paired_difference` for two runs over the same tasks, `seeds_difference` for several runs of each, `t_interval` across
training seeds. All have a confidence of 95 %; benchmarks/interval_coverage.py measures their coverage. Power is 80 %
at a two-sided significance of 5 %. The `seed` argument is the only source of randomness.

SciPy computes the bootstrap, the binomial test and Student's quantiles; it is imported on the first call, because its
import takes half a second. `wilson` does not use SciPy, whose result differs in the last bit from stored bounds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

_RESAMPLES = 2000
_CONFIDENCE = 0.95
_QUANTILE = 0.5 + _CONFIDENCE / 2
_Z, _Z_POWER = NormalDist().inv_cdf(_QUANTILE), NormalDist().inv_cdf(0.8)
_BATCH = 4_000_000
"""Number of indices that the bootstrap draws at a time; bounds its memory."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A confidence interval, ends included."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its interval over tasks or over training seeds."""

    mean: float
    interval: Interval


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """Run `a` minus run `b` over the same tasks.

    `only_a` and `only_b` count the tasks that only one run solved, and `p_value` is the exact two-sided McNemar test
    on them. The three are None if any score is neither 0 nor 1.
    """

    difference: float
    interval: Interval
    num_tasks: int
    p_value: float | None
    only_a: int | None
    only_b: int | None

    @property
    def detectable(self) -> float | None:
        """Minimum detectable difference; None unless scores are 0/1."""
        if self.only_a is None or self.only_b is None:
            return None
        return detectable_difference(smoothed(self.only_a + self.only_b, self.num_tasks), self.num_tasks)


@dataclass(frozen=True, slots=True)
class SeedsDifference:
    """Mean of runs `a` minus that of `b`; the standard errors are those due to the choice of tasks and of seeds."""

    difference: float
    interval: Interval
    num_tasks: int
    num_seeds: tuple[int, int]
    error_tasks: float
    error_seeds: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """Cohen's kappa; `counts` of the items that both accept, only the first, only the second, and neither."""

    estimate: float
    low: float
    high: float
    counts: tuple[int, int, int, int]


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that at least one of `k` samples is correct, given `c` correct among `n` samples.

    `1 - C(n-c, k) / C(n, k)`, unbiased (Chen et al., arXiv:2107.03374, eq. 1). ValueError for impossible counts.
    """
    _check_counts(n, c, k)
    return (math.comb(n, k) - math.comb(n - c, k)) / math.comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """Return the unbiased probability that all of `k` samples are correct, `C(c, k) / C(n, k)` (arXiv:2406.12045)."""
    _check_counts(n, c, k)
    return math.comb(c, k) / math.comb(n, k)


def wilson(successes: int, n: int) -> Interval:
    """Return the Wilson score interval (1927) of independent 0/1 outcomes. Raises ValueError for impossible counts."""
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"need 0 <= successes <= n and n >= 1, got successes={successes}, n={n}")
    rate, scale = successes / n, 1 + _Z * _Z / n
    centre = (rate + _Z * _Z / (2 * n)) / scale
    half = _Z / scale * math.sqrt(rate * (1 - rate) / n + _Z * _Z / (4 * n * n))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    return Interval(low, 1.0 if successes == n else min(1.0, centre + half))


def bootstrap_mean(values_per_task: Sequence[float], *, seed: int, resamples: int = _RESAMPLES) -> Estimate:
    """Return the mean over tasks with a percentile bootstrap interval that resamples whole tasks (Efron 1979).

    `values_per_task`: `[N]`, one number per task (its success rate, or its pass@k). Tasks are resampled and samples
    are not, because the samples of one task are not independent. If all values in [0, 1] are equal, the interval is
    `constant_interval`. Raises ValueError for fewer than 2 tasks or a value that is not finite.
    """
    from scipy.stats import bootstrap

    values = _checked(values_per_task, "bootstrap over tasks")
    interval = constant_interval(values, Interval(0.0, 1.0))
    if interval is None:
        size = max(1, _BATCH // len(values))
        method = {"n_resamples": resamples, "batch": size, "method": "percentile", "rng": seed}
        found = bootstrap((values,), np.mean, vectorized=True, confidence_level=_CONFIDENCE, **method)
        interval = Interval(float(found.confidence_interval.low), float(found.confidence_interval.high))
    return Estimate(float(values.mean()), interval)


def clustered_interval(values: Sequence[float]) -> Interval:
    """Return an interval of the mean of values in [0, 1], one per task: its success rate, its pass@k or its pass^k.

    `values`: `[N]`. The Wilson interval with the effective sample size `N / d` and Student's quantile, as for surveys
    of clusters (Franco et al. 2019, J. Survey Stat. Methodol. 7, 334). The design effect is
    `d = (m s^2 / (p (1 - p)) + 1) / (m + 1)`, where `s^2` is the variance between tasks and `m` Kish's effective number
    of tasks, the smaller one of `(sum v)^2 / sum v^2` and the same for `1 - v`: if few tasks determine the mean, `s^2`
    is often too small, and `d` tends to 1, its largest value. If all values are equal, the interval is
    `constant_interval`. Raises ValueError for fewer than 2 tasks.
    """
    from scipy.special import stdtrit

    numbers = _checked(values, "an interval over tasks")
    if (constant := constant_interval(numbers, Interval(0.0, 1.0))) is not None:
        return constant
    num, rate = len(numbers), float(numbers.mean())
    binomial = rate * (1 - rate)
    effective = min(float(part.sum() ** 2 / (part**2).sum()) for part in (numbers, 1 - numbers))
    design = (effective * float(numbers.var(ddof=1)) / binomial + 1) / (effective + 1)
    square = float(stdtrit(num - 1, _QUANTILE)) ** 2 * design / num
    centre = (rate + square / 2) / (1 + square)
    half = math.sqrt(square * (binomial + square / 4)) / (1 + square)
    return Interval(max(0.0, centre - half), min(1.0, centre + half))


def paired_difference(a: Mapping[str, float], b: Mapping[str, float]) -> PairedDifference:
    """Return `mean(a - b)` of the scores `a` and `b` by task, its `difference_interval`, and McNemar's p-value.

    Raises ValueError if the tasks differ or there are fewer than 2.
    """
    if a.keys() != b.keys():
        unpaired = sorted(a.keys() ^ b.keys())
        raise ValueError(f"the two runs differ in {len(unpaired)} tasks, for example {unpaired[0]!r}")
    tasks = sorted(a)
    first, second = (_checked([scores[t] for t in tasks], "a paired comparison") for scores in (a, b))
    gaps = first - second
    difference = PairedDifference(float(gaps.mean()), difference_interval(gaps), len(tasks), None, None, None)
    if not np.isin([first, second], (0.0, 1.0)).all():
        return difference
    only_a, only_b = int((gaps > 0).sum()), int((gaps < 0).sum())
    return replace(difference, p_value=mcnemar(only_a, only_b), only_a=only_a, only_b=only_b)


def difference_interval(gaps: NDArray[np.float64]) -> Interval:
    """Return an interval of the mean of differences `gaps` [N] in [-1, 1], one per task.

    The normal interval after adding two tasks with the differences `g` and `-g`, where `g` is the root mean square of
    the nonzero differences; for 0/1 scores the adjusted Wald interval of Bonett and Price (2012, J. Educ. Behav. Stat.
    37, 479). If all are equal, the interval is `constant_interval`.
    """
    if (constant := constant_interval(gaps, Interval(-1.0, 1.0))) is not None:
        return constant
    typical = math.sqrt(float((gaps**2).sum()) / np.count_nonzero(gaps))
    numbers = np.append(gaps, (typical, -typical))
    mean, half = float(numbers.mean()), _Z * float(numbers.std()) / math.sqrt(len(numbers))
    return Interval(max(-1.0, mean - half), min(1.0, mean + half))


def rates_difference(a: tuple[float, Interval], b: tuple[float, Interval]) -> tuple[float, Interval]:
    """Return `b - a` of independent rates and its interval (Newcombe 1998, Stat. in Medicine 17, 873, method 10)."""
    (first, one), (second, other) = a, b
    difference = second - first
    low = math.hypot(second - other.low, one.high - first)
    high = math.hypot(other.high - second, first - one.low)
    return difference, Interval(max(-1.0, difference - low), min(1.0, difference + high))


def seeds_difference(a: NDArray[np.float64], b: NDArray[np.float64]) -> SeedsDifference:
    """Return the difference of the mean scores `a` [S_a, N] and `b` [S_b, N] of runs (rows) over the same tasks.

    Runs are samples of training seeds and columns samples of tasks. The variance is the sum of the components of tasks
    and seeds less their interaction, which both contain (two-way clustering: Cameron, Gelbach and Miller 2011, J. Bus.
    Econ. Stat. 29, 238), with the degrees of freedom of Satterthwaite (1946). Both sides share the variance between
    seeds. Raises ValueError for fewer than 2 tasks, or fewer than 3 runs in total.
    """
    from scipy.special import stdtrit

    (runs_a, num), (runs_b, other) = a.shape, b.shape
    if num != other or num < 2 or runs_a + runs_b < 3:
        raise ValueError(f"need the same 2 tasks or more and 3 runs or more, got the shapes {a.shape} and {b.shape}")
    gaps, free = a.mean(0) - b.mean(0), runs_a + runs_b - 2
    difference, share = float(gaps.mean()), 1 / runs_a + 1 / runs_b
    tasks = float(gaps.var(ddof=1)) / num
    centred = [scores - scores.mean(0) for scores in (a, b)]
    seeds = share * sum(float((one.mean(1) ** 2).sum()) for one in centred) / free
    within = sum(float(((one - one.mean(1, keepdims=True)) ** 2).sum()) for one in centred)
    both = share * within / (free * (num - 1) * num)
    variance = max(tasks + seeds - both, tasks, seeds)
    if variance == 0:
        interval = constant_interval(gaps, Interval(-1.0, 1.0)) or Interval(difference, difference)
    else:
        freedom = variance**2 / (tasks**2 / (num - 1) + seeds**2 / free)
        half = float(stdtrit(freedom, _QUANTILE)) * math.sqrt(variance)
        interval = Interval(difference - half, difference + half)
    errors = (math.sqrt(tasks), math.sqrt(max(0.0, seeds - both)))
    return SeedsDifference(difference, interval, num, (runs_a, runs_b), *errors)


def tasks_needed(difference: float, discordance: float) -> int:
    """Return the number of tasks with which a two-sided paired test detects a difference.

    `(z[0.975] sqrt(d) + z[0.8] sqrt(d - difference^2))^2 / difference^2`, rounded up, where `d` is
    the mean square of the differences of one task: for 0/1 scores the share of discordant tasks (Connor 1987,
    Biometrics 43, 207). A `discordance` below `|difference|` is raised to it, for 0/1 scores the least possible.
    Raises ValueError for a difference of 0 or outside [-1, 1], or a negative discordance.
    """
    if not 0 < abs(difference) <= 1 or discordance < 0:
        raise ValueError(f"need a difference in [-1, 1] other than 0, got {difference}, {discordance}")
    square, discordance = difference**2, max(discordance, abs(difference))
    reach = _Z * math.sqrt(discordance) + _Z_POWER * math.sqrt(discordance - square)
    return math.ceil(reach**2 / square)


def cohens_kappa(a: Sequence[bool], b: Sequence[bool]) -> Agreement:
    """Return the agreement of two raters of the same items beyond chance (Cohen 1960).

    The interval uses the asymptotic variance of Fleiss, Cohen and Everitt (1969, Psychol. Bull. 72, 323). Kappa is
    undefined if both raters give all items the same one label: the estimate is then NaN with the interval [-1, 1].
    Raises ValueError for empty or unequal lists.
    """
    if len(a) != len(b) or not a:
        raise ValueError(f"need two lists of the same length above 0, got {len(a)} and {len(b)}")
    observed = Counter(zip(map(bool, a), map(bool, b), strict=True))
    counts = (observed[True, True], observed[True, False], observed[False, True], observed[False, False])
    table = np.reshape(counts, (2, 2)) / len(a)
    rows, columns, agree = table.sum(1), table.sum(0), float(np.trace(table))
    chance = float(rows @ columns)
    if chance == 1:
        return Agreement(math.nan, -1.0, 1.0, counts)
    kappa = (agree - chance) / (1 - chance)
    diagonal = sum(table[i, i] * (1 - (rows[i] + columns[i]) * (1 - kappa)) ** 2 for i in (0, 1))
    others = (1 - kappa) ** 2 * sum(table[i, 1 - i] * (columns[i] + rows[1 - i]) ** 2 for i in (0, 1))
    variance = (diagonal + others - (kappa - chance * (1 - kappa)) ** 2) / (len(a) * (1 - chance) ** 2)
    half = _Z * math.sqrt(max(0.0, float(variance)))
    return Agreement(kappa, max(-1.0, kappa - half), min(1.0, kappa + half), counts)


def mcnemar(only_a: int, only_b: int) -> float:
    """Return McNemar's exact two-sided p-value (1947); 1 without discordant tasks. ValueError for negative counts."""
    from scipy.stats import binomtest

    if only_a < 0 or only_b < 0:
        raise ValueError(f"counts must not be negative, got {only_a} and {only_b}")
    return float(binomtest(only_a, only_a + only_b).pvalue) if only_a + only_b else 1.0


def detectable_difference(variance: float, n: int) -> float:
    """Return the minimum difference of two means that a two-sided test of `n` differences detects.

    `(z[0.975] + z[0.8]) sqrt(variance / n)`, at most 1. `variance` is the variance of the difference at one task:
    `2 p (1 - p)` for two runs with success rate `p` over different tasks, and the share of discordant tasks for two
    runs over the same tasks. Raises ValueError for `n` below 1 or a negative variance.
    """
    if n < 1 or variance < 0:
        raise ValueError(f"need n >= 1 and variance >= 0, got {n}, {variance}")
    return min(1.0, (_Z + _Z_POWER) * math.sqrt(variance / n))


def smoothed(successes: float, n: int) -> float:
    """Return a rate after adding two successes and two failures (Agresti and Coull 1998); never 0 or 1."""
    return (successes + 2) / (n + 4)


def t_interval(values: Sequence[float]) -> Estimate:
    """Return the mean of `values` `[N]` (one per seed) with Student's interval. ValueError below 2 or if not finite."""
    from scipy.special import stdtrit

    numbers = _checked(values, "an interval over seeds")
    mean = float(numbers.mean())
    error = float(numbers.std(ddof=1)) / math.sqrt(len(numbers))
    half = float(stdtrit(len(numbers) - 1, _QUANTILE)) * error
    return Estimate(mean, Interval(mean - half, mean + half))


def constant_interval(values: NDArray[np.float64], bounds: Interval) -> Interval | None:
    """Return the interval of a mean of equal `values` [N] within `bounds`; None if the values differ.

    The bootstrap interval of equal values has width 0. Wilson's upper limit for 0 of N bounds the share of tasks with
    another value; the interval covers the mean if these had the least or the greatest value. For a constant 0 or 1
    within [0, 1] it equals `wilson`.
    """
    value = float(values[0])
    if not (values == value).all() or value not in bounds:
        return None
    share = wilson(0, len(values)).high
    return Interval(value - share * (value - bounds.low), value + share * (bounds.high - value))


def _check_counts(n: int, c: int, k: int) -> None:
    if not 0 <= c <= n:
        raise ValueError(f"the number of correct samples must lie in 0..n, got c={c}, n={n}")
    if not 1 <= k <= n:
        raise ValueError(f"k must lie in 1..n: k={k} needs at least {k} samples per task, there are n={n}")


def _checked(values: Sequence[float], purpose: str) -> NDArray[np.float64]:
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.ndim != 1 or len(numbers) < 2:
        raise ValueError(f"{purpose} needs a flat list of at least 2 values, got shape {numbers.shape}")
    if not np.isfinite(numbers).all():
        raise ValueError(f"{purpose} got a value that is not finite")
    return numbers
