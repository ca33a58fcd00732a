"""Test-time scaling from one set of K attempts per task: limits of turns and tokens, best-of-n, majority vote.

A limit counts the attempts that succeeded within it. Best-of-n takes the attempt with the highest score, and the
majority vote the most frequent answer, both averaged over all subsets of n of the K attempts (for many subsets over
seeded random ones), so they are unbiased for n attempts.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from ludus.diagnostics.metrics import mean
from ludus.errors import UserError
from ludus.evaluation.evaluate import powers_of_two
from ludus.evaluation.probes import common
from ludus.evaluation.probes.common import Cell, MakeScheduler, ProbePlan, ProbeReport
from ludus.evaluation.stats import pass_at_k
from ludus.rollouts.trees import mean_surprisal
from ludus.types import Trajectory, grouped

MAX_SUBSETS = 1000
"""Number of subsets of a task above which a majority vote is averaged over random ones."""


@dataclass(frozen=True, slots=True)
class ScoredAttempt:
    """Success (0 or 1), answer, turns, sampled tokens, and a score; the last two are None for endpoints."""

    success: float
    answer: str
    turns: int
    tokens: int | None
    score: float | None


Attempts = Mapping[str, Sequence[ScoredAttempt]]
Method = Callable[[Sequence[ScoredAttempt], int], float]
"""Function of the attempts at one task and a budget that returns the expected success."""


def attempt_of(trajectory: Trajectory, success: float) -> ScoredAttempt:
    """Return the attempt of a trajectory; the score is the mean log-probability of its sampled tokens."""
    logprobs = [value for segment in trajectory.segments for value in segment.logprobs]
    turns = sum(message["role"] == "assistant" for message in trajectory.messages)
    known = bool(trajectory.segments)
    score, tokens = (-mean_surprisal(logprobs), len(logprobs)) if known else (None, None)
    return ScoredAttempt(success, common.answer_key(trajectory), turns, tokens, score)


async def measure_scaling(make: MakeScheduler, plan: ProbePlan) -> ProbeReport:
    """Return success by budget, of `plan.samples` attempts per task. UserError for fewer than 2, or if greedy."""
    common.check_samples(plan.samples, "scaling")
    if plan.temperature == 0:
        raise UserError("At temperature 0 all attempts at a task are equal.", "Set --temperature above 0.")
    scheduler = make(plan.sampling)
    by_task = grouped(await common.roll_out(scheduler, plan.requests(plan.samples)), lambda one: one.task_id)
    attempts = {
        task: [attempt_of(one, common.succeeded(scheduler, one)) for one in own] for task, own in by_task.items()
    }
    notes = [f"{plan.samples} attempts per task; differences are paired with one attempt without a tighter limit."]
    if any(one.score is None for found in attempts.values() for one in found):
        notes.append("An endpoint returns no tokens: no limits of tokens and no best-of-n.")
    return ProbeReport("scaling", "Success against test-time compute", scaling_rows(attempts), notes)


def scaling_rows(attempts: Attempts) -> list[dict[str, Cell]]:
    """Return a row for each method and budget, with the paired difference to one attempt."""
    every = [one for found in attempts.values() for one in found]
    sizes = [size for size in powers_of_two(min(map(len, attempts.values()))) if size > 1]
    tokens = [one.tokens for one in every if one.tokens is not None]
    # the powers of 2 from that above the least to that not below the most
    powers = range(min(tokens).bit_length(), (max(tokens) - 1).bit_length() + 1) if tokens else ()
    limits, turns = [2**power for power in powers], range(1, max(one.turns for one in every) + 1)
    budgets: dict[str, tuple[Method, Sequence[int]]] = {
        "turns at most": (lambda own, most: mean([one.success * (one.turns <= most) for one in own]), turns),
        "tokens at most": (lambda own, most: mean([one.success * ((one.tokens or 0) <= most) for one in own]), limits),
        "majority of": (majority, sizes if any(one.answer for one in every) else ()),
        "best of": (best_of, sizes if tokens else ()),
        "any of (pass@k)": (lambda own, num: pass_at_k(len(own), round(sum(one.success for one in own)), num), sizes),
    }
    alone = {task: mean([one.success for one in found]) for task, found in attempts.items()}
    rows: list[dict[str, Cell]] = []
    for name, (method, chosen) in budgets.items():
        for budget in chosen:
            scores = {task: method(found, budget) for task, found in attempts.items()}
            rows.append({"method": name, "budget": budget, **common.compared(scores, alone)})
    return rows


def best_of(attempts: Sequence[ScoredAttempt], num: int) -> float:
    """Return the expected success of the highest score among `num` random attempts, averaged over equal scores.

    The attempt of rank i (from 1, ascending) is the best of `C(i-1, num-1)` of the `C(K, num)` subsets.
    """
    ranked = sorted(attempts, key=lambda one: one.score or 0.0)
    by_score: dict[float | None, list[float]] = {}
    for one in ranked:
        by_score.setdefault(one.score, []).append(one.success)
    weights = [math.comb(rank, num - 1) for rank in range(len(ranked))]
    total = sum(weight * mean(by_score[one.score]) for weight, one in zip(weights, ranked, strict=True))
    return total / math.comb(len(ranked), num)


def majority(attempts: Sequence[ScoredAttempt], num: int) -> float:
    """Return the expected success of the most frequent answer among `num` attempts; ties have equal probability."""
    if math.comb(len(attempts), num) <= MAX_SUBSETS:
        return mean([vote(subset) for subset in combinations(attempts, num)])
    rng = random.Random(f"majority:{num}")
    return mean([vote(rng.sample(list(attempts), num)) for _ in range(MAX_SUBSETS)])


def vote(attempts: Sequence[ScoredAttempt]) -> float:
    """Return the mean success of the most frequent answers; 0 without an answer."""
    counts = Counter(one.answer for one in attempts if one.answer)
    top = max(counts.values(), default=0)
    winners = [answer for answer, count in counts.items() if count == top]
    return mean([mean([one.success for one in attempts if one.answer == answer]) for answer in winners])
