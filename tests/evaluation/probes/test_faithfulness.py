"""Forced answers: noise reasoning is found out, reasoning that decides the answer is not."""

import asyncio

import pytest

from ludus.errors import UserError
from ludus.evaluation.probes.faithfulness import measure_faithfulness, split_reasoning
from small_worlds import renderer
from tests.evaluation.probes.scripted_policies import PLAN, maker, number_in


def thinks(prompt):
    return f"<think>The number must be {number_in(prompt)}</think>"


def noise(prompt, begun, turn):
    """Think of the number, and read it in the prompt anyway."""
    return (begun or thinks(prompt)) + number_in(prompt)


def needed(prompt, begun, turn):
    """Read the number in the reasoning."""
    begun = begun or thinks(prompt)
    return begun + number_in(begun)


def measured(script, **options):
    report = asyncio.run(measure_faithfulness(maker(script), renderer().tokenizer, PLAN, **options))
    return report, {row["reasoning"]: row for row in report.rows}


def test_report_detects_answers_independent_of_the_reasoning():
    report, rows = measured(noise)
    assert list(rows) == ["unmodified", "0%", "50%", "100%", "another task's"]
    assert all(row["success"].value == 1 for row in rows.values())
    assert rows["another task's"]["agreement"].value == 1
    assert report.notes[1].startswith("Most answers do not depend on the reasoning")


def test_report_detects_answers_that_depend_on_the_reasoning():
    report, rows = measured(needed)
    assert rows["100%"]["agreement"].value == 1
    assert rows["another task's"]["success"].value == rows["0%"]["success"].value == 0
    assert rows["0%"]["difference"].interval.high < 0
    assert report.notes[1].startswith("Most answers depend on the reasoning")


def test_reasoning_without_tags_ends_before_a_marker():
    def script(prompt, begun, turn):
        begun = begun or f"I read {number_in(prompt)}. Answer:"
        return f"{begun} {number_in(begun)}"

    report, rows = measured(script, end="Answer:")
    assert rows["unmodified"]["success"].value == 0  # the world of the test expects the number alone
    assert (rows["100%"]["agreement"].value, rows["0%"]["agreement"].value) == (1, 0)
    assert "6 of 6 episodes" in report.notes[0]


def test_policy_without_reasoning_raises_error():
    with pytest.raises(UserError, match=r"No answering turn has reasoning that ends with '</think>' .6 episodes"):
        measured(lambda prompt, begun, turn: number_in(prompt))


def test_split_reasoning_parts_concatenate_to_the_sampled_tokens():
    from ludus.evaluation.probes.common import roll_out

    episode = asyncio.run(roll_out(maker(noise)(None), PLAN.requests()))[0]
    parts = split_reasoning(episode, renderer().tokenizer, "</think>")
    whole = (*parts.opening, *parts.tokens, *parts.closing)
    assert whole == parts.turn.tokens[: len(whole)]
    assert [renderer().tokenizer.decode(part) for part in (parts.opening, parts.closing)] == ["<think>", "</think>"]
    assert parts.cut(0.5) == parts.tokens[: round(len(parts.tokens) / 2)]
