"""Turn rewards by lengths and events: by hand, through reward mixing, and from a run folder."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from ludus.algorithms.spec.resolve import PRESETS
from ludus.config import load_config
from ludus.config.schema import Config
from ludus.config.sections.rewards import RewardsConfig
from ludus.envs.registry import build_world
from ludus.errors import ConfigError
from ludus.rewards.registry import training_parts
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path, write_rollouts
from ludus.training.collection.rewards.reward_mixing import RewardMixer
from ludus.training.collection.rewards.reward_plan import check_reward_settings, plan_parts
from ludus.training.credit.advantages import assign_credit
from ludus.training.credit.turn_rewards import calibrate, events_of
from ludus.types import Segment, ToolOutcome, ToolStatus
from tests.training.credit.test_combine import WORLD, combiner, episode, rewards_of
from tiny_run import copy_run, ludus, make_recipe, refused

LONG = (Segment("prompt", (1, 2)), Segment("action", tuple(range(10)), 0, logprobs=(-1.0,) * 10, versions=(0,) * 10))
"""10 action tokens; the ordinary episode has 3."""


def test_linear_length_penalty_is_capped():
    group = [episode(1, 0, 0), episode(1, 0, 0, segments=LONG), episode(0, 0, 0, segments=LONG)]
    linear = {"kind": "linear", "target": 4, "lam": 0.05, "cap": 0.25}
    one = combiner(length=linear)
    assert rewards_of(one, group)[0] == pytest.approx([1.0, 0.75, -0.25])
    mild = combiner(length=linear | {"lam": 0.01})
    assert rewards_of(mild, group)[0] == pytest.approx([1.0, 0.94, -0.06])
    assert one.combine(1, [group])[0][1].trajectory.rewards["length"] == pytest.approx(-0.25)
    failures, successes = (combiner(length=linear | {"applies_to": which}) for which in ("failures", "successes"))
    assert rewards_of(failures, group)[0] == pytest.approx([1.0, 1.0, -0.25])
    assert rewards_of(successes, group)[0] == pytest.approx([1.0, 0.75, 0.0])


def test_sigmoid_length_term_reduces_positive_rewards():
    one = RewardMixer(
        settings := RewardsConfig(length={"kind": "sigmoid", "target": 3, "tau": 2, "floor": 0.5}),
        plan_parts(Config(rewards=settings), WORLD[:1]),
    )
    group = [episode(1, 0, 0), episode(1, 0, 0, segments=LONG), episode(-1, 0, 0, segments=LONG)]
    assert rewards_of(one, group)[0] == pytest.approx([0.75, 0.5 + 0.5 / (1 + math.exp(7 / 2)), -1.0])


def test_very_long_success_earns_more_than_a_shaped_failure():
    endless = (LONG[0], replace(LONG[1], tokens=(1,) * 9999, logprobs=(-1.0,) * 9999, versions=(0,) * 9999))
    one = combiner(length={"kind": "sigmoid"}, weights={"form": 0.25})
    worst, best = episode(1, -1, -1, segments=endless), episode(0, 1, 1)
    ((success, failure),) = rewards_of(one, [worst, best])
    assert success > failure > 0


@pytest.mark.parametrize(
    "rewards",
    [
        {"length": {"kind": "sigmoid", "floor": 0.1}},
        {"length": {"kind": "sigmoid", "floor": 0.0}, "weights": {"form": 0.0, "short": 0.0}},
        {"length": {"kind": "sigmoid"}, "weights": {"form": 0.8}},
        {"length": {"kind": "linear", "cap": 0.8}},
    ],
)
def test_values_proposed_by_the_error_are_accepted(rewards):
    with pytest.raises(ConfigError) as told:
        combiner(**rewards)
    floor = re.search(r"rewards\.length\.floor = ([\d.]+\d)", str(told.value))
    scale = re.search(r"Multiply the weights or caps of the shaping by ([\d.]+\d)", str(told.value))
    mended = {"length": dict(rewards["length"]), "weights": dict(rewards.get("weights", {}))}
    if floor is not None:
        mended["length"]["floor"] = float(floor[1])
    if scale is not None:
        own = {"form": 0.2, "short": 0.1} | mended["weights"]
        mended["weights"] = {name: weight * float(scale[1]) for name, weight in own.items()}
        if "cap" in mended["length"]:
            mended["length"]["cap"] *= float(scale[1])
    combiner(**mended)


@pytest.mark.parametrize("recipe", ["code", "functions", "math", "mixed", "search", "sql", "terminal"])
def test_sigmoid_length_term_is_accepted_in_every_recipe(recipe):
    config = load_config(recipe, ["--rewards.length.kind", "sigmoid"])
    world = build_world(config.env, config.rollout, config.sandbox)
    plan_parts(config, training_parts(config.rewards, world.rewards))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"length": {"kind": "linear", "cap": 0.8}}, "Shaping"),
        ({"length": {"kind": "sigmoid", "floor": 0.2}}, "Shaping"),
        ({"turns": {"look": 0.1}}, "Shaping"),
        ({"aggregation": "pareto", "length": {"kind": "linear", "cap": 0.1}}, "pareto"),
        ({"aggregation": "pareto", "turns": {"look": 0.1}}, "pareto"),
    ],
)
def test_outweighing_or_unsupported_shaping_is_rejected(settings, words):
    with pytest.raises(ConfigError, match=words):
        combiner(**settings)
    if words == "Shaping":
        combiner(**settings, allow_outweigh=True)


@pytest.mark.parametrize(
    "length", [{"target": 9}, {"kind": "linear", "tau": 3}, {"kind": "sigmoid", "target": 3, "cap": 0.1}]
)
def test_length_parameter_of_another_kind_is_rejected(length):
    with pytest.raises(ValueError, match=r"rewards\.length"):
        RewardsConfig(length=length)


def outcome(turn, tool="look", status=ToolStatus.OK, number=0):
    return ToolOutcome(f"call_{turn}_{number}", tool, status, "")


def test_turn_events_name_the_tools_called_or_failed():
    two = episode(0, 0, 0).trajectory
    assert events_of(two) == ["answer", "answer"]
    assert events_of(replace(two, outcomes=(outcome(0), outcome(0, "add", number=1)))) == ["add+look", "answer"]
    bad = (outcome(1), outcome(1, "add", ToolStatus.RAISED, 1), outcome(1, "x", ToolStatus.UNKNOWN_TOOL, 2))
    assert events_of(replace(two, outcomes=bad)) == ["answer", "raised"]
    assert events_of(replace(two, outcomes=(outcome(7), replace(outcome(0), call_id="other")))) == ["answer"] * 2


def attempts():
    """`look` is in 3 of 3 successes and 1 of 3 failures, `raised` in failures alone, `answer` in all."""
    plan = [("look", 1), ("look", 1), ("look", 1), ("look", 0), ("raised", 0), ("raised", 0)]
    for event, won in plan:
        first = outcome(0) if event == "look" else outcome(0, status=ToolStatus.RAISED)
        yield replace(episode(won, 0, 0).trajectory, outcomes=(first,)), bool(won)


def test_events_are_rewarded_by_their_correlation_with_success():
    found = calibrate(list(attempts()), max_turns=2, outcome=1.0, threshold=0.1)
    assert found.counts == {"answer": 6, "look": 4, "raised": 2}
    rho = (3 / 6 - 4 / 6 * 3 / 6) / math.sqrt(4 / 6 * 2 / 6 * 3 / 6 * 3 / 6)
    assert found.found.correlation.tolist() == pytest.approx([0.0, rho, -rho])
    assert found.scale == pytest.approx(0.9 / (2 * 2 * rho))
    assert found.rewards == pytest.approx({"look": 0.9 / 4, "raised": -0.9 / 4})
    combiner(turns=found.rewards, allow_outweigh=True)
    assert calibrate(list(attempts()), 2, 1.0, 0.9).rewards == {}


def test_rewards_of_events_reach_the_advantages_of_their_turns():
    first, second = (
        episode(1, 0, 0, outcomes=(made,), sample=i, turn_rewards=(0.01,))
        for i, made in enumerate((outcome(0), outcome(0, status=ToolStatus.RAISED)))
    )
    one = combiner(turns={"look": 0.2, "raised": -0.1}, allow_outweigh=True)
    (group,) = one.combine(1, [[first, second]])
    assert [e.trajectory.turn_rewards for e in group] == [pytest.approx((0.21, 0.0)), pytest.approx((-0.09, 0.0))]
    credits = assign_credit([group], PRESETS["turn_grpo"])
    assert credits[0].advantages[0] > credits[1].advantages[0]
    assert credits[0].advantages[-1] == credits[1].advantages[-1] == 0


def test_turn_rewards_with_an_outcome_advantage_are_rejected(tmp_path):
    config = load_config("search", ["--rewards.turns.search", "0.01", "--algorithm.preset", "grpo"])
    world = type("World", (), {"rewards": WORLD, "tasks": lambda self, split: []})()
    with pytest.raises(ConfigError, match="the advantage grpo uses no turn rewards"):
        check_reward_settings(config, world)


def test_calibrate_command_prints_turn_rewards_for_a_run(tiny_run, tmp_path):
    """Step 1: a third of the attempts is right and looked; the others' calls raised."""
    folder = copy_run(tiny_run, tmp_path)
    rollouts_path(folder, 2).unlink()
    path = rollouts_path(folder, 1)
    records = []
    for record in read_rollouts(path):
        right = record.trajectory.sample == 0
        made = outcome(0, "price") if right else outcome(0, "price", ToolStatus.RAISED)
        segments = record.trajectory.segments[:2]
        one = replace(
            record.trajectory,
            rewards={"exact_match": float(right), "f1": 0.0, "well_formed": 1.0},
            outcomes=(made,),
            segments=segments,
        )
        records.append(replace(record, trajectory=one))
    write_rollouts(path, records)
    said = ludus("rewards", "calibrate", folder)
    assert said.code == 0, said
    assert "aligned" in said.out
    assert "All rewards below are aligned with the advantage turn_return_hybrid." in said.out
    lines = [line for line in said.out.splitlines() if line.startswith("--rewards.turns.")]
    assert [line.split()[0] for line in lines] == ["--rewards.turns.price", "--rewards.turns.raised"]
    words = [word for line in lines for word in line.split()]
    assert float(words[1]) == -float(words[3]) > 0
    assert "takes no settings" in refused("rewards", "calibrate", folder, *words)
    assert ludus("config", make_recipe(tmp_path), *words, "--algorithm.preset", "turn_grpo").code == 0
