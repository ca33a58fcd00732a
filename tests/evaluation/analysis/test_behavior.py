"""Measures of behavior on episodes written by hand, each with one planted behavior."""

import json

import pytest

from ludus.evaluation.analysis.behavior import AttemptedTask, mean_amount, measure_behavior, paired_change
from ludus.types import Message, Segment, StopReason, ToolOutcome, ToolStatus, Trajectory

OK, RAISED = ToolStatus.OK, ToolStatus.RAISED


def call(tool, result, status=OK, **arguments):
    return tool, arguments, result, status


def attempt(*turns, task="t", sample=0, solved=True, answers=(), prompt="In which country is Hranice?", **options):
    """Return an episode whose turns are calls or texts."""
    retrieves = options.get("retrieves", True)
    messages = [*options.get("examples", ()), Message(role="user", content=prompt)]
    outcomes, segments = [], [Segment("prompt", (1,))]
    for number, turn in enumerate(turns):
        segments.append(Segment("action", (2, 3), number))
        if isinstance(turn, str):
            messages.append(Message(role="assistant", content=turn))
            continue
        tool, arguments, result, status = turn
        name = f"call_{number}"
        function = {"name": tool, "arguments": json.dumps(arguments)}
        asked = {"id": name, "type": "function", "function": function}
        messages.append(Message(role="assistant", content="", tool_calls=[asked]))
        messages.append(Message(role="tool", content=result, name=tool, tool_call_id=name))
        outcomes.append(ToolOutcome(name, tool, status, result))
    ended = StopReason.ANSWERED if isinstance(turns[-1], str) else StopReason.MAX_TURNS
    one = Trajectory(task, sample, tuple(segments), tuple(messages), ended, tuple(outcomes))
    return AttemptedTask(one, solved, answers, retrieves)


def measured(*attempts):
    found = measure_behavior(attempts)
    return {name: values["t"] for name, values in found.items() if "t" in values}


FOUND = call("search", "Hranice lies within Czechia", query="Hranice")


def test_direct_solution_has_no_wasted_calls_or_lucky_guesses():
    found = measured(attempt(FOUND, "Czechia", answers=("Czechia",)))
    assert (found["calls"], found["wasted_calls"], found["lucky_guesses"], found["call_position"]) == (1, 0, 0, 0)
    assert (found["response_words"], found["response_tokens"], found["reflection_words"]) == (1, 4, 0)
    assert "self_correction" not in found
    assert "composed_calls" not in found
    assert "diversity" not in found


def test_repeated_and_unused_calls_are_wasted():
    other = call("search", "Brno was founded early", query="Brno")
    found = measured(attempt(FOUND, FOUND, other, "Czechia"))
    assert (found["repeated_calls"], found["unused_results"], found["wasted_calls"]) == (
        pytest.approx(1 / 3),
        pytest.approx(1 / 3),
        pytest.approx(2 / 3),
    )


def test_the_same_call_with_another_result_is_not_repeated():
    first, second = call("run", "1 failed"), call("run", "2 passed")
    assert measured(attempt(first, second, "2 passed, 1 failed before"))["repeated_calls"] == 0


def test_result_in_the_last_turn_does_not_count_as_unused():
    assert measured(attempt(FOUND, solved=False))["unused_results"] == 0


def test_a_success_without_evidence_is_a_lucky_guess():
    empty = call("search", "nothing found", query="Hranice")
    assert measured(attempt(empty, "It is Czechia", answers=("Czechia", "CZ")))["lucky_guesses"] == 1
    assert measured(attempt("Czechia", answers=("Czechia",)))["lucky_guesses"] == 1
    assert measured(attempt("Czechia", answers=("the Czechia",), prompt="Is Czechia big?"))["lucky_guesses"] == 0
    assert "lucky_guesses" not in measured(attempt("Czechia", solved=False))
    assert "lucky_guesses" not in measured(attempt("Czechia", retrieves=False))


def test_self_correction_needs_a_changed_call_that_succeeds():
    wrong = call("look", "KeyError", RAISED, item="aple")
    right = call("look", "apple costs 3", item="apple")
    assert measured(attempt(wrong, right, "3"))["self_correction"] == 1
    assert measured(attempt(wrong, wrong, right, "3"))["self_correction"] == 0.5
    assert measured(attempt(wrong, "3"))["self_correction"] == 0


def test_argument_copied_from_a_result_counts_as_tool_composition():
    page = call("fetch", "Prague is the capital", page="Czechia")
    again = call("search", "more", query="Czechia")
    fresh = call("search", "more", query="the country")
    assert measured(attempt(FOUND, page, "Prague"))["composed_tools"] == 1
    found = measured(attempt(FOUND, again, "Prague"))
    assert (found["composed_calls"], found["composed_tools"]) == (1, 0)
    assert measured(attempt(FOUND, fresh, "Prague"))["composed_calls"] == 0


def test_reflection_rate_is_per_thousand_words_and_call_position_is_relative():
    late = attempt("Wait, let me check that again", FOUND, "Czechia")
    found = measured(late)
    assert found["reflection_words"] == pytest.approx(1000 * 2 / 7)
    assert found["call_position"] == 0.5


def test_measures_are_means_over_the_attempts_of_a_task():
    found = measured(attempt(FOUND, FOUND, "a"), attempt("b", sample=1, solved=False))
    assert (found["success"], found["calls"]) == (0.5, 1)


def test_diversity_counts_distinct_tool_sequences():
    page = call("fetch", "Prague", page="Hranice")
    attempts = [attempt(FOUND, "a"), attempt(FOUND, "b", sample=1), attempt(FOUND, page, "c", sample=2)]
    assert measured(*attempts)["diversity"] == 0.5
    assert measured(*attempts[:2])["diversity"] == 0


def test_example_dialogues_in_the_prompt_are_not_counted():
    examples = attempt(FOUND, FOUND, "Wait").trajectory.messages
    found = measured(attempt(FOUND, "Czechia", examples=examples))
    assert (found["calls"], found["response_words"], found["wasted_calls"]) == (1, 1, 0)
    assert "composed_calls" not in found


def test_malformed_calls_count_at_their_turn_position():
    one = attempt(FOUND, "Czechia")
    error = Message(role="tool", content="not JSON", name="error", tool_call_id="bad")
    outcome = ToolOutcome("bad", "error", ToolStatus.MALFORMED, "not JSON")
    trajectory = one.trajectory
    messages = (trajectory.messages[0], Message(role="assistant", content="{"), error, *trajectory.messages[1:])
    segments = (*trajectory.segments, Segment("action", (4,), 2))
    broken = Trajectory("t", 0, segments, messages, StopReason.ANSWERED, (outcome, *trajectory.outcomes))
    found = measured(AttemptedTask(broken, True))
    assert (found["calls"], found["self_correction"], found["call_position"]) == (2, 1, 0.25)


def test_intervals_and_paired_changes_are_computed_over_tasks():
    a = {"x": 0.0, "y": 1.0, "z": 0.0}
    interval = mean_amount("success", a).interval
    assert interval is not None
    assert 1 / 3 in interval
    assert mean_amount("success", {"x": 1.0}).interval is None
    assert mean_amount("calls", dict.fromkeys("xyz", 3.0)).interval is None
    change = paired_change("calls", {"x": 1.0, "y": 2.0, "z": 3.0}, {"x": 9.0, "y": 10.0, "w": 1.0})
    assert change == (8.0, None, 2)
    change = paired_change("calls", {"x": 1.0, "y": 2.0}, {"x": 11.0, "y": 22.0})
    assert change is not None
    assert change[0] == 15
    assert change[1] is not None
    assert change[1].low < 15 < change[1].high
    assert paired_change("success", {"x": 1.0}, a) is None
