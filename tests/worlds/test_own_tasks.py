"""Custom tasks as JSON Lines: each type uses its verifier, and broken records are named."""

import json

import pytest

from ludus.config.sections.rewards import PartConfig
from ludus.errors import UserError
from ludus.rewards.exact_match import ExpectedAnswers
from ludus.rewards.json_match import MatchState, Schema, Value
from ludus.rewards.math.numeric import Quantity
from ludus.rewards.multiple_choice import Choice
from ludus.rewards.registry import named_part
from ludus.rewards.truth_records import TYPES, by_record, is_right, read_truth
from ludus.types import Message, StopReason, Task, ToolOutcome, ToolStatus, Trajectory
from ludus.worlds.math.grader import solved
from ludus.worlds.math.sources import load_problems
from tiny_run import ludus

SCHEMA = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
RECORDS = {
    "number": ({"answer": "#### 2.5"}, ["5/2", "The answer is 2.50."], ["2.6", "2.5 or 3"]),
    "expression": ({"answer": "x^2"}, ["$x \\cdot x$"], ["x^3"]),
    "text": ({"answer": "Monday"}, ["monday", "The answer is Monday."], ["Not Monday", "Tuesday"]),
    "choice": ({"answer": "B", "options": ["red", "blue"]}, ["B", "(b) blue", "Blue"], ["A", "A or B", "red"]),
    "json": ({"answer": {"a": [1, 2]}, "tolerance": 0.1}, ['{"a": [1.0, 2.05]}'], ['{"a": [2, 1]}', "{}", "a"]),
    "schema": ({"answer": SCHEMA}, ['{"a": 3, "b": null}', '```json\n{"a": 1}\n```'], ['{"a": "3"}', "[]"]),
    "state": (
        {"answer": {"due": [1], "at": 5}, "ignored": ["at"]},
        ['{"due": [1], "at": 9}', '{"due": [1]}'],
        ['{"due": [2], "at": 5}', '{"due": [1], "by": 1}'],
    ),
}


def answered(text, outcomes=()):
    said = Message(role="assistant", content=text)
    return Trajectory("", 0, (), (said,), StopReason.ANSWERED, outcomes=tuple(outcomes))


@pytest.fixture
def tasks(tmp_path):
    """The tasks of a file with a line of each type, by type."""
    lines = [
        json.dumps({"question": f"{type_}?", "type": type_, "split": "train", **record})
        for type_, (record, _, _) in RECORDS.items()
    ]
    (tmp_path / "own.jsonl").write_text("\n".join(lines))
    return dict(zip(RECORDS, load_problems(tmp_path / "own.jsonl")["train"], strict=True))


@pytest.mark.parametrize("type_", TYPES)
def test_type_of_a_line_selects_its_verifier(tasks, type_):
    task, (_, right, wrong) = tasks[type_], RECORDS[type_]
    for grade in (solved, by_record):
        assert [grade(task, answered(text)) for text in right] == [1.0] * len(right)
        assert [grade(task, answered(text)) for text in wrong] == [0.0] * len(wrong)


def test_choice_options_are_shown_and_json_is_requested(tasks):
    assert tasks["choice"].prompt[-1]["content"] == "choice?\nA) red\nB) blue"
    assert "letter" in tasks["choice"].prompt[0]["content"]
    assert "JSON" in tasks["schema"].prompt[0]["content"]
    assert "a number" in tasks["text"].prompt[0]["content"]
    named = read_truth({"type": "choice", "options": {"X": "one", "Y": "two"}, "answer": "two"})
    assert named == Choice("Y", {"X": "one", "Y": "two"})


def test_without_a_type_a_number_is_one():
    assert isinstance(read_truth({"answer": 3}), Quantity)
    assert is_right("3.0", read_truth({"answer": "It is \\boxed{3}"}))
    assert not is_right("3.1", read_truth({"answer": 3}))


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"type": "choice", "answer": "A"}, '"options" must be'),
        ({"type": "choice", "answer": "C", "options": ["a", "b"]}, "not one of the options"),
        ({"type": "choice", "answer": "same", "options": ["same", "same"]}, "not one of the options"),
        ({"type": "choice", "answer": "a", "options": {"1": "a", "2": "b"}}, "letters from A to Z"),
        ({"type": "choice", "answer": "A", "options": ["a", 2]}, "must map letters"),
        ({"type": "schema", "answer": [1]}, "not a JSON schema"),
        ({"type": "schema", "answer": {"type": "nothing"}}, "not a JSON schema"),
        ({"type": "json", "answer": 1, "tolerance": -1}, '"tolerance" is -1'),
        ({"type": "state", "answer": 1, "ignored": "at"}, '"ignored" is not a list'),
        ({"type": "number", "answer": float("inf")}, "it is not JSON"),
        ({"answer": float("nan")}, "it is not JSON"),
        ({"type": "letter", "answer": "A"}, "choice, json, schema, state"),
        ({"type": "text", "answer": "!!!"}, "no words to compare"),
        ({"type": "schema", "answer": {"$ref": "http://x/y"}}, "http://x/y, which it does not contain"),
    ],
)
def test_broken_record_is_reported_with_the_reason(tmp_path, record, reason):
    (tmp_path / "own.jsonl").write_text(json.dumps({"question": "q", **record}))
    with pytest.raises(UserError, match="line 1, is not a task") as error:
        load_problems(tmp_path / "own.jsonl")
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("name", "truth", "right", "wrong"),
    [
        ("multiple_choice", Choice("A", {"A": "red", "B": "blue"}), "A", "B"),
        ("json_value", Value([1]), "[1]", "[2]"),
        ("json_schema", Schema(SCHEMA), '{"a": 1}', "{}"),
        ("same_state", MatchState({"n": 1}), '{"n": 1}', '{"n": 2}'),
        ("token_f1", ExpectedAnswers(("Oslo",)), "Oslo", "Riga"),
    ],
)
def test_verifiers_are_there_by_name(name, truth, right, wrong):
    part, task = named_part(name, PartConfig(weight=0.1)), Task("t", (), truth)
    assert [part.function(task, answered(text)) for text in (right, wrong)] == [1.0, 0.0]


def test_a_state_by_name_is_that_of_a_tool():
    part, task = (named_part("same_state", PartConfig(weight=0.1, tool="left")), Task("t", (), MatchState({"n": 1})))
    left = ToolOutcome("", "left", ToolStatus.OK, '{"n": 1}')
    assert part.function(task, answered('{"n": 1}')) == 0.0
    assert part.function(task, answered("Done.", [left])) == 1.0


def test_a_truth_that_no_record_has_is_an_error():
    with pytest.raises(TypeError, match="not a type of truth of a record"):
        by_record(Task("t", (), "Oslo"), answered("Oslo"))


def test_the_command_line_shows_and_checks_such_tasks(tmp_path):
    file = tmp_path / "own.jsonl"
    record = {"type": "choice", "options": ["9", "11"], "answer": "11", "split": "train"}
    file.write_text("".join(json.dumps({"question": f"Prime {n}?", **record}) + "\n" for n in range(3)))
    words = ("--env.settings.data", str(file), "--env.settings.tool", "none")
    shown = ludus("env", "show", "math", *words)
    assert shown.code == 0, shown
    assert "A) 9" in shown.out
    part = ("--rewards.extra.multiple_choice.weight", "0.1")
    assert "reward multiple_choice: weight 0.1" in ludus("env", "show", "math", *words, *part).out
    other = ludus("env", "show", "math", *words, "--rewards.extra.json_value.weight", "0.1")
    assert "reads a truth of the type Value" in other.err
