"""Every verifier against its table of accepted and rejected pairs (`tests/tables/`)."""

from __future__ import annotations

import importlib.util
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.errors import ConfigError, UserError
from ludus.rewards.code.patches import Patch, patch_similarity
from ludus.rewards.code.sql_rows import Rows, rows_match, same_rows
from ludus.rewards.code.unit_tests import Suite, share_passed, suite_passes, thrift
from ludus.rewards.extract import candidates, final_answer, last_output
from ludus.rewards.json_match import MatchState, Schema, Value, json_schema, json_value, same_state
from ludus.rewards.math.math_verify import mathematics
from ludus.rewards.math.numeric import Quantity, number_close
from ludus.rewards.multiple_choice import Choice, multiple_choice
from ludus.types import Message, StopReason, Task, ToolOutcome, ToolStatus, Trajectory
from tables import choice_pairs, json_pairs, math_pairs, number_pairs, patch_pairs, rows_pairs, suite_pairs


def episode(answer="", stop=StopReason.ANSWERED, outcomes=()):
    return Trajectory("t", 0, (), (Message(role="assistant", content=answer),), stop, tuple(outcomes))


def task(truth):
    return Task("t", (), truth)


BY_ANSWER = [
    (number_close, number_pairs.ACCEPTED, number_pairs.REJECTED),
    (mathematics, math_pairs.ACCEPTED, math_pairs.REJECTED),
    (multiple_choice, choice_pairs.ACCEPTED, choice_pairs.REJECTED),
    (json_schema, json_pairs.SCHEMA_ACCEPTED, json_pairs.SCHEMA_REJECTED),
    (json_value, json_pairs.VALUE_ACCEPTED, json_pairs.VALUE_REJECTED),
    (same_state(), json_pairs.STATE_ACCEPTED, json_pairs.STATE_REJECTED),
    (rows_match(final_answer), rows_pairs.ACCEPTED, rows_pairs.REJECTED),
    (suite_passes(final_answer), suite_pairs.ACCEPTED, suite_pairs.REJECTED),
]


@pytest.mark.parametrize(("verifier", "accepted", "rejected"), BY_ANSWER)
def test_accepted_answers_have_reward_1_and_rejected_answers_0(verifier, accepted, rejected):
    assert len(accepted) + len(rejected) >= 40
    assert [(answer, truth) for answer, truth in accepted if verifier(task(truth), episode(answer)) != 1] == []
    assert [(answer, truth) for answer, truth in rejected if verifier(task(truth), episode(answer)) != 0] == []


JUDGES = [
    number_close,
    mathematics,
    multiple_choice,
    json_schema,
    json_value,
    same_state(),
    rows_match(final_answer),
    patch_similarity(),
    suite_passes(final_answer),
]


@pytest.mark.parametrize("verifier", JUDGES)
def test_truth_of_another_type_raises_error(verifier):
    with pytest.raises(TypeError, match="the truth is str, expected"):
        verifier(task("7"), episode("[[7]]"))


def test_last_tool_output_counts_only_if_successful_and_untruncated():
    def left(*outcomes):
        return rows_match(last_output("sql"))(task(Rows(((1,),))), episode("[[2]]", outcomes=outcomes))

    right = ToolOutcome("c", "sql", ToolStatus.OK, "[[1]]")
    assert left(right) == 1
    assert left(ToolOutcome("c", "sql", ToolStatus.OK, "[[2]]"), right) == 1
    assert left(right, ToolOutcome("c", "other", ToolStatus.OK, "[[2]]")) == 1
    assert left(right, ToolOutcome("c", "sql", ToolStatus.OK, "[[2]]")) == 0
    assert left(right, ToolOutcome("c", "sql", ToolStatus.RAISED, "[[1]]")) == 0
    assert left(ToolOutcome("c", "sql", ToolStatus.UNKNOWN_TOOL, "[[1]]")) == 0
    assert left(ToolOutcome("c", "sql", ToolStatus.OK, "[[1]]", truncated=True)) == 0
    assert left(ToolOutcome("c", "other", ToolStatus.OK, "[[1]]")) == 0
    assert left() == 0


def test_large_or_highly_symmetric_row_sets_are_compared_in_time():
    rows = tuple((i, i * 0.5, str(i % 7)) for i in range(3_000))
    assert same_rows(rows[::-1], Rows(rows))
    assert same_rows([row[::-1] for row in rows], Rows(rows, columns_free=True))
    assert not same_rows([(i + 1, half, text) for i, half, text in rows], Rows(rows))
    alike = tuple(tuple(range(12)) for _ in range(5))
    assert not same_rows([(*row[:-1], 99) for row in alike], Rows(alike, columns_free=True))
    same = tuple((0,) * 12 for _ in range(5))
    assert not same_rows([*same[:-1], (1,) * 12], Rows(same, columns_free=True))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"$ref": "http://example.com/person.json"},
        {"properties": {"a": {"items": {"$ref": "#/$defs/none"}}}},
        {"$ref": "#"},
    ],
)
def test_invalid_json_schema_raises_config_error(schema):
    with pytest.raises(ConfigError):
        json_schema(task(Schema(schema)), episode("{}"))


def test_missing_schema_package_reports_the_required_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"ludus\[schema\]"):
        json_schema(task(Schema({})), episode("{}"))


PATCHES = [
    *((text, truth, 1.0) for text, truth in patch_pairs.ACCEPTED),
    *((text, truth, -1.0) for text, truth in patch_pairs.REJECTED),
    *patch_pairs.BETWEEN,
]


@pytest.mark.parametrize(("text", "truth", "value"), PATCHES)
def test_patch_similarity_matches_expected_values(text, truth, value):
    assert len(PATCHES) >= 40
    assert patch_similarity()(task(truth), episode(text)) == pytest.approx(value, abs=1e-12)


def test_large_patches_are_compared_by_lines():
    def patch(lines):
        return "--- a/x\n+++ b/x\n@@ -0,0 +1,5000 @@\n" + "\n".join(lines)

    oracle = Patch(patch(["+" + "a" * 20] * 5_000))
    assert patch_similarity()(task(oracle), episode(patch(["+" + "a" * 19] * 5_000))) < 0.01


def added(texts):
    """A patch that adds each text as a file of one line."""
    return "\n".join(f"--- a/{n}\n+++ b/{n}\n@@ -0,0 +1 @@\n+{text}" for n, text in enumerate(texts))


SIGNS = [chr(0x4E00 + n) for n in range(1000)]


def test_patches_with_many_short_matches_are_compared_in_time():
    given = "".join("a" + sign for sign in SIGNS)
    oracle = "".join("aa" + sign for sign in SIGNS[:500])
    begin = time.process_time()
    assert 0 < patch_similarity()(task(Patch(added([oracle]))), episode(added([given]))) < 1
    assert time.process_time() - begin < 2.5


def test_invalid_reference_patch_raises_error():
    with pytest.raises(ValueError, match="reference patch"):
        patch_similarity()(task(Patch("x")), episode(""))


@pytest.mark.parametrize(("text", "suite", "which", "share"), suite_pairs.SHARES)
def test_share_passed_matches_expected_values(text, suite, which, share):
    assert share_passed(final_answer, which)(task(suite), episode(text)) == pytest.approx(share)


@pytest.mark.parametrize(("text", "suite", "value"), suite_pairs.THRIFT)
def test_thrift_equals_the_unused_share_of_the_limits(text, suite, value):
    assert thrift(final_answer)(task(suite), episode(text)) == pytest.approx(value)


def test_thrift_favours_solutions_using_less_time_and_memory():
    suite = Suite(("a",), seconds=10, memory_bytes=100)

    def value(seconds, memory, passed="true", suite=suite):
        text = f'{{"passed": {{"a": {passed}}}, "seconds": {seconds}, "memory_bytes": {memory}}}'
        return thrift(final_answer)(task(suite), episode(text))

    assert value(5, 25) == pytest.approx((0.5 + 0.75) / 2)
    assert value(20, 25) == pytest.approx(0.75 / 2)
    assert value(5, 25, passed="false") == 0
    assert value("null", "null") == 0
    assert value(-5, -5) == 0
    assert value("true", "true") == 0
    assert value(5, 25, suite=Suite(("a",), seconds=10)) == 0.5
    assert value(5, 25, suite=Suite(("a",))) == 0


def test_suite_without_tests_raises_error():
    with pytest.raises(ValueError, match="no tests"):
        suite_passes(final_answer)(task(Suite(())), episode("{}"))


PIECES = [
    "(",
    ")",
    "{",
    "}",
    "[",
    "]",
    "\\boxed{",
    "\\frac",
    "$",
    ",",
    ".",
    "-",
    "7",
    "B",
    "x",
    "=",
    "%",
    "^",
    " ",
    "\n",
]
PIECES += [
    '"a"',
    ":",
    "null",
    "true",
    "--- a/x",
    "+++ b/x",
    "@@ -1 +1 @@",
    "```",
    "answer:",
    "²",
    "٣",
    "\x00",
    "\ud800",
]
TRUTHS = {
    number_close: Quantity(7, units={"m": 1}),
    multiple_choice: Choice("B", {"A": "x", "B": "7"}),
    json_schema: Schema({"type": "object"}),
    json_value: Value({"a": [7]}),
    same_state(): MatchState({"a": 7}),
    rows_match(final_answer): Rows(((7, "x"),), columns_free=True),
    patch_similarity(): Patch("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-7\n+8\n"),
    suite_passes(final_answer): Suite(("a",)),
}


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=30).map("".join)))
def test_verifiers_return_a_bounded_reward_for_any_text(text):
    for verifier, truth in TRUTHS.items():
        assert -1 <= verifier(task(truth), episode(text)) <= 1
    assert isinstance(candidates(text), tuple)
