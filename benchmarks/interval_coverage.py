"""Measure the coverage of the 95 % intervals of `ludus.evaluation.stats` by simulation.

    python benchmarks/interval_coverage.py                    2,000 evaluations per setting
    python benchmarks/interval_coverage.py --simulations 200

Each simulated evaluation draws the pass rates of its tasks from a distribution and attempts from those rates. The
share of intervals that contain the true value should be 93 to 97 %; other rows are marked with an asterisk.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ludus.evaluation.stats import (
    Interval,
    clustered_interval,
    difference_interval,
    pass_at_k,
    pass_hat_k,
    seeds_difference,
    wilson,
)

Floats = NDArray[np.float64]
DISTRIBUTIONS = {"uniform": (1.0, 1.0), "bimodal": (0.3, 0.3), "hard": (0.3, 1.5), "rare": (0.2, 4.0)}
"""Parameters (a, b) of the beta distributions of pass rates."""
GOAL = (0.93, 0.97)


@dataclass(frozen=True)
class Coverage:
    """Share of the intervals that contain the true value, and their mean width."""

    estimate: str
    tasks: int
    attempts: int
    distribution: str
    share: float
    width: float


def coverage(draw: Callable[[np.random.Generator], Interval], truth: float, num: int, seed: int) -> tuple[float, float]:
    """Return coverage and mean width over `num` simulations."""
    rng = np.random.default_rng(seed)
    found = [draw(rng) for _ in range(num)]
    return sum(truth in one for one in found) / num, sum(one.high - one.low for one in found) / num


def over_tasks(kind: str, num_tasks: int, attempts: int, num: int) -> Iterator[Coverage]:
    """Yield the coverage for the mean, pass@k and pass^k, with k half of the attempts."""
    rates = np.random.default_rng(0).beta(*DISTRIBUTIONS[kind], size=1_000_000)
    k = max(1, attempts // 2)
    scores = {"mean": ([c / attempts for c in range(attempts + 1)], rates.mean())}
    if attempts > 1:
        counts = range(attempts + 1)
        scores["pass@k"] = ([pass_at_k(attempts, c, k) for c in counts], 1 - ((1 - rates) ** k).mean())
        scores["pass^k"] = ([pass_hat_k(attempts, c, k) for c in counts], (rates**k).mean())
    for name, (table, truth) in scores.items():
        values = np.array(table)

        def draw(rng: np.random.Generator, values: Floats = values) -> Interval:
            solved = rng.binomial(attempts, rng.beta(*DISTRIBUTIONS[kind], size=num_tasks))
            return (
                wilson(int(solved.sum()), num_tasks) if attempts == 1 else clustered_interval(values[solved].tolist())
            )

        yield Coverage(name, num_tasks, attempts, kind, *coverage(draw, float(truth), num, 1))


def paired(kind: str, num_tasks: int, attempts: int, num: int) -> Coverage:
    """Return the coverage for the difference of two runs whose tasks are 0.6 or 1 times as likely solved by one."""
    rates = np.random.default_rng(0).beta(*DISTRIBUTIONS[kind], size=1_000_000)

    def draw(rng: np.random.Generator) -> Interval:
        first = rng.beta(*DISTRIBUTIONS[kind], size=num_tasks)
        second = first * rng.choice((0.6, 1.0), size=num_tasks)
        return difference_interval((rng.binomial(attempts, first) - rng.binomial(attempts, second)) / attempts)

    truth = 0.2 * float(rates.mean())
    return Coverage("paired difference", num_tasks, attempts, kind, *coverage(draw, truth, num, 2))


def over_seeds(kind: str, num_tasks: int, seeds: int, num: int, spread: float = 0.3) -> Coverage:
    """Return the coverage for `seeds` runs a side, whose task rates are shifted on the logit scale by seed."""

    def runs(rng: np.random.Generator, logits: Floats) -> Floats:
        shifted = logits + spread * rng.standard_normal((seeds, 1))
        return rng.binomial(1, 1 / (1 + np.exp(-shifted))).astype(np.float64)

    def draw(rng: np.random.Generator) -> Interval:
        rates = rng.beta(*DISTRIBUTIONS[kind], size=num_tasks).clip(1e-9, 1 - 1e-9)
        a, b = (np.log(rates / (1 - rates)) + 0.5 * rng.standard_normal(num_tasks) for _ in "ab")
        return seeds_difference(runs(rng, a), runs(rng, b)).interval

    return Coverage(f"{seeds} seeds a side", num_tasks, 1, kind, *coverage(draw, 0.0, num, 3))


def settings(num: int) -> Iterator[Coverage]:
    """Yield the coverage of all settings."""
    for kind in DISTRIBUTIONS:
        for num_tasks in (20, 50, 200):
            for attempts in (1, 4, 16):
                yield from over_tasks(kind, num_tasks, attempts, num)
            for attempts in (1, 4):
                yield paired(kind, num_tasks, attempts, num)
            for seeds in (2, 3, 5):
                yield over_seeds(kind, num_tasks, seeds, num)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulations", type=int, default=2000, metavar="N", help="evaluations per setting (2000)")
    print(f"{'estimate':18} {'tasks':>5} {'attempts':>8} {'pass rates':10} {'coverage':>8} {'width':>6}")
    for one in settings(parser.parse_args().simulations):
        mark = "" if GOAL[0] <= one.share <= GOAL[1] else " *"
        numbers = f"{one.tasks:5} {one.attempts:8} {one.distribution:10} {one.share:8.1%} {one.width:6.3f}"
        print(f"{one.estimate:18} {numbers}{mark}", flush=True)


if __name__ == "__main__":
    main()
