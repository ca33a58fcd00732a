"""Votes, confidence, metacognition, and rewards for results that were used."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest

from ludus.config.sections.rewards import PartConfig
from ludus.errors import ConfigError, UserError
from ludus.rewards.registry import named_part
from ludus.rewards.tool_results import Necessity, read_necessity, used_results, write_necessity
from ludus.training.collection.rewards.unsupervised_rewards import (
    answer_key,
    confidence_gain,
    confidence_stages,
    coverage,
    majority,
    majority_label,
    metacognition,
    regulation,
)
from ludus.types import Message, Segment, StopReason, Task, ToolOutcome, ToolStatus, Trajectory
from tables import shaping_pairs


def answered(*messages: Message, outcomes=(), **changes) -> Trajectory:
    return Trajectory("t", 0, (), messages, StopReason.ANSWERED, outcomes=tuple(outcomes), **changes)


def says(text: str) -> Trajectory:
    return answered(Message(role="user", content="?"), Message(role="assistant", content=text))


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("The answer is \\boxed{1/2}.", "1/2"),
        ("0.5", "1/2"),
        ("**7.0**", "7"),
        ("1,234", "1234"),
        ("The Paris", "paris"),
        ("\\boxed{3} \\boxed{4}", ""),
        ("1/0", "1/0"),
        ("9" * 40, "9" * 40),
        ("", ""),
    ],
)
def test_answers_are_compared_in_one_form(text, key):
    assert answer_key(text) == key


def test_the_label_is_the_most_frequent_answer_and_of_equals_the_first():
    assert majority_label(["a", "b", "b", ""]) == "b"
    assert majority_label(["b", "a", "a", "b"]) == "b"
    assert majority_label(["", ""]) == ""
    attempts = [says("7"), says("8"), says("7.0"), says(""), says("8")]
    assert majority(attempts, [True] * 5) == [1, 0, 1, 0, 0]
    assert majority(attempts, [False, True, True, True, True]) == [0, 1, 0, 0, 1]  # an attempt without a vote
    assert majority([says(""), says("")], [True, True]) == [0, 0]


def sampled(*turns: list[float]) -> Trajectory:
    segments = []
    for number, chances in enumerate(turns):
        logprobs = tuple(map(math.log, chances))
        segments += [Segment("prompt", (1,)), Segment("action", (2,) * len(chances), number, logprobs=logprobs)]
    return Trajectory("t", 0, tuple(segments), (), StopReason.ANSWERED)


def test_confidence_is_the_mean_token_probability_by_turn_or_quarter():
    several = sampled([0.2, 0.4], [0.5], [0.9, 0.7])
    assert confidence_stages(several) == pytest.approx([0.3, 0.5, 0.8])
    assert confidence_gain(several) == pytest.approx(0.5)
    one = sampled([0.1, 0.3, 0.5, 0.5, 0.6, 0.8, 1.0, 0.9])
    assert confidence_stages(one) == pytest.approx([0.2, 0.5, 0.7, 0.95])
    assert confidence_gain(sampled([0.4])) == 0.0
    assert confidence_gain(sampled()) == 0.0
    # premature: as sure at the end, but sure from the start
    assert confidence_gain(sampled([0.9], [0.9])) == pytest.approx(0.0)


def call(name: str, number: int, **arguments) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return Message(
        role="assistant", content="", tool_calls=[{"id": f"c{number}", "type": "function", "function": function}]
    )


def result(number: int, text: str) -> Message:
    return Message(role="tool", content=text, tool_call_id=f"c{number}")


def outcome(number: int, status: ToolStatus = ToolStatus.OK) -> ToolOutcome:
    return ToolOutcome(f"c{number}", "look", status, "")


def test_metacognition_is_the_mean_of_its_three_parts():
    question = Message(role="user", content="What do 12 apples and pears cost?")  # what, apples, pears, cost, 12
    asked = (question, call("look", 0, item="apples"), result(0, "error"), call("look", 1, item="apples"))
    asked += (result(1, "error"), call("look", 2, item="pears"), result(2, "5"))
    failed = [outcome(0, ToolStatus.RAISED), outcome(1, ToolStatus.RAISED), outcome(2)]
    attempt = answered(*asked, Message(role="assistant", content="12 cost 60"), outcomes=failed)
    assert coverage(attempt) == pytest.approx(4 / 5)
    assert regulation(attempt) == 0.5  # the first failed call is repeated, the second is not
    assert metacognition(attempt, 1.0) == pytest.approx((0.8 + 0.5 + 1) / 3)
    assert regulation(says("x")) == coverage(says("x")) == 1.0


TASK = Task("t", (), None)
QUESTION = Message(role="user", content="Where was the author of Emma born?")


def answer(text: str) -> Message:
    return Message(role="assistant", content=text)


def test_calls_are_paid_only_if_their_results_are_used():
    score = used_results()
    chain = (QUESTION, call("find", 0, book="Emma"), result(0, "by Austen"), call("find", 1, person="Austen"))
    chain += (result(1, "born in Steventon"),)
    used = answered(*chain, answer("Steventon"), outcomes=[outcome(0), outcome(1)])
    assert score(TASK, used) == 1.0  # the first result is used by the second call, whose result is the answer
    assert score(TASK, answered(*chain, answer("London"), outcomes=[outcome(0), outcome(1)])) == 0.0
    assert score(TASK, says("Steventon")) == 0.0
    # an output that the answer does not need
    extra = (*chain, call("find", 2, person="Bronte"), result(2, "born in Thornton"), answer("Steventon"))
    assert score(TASK, answered(*extra, outcomes=[outcome(i) for i in range(3)])) == pytest.approx(2 / 3)
    # the same call again has nothing new
    again = (*chain, call("find", 2, person="Austen"), result(2, "born in Steventon"), answer("Steventon"))
    assert score(TASK, answered(*again, outcomes=[outcome(i) for i in range(3)])) == pytest.approx(2 / 3)
    # empty outputs, failed calls, and an echo of the question
    empty = (QUESTION, call("find", 0), result(0, ""), answer("Steventon"))
    assert score(TASK, answered(*empty, outcomes=[outcome(0)])) == 0.0
    broken = answered(*chain, answer("Steventon"), outcomes=[outcome(0), outcome(1, ToolStatus.RAISED)])
    assert score(TASK, broken) == 0.0
    echo = (QUESTION, call("find", 0, text="Steventon"), result(0, "Steventon"), answer("Steventon"))
    assert score(TASK, answered(*echo, outcomes=[outcome(0)])) == 0.0


WORDS = {"a": "Steventon", "b": "Thornton", "c": "Chawton", "d": "Haworth"}


@pytest.mark.parametrize(("returned", "answered_with", "value"), shaping_pairs.USED_RESULTS)
def test_used_results_are_the_share_of_calls_whose_words_reach_the_answer(returned, answered_with, value):
    calls = [(call("find", i, place=i), result(i, WORDS[letter])) for i, letter in enumerate(returned)]
    said = answer(" ".join(WORDS[letter] for letter in answered_with))
    attempt = answered(QUESTION, *itertools.chain(*calls), said, outcomes=[outcome(i) for i in range(len(returned))])
    assert used_results()(TASK, attempt) == pytest.approx(value)


def test_used_results_are_scaled_by_the_necessity_of_the_task(tmp_path):
    path = tmp_path / "necessity.jsonl"
    write_necessity(path, {"t": Necessity(0.75, 0.5), "harmful": Necessity(0.0, 1.0)})
    assert read_necessity(str(path)) == {"t": 0.25, "harmful": -1.0}
    part = named_part("used_results", PartConfig(necessity=str(path)))
    found = (QUESTION, call("find", 0, book="Emma"), result(0, "by Austen"), answer("Austen"))
    attempt = answered(*found, outcomes=[outcome(0)])
    values = [part.function(replace(TASK, id=name), attempt) for name in ("t", "harmful", "other")]
    assert values == [0.25, 0.0, 1.0]
    with pytest.raises(UserError, match="not a file of tool necessity"):
        named_part("used_results", PartConfig(necessity=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="has no option 'necessity'"):
        named_part("tool_use", PartConfig(necessity=str(path)))
