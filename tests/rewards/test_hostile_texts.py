"""Any text has a verdict: no verifier and no reward of a world raises on it."""

import json
import math
import time

import pytest

from ludus.config.sections.rollout import EnvConfig, RolloutConfig
from ludus.envs.registry import WORLDS, build_world
from ludus.rewards import extract, paper_rewards, shaping
from ludus.rewards.base import score
from ludus.rewards.code.patches import Patch, patch_similarity
from ludus.rewards.code.sql_rows import Rows, rows_match
from ludus.rewards.code.unit_tests import Suite, share_passed, suite_passes, thrift
from ludus.rewards.exact_match import ExpectedAnswers, exact_match, token_f1
from ludus.rewards.extract import final_answer
from ludus.rewards.json_match import MatchState, Schema, Value, json_schema, json_value, same_state
from ludus.rewards.math import math_verify
from ludus.rewards.math.math_verify import Expression, mathematics
from ludus.rewards.math.numeric import Quantity, number_close
from ludus.rewards.multiple_choice import Choice, multiple_choice
from ludus.rewards.paper_rewards import ExpectedCall, ExpectedCalls
from ludus.rewards.truth_records import by_record
from ludus.types import Message, StopReason, Task, ToolOutcome, ToolStatus, Trajectory
from tables.hostile_texts import TEXTS, VALUES

NUMBERS = [Quantity(5), Quantity(0.5), Quantity(-5, units={"%": 1, "$": 1, "m": 1}), Quantity(10**350)]
NUMBERS += [Quantity(1e308), Quantity(1.5, decimal_comma=True), Quantity(5, needs_unit=True, units={"m": 1})]
SCHEMAS = [{"multipleOf": 0.1}, {"items": {"multipleOf": 3}, "uniqueItems": True}, {"maximum": 1.5}, {"pattern": "a$"}]
CALLS = ExpectedCalls((ExpectedCall("look", {"x": 1.5, "y": "a"}),))
PATCH = Patch("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-7\n+8\n")
SUITE = Suite(("a",), seconds=10, memory_bytes=100)
CASES = [
    *((number_close, truth) for truth in NUMBERS),
    *((by_record, truth) for truth in (NUMBERS[0], Choice("A", {"A": "a", "B": "b"}), ExpectedAnswers(("Paris",)))),
    *((verifier, ExpectedAnswers(("Paris", "x y"))) for verifier in (exact_match, token_f1, paper_rewards.accuracy)),
    (multiple_choice, Choice("A", {"A": "Paris", "B": "London"})),
    *((json_schema, Schema(schema)) for schema in SCHEMAS),
    *((json_value, Value(value, 0.1)) for value in (1.5, [1.5], {"a": 1})),
    (same_state(), MatchState({"a": 1.5}, frozenset({"z"}), 0.1)),
    *((rows_match(final_answer), Rows(((1.5, 2),), columns_free=free)) for free in (False, True)),
    (patch_similarity(), PATCH),
    *((verifier, SUITE) for verifier in (suite_passes(final_answer), share_passed(final_answer), thrift(final_answer))),
    *((verifier, CALLS) for verifier in (paper_rewards.tool_correctness, paper_rewards.right_argument_values)),
    (shaping.citation_support, None),
    (shaping.repeated_calls(), None),
    (shaping.tool_diversity(), None),
    (shaping.format_score, Quantity(1.5)),
    *((part, None) for part in (shaping.think_format, shaping.tool_use)),
    (shaping.language_consistency(), None),
]
PARTS = ("\n", " \n", "<answer>", "####", "answer: ", "The answer is ", "**answer**\n", "\\boxed{", "\\boxed{}", "{")
"""Repeated, they are text in which frames are looked for over and over."""
REPORTS = ("report", "state", "tests", "verdict")


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(math_verify, "CPU_S", 0.02)


def episode(text, calls=()):
    """An episode that ends with the text, which a call and the environment have also left behind."""
    made = [
        {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for n, (name, arguments) in enumerate(calls)
    ]
    said = (Message(role="assistant", content="", tool_calls=made), Message(role="assistant", content=text))
    left = [ToolOutcome(f"c{n}", name, ToolStatus.OK, text) for n, (name, _) in enumerate(calls)]
    left += [ToolOutcome("", name, ToolStatus.OK, text) for name in REPORTS]
    return Trajectory("t", 0, (), said, StopReason.ANSWERED, outcomes=tuple(left))


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.scale)])
def test_every_verifier_returns_a_bounded_reward_for_every_text(part):
    """Each text goes to every second case by default, and to the others with the marker."""
    for number, text in enumerate(TEXTS):
        for verifier, truth in CASES[(number + part) % 2 :: 2]:
            assert -1 <= verifier(Task("t", (), truth), episode(text, [("look", {"x": text})])) <= 1


@pytest.mark.parametrize("part", [*PARTS, "Paris "])
def test_answer_extraction_has_linear_runtime(part):
    text, begin = "Paris " + part * (extract.MAX_CHARACTERS // len(part) - 6), time.process_time()
    assert len(text) > extract.MAX_CHARACTERS // 2
    assert isinstance(extract.candidates(text), tuple)
    assert isinstance(extract.short_answers(text), tuple)
    assert time.process_time() - begin < 2  # 10 to 250 s where it is quadratic


@pytest.mark.scale
@pytest.mark.parametrize("gold", [Expression("x^2+1"), Expression(r"\frac{1}{2}", evaluated=True)])
def test_mathematics_verifier_returns_0_or_1_for_every_text(gold):
    assert all(mathematics(Task("t", (), gold), episode(text)) in (0, 1) for text in TEXTS)


def test_tool_correctness_is_bounded_for_all_argument_values():
    for value in VALUES:
        lived = episode("Done.", [("look", {"x": value, "y": value})])
        assert -1 <= paper_rewards.tool_correctness(Task("t", (), CALLS), lived) <= 1


def some_of_each_kind(world):
    """Tasks of the first split, one of each kind; of `swe`, whose sources are not here, a bare suite."""
    if world.name == "swe":
        return [Task("t", (), SUITE)]
    found = {}
    for task in world.tasks(world.splits[0]):
        right = getattr(task.truth, "right", getattr(task.truth, "value", None))
        found.setdefault((type(task.truth), type(right), right if isinstance(right, str) else ""), task)
    return list(found.values())


@pytest.mark.scale
@pytest.mark.parametrize("name", sorted(WORLDS))
def test_every_world_returns_a_reward_for_every_text(name):
    world = build_world(EnvConfig(name=name), RolloutConfig())
    for task in some_of_each_kind(world):
        gold = getattr(task.truth, "gold", ())
        plays = [episode(text) for text in TEXTS]
        plays += [
            episode("Done.", [(call.name, dict.fromkeys(call.accepted, value)) for call in gold]) for value in VALUES
        ]
        for lived in plays:
            assert math.isfinite(score(world.rewards, task, lived).reward)
