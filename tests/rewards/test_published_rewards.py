"""Published rewards against hand-computed values, and as settings of a run."""

from __future__ import annotations

import json

import pytest

from ludus.config.schema import Config
from ludus.config.sections.rewards import RewardsConfig
from ludus.diagnostics.trackers import read_metrics
from ludus.errors import ConfigError
from ludus.rewards.base import Reward, check_rewards, score
from ludus.rewards.exact_match import ExpectedAnswers
from ludus.rewards.math.numeric import Quantity
from ludus.rewards.paper_rewards import ExpectedCall, ExpectedCalls, match_calls, tool_correctness
from ludus.rewards.registry import PUBLISHED, added_parts, preset_parts, training_parts
from ludus.rewards.shaping import extra_turns, format_score, think_format, tool_use
from ludus.rollouts.ledger import RolloutKey
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path
from ludus.rollouts.scheduler import Episode
from ludus.training.collection.rewards.reward_mixing import RewardMixer
from ludus.training.collection.rewards.reward_plan import plan_parts
from ludus.types import Message, StopReason, Task, ToolOutcome, ToolStatus, Trajectory
from ludus.worlds.search.world import SearchSettings, SearchWorld
from tables import composite_pairs
from tiny_run import ludus, make_recipe, refused

OK, MALFORMED, BAD = ToolStatus.OK, ToolStatus.MALFORMED, ToolStatus.BAD_ARGUMENTS


def call(name: str, **arguments) -> ExpectedCall:
    return ExpectedCall(name, arguments)


def trajectory(*calls: ExpectedCall, answer: str = "", statuses=(OK,), stop=StopReason.ANSWERED) -> Trajectory:
    made = [
        {"id": str(i), "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
        for i, c in enumerate(calls)
    ]
    messages = (Message(role="assistant", content="", tool_calls=made), Message(role="assistant", content=answer))
    outcomes = tuple(ToolOutcome(str(i), "x", status, "") for i, status in enumerate(statuses))
    return Trajectory("t", 0, (), messages, stop, outcomes=outcomes)


def reward(preset: str, truth, given: Trajectory) -> float:
    return score(PUBLISHED[preset].parts(), Task("t", (), truth), given).reward


LOOK = call("look", item="fig", shop="north")
BUY = call("buy", item="fig")


@pytest.mark.parametrize("preset", PUBLISHED)
def test_outcome_dominates_in_every_preset(preset):
    own = [Reward(name, len, weight=2.0, outcome=True) for name in ("first", "second")]
    check_rewards(preset_parts(preset, own))


def test_calls_are_compared_by_name_argument_names_and_values():
    # Names {look, buy} and {look, sell}: 1 of 3. look: {item, shop} and {item, day}: 1 of 3, item right.
    found = match_calls([LOOK, BUY], [call("look", item="fig", day="mon"), call("sell", item="fig")])
    assert (found.names, found.argument_names, found.argument_values) == (1 / 3, 1 / 3, 1.0)
    assert found.share == pytest.approx((1 / 3 + 1 / 3 + 1) / (1 + 2 + 3))
    # Each call made is used once, the best one first.
    twice = match_calls([BUY, BUY], [call("buy", item="pear"), BUY])
    assert (twice.names, twice.argument_names, twice.argument_values) == (1.0, 2.0, 1.0)


def test_toolrl_matches_hand_computed_values():
    truth = ExpectedCalls((LOOK, BUY))
    assert reward("toolrl", truth, trajectory(BUY, LOOK)) == pytest.approx(3 + 1)
    assert reward("toolrl", truth, trajectory(statuses=())) == pytest.approx(-3 + 1)
    # R = 1/2 + 1 + 1 (name buy of two, its argument's name and value), S = 6.
    part = trajectory(BUY)
    assert reward("toolrl", truth, part) == pytest.approx(6 * 2.5 / 6 - 3 + 1)
    broken = trajectory(BUY, statuses=(MALFORMED, OK))
    assert reward("toolrl", truth, broken) == pytest.approx(6 * 2.5 / 6 - 3)
    cut = trajectory(BUY, stop=StopReason.TRUNCATED)
    assert reward("toolrl", truth, cut) == pytest.approx(6 * 2.5 / 6 - 3)
    none = ExpectedCalls(())
    quiet = trajectory(answer="No tool fits.", statuses=())
    tried = trajectory(answer="No tool fits.", statuses=(MALFORMED,))
    cut = trajectory(answer="No tool fits.", statuses=(), stop=StopReason.TRUNCATED)
    silent = trajectory(statuses=())
    found = [tool_correctness(Task("t", (), none), given) for given in (quiet, part, tried, cut, silent)]
    assert found == [1.0, -1.0, -1.0, -1.0, -1.0]


def test_toolrl_reports_call_validity_names_and_arguments_separately():
    given = trajectory(call("look", item="fig", shop="south"), statuses=(OK, BAD, MALFORMED, OK))
    found = score(PUBLISHED["toolrl"].parts(), Task("t", (), ExpectedCalls((LOOK, BUY))), given).rewards
    assert found["valid_calls"] == 0.5
    assert found["right_names"] == 0.5
    assert found["right_argument_names"] == 0.5
    assert found["right_argument_values"] == pytest.approx(1 / 3)


def test_search_r1_does_not_extract_boxed_answers():
    framed, plain = (
        Trajectory("t", 0, (), (Message(role="assistant", content=text),), StopReason.ANSWERED)
        for text in (r"\boxed{Paris}", "Paris")
    )
    truth = Task("t", (), ExpectedAnswers(("Paris",)))

    def matched(parts, trajectory):
        return score(parts, truth, trajectory).rewards["exact_match"]

    assert matched(PUBLISHED["search_r1"].parts(), framed) == 0
    assert matched(PUBLISHED["search_r1"].parts(), plain) == 1
    assert matched(SearchWorld().rewards, framed) == 1
    assert matched(SearchWorld(SearchSettings(framed=False)).rewards, framed) == 0


def test_search_r1_matches_hand_computed_values():
    truth = ExpectedAnswers(("Chad",))
    cases = {
        1.0: trajectory(answer="Chad"),
        0.8: trajectory(answer="Chad", statuses=(BAD,)),
        0.2: trajectory(answer="Mali"),
        0.1: trajectory(answer="Mali", statuses=(BAD,)),
        0.0: trajectory(answer="Mali", statuses=(BAD,), stop=StopReason.TRUNCATED),
    }
    for expected, given in cases.items():
        assert reward("search_r1", truth, given) == pytest.approx(expected)


def test_retool_matches_hand_computed_values():
    truth = ExpectedAnswers(("4",))
    assert reward("retool", truth, trajectory(answer="4", statuses=(OK,) * 3)) == 1.0
    found = [reward("retool", truth, trajectory(answer="5", statuses=(OK,) * n)) for n in (0, 1, 3, 4, 9)]
    assert found == pytest.approx([-1.0, -0.9, -0.7, -0.6, -0.6])


def test_preset_replaces_the_worlds_parts_and_supports_weight_schedules():
    weights = {"weights": {"tool_correctness": 2.0}, "weights_end": {"tool_correctness": 3.0}}
    config = Config(rewards=RewardsConfig(preset="toolrl", schedule_steps=10, allow_outweigh=True, **weights))
    parts = PUBLISHED["toolrl"].parts()
    one = RewardMixer(config.rewards, plan_parts(config, parts))
    given = trajectory(BUY)
    task = Task("t", (), ExpectedCalls((LOOK, BUY)))
    episode = Episode(RolloutKey(1, "t", 0), task, score(parts, task, given))
    ((first,),), ((last,),) = one.combine(1, [[episode]]), one.combine(11, [[episode]])
    correctness = 2 * 2.5 / 6 - 1
    assert first.trajectory.reward == pytest.approx(2 * correctness + 1)
    assert last.trajectory.reward == pytest.approx(3 * correctness + 1)
    assert last.trajectory.rewards["format"] == 1.0


@pytest.mark.slow
def test_a_run_trains_on_a_preset(tiny_run, tmp_path):
    model = sorted((tiny_run / "cold_start" / "checkpoints").iterdir())[-1]
    words = ("--rewards.preset", "search_r1", "--training.steps", "1", "--evaluation.splits", "[]")
    run = tmp_path / "run"
    said = ludus("train", make_recipe(tmp_path), "--model", model, "--run.dir", run, *words)
    assert said.code == 0, said
    found = [record.trajectory for record in read_rollouts(rollouts_path(run, 1))]
    for one in found:
        right, formed = one.rewards["exact_match"] == 1, one.rewards["well_formed"] == 1
        expected = 0.8 * right + 0.2 * formed + 0.1 * (bool(one.answer) and not right and not formed)
        assert one.reward == pytest.approx(expected)
        assert "f1" in one.rewards
    (row,) = read_metrics(run / "metrics.jsonl")
    assert row.metrics["reward/mean"] == pytest.approx(sum(one.reward for one in found) / len(found))


def test_preset_for_another_truth_type_is_rejected(tiny_run, tmp_path):
    model = sorted((tiny_run / "cold_start" / "checkpoints").iterdir())[-1]
    words = ("train", make_recipe(tmp_path), "--model", model, "--rewards.preset", "toolrl")
    assert "needs tasks whose truth is ExpectedCalls; here it is ExpectedAnswers" in refused(*words)


UNKNOWN = ToolStatus.UNKNOWN_TOOL
DONE = Message(role="assistant", content="4")
THOUGHT = Message(role="assistant", content="4", reasoning_content="2 + 2")
CALLS = {"l": LOOK, "s": call("look", item="fig", shop="south"), "b": BUY, "u": call("steal")}
STATUSES = {"u": UNKNOWN, "m": MALFORMED}
TRUTHS = {"a": ExpectedAnswers(("4",)), "n": Quantity(4.0), "c": ExpectedCalls((BUY,)), "0": ExpectedCalls(())}


def transcript(*said: Message, calls=(), statuses=None, stop=StopReason.ANSWERED) -> Trajectory:
    """One turn for each call, then what is said."""
    statuses = [OK] * len(calls) if statuses is None else statuses
    made = trajectory(*calls).messages[0]["tool_calls"]
    turns = [Message(role="assistant", content="", tool_calls=[one]) for one in made]
    outcomes = tuple(ToolOutcome(f"call_{i}_0", "x", status, "") for i, status in enumerate(statuses))
    return Trajectory("t", 0, (), (*turns, *said), stop, outcomes=outcomes)


@pytest.mark.parametrize("row", composite_pairs.TRANSCRIPTS)
def test_composite_reward_parts_match_hand_computed_values(row):
    said, letters, truth, stop, *expected = row
    messages = [Message(role="assistant", content=text, reasoning_content=thought) for thought, text in said]
    calls = tuple(CALLS[letter] for letter in letters if letter in CALLS)
    statuses = [STATUSES.get(letter, OK) for letter in letters]
    given = transcript(*messages, calls=calls, statuses=statuses, stop=stop)
    task = Task("t", (), TRUTHS[truth])
    found = [part(task, given) for part in (think_format, format_score, tool_use, extra_turns(1, 3))]
    assert found == pytest.approx(expected, abs=1e-12)


OWN = (
    Reward("solved", lambda task, trajectory: float(trajectory.answer == "4"), weight=2.0, outcome=True),
    Reward("form", lambda task, trajectory: 1.0, weight=0.5),
)
WRONG = Message(role="assistant", content="5")


@pytest.mark.parametrize(
    ("preset", "expected", "given"),
    [
        ("r1", 1.2, transcript(THOUGHT)),
        ("r1", 1.0, transcript(DONE)),
        ("r1", 0.2, transcript({**THOUGHT, "content": "5"})),
        ("composite", 1.0, transcript(DONE)),
        ("composite", 1 + 0.2 * 0.4 + 0.1 * 0.1, transcript(THOUGHT, calls=(BUY,))),
        ("composite", 0.2 * 0.3 + 0.1 * 0.1, transcript(WRONG, calls=(BUY, LOOK, BUY))),
        ("composite", 1 + 0.2 * 0.5 - 0.1 * 0.1 - 0.05 * 2, transcript(DONE, calls=(BUY,) * 5)),
        ("composite", 0.2 - 0.1 * 0.35 - 0.15, transcript(WRONG, calls=(BUY,) * 10)),
        (
            "composite",
            -0.1 - 0.05,
            transcript(WRONG, calls=(BUY, LOOK) * 2, statuses=(UNKNOWN,) * 4 + (MALFORMED,) * 4),
        ),
    ],
)
def test_r1_and_composite_match_hand_computed_values(preset, expected, given):
    """The world's outcome counts 1, whatever its weight there, and its own shaping does not train."""
    config = Config(rewards=RewardsConfig(preset=preset))
    parts = training_parts(config.rewards, OWN)
    combined = RewardMixer(config.rewards, plan_parts(config, parts))
    task = Task("t", (), None)
    episode = Episode(RolloutKey(1, "t", 0), task, score(parts, task, given))
    ((found,),) = combined.combine(1, [[episode]])
    assert found.trajectory.reward == pytest.approx(expected, abs=1e-12)


def test_named_part_replaces_the_composite_part_and_dominating_shaping_is_rejected():
    turns = {"extra_turns": {"weight": 0.1, "free": 1, "limit": 3}}
    config = Config(rewards=RewardsConfig(preset="composite", extra=turns))
    found = {part.name: part.weight for part in training_parts(config.rewards, OWN)}
    assert found == {"solved": 1.0, "format_score": 0.2, "tool_use": 0.1, "extra_turns": 0.1}
    assert [part.name for part in added_parts(config.rewards)] == ["format_score", "tool_use", "extra_turns"]
    plan_parts(config, training_parts(config.rewards, OWN))
    heavy = Config(rewards=RewardsConfig(preset="composite", weights={"tool_use": 0.2}))
    with pytest.raises(ConfigError, match="a failure could earn as much as a success"):
        plan_parts(heavy, training_parts(heavy.rewards, OWN))
