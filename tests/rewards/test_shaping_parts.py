"""Shaping rewards: calls, lengths, scripts, support, and format behind a gate."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ludus.rewards.exact_match import ExpectedAnswers, well_formed
from ludus.rewards.paper_rewards import (
    ExpectedCall,
    ExpectedCalls,
    calls_of_the_wrong,
    format_kept,
    right_argument_names,
    right_argument_values,
    right_names,
    tool_correctness,
    valid_calls,
)
from ludus.rewards.shaping import (
    citation_support,
    either,
    extra_calls,
    invalid_calls,
    is_supported,
    language_consistency,
    long_answer,
    only_if,
    repeated_calls,
    share_in_script,
    tool_diversity,
)
from ludus.types import Message, StopReason, Task, ToolOutcome, ToolStatus, Trajectory
from tables import call_pairs, episode_pairs, shaping_pairs

TASK = Task("t", (), None)
STATUS = {
    "o": ToolStatus.OK,
    "m": ToolStatus.MALFORMED,
    "u": ToolStatus.UNKNOWN_TOOL,
    "b": ToolStatus.BAD_ARGUMENTS,
    "r": ToolStatus.RAISED,
    "t": ToolStatus.TIMED_OUT,
}


def episode(answer="", outcomes=(), calls=(), thoughts=""):
    made = [
        {"id": str(i), "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(calls)
    ]
    messages = (
        Message(role="user", content="вопрос"),
        Message(role="assistant", content="", tool_calls=made, reasoning_content=thoughts),
        Message(role="assistant", content=answer),
    )
    return Trajectory("t", 0, (), messages, StopReason.ANSWERED, tuple(outcomes))


def outcome(status=ToolStatus.OK, output=""):
    return ToolOutcome("c", "f", status, output)


CALLS = [*((*pair, True) for pair in call_pairs.ACCEPTED), *((*pair, False) for pair in call_pairs.REJECTED)]


@pytest.mark.parametrize(("made", "expected", "right"), CALLS)
def test_tool_correctness_is_1_only_if_all_calls_are_correct(made, expected, right):
    assert len(CALLS) >= 40
    truth = ExpectedCalls(tuple(ExpectedCall(name, arguments) for name, arguments in expected))
    value = tool_correctness(Task("t", (), truth), episode("Done.", calls=made))
    assert (value == 1) == right
    assert -1 <= value <= 1


@pytest.mark.parametrize(("made", "expected", "right"), CALLS)
def test_call_aspect_rewards_are_1_exactly_for_correct_calls(made, expected, right):
    wanted = tuple(ExpectedCall(name, arguments) for name, arguments in expected)
    one = Task("t", (), ExpectedCalls(wanted)), episode(calls=made)
    full = right_names(*one) == 1
    if wanted:
        full &= right_argument_names(*one) == 1
    if any(call.arguments for call in wanted):
        full &= right_argument_values(*one) == 1
    assert full == right


@pytest.mark.parametrize(("letters", "stop", "fine", "kept", "valid"), episode_pairs.EPISODES)
def test_format_rewards_match_expected_values(letters, stop, fine, kept, valid):
    one = replace(episode("x", [outcome(STATUS[letter]) for letter in letters]), stop_reason=stop)
    assert (well_formed(TASK, one), format_kept(TASK, one)) == (fine, kept)
    assert valid_calls(TASK, one) == pytest.approx(valid)


@pytest.mark.parametrize(("answer", "output"), shaping_pairs.SUPPORT_ACCEPTED)
def test_retrieved_answer_is_supported(answer, output):
    assert is_supported(answer, output)
    assert citation_support(TASK, episode(answer, [outcome(), outcome(output=output)])) == 1


@pytest.mark.parametrize(("answer", "output"), shaping_pairs.SUPPORT_REJECTED)
def test_answer_that_was_not_retrieved_is_unsupported(answer, output):
    assert len(shaping_pairs.SUPPORT_ACCEPTED) + len(shaping_pairs.SUPPORT_REJECTED) >= 40
    assert not is_supported(answer, output)
    assert citation_support(TASK, episode(answer, [outcome(output=output)])) == 0


def test_citation_support_requires_a_single_successful_call():
    assert citation_support(TASK, episode("Paris", [outcome(ToolStatus.RAISED, "Paris")])) == 0
    assert citation_support(TASK, episode("New York", [outcome(output="New"), outcome(output="York")])) == 0
    assert citation_support(TASK, episode("Paris")) == 0


def test_environment_outcomes_are_not_counted_as_calls():
    verdict = ToolOutcome("", "verdict", ToolStatus.OK, '{"solved": true}')
    quiet = episode("true", [verdict])
    assert quiet.call_outcomes == ()
    assert extra_calls(0, 4)(TASK, quiet) == 0
    assert citation_support(TASK, quiet) == 0
    assert valid_calls(TASK, quiet) == 0
    assert valid_calls(TASK, episode("true", [outcome(STATUS["m"]), verdict])) == 0
    assert tool_correctness(Task("t", (), ExpectedCalls(())), quiet) == 1
    assert calls_of_the_wrong(Task("t", (), ExpectedAnswers(("false",))), quiet) == 0


@pytest.mark.parametrize(("text", "script", "share"), shaping_pairs.SCRIPTS)
def test_share_in_script_matches_expected_values(text, script, share):
    assert len(shaping_pairs.SCRIPTS) >= 40
    assert share_in_script(text, script) == pytest.approx(share)


def test_language_consistency_counts_only_text_of_the_model():
    assert language_consistency("LATIN")(TASK, episode("ab", thoughts="cd")) == 1
    assert language_consistency("LATIN")(TASK, episode("ab", thoughts="мы")) == 0.5
    assert language_consistency("CYRILLIC")(TASK, episode("", [outcome(output="abc")])) == 1


@pytest.mark.parametrize(("letters", "spare", "bad"), shaping_pairs.COUNTS)
def test_extra_and_invalid_calls_are_counted_up_to_a_cap(letters, spare, bad):
    one = episode(outcomes=[outcome(STATUS[letter]) for letter in letters])
    assert extra_calls(2, 6)(TASK, one) == pytest.approx(spare)
    assert invalid_calls(4)(TASK, one) == pytest.approx(bad)


@pytest.mark.parametrize(("letters", "value"), shaping_pairs.REPEATS)
def test_repeated_calls_are_counted_up_to_a_cap(letters, value):
    calls = [("look", {"item": letter, "shop": 1}) for letter in letters]
    turned = [(name, dict(reversed(arguments.items()))) for name, arguments in calls]
    assert repeated_calls(4)(TASK, episode(calls=calls)) == pytest.approx(value)
    assert repeated_calls(4)(TASK, episode(calls=[*calls, *turned])) <= value


@pytest.mark.parametrize(("calls", "value"), shaping_pairs.REPEATED_CALLS)
def test_repeated_calls_counts_only_identical_calls(calls, value):
    assert repeated_calls(4)(TASK, episode(calls=calls)) == pytest.approx(value)


@pytest.mark.parametrize(("tools", "value"), shaping_pairs.DIVERSITY)
def test_tool_diversity_counts_different_tools_that_succeeded(tools, value):
    made = [
        ToolOutcome(f"c{i}", t.lower(), ToolStatus.RAISED if t.isupper() else ToolStatus.OK, "")
        for i, t in enumerate(tools)
    ]
    found = Trajectory("t", 0, (), (), StopReason.ANSWERED, outcomes=tuple(made))
    assert tool_diversity(3)(TASK, found) == pytest.approx(value)


@pytest.mark.parametrize(("text", "value"), shaping_pairs.LONG_TEXTS)
def test_long_answer_counts_words_separated_by_whitespace(text, value):
    assert long_answer(10, 20)(TASK, episode(text)) == pytest.approx(value)


@pytest.mark.parametrize(("num", "value"), shaping_pairs.LENGTHS)
def test_long_answer_is_penalized_by_length(num, value):
    assert long_answer(10, 20)(TASK, episode("word " * num)) == pytest.approx(value)


def test_only_if_zeroes_a_part_unless_its_conditions_are_met():
    def part(value):
        return lambda task, trajectory: value

    assert only_if(part(0.5), part(1.0), part(1.0))(TASK, episode()) == 0.5
    assert only_if(part(0.5), part(1.0), part(0.99))(TASK, episode()) == 0.0
    assert only_if(part(0.5))(TASK, episode()) == 0.5
    assert only_if(part(0.5), either(part(0.3), part(1.0)))(TASK, episode()) == 0.5
    assert only_if(part(0.5), either(part(0.3), part(0.9)))(TASK, episode()) == 0.0
    with pytest.raises(ValueError, match="needs at least one part"):
        either()


@pytest.mark.parametrize("make", [lambda: extra_calls(2, 2), lambda: long_answer(5, 4), lambda: invalid_calls(0)])
def test_invalid_limits_raise_error(make):
    with pytest.raises(ValueError, match="must be"):
        make()
