"""Verifiers of short answers, and rewards in which the outcome dominates."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.errors import ConfigError
from ludus.rewards.base import Reward, check_rewards, score, success
from ludus.rewards.exact_match import ExpectedAnswers, exact_match, f1, matches, normalise, token_f1, well_formed
from ludus.rewards.paper_rewards import accuracy, calls_of_the_wrong, wrong_and_ill_formed
from ludus.types import Message, StopReason, Task, ToolOutcome, ToolStatus, Trajectory
from tables.answer_pairs import ACCEPTED, REJECTED


def episode(answer="", stop=StopReason.ANSWERED, statuses=(), rewards=None):
    outcomes = tuple(ToolOutcome(str(i), "f", status, "") for i, status in enumerate(statuses))
    messages = (Message(role="assistant", content=answer),)
    return Trajectory("t", 0, (), messages, stop, outcomes, rewards or {})


def task(*accepted):
    return Task("t", (), ExpectedAnswers(accepted))


@pytest.mark.parametrize(("answer", "accepted"), ACCEPTED)
def test_exact_match_accepts_equivalent_answers(answer, accepted):
    assert matches(answer, ExpectedAnswers(tuple(accepted)))
    assert exact_match(task(*accepted), episode(answer)) == 1.0
    assert f1(answer, ExpectedAnswers(tuple(accepted))) == 1.0


@pytest.mark.parametrize(("answer", "accepted"), REJECTED)
def test_exact_match_rejects_different_answers(answer, accepted):
    assert not matches(answer, ExpectedAnswers(tuple(accepted)))
    assert exact_match(task(*accepted), episode(answer)) == 0.0
    assert f1(answer, ExpectedAnswers(tuple(accepted))) < 1.0


@pytest.mark.parametrize(
    ("answer", "accepted", "right"), [*((*pair, True) for pair in ACCEPTED), *((*pair, False) for pair in REJECTED)]
)
def test_published_answer_rewards_agree_with_exact_match(answer, accepted, right):
    bad, called = episode(answer, statuses=[ToolStatus.RAISED]), episode(answer, statuses=[ToolStatus.OK] * 3)
    assert accuracy(task(*accepted), bad) == (1 if right else -1)
    assert calls_of_the_wrong(task(*accepted), called) == (0 if right else 0.75)
    assert wrong_and_ill_formed(task(*accepted), bad) == float(not right and bool(answer))
    assert wrong_and_ill_formed(task(*accepted), called) == 0


@pytest.mark.parametrize(
    ("answer", "accepted", "value"),
    [
        ("Paris France", ["Paris"], 2 / 3),
        ("the city of Paris", ["Paris"], 2 * 1 / (3 + 1)),
        ("New York City", ["York New"], 2 * 2 / (3 + 2)),
        ("York York", ["York New York"], 2 * 2 / (2 + 3)),
        ("Rome", ["Paris", "City of Rome"], 2 * 1 / (1 + 3)),
        ("Rome", ["Paris"], 0.0),
        ("", ["Paris"], 0.0),
        ("Paris", [], 0.0),
    ],
)
def test_token_f1_matches_hand_computed_values(answer, accepted, value):
    assert token_f1(task(*accepted), episode(answer)) == pytest.approx(value)


@given(st.text())
def test_text_matches_itself_within_quotes_and_whitespace(text):
    assert normalise(f' "{text}" ') == normalise(text)
    assert matches(text, ExpectedAnswers((text.swapcase().swapcase(), text))) == bool(normalise(text))


def test_unanswered_episodes_have_zero_answer_reward():
    for stop in set(StopReason) - {StopReason.ANSWERED}:
        assert exact_match(task("Paris"), episode("Paris", stop)) == 0.0
        assert token_f1(task("Paris"), episode("Paris", stop)) == 0.0


def test_truth_of_the_wrong_type_raises_error():
    with pytest.raises(TypeError, match="task t: the truth is str"):
        exact_match(Task("t", (), "Paris"), episode("Paris"))


def test_well_formed_needs_an_answer_and_calls_without_errors():
    right = episode("x", statuses=[ToolStatus.OK, ToolStatus.OK])
    assert well_formed(task(), right) == 1.0
    for status in set(ToolStatus) - {ToolStatus.OK}:
        assert well_formed(task(), episode("x", statuses=[ToolStatus.OK, status])) == 0.0
    for stop in set(StopReason) - {StopReason.ANSWERED}:
        assert well_formed(task(), episode("x", stop)) == 0.0


def part(name, value=0.0, weight=1.0, outcome=False):
    return Reward(name, lambda *_: value, weight, outcome)


def test_a_score_is_the_weighted_sum_of_its_parts():
    parts = [part("right", 1.0, 2.0, True), part("short", 0.5, 0.2), part("seen", 0.25, 0.0)]
    scored = score(parts, task(), episode())
    assert scored.rewards == {"right": 1.0, "short": 0.5, "seen": 0.25}
    assert scored.reward == pytest.approx(2.0 * 1.0 + 0.2 * 0.5)


def test_shaping_is_clipped_and_an_outcome_out_of_bounds_raises_error():
    parts = [part("right", 0.75, 1.0, True), part("up", 40.0, 0.1), part("down", -7.0, 0.2)]
    scored = score(parts, task(), episode())
    assert scored.rewards == {"right": 0.75, "up": 1.0, "down": -1.0}
    assert scored.reward == pytest.approx(0.75 + 0.1 - 0.2)
    for value in (3.0, 1.001, -0.001, -1.0):
        with pytest.raises(ValueError, match=r"the outcome 'right' of task t is .*, not from 0 to 1"):
            score([part("right", value, 1.0, True)], task(), episode())
    signed = replace(part("right", -1.0, 1.0, True), low=-1.0)
    assert score([signed], task(), episode()).reward == -1.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("outcome", [True, False])
def test_nonfinite_reward_raises_error_instead_of_being_clipped(value, outcome):
    with pytest.raises(ValueError, match="reward 'odd' of task t is"):
        score([part("odd", value, outcome=outcome)], task(), episode())


def test_success_requires_the_full_value_of_every_outcome():
    parts = [part("right", outcome=True), part("safe", outcome=True), part("short")]
    assert success(parts, episode(rewards={"right": 1.0, "safe": 1.0, "short": -1.0}))
    assert not success(parts, episode(rewards={"right": 1.0, "safe": 0.99}))
    assert not success(parts, episode(rewards={"right": 1.0, "short": 1.0}))


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([], "need an outcome with a weight above 0"),
        ([part("short", weight=0.1)], "need an outcome with a weight above 0"),
        ([part("right", weight=0.0, outcome=True)], "need an outcome with a weight above 0"),
        ([part("right", outcome=True), part("safe", weight=-0.5, outcome=True)], "The rewards need an outcome"),
        ([part("right", outcome=True), part("right", weight=0.1)], "share a name"),
        ([part("right", outcome=True), part("odd", weight=math.nan)], "'odd' is not a finite"),
        ([part("right", weight=math.inf, outcome=True)], "'right' is not a finite"),
        ([part("right", outcome=True), part("a", weight=0.5)], "no less than a success"),
        ([part("right", outcome=True), part("a", weight=0.3), part("b", weight=-0.3)], "no less than"),
        (
            [part("right", outcome=True), part("safe", weight=0.2, outcome=True), part("a", weight=0.15)],
            "the outcome 0.2",
        ),
    ],
)
def test_misspecified_reward_parts_raise_config_error(parts, words):
    with pytest.raises(ConfigError, match=words) as refusal:
        check_rewards(parts)
    assert refusal.value.hint


@given(st.lists(st.floats(0.01, 2), min_size=1, max_size=3), st.lists(st.floats(-1, 1), min_size=0, max_size=3))
def test_checked_rewards_rank_every_success_above_every_failure(outcomes, shaping):
    def parts(right, shaped):
        return [
            *(
                part(f"o{i}", value, weight, True)
                for i, (weight, value) in enumerate(zip(outcomes, right, strict=True))
            ),
            *(part(f"s{i}", value, weight) for i, (weight, value) in enumerate(zip(shaping, shaped, strict=True))),
        ]

    try:
        check_rewards(parts([1] * len(outcomes), shaping))
    except ConfigError:
        return
    corners = list(itertools.product((-1, 1), repeat=len(shaping)))
    wins = [score(parts([1] * len(outcomes), corner), task(), episode()).reward for corner in corners]
    for failed in itertools.product((0, 1), repeat=len(outcomes)):
        if all(failed):
            continue
        losses = [score(parts(failed, corner), task(), episode()).reward for corner in corners]
        assert max(losses) < min(wins)
