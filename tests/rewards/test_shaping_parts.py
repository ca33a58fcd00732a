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
def test_calls_are_right_only_if_all_of_them_are(made, expected, right):
    assert len(CALLS) >= 40
    truth = ExpectedCalls(tuple(ExpectedCall(name, arguments) for name, arguments in expected))
    value = tool_correctness(Task("t", (), truth), episode("Done.", calls=made))
    assert (value == 1) == right
    assert -1 <= value <= 1


@pytest.mark.parametrize(("made", "expected", "right"), CALLS)
def test_the_aspects_of_calls_are_all_full_where_the_calls_are_right(made, expected, right):
    wanted = tuple(ExpectedCall(name, arguments) for name, arguments in expected)
    one = Task("t", (), ExpectedCalls(wanted)), episode(calls=made)
    full = right_names(*one) == 1
    if wanted:
        full &= right_argument_names(*one) == 1
    if any(call.arguments for call in wanted):
        full &= right_argument_values(*one) == 1
    assert full == right


@pytest.mark.parametrize(("letters", "stop", "fine", "kept", "valid"), episode_pairs.EPISODES)
def test_the_form_of_an_episode(letters, stop, fine, kept, valid):
    one = replace(episode("x", [outcome(STATUS[letter]) for letter in letters]), stop_reason=stop)
    assert (well_formed(TASK, one), format_kept(TASK, one)) == (fine, kept)
    assert valid_calls(TASK, one) == pytest.approx(valid)


@pytest.mark.parametrize(("answer", "output"), shaping_pairs.SUPPORT_ACCEPTED)
def test_an_answer_that_was_retrieved_is_supported(answer, output):
    assert is_supported(answer, output)
    assert citation_support(TASK, episode(answer, [outcome(), outcome(output=output)])) == 1


@pytest.mark.parametrize(("answer", "output"), shaping_pairs.SUPPORT_REJECTED)
def test_an_answer_that_was_not_retrieved_is_not_supported(answer, output):
    assert len(shaping_pairs.SUPPORT_ACCEPTED) + len(shaping_pairs.SUPPORT_REJECTED) >= 40
    assert not is_supported(answer, output)
    assert citation_support(TASK, episode(answer, [outcome(output=output)])) == 0


def test_only_one_call_that_went_well_supports():
    assert citation_support(TASK, episode("Paris", [outcome(ToolStatus.RAISED, "Paris")])) == 0
    assert citation_support(TASK, episode("New York", [outcome(output="New"), outcome(output="York")])) == 0
    assert citation_support(TASK, episode("Paris")) == 0


def test_what_an_environment_left_is_no_call():
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
def test_the_share_of_letters_in_a_script(text, script, share):
    assert len(shaping_pairs.SCRIPTS) >= 40
    assert share_in_script(text, script) == pytest.approx(share)


def test_what_the_model_wrote_counts_and_nothing_else():
    assert language_consistency("LATIN")(TASK, episode("ab", thoughts="cd")) == 1
    assert language_consistency("LATIN")(TASK, episode("ab", thoughts="мы")) == 0.5
    assert language_consistency("CYRILLIC")(TASK, episode("", [outcome(output="abc")])) == 1


@pytest.mark.parametrize(("letters", "spare", "bad"), shaping_pairs.COUNTS)
def test_calls_that_are_spared_or_cannot_be_run_are_counted_up_to_a_cap(letters, spare, bad):
    one = episode(outcomes=[outcome(STATUS[letter]) for letter in letters])
    assert extra_calls(2, 6)(TASK, one) == pytest.approx(spare)
    assert invalid_calls(4)(TASK, one) == pytest.approx(bad)


@pytest.mark.parametrize(("letters", "value"), shaping_pairs.REPEATS)
def test_calls_that_were_made_before_are_counted_up_to_a_cap(letters, value):
    calls = [("look", {"item": letter, "shop": 1}) for letter in letters]
    turned = [(name, dict(reversed(arguments.items()))) for name, arguments in calls]
    assert repeated_calls(4)(TASK, episode(calls=calls)) == pytest.approx(value)
    assert repeated_calls(4)(TASK, episode(calls=[*calls, *turned])) <= value


@pytest.mark.parametrize(("calls", "value"), shaping_pairs.REPEATED_CALLS)
def test_a_repeat_is_the_same_call_and_no_other(calls, value):
    assert repeated_calls(4)(TASK, episode(calls=calls)) == pytest.approx(value)


@pytest.mark.parametrize(("text", "value"), shaping_pairs.LONG_TEXTS)
def test_words_are_what_blanks_separate(text, value):
    assert long_answer(10, 20)(TASK, episode(text)) == pytest.approx(value)


@pytest.mark.parametrize(("num", "value"), shaping_pairs.LENGTHS)
def test_a_long_answer_costs(num, value):
    assert long_answer(10, 20)(TASK, episode("word " * num)) == pytest.approx(value)


def test_form_counts_once_nothing_else_failed():
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
def test_limits_that_make_no_sense_are_refused(make):
    with pytest.raises(ValueError, match="must be"):
        make()
