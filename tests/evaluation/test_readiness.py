"""Statistics before training, against enumeration, integration and simulation."""

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import beta as beta_distribution

from ludus.config.load import load_config
from ludus.evaluation.evaluate import Evaluation, EvaluationPlan
from ludus.evaluation.readiness import (
    PromptGains,
    alternatives,
    beta_share,
    fit_correlation,
    readiness,
    suggested_group_size,
    suggested_settings,
    usable_share,
    usable_shares,
)
from ludus.evaluation.stats import Interval
from ludus.types import Failure, Segment, StopReason, ToolOutcome, ToolStatus, Trajectory


@pytest.mark.parametrize("k", [1, 2, 3, 4, 6, 8])
def test_usable_share_equals_the_fraction_of_mixed_subsets(k):
    for c in range(9):
        outcomes = [1] * c + [0] * (8 - c)
        drawn = list(combinations(outcomes, k))
        exact = Fraction(sum(0 < sum(group) < k for group in drawn), len(drawn))
        assert usable_share(8, c, k) == pytest.approx(float(exact), abs=1e-15)


@pytest.mark.parametrize(("mean", "correlation", "k"), [(0.3, 0.2, 8), (0.05, 0.5, 32), (0.9, 0.05, 16)])
def test_beta_share_matches_numerical_integration(mean, correlation, k):
    size = 1 / correlation - 1
    law = beta_distribution(mean * size, (1 - mean) * size)

    def same(quantile):
        p = law.ppf(quantile)
        return p**k + (1 - p) ** k

    assert beta_share(mean, correlation, k) == pytest.approx(1 - quad(same, 0, 1, limit=400)[0], abs=1e-7)


def test_beta_share_without_correlation_approaches_independent_attempts():
    assert beta_share(0.3, 1e-9, 8) == pytest.approx(1 - 0.3**8 - 0.7**8, abs=1e-7)
    assert beta_share(0.0, 0.5, 8) == beta_share(1.0, 0.5, 8) == 0.0


def test_larger_groups_than_attempts_are_extrapolated_from_simulated_tasks():
    rng = np.random.default_rng(1)
    rates = rng.beta(0.6, 1.4, 4000)
    successes = rng.binomial(8, rates)
    histogram = np.bincount(successes, minlength=9)
    assert fit_correlation(histogram, successes.mean() / 8) == pytest.approx(1 / 3, abs=0.03)
    truth = {size: float((1 - rates**size - (1 - rates) ** size).mean()) for size in (2, 4, 8, 16, 32)}
    found = usable_shares(successes.tolist()[:400], 8, seed=0)
    assert [one.method for one in found] == ["unbiased"] * 3 + ["beta-binomial"] * 2
    for one in found:
        assert truth[one.group_size] in one.interval
        assert one.interval.high - one.interval.low < 0.12


@pytest.mark.parametrize("count", [0, 8])
def test_equal_tasks_have_usable_share_0_with_a_nonempty_interval(count):
    for one in usable_shares([count] * 20, 8):
        assert one.share == 0
        assert 0 < one.interval.high < 0.2


def attempt(task, solved=True, stop=StopReason.ANSWERED, statuses=(ToolStatus.OK,), failure=None):
    segments = (Segment("prompt", (1,) * 10), Segment("action", (2,) * 5), Segment("observation", (3,) * 3))
    calls = tuple(ToolOutcome("a", f"tool{i}", one, "") for i, one in enumerate(statuses))
    return Trajectory(f"t{task}", 0, segments, (), stop, calls, {"exact": float(solved)}, failure=failure)


def examined(successes, attempts=4, **changed):
    plan = EvaluationPlan("train", len(successes), attempts, 1.0, 0)
    names = tuple(f"t{i}" for i in range(len(successes)))
    result = Evaluation(plan, names, tuple(successes), names, {}, 0)
    tries = [attempt(i, k < c, **changed) for i, c in enumerate(successes) for k in range(attempts)]
    return readiness(result, tries, 36.0)


@pytest.mark.parametrize(
    ("successes", "changed", "answer", "words"),
    [
        ([0, 1, 2, 3] * 5, {}, "RL can start", "of 4 are usable"),
        ([4] * 20, {}, "too easy", "100% of the attempts"),
        ([0] * 20, {}, "SFT first", "0.0% of the attempts"),
        ([0] * 20, {"statuses": (ToolStatus.MALFORMED,)}, "SFT first", "100% of its calls are invalid"),
        ([0] * 20, {"stop": StopReason.MAX_TURNS}, "SFT first", "answered, 100% stop at rollout.max_turns"),
        ([0] * 20, {"stop": StopReason.PROMPT_TOO_LONG}, "fix the environment first", "rollout.max_seq_len"),
        ([0] * 20, {"failure": Failure("tool", "refused", 3)}, "fix the environment first", "(tool): refused"),
    ],
)
def test_readiness_verdict_has_expected_answer_and_reason(successes, changed, answer, words):
    found = examined(successes, **changed).verdict
    assert found.answer == answer
    assert words in found.reason


def test_all_dead_tools_are_named():
    found = examined([1, 2] * 5, statuses=(ToolStatus.RAISED, ToolStatus.OK, ToolStatus.TIMED_OUT))
    assert found.episodes.dead == {"tool0": 40, "tool2": 40}
    assert found.verdict.reason == "No call of these tools works: tool0 (40 calls), tool2 (40 calls)."


def test_lengths_speed_and_pass_rates_match_hand_computed_values():
    found = examined([0, 1, 2, 3, 4], stop=StopReason.TRUNCATED)
    one = found.episodes
    lengths = one.lengths
    assert (lengths["prompt"]["p50"], lengths["response"]["p95"], lengths["total"]["maximum"]) == (10, 5, 18)
    assert one.stopped == {StopReason.TRUNCATED: 1.0}
    assert (one.sampled, one.tokens, one.hours(2000)) == (5, 18, 1.0)
    assert found.pass_rates == {"0 %": 1, "1 to 49 %": 1, "50 to 99 %": 2, "100 %": 1}


def test_suggested_settings_keep_episode_count_and_raise_a_truncating_limit():
    config = load_config("search", [])
    found = examined([1] * 20, stop=StopReason.TRUNCATED)
    assert suggested_group_size(found.shares).group_size == 4
    settings = {"algorithm.group_size": 4, "training.prompts_per_step": 24, "rollout.max_tokens_per_turn": 128}
    assert suggested_settings(found, config) == settings


def test_alternatives_report_gain_bounds_hours_and_costs_or_none_if_unknown():
    found, config = examined([0, 2]), load_config("search", [])  # 8 episodes in 36 s
    by_name = {one.name: one for one in alternatives(found, config, 9.0, 2.0, PromptGains(Interval(-0.1, 0.2)))}
    rl, rft = by_name["RL"], by_name["RFT"]
    assert (rl.gain_low, rl.gain_high) == (None, 0.25)  # pass@4 is 1/2, success 1/4
    assert rl.hours == pytest.approx((80 * 96 * 4.5 + 80 * 9) / 3600)
    assert rl.cost == 2 * rl.hours
    # 3 rounds of 64 tasks with 8 attempts, of which a quarter trains; a step of RL trains 96 episodes in 9 s.
    assert rft.hours == pytest.approx(3 * 64 * (8 * 4.5 + 8 / 4 * 9 / 96) / 3600)
    stepped = alternatives(found, load_config("search", ["--rft.steps", "10"]), 9.0, 2.0, PromptGains())
    hours = {one.name: one.hours for one in stepped}
    assert hours["RFT"] == pytest.approx(3 * (64 * 8 * 4.5 + 10 * 16 * 9 / 96) / 3600)
    assert (by_name["few-shot prompt"].gain_low, by_name["few-shot prompt"].gain_high) == (-0.1, 0.2)
    unknown = {one.name: one for one in alternatives(found, config, None, None, PromptGains())}
    assert unknown["RFT"].hours is None
    assert (unknown["RL"].hours, unknown["few-shot prompt"].gain_low, unknown["prompt as is"].cost) == (None,) * 3


def test_repr_of_a_large_evaluation_is_one_short_line():
    ids = tuple(f"t{i}" for i in range(1000))
    result = Evaluation(EvaluationPlan("test", 1000, 1, 0.0, 0, step=80), ids, (1, 0) * 500, ids, {"exact": 0.5}, 2)
    shown = "success=0.5 [0.4691, 0.5309], 1000 tasks, samples=1, failed=2"
    assert repr(result) == f"Evaluation('step-000080-test-greedy', {shown})"
    assert repr(Evaluation(result.plan, (), (), (), {}, 0)).endswith("0 tasks, samples=1, failed=0)")
