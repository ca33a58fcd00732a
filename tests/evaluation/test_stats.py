"""Scores and intervals against enumeration, published tables and simulation."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.evaluation.evaluate import Evaluation, EvaluationPlan
from ludus.evaluation.stats import (
    Interval,
    bootstrap_mean,
    clustered_interval,
    cohens_kappa,
    detectable_difference,
    difference_interval,
    mcnemar,
    paired_difference,
    pass_at_k,
    pass_hat_k,
    seeds_difference,
    smoothed,
    t_interval,
    tasks_needed,
    wilson,
)


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_and_pass_hat_k_match_full_enumeration(n):
    for c in range(n + 1):
        samples = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            draws = list(combinations(samples, k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-15)
            assert pass_hat_k(n, c, k) == pytest.approx(sum(map(all, draws)) / len(draws), abs=1e-15)


def test_pass_at_k_is_exact_for_huge_binomials():
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01, rel=1e-12)
    assert pass_hat_k(10_000, 9_999, 100) == pytest.approx(0.99, rel=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 2, 5), (4, 2, 0), (4, 5, 1), (4, -1, 1), (0, 0, 1)])
def test_impossible_counts_raise_error(n, c, k):
    for score in (pass_at_k, pass_hat_k):
        with pytest.raises(ValueError, match=r"must lie in"):
            score(n, c, k)


def test_too_large_k_reports_the_number_of_samples_needed():
    with pytest.raises(ValueError, match="needs at least 5 samples per task, there are n=4"):
        pass_at_k(4, 2, 5)


def test_wilson_matches_published_values():
    eight = wilson(8, 10)
    assert (eight.low, eight.high) == pytest.approx((0.4901625, 0.9433178), abs=1e-7)
    none = wilson(0, 10)
    assert none.low == 0.0
    assert none.high == pytest.approx(0.2775328, abs=1e-7)
    assert wilson(10, 10).high == 1.0
    assert wilson(10, 10).low == pytest.approx(1 - none.high, abs=1e-12)


@given(st.integers(1, 500), st.data())
def test_wilson_interval_contains_the_rate_and_is_symmetric(n, data):
    successes = data.draw(st.integers(0, n))
    interval = wilson(successes, n)
    assert 0 <= interval.low <= successes / n <= interval.high <= 1
    mirrored = wilson(n - successes, n)
    assert mirrored.low == pytest.approx(1 - interval.high, abs=1e-12)


def test_wilson_interval_has_nominal_coverage():
    n = 40
    covered = []
    for rate in np.linspace(0.05, 0.95, 19):
        chances = [math.comb(n, s) * rate**s * (1 - rate) ** (n - s) for s in range(n + 1)]
        covered.append(sum(p for s, p in enumerate(chances) if rate in wilson(s, n)))
    assert min(covered) > 0.92
    assert 0.94 < np.mean(covered) < 0.97


@pytest.mark.parametrize("arguments", [(1, 0), (3, 2), (-1, 2)])
def test_wilson_rejects_impossible_counts(arguments):
    with pytest.raises(ValueError, match="successes"):
        wilson(*arguments)


def test_bootstrap_over_two_tasks_matches_the_exact_distribution():
    """Means of 2 redrawn tasks worth 0 and 1 are 0, 1/2, 1 with chances 1/4, 1/2, 1/4."""
    wide = bootstrap_mean([0.0, 1.0], seed=3)
    assert (wide.mean, wide.interval) == (0.5, Interval(0.0, 1.0))


def test_bootstrap_depends_only_on_its_seed():
    values = np.random.default_rng(0).random(50).tolist()
    first = bootstrap_mean(values, seed=1)
    assert first == bootstrap_mean(values, seed=1)
    assert first != bootstrap_mean(values, seed=2)


def test_blockwise_bootstrap_of_many_values_matches_the_normal_interval():
    """5000 tasks need several blocks; the interval is close to the normal one, mean ± 1.96 s / sqrt(n)."""
    values = np.random.default_rng(0).normal(size=5000)
    result = bootstrap_mean(values.tolist(), seed=0, resamples=1700)
    half = 1.96 * values.std() / math.sqrt(len(values))
    assert result.interval.high - result.mean == pytest.approx(half, rel=0.1)
    assert result.mean - result.interval.low == pytest.approx(half, rel=0.1)


def test_bootstrap_interval_has_nearly_nominal_coverage():
    rng = np.random.default_rng(11)
    covered = 0
    for trial in range(300):
        rates = rng.beta(1.0, 1.0, size=40)
        solved = rng.binomial(4, rates) / 4
        covered += 0.5 in bootstrap_mean(solved.tolist(), seed=trial, resamples=400).interval
    assert 0.90 < covered / 300 < 0.98


@pytest.mark.parametrize("values", [[], [1.0], [1.0, math.nan], [1.0, math.inf], [[0.0, 1.0], [1.0, 1.0]]])
def test_too_few_or_nonfinite_values_raise_error(values):
    with pytest.raises(ValueError, match=r"at least 2|not finite"):
        bootstrap_mean(values, seed=0)
    with pytest.raises(ValueError, match=r"at least 2|not finite"):
        t_interval(values)


def test_mcnemar_matches_hand_computed_values():
    """8 against 2: 2 · (C(10,0) + C(10,1) + C(10,2)) / 2^10 = 112 / 1024."""
    assert mcnemar(8, 2) == pytest.approx(112 / 1024, rel=1e-12)
    assert mcnemar(2, 8) == mcnemar(8, 2)
    assert mcnemar(5, 0) == pytest.approx(2 / 32, rel=1e-12)
    assert mcnemar(3, 3) == 1.0
    assert mcnemar(0, 0) == 1.0
    with pytest.raises(ValueError, match="negative"):
        mcnemar(-1, 2)


def test_paired_difference_counts_the_tasks_that_differ():
    ids = [f"t{i}" for i in range(20)]
    a = {task: float(i < 14) for i, task in enumerate(ids)}
    b = {task: float(6 <= i < 16) for i, task in enumerate(ids)}
    result = paired_difference(a, b)
    assert result.difference == pytest.approx(14 / 20 - 10 / 20)
    assert (result.only_a, result.only_b, result.num_tasks) == (6, 2, 20)
    assert result.p_value == mcnemar(6, 2)
    back = paired_difference(b, a)
    assert back.difference == -result.difference
    assert (back.only_a, back.only_b, back.p_value) == (2, 6, result.p_value)


def test_paired_difference_does_not_depend_on_the_order_of_the_tasks():
    rng = np.random.default_rng(5)
    a = {f"t{i}": float(v) for i, v in enumerate(rng.random(30))}
    b = {f"t{i}": float(v) for i, v in enumerate(rng.random(30))}
    shuffled = dict(reversed(a.items()))
    assert paired_difference(a, b) == paired_difference(shuffled, b)


def test_pairing_removes_the_difficulty_of_the_tasks():
    """Scores spread over [0, 1] by task; `a` is better by 0.1 on each, so the interval is narrow."""
    hard = np.random.default_rng(2).random(40) * 0.9
    a = {f"t{i}": float(v) + 0.1 for i, v in enumerate(hard)}
    b = {f"t{i}": float(v) for i, v in enumerate(hard)}
    result = paired_difference(a, b)
    assert result.interval.low == pytest.approx(0.1, abs=0.02)
    assert result.interval.high == pytest.approx(0.1, abs=0.02)
    assert (result.p_value, result.only_a, result.only_b) == (None, None, None)
    alone = bootstrap_mean(list(a.values()), seed=0).interval
    assert alone.high - alone.low > 0.1


def test_paired_difference_reports_a_task_missing_in_one_run():
    with pytest.raises(ValueError, match="differ in 2 tasks, for example 'only-here'"):
        paired_difference({"x": 1.0, "y": 0.0, "only-here": 1.0}, {"x": 1.0, "y": 0.0, "z": 1.0})


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062047364), (2, 4.3026527299), (4, 2.7764451052), (10, 2.2281388520), (30, 2.0422724563)],
)
def test_t_intervals_match_published_tables(freedom, quantile):
    values = [float(i) for i in range(freedom + 1)]
    error = np.std(values, ddof=1) / math.sqrt(len(values))
    found = t_interval(values).interval
    assert (found.high - found.low) / 2 == pytest.approx(quantile * error, rel=1e-9)


def test_t_interval_matches_hand_computed_values():
    """Values 1, 2, 3: mean 2, s 1, so 2 ± 4.30265 / sqrt(3)."""
    result = t_interval([1.0, 2.0, 3.0])
    assert result.mean == 2.0
    assert result.interval.high == pytest.approx(2 + 4.3026527299 / math.sqrt(3))
    assert result.interval.low == pytest.approx(2 - 4.3026527299 / math.sqrt(3))


def test_t_interval_covers_the_true_mean_with_three_seeds():
    draws = np.random.default_rng(7).normal(loc=0.3, scale=0.05, size=(1000, 3))
    covered = sum(0.3 in t_interval(row.tolist()).interval for row in draws)
    assert 0.93 < covered / 1000 < 0.97


def test_identical_values_have_an_interval_of_nonzero_width():
    none, every = (bootstrap_mean([value] * 40, seed=0).interval for value in (0.0, 1.0))
    assert (none.low, none.high) == pytest.approx((0, wilson(0, 40).high))
    assert (every.low, every.high) == pytest.approx((wilson(40, 40).low, 1))
    half = bootstrap_mean([0.5] * 40, seed=0).interval
    assert (half.low, half.high) == pytest.approx((0.5 - none.high / 2, 0.5 + none.high / 2))
    tasks = [str(i) for i in range(40)]
    gained = paired_difference(dict.fromkeys(tasks, 1.0), dict.fromkeys(tasks, 0.0)).interval
    assert (gained.low, gained.high) == pytest.approx((1 - 2 * none.high, 1))


def test_detectable_difference_has_80_percent_power_in_simulation():
    rng, trials = np.random.default_rng(0), 4_000
    for rate, n in ((0.5, 1_000), (0.2, 400)):
        gap = detectable_difference(2 * rate * (1 - rate), n)
        a, b = (rng.binomial(n, p, trials) / n for p in (rate - gap / 2, rate + gap / 2))
        error = np.sqrt((a * (1 - a) + b * (1 - b)) / n)
        assert np.mean(np.abs(b - a) > 1.959964 * error) == pytest.approx(0.8, abs=0.025)
    for share, n in ((0.1, 1_000), (0.3, 200)):
        gap = detectable_difference(share, n)
        counts = rng.multinomial(n, [(share + gap) / 2, (share - gap) / 2, 1 - share], trials)
        z = (counts[:, 0] - counts[:, 1]) / np.sqrt(counts[:, 0] + counts[:, 1])
        assert np.mean(np.abs(z) > 1.959964) == pytest.approx(0.8, abs=0.025)


def test_detectable_difference_matches_hand_computed_values():
    assert detectable_difference(2 * 0.5 * 0.5, 1_000) == pytest.approx(2.8015852 * (0.5 / 1_000) ** 0.5)
    assert detectable_difference(2 * 0.25, 1) == 1
    found = paired_difference({str(i): float(i < 30) for i in range(96)}, {str(i): float(i < 20) for i in range(96)})
    assert found.detectable == pytest.approx(2.8015852 * (12 / 100 / 96) ** 0.5)
    rate = smoothed(2.0, 4)  # 4 of 8 attempts; two tasks vary within their attempts
    several = Evaluation(EvaluationPlan("test", 4, 2, 1.0, 0), tuple("abcd"), (2, 1, 0, 1), tuple("abcd"), {}, 0)
    assert several.detectable == detectable_difference(2 * (rate * (1 - rate) - 2 / 16), 4)
    for variance, n in ((-0.1, 10), (0.1, 0)):
        with pytest.raises(ValueError, match="need n >= 1"):
            detectable_difference(variance, n)


@pytest.mark.parametrize("shape", [(1.0, 1.0), (0.3, 0.3), (0.3, 1.5)])
def test_intervals_over_tasks_with_several_attempts_cover_the_true_mean(shape):
    rng, truth = np.random.default_rng(0), shape[0] / sum(shape)
    for num in (20, 50):
        drawn = (rng.binomial(4, rng.beta(*shape, size=num)) / 4 for _ in range(600))
        covered = sum(truth in clustered_interval(values.tolist()) for values in drawn)
        assert 0.93 < covered / 600 < 0.99


def test_clustered_interval_covers_a_rate_dominated_by_few_tasks():
    rng, truth = np.random.default_rng(0), (np.random.default_rng(1).beta(0.3, 1.5, 200_000) ** 8).mean()
    table = np.array([pass_hat_k(16, c, 8) for c in range(17)])
    drawn = (table[rng.binomial(16, rng.beta(0.3, 1.5, size=50))] for _ in range(600))
    assert sum(truth in clustered_interval(values.tolist()) for values in drawn) / 600 > 0.93


def test_clustered_interval_matches_hand_computed_values():
    values = [0.0, 0.5, 0.5, 1.0]
    effective = 2**2 / (0.25 + 0.25 + 1)
    design = (effective * np.var(values, ddof=1) / 0.25 + 1) / (effective + 1)
    square = 3.182446**2 * design / 4
    half = (square * (0.25 + square / 4)) ** 0.5 / (1 + square)
    found = clustered_interval(values)
    assert (found.low, found.high) == pytest.approx((0.5 - half, 0.5 + half), rel=1e-6)
    with pytest.raises(ValueError, match="at least 2 values"):
        clustered_interval([0.5])


def test_paired_difference_interval_is_the_adjusted_wald_interval():
    found = difference_interval(np.array([1.0] * 6 + [-1.0] * 2 + [0.0] * 12))  # Bonett and Price: two tasks added
    mean, share = 4 / 22, 10 / 22
    half = 1.959964 * ((share - mean**2) / 22) ** 0.5
    assert (found.low, found.high) == pytest.approx((mean - half, mean + half), rel=1e-6)


def test_seeds_difference_has_nominal_coverage_and_includes_variance_between_seeds():
    rng, covered = np.random.default_rng(1), 0
    for _ in range(600):
        tasks, shifts = rng.normal(size=(2, 40)) * 0.5 + rng.normal(size=40), rng.normal(size=(2, 3, 1)) * 0.4
        scores = rng.binomial(1, 1 / (1 + np.exp(-tasks[:, None] - shifts))).astype(float)
        covered += 0 in seeds_difference(*scores).interval
    assert 0.925 < covered / 600 < 0.985
    a, b = np.array([[1.0] * 500, [0.0] * 500]), np.array([[0.5] * 500] * 2)
    found = seeds_difference(a, b)
    assert (found.difference, found.error_tasks) == (0, 0)
    assert found.error_seeds == pytest.approx(0.5)
    with pytest.raises(ValueError, match="3 runs or more"):
        seeds_difference(a[:1], b[:1])


def test_tasks_needed_has_the_nominal_power_in_simulation():
    rng, share, gap = np.random.default_rng(0), 0.2, 0.1
    num = tasks_needed(gap, share)
    assert num == 155  # Connor 1987: (1.96 sqrt(0.2) + 0.8416 sqrt(0.19))^2 / 0.01
    counts = rng.multinomial(num, [(share + gap) / 2, (share - gap) / 2, 1 - share], 4_000)
    z = (counts[:, 0] - counts[:, 1]) / np.sqrt(counts[:, 0] + counts[:, 1])
    assert np.mean(np.abs(z) > 1.959964) == pytest.approx(0.8, abs=0.03)
    assert tasks_needed(gap, 0.0) == tasks_needed(gap, gap)
    with pytest.raises(ValueError, match="other than 0"):
        tasks_needed(0.0, share)


def test_cohens_kappa_matches_hand_computed_values():
    pairs = [(True, True)] * 20 + [(True, False)] * 5 + [(False, True)] * 10 + [(False, False)] * 15
    found = cohens_kappa(*zip(*pairs, strict=True))
    assert found.counts == (20, 5, 10, 15)
    assert found.estimate == pytest.approx(0.4)  # (0.7 - 0.5) / (1 - 0.5)
    assert found.low == pytest.approx(0.4 - 1.959964 * 0.12627, abs=2e-3)
    same = cohens_kappa([True] * 4, [True] * 4)
    assert (np.isnan(same.estimate), same.low, same.high) == (True, -1, 1)
    with pytest.raises(ValueError, match="same length"):
        cohens_kappa([True], [])
