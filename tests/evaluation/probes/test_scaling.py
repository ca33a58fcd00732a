"""Budgets from one set of attempts: hand-computed cases, and agreement with all subsets."""

import asyncio
from dataclasses import replace
from itertools import combinations
from statistics import fmean

import pytest

from ludus.errors import UserError
from ludus.evaluation.probes.scaling import ScoredAttempt, best_of, majority, measure_scaling, scaling_rows, vote
from tests.evaluation.probes.scripted_policies import PLAN, maker, number_in


def attempts(*given):
    return [ScoredAttempt(float(right), answer, turns, turns * 10, score) for right, answer, turns, score in given]


FIVE = attempts((1, "a", 2, 0.3), (0, "b", 1, 0.9), (1, "a", 3, 0.5), (0, "c", 1, 0.5), (0, "", 4, 0.1))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_best_of_n_equals_the_mean_over_all_subsets(size):
    def best(subset):
        top = max(one.score for one in subset)
        return fmean(one.success for one in subset if one.score == top)

    expected = fmean(best(subset) for subset in combinations(FIVE, size))
    assert best_of(FIVE, size) == pytest.approx(expected)


def test_an_attempt_without_a_score_ranks_as_one_with_score_zero():
    assert best_of(attempts((1, "a", 1, None), (0, "b", 1, 0.5)), 2) == 0
    assert best_of(attempts((1, "a", 1, None), (0, "b", 1, -0.5)), 2) == 1


def test_majority_vote_matches_hand_computed_values():
    assert vote(FIVE) == 1  # a: 2, b: 1, c: 1
    assert vote(FIVE[:2]) == 0.5  # a tie
    assert vote(FIVE[4:]) == 0  # no answer
    assert majority(FIVE, 5) == 1
    assert majority(FIVE, 1) == pytest.approx(0.4)


def test_success_rows_by_turn_and_token_limits_match_hand_computed_values():
    rows = {(row["method"], row["budget"]): row for row in scaling_rows({"x": FIVE, "y": FIVE})}
    shares = {turns: rows["turns at most", turns]["success"].value for turns in (1, 2, 3, 4)}
    assert shares == pytest.approx({1: 0, 2: 0.2, 3: 0.4, 4: 0.4})
    assert rows["tokens at most", 16]["success"].value == 0
    assert rows["tokens at most", 64]["success"].value == pytest.approx(0.4)
    assert rows["any of (pass@k)", 5]["difference"].value == pytest.approx(0.6)


def test_attempts_without_token_counts_have_no_token_rows():
    bare = [replace(one, tokens=None, score=None) for one in FIVE]
    methods = {row["method"] for row in scaling_rows({"x": bare, "y": bare})}
    assert methods == {"turns at most", "majority of", "any of (pass@k)"}


def test_scaling_measurement_plays_the_attempts():
    plan = replace(PLAN, samples=3, temperature=1.0)
    report = asyncio.run(measure_scaling(maker(lambda prompt, begun, turn: number_in(prompt)), plan))
    assert all(row["success"].value == 1 for row in report.rows if row["method"] != "tokens at most")


@pytest.mark.parametrize(("changes", "message"), [({"samples": 1}, "at least 2"), ({"samples": 2}, "temperature 0")])
def test_invalid_scaling_plans_raise_error(changes, message):
    with pytest.raises(UserError, match=message):
        asyncio.run(measure_scaling(maker(lambda *_: ""), replace(PLAN, **changes)))
