"""Scores with honest error bars: pass@k and pass^k, intervals, and paired comparisons.

Which interval to use: `wilson` for one 0/1 sample a task, `bootstrap_mean` over tasks where each task has
several samples, `paired_difference` for two runs over the same tasks, `t_interval` across training seeds.
Each result says what its interval is over. Randomness comes from the `seed` argument alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

_RESAMPLES = 2000
_BLOCK = 4_000_000
"""Numbers drawn at a time by the bootstrap, so that many tasks do not take much memory."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A confidence interval, ends included."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean of `count` numbers, its interval, and what that interval is over."""

    mean: float
    interval: Interval
    count: int
    over: Literal["tasks", "seeds"]
    confidence: float


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """Run `a` minus run `b` over the same tasks.

    `only_a` and `only_b` count the tasks that one run alone got right, and `p_value` is the exact two-sided
    McNemar test on them. The three are None where a value is neither 0 nor 1.
    """

    difference: float
    interval: Interval
    num_tasks: int
    p_value: float | None
    only_a: int | None
    only_b: int | None
    confidence: float

    @property
    def detectable(self) -> float | None:
        """The smallest difference that these tasks would have shown (80 % power, 5 %); None unless 0/1."""
        if self.only_a is None or self.only_b is None:
            return None
        return detectable_difference(smoothed(self.only_a + self.only_b, self.num_tasks), self.num_tasks)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of `k` samples is right, from `n` samples of which `c` are right.

    `1 - C(n-c, k) / C(n, k)`, unbiased (Chen et al., arXiv:2107.03374, eq. 1). Raises ValueError where
    `k > n` or the counts are impossible.
    """
    _check_counts(n, c, k)
    return (math.comb(n, k) - math.comb(n - c, k)) / math.comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """Chance that all of `k` samples are right: `C(c, k) / C(n, k)`, unbiased (tau-bench, arXiv:2406.12045).

    Raises ValueError where `k > n` or the counts are impossible.
    """
    _check_counts(n, c, k)
    return math.comb(c, k) / math.comb(n, k)


def wilson(successes: int, n: int, confidence: float = 0.95) -> Interval:
    """The Wilson score interval of a success rate (Wilson 1927), for independent 0/1 outcomes.

    Raises ValueError for `n` below 1, impossible counts, or a confidence outside (0, 1).
    """
    _check_confidence(confidence)
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"need 0 <= successes <= n and n >= 1, got successes={successes}, n={n}")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    rate = successes / n
    scale = 1 + z * z / n
    centre = (rate + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return Interval(low, high)


def bootstrap_mean(
    values_per_task: Sequence[float], *, seed: int, confidence: float = 0.95, resamples: int = _RESAMPLES
) -> Estimate:
    """The mean over tasks, with a percentile bootstrap that redraws whole tasks (Efron 1979).

    `values_per_task`: `[N]`, one number a task (its success rate, or its pass@k). Samples of one task are
    not independent, which is why tasks are redrawn and samples are not. Where all values are the same the
    interval is that of `constant_interval`, for values in [0, 1]. Raises ValueError for fewer than 2 tasks
    (one task says nothing about others) or a value that is not finite.
    """
    values = _checked(values_per_task, "bootstrap over tasks", confidence)
    interval = constant_interval(values, Interval(0.0, 1.0), confidence) or _bootstrap(
        values, seed=seed, confidence=confidence, resamples=resamples
    )
    return Estimate(float(values.mean()), interval, len(values), "tasks", confidence)


def paired_difference(
    a: Mapping[str, float], b: Mapping[str, float], *, seed: int, confidence: float = 0.95, resamples: int = _RESAMPLES
) -> PairedDifference:
    """Compare two runs over the same tasks: `mean(a - b)`, its bootstrap interval, and McNemar's p-value.

    `a` and `b` map the id of a task to its score. The bootstrap redraws tasks and keeps their pairs
    together. Where every task differs by the same the interval is that of `constant_interval`, for scores
    in [0, 1]. Raises ValueError where the tasks differ, or there are fewer than 2.
    """
    if a.keys() != b.keys():
        odd = sorted(a.keys() ^ b.keys())
        raise ValueError(f"the two runs differ in {len(odd)} tasks, for example {odd[0]!r}")
    tasks = sorted(a)
    first = _checked([a[t] for t in tasks], "a paired comparison", confidence)
    second = _checked([b[t] for t in tasks], "a paired comparison", confidence)
    gaps = first - second
    interval = constant_interval(gaps, Interval(-1.0, 1.0), confidence) or _bootstrap(
        gaps, seed=seed, confidence=confidence, resamples=resamples
    )
    binary = bool(np.isin(first, (0.0, 1.0)).all() and np.isin(second, (0.0, 1.0)).all())
    only_a, only_b = int((gaps > 0).sum()), int((gaps < 0).sum())
    return PairedDifference(
        difference=float(gaps.mean()),
        interval=interval,
        num_tasks=len(tasks),
        p_value=mcnemar(only_a, only_b) if binary else None,
        only_a=only_a if binary else None,
        only_b=only_b if binary else None,
        confidence=confidence,
    )


def mcnemar(only_a: int, only_b: int) -> float:
    """Exact two-sided p-value of McNemar's test (1947): each discordant task is a fair coin.

    1 where no task is discordant. Raises ValueError for negative counts.
    """
    if only_a < 0 or only_b < 0:
        raise ValueError(f"counts must not be negative, got {only_a} and {only_b}")
    flips = only_a + only_b
    tail = sum(math.comb(flips, i) for i in range(min(only_a, only_b) + 1))
    p_value: float = 2 * tail / 2**flips
    return min(1.0, p_value)


def detectable_difference(variance: float, n: int, *, power: float = 0.8, significance: float = 0.05) -> float:
    """The smallest difference of two means that a two-sided test of `n` differences would find.

    `(z[1 - significance / 2] + z[power]) sqrt(variance / n)`, at most 1; `variance` is that of the difference
    at one task: `2 p (1 - p)` for two runs with the success rate `p` over different tasks, the share of the
    tasks that one run alone gets right for two runs over the same ones. Raises ValueError for `n` below 1, a
    negative variance, or a power or significance outside (0, 1).
    """
    if n < 1 or variance < 0 or not (0 < power < 1 and 0 < significance < 1):
        raise ValueError(f"need n >= 1, variance >= 0, power and significance in (0, 1), got {n}, {variance}")
    normal = NormalDist()
    reach = normal.inv_cdf(1 - significance / 2) + normal.inv_cdf(power)
    return min(1.0, reach * math.sqrt(variance / n))


def smoothed(successes: float, n: int) -> float:
    """A rate pulled to a half by two successes and two failures (Agresti and Coull 1998), never 0 or 1."""
    return (successes + 2) / (n + 4)


def t_interval(values: Sequence[float], confidence: float = 0.95) -> Estimate:
    """Mean across training seeds, with Student's interval `mean ± t[n-1] · s / sqrt(n)`.

    `values`: `[N]`, one number a seed. Raises ValueError for fewer than 2 values or one that is not finite.
    """
    numbers = _checked(values, "an interval over seeds", confidence)
    mean = float(numbers.mean())
    error = float(numbers.std(ddof=1)) / math.sqrt(len(numbers))
    half = t_quantile(0.5 + confidence / 2, len(numbers) - 1) * error
    return Estimate(mean, Interval(mean - half, mean + half), len(numbers), "seeds", confidence)


def t_quantile(p: float, freedom: float) -> float:
    """The `p`-quantile of Student's t with `freedom` degrees of freedom.

    Found by bisection of `P(|T| <= t) = I_y(1/2, freedom/2)` at `y = t^2 / (freedom + t^2)` (Abramowitz and
    Stegun 26.7.1). Raises ValueError for `p` outside (0, 1) or `freedom` not positive.
    """
    if not 0 < p < 1 or not freedom > 0:
        raise ValueError(f"need 0 < p < 1 and freedom > 0, got p={p}, freedom={freedom}")
    if p < 0.5:
        return -t_quantile(1 - p, freedom)
    inside = 2 * p - 1
    low, high = 0.0, 1.0
    while _t_inside(high, freedom) < inside and high < 1e150:
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:
        if _t_inside(middle, freedom) < inside:
            low = middle
        else:
            high = middle
    return low if inside == 0 else high


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function `I_x(a, b)`, for positive `a`, `b` and `x` in [0, 1].

    The continued fraction of the NIST Handbook (DLMF 8.17.22), on the side where it converges fast.
    """
    if not (a > 0 and b > 0 and 0 <= x <= 1):
        raise ValueError(f"need a > 0, b > 0 and 0 <= x <= 1, got a={a}, b={b}, x={x}")
    if x in (0.0, 1.0):
        return x
    if x > (a + 1) / (a + b + 2):
        return 1 - incomplete_beta(b, a, 1 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) / (a * _beta_fraction(a, b, x))


def _beta_fraction(a: float, b: float, x: float) -> float:
    """`1 + d1/(1 + d2/(1 + ...))` of DLMF 8.17.22, by Lentz's method."""
    value, above, below = 1.0, 1.0, 0.0
    for i in range(1, 100_000):
        m = i // 2
        if i % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        below = 1 / ((1 + term * below) or 1e-300)
        above = (1 + term / above) or 1e-300
        value *= above * below
        if abs(above * below - 1) < 1e-15:
            return value
    raise ArithmeticError(f"incomplete beta does not converge at a={a}, b={b}, x={x}")


def _t_inside(t: float, freedom: float) -> float:
    """`P(|T| <= t)`."""
    return incomplete_beta(0.5, freedom / 2, t * t / (freedom + t * t))


def constant_interval(values: NDArray[np.float64], bounds: Interval, confidence: float = 0.95) -> Interval | None:
    """The interval of a mean of `values` [N] within `bounds` that are all the same; None where they differ.

    A bootstrap has width 0 there. Wilson's upper limit for 0 of N bounds the share of tasks that could have
    another value, and the interval is where the mean lies if these had the least or the greatest. For a
    constant 0 or 1 within [0, 1] it is `wilson`.
    """
    value = float(values[0])
    if not (values == value).all() or value not in bounds:
        return None
    share = wilson(0, len(values), confidence).high
    return Interval(value - share * (value - bounds.low), value + share * (bounds.high - value))


def _bootstrap(values: NDArray[np.float64], *, seed: int, confidence: float, resamples: int) -> Interval:
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")
    rng = np.random.default_rng(seed)
    rows = max(1, _BLOCK // len(values))
    means: list[NDArray[np.float64]] = []
    for start in range(0, resamples, rows):
        draws = rng.integers(0, len(values), size=(min(rows, resamples - start), len(values)))
        means.append(values[draws].mean(axis=1))
    outside = (1 - confidence) / 2
    low, high = np.quantile(np.concatenate(means), [outside, 1 - outside])
    return Interval(float(low), float(high))


def _check_counts(n: int, c: int, k: int) -> None:
    if not 0 <= c <= n:
        raise ValueError(f"right samples must lie in 0..n, got c={c}, n={n}")
    if not 1 <= k <= n:
        raise ValueError(f"k must lie in 1..n: k={k} needs at least {k} samples a task, there are n={n}")


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")


def _checked(values: Sequence[float], purpose: str, confidence: float) -> NDArray[np.float64]:
    _check_confidence(confidence)
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.ndim != 1 or len(numbers) < 2:
        raise ValueError(f"{purpose} needs a flat list of at least 2 values, got shape {numbers.shape}")
    if not np.isfinite(numbers).all():
        raise ValueError(f"{purpose} got a value that is not finite")
    return numbers
