"""Plans of groups, bonuses, objectives and uniform failures; refused settings; a resumed run."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from ludus.algorithms.spec.resolve import PRESETS
from ludus.cli.main import main
from ludus.config.load import load_config
from ludus.envs.registry import build_world
from ludus.envs.tool_world import assistant
from ludus.errors import ConfigError
from ludus.rollouts.ledger import RolloutKey, RolloutOutcome
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path
from ludus.rollouts.scheduler import Episode
from ludus.training.collection.exploration import (
    ExplorationState,
    Explorer,
    check_exploration,
    count_bonus,
    fails_uniformly,
    visited_keys,
)
from ludus.training.collection.filters import AlgorithmState
from ludus.training.credit.advantages import assign_credit
from ludus.training.rl.build import train
from ludus.training.rl.validate import config_warnings, inactive_parts
from ludus.training.run.run_dir import RunFolder, lock_run, new_run
from ludus.training.run.session import open_session
from ludus.types import Group, Segment, StopReason, Task, ToolOutcome, ToolStatus, Trajectory
from small_runs import SMALLEST, InterruptingReporter, RecordingReporter, RunInterrupted, config, lasting_files
from tiny_run import WORLD

SHOWN = tuple(assistant(f"turn {i}") for i in range(10))


def settings(name="search", **changes):
    words = [word for key, value in changes.items() for word in (f"--{key.replace('__', '.')}", str(value))]
    return load_config(name, words)


def explorer(**changes):
    chosen = settings(**{f"exploration__{key}": value for key, value in changes.items()})
    return Explorer(chosen, "success", lambda task: SHOWN)


def plans(one, tasks, step=1, state=None):
    state = state or ExplorationState()
    found = []
    for task in tasks:
        state, plan = one.plan(state, step, task)
        found.append(plan)
    return state, found


def task(name="t", **tags):
    return Task(name, (), None, tags)


def attempt(
    sample=0, success=0.0, stop=StopReason.MAX_TURNS, *, anchors=(), outcomes=(), coverage=0.0, name="t", **tags
):
    segments = (Segment("prompt", (1,)), Segment("action", (2,), 0, logprobs=(-1.0,), versions=(0,)))
    rewards = {"success": success, "coverage": coverage}
    one = Trajectory(name, sample, segments, (), stop, outcomes, rewards, success, anchors=anchors, tags=tags)
    return Episode(RolloutKey(1, name, sample), task(name), one)


@pytest.mark.parametrize(("ratio", "expected"), [((5, 1), "TTTTTE" * 2), ((1, 5), "TEEEEE" * 2)])
def test_groups_of_the_two_objectives_alternate_in_the_ratio(ratio, expected):
    one = explorer(interleave__task=ratio[0], interleave__exploration=ratio[1], interleave__prompt="Look around.")
    state, found = plans(one, [task(f"t{i}", checkpoints="3") for i in range(12)])
    assert "".join("E" if plan.explores else "T" for plan in found) == expected
    assert state.groups == 12
    for plan in found:
        member = plan.member(0)
        assert member.prompt == ("Look around." if plan.explores else "")
        assert member.tags == ({"objective": "exploration"} if plan.explores else {})
    state, found = plans(one, [task(checkpoints="0")] * 12)
    assert state.groups == 0
    assert not any(plan.explores for plan in found)


def test_lists_cycle_over_the_members_and_mark_them():
    one = explorer(group_temperatures="[1.0, 1.5]", group_top_p="[1.0, 0.9, 0.8]", group_prompts='["", "Be bold."]')
    _, (plan,) = plans(one, [task()])
    members = [plan.member(i) for i in range(6)]
    assert [m.temperature for m in members] == [1.0, 1.5] * 3
    assert members[0].tags == {}
    assert [m.top_p for m in members] == [1.0, 0.9, 0.8] * 2
    assert [m.prompt for m in members] == ["", "Be bold."] * 3
    assert members[1].tags == {"temperature": "1.5", "top_p": "0.9", "prompt": "1"}


def test_prefixes_fall_with_the_steps_and_leave_a_turn_to_the_policy():
    one = explorer(demonstration_prefix__share=1.0, demonstration_prefix__start=1.0, demonstration_prefix__steps=10)
    lengths = [len(plans(one, [task()], step)[1][0].prefix) for step in range(1, 13)]
    assert lengths == [9, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 0]
    half = explorer(demonstration_prefix__share=0.5)
    _, found = plans(half, [task(f"t{i}") for i in range(200)])
    begun = [plan for plan in found if plan.prefix]
    assert 70 < len(begun) < 130
    assert plans(half, [task(f"t{i}") for i in range(200)])[1] == found
    assert begun[0].member(3).prefix == SHOWN[:8]


def test_temperature_schedule_applies_to_whole_groups_without_correction():
    one = explorer(temperature__kind="linear", temperature__end=2.0, temperature__steps=4)
    found = [plans(one, [task()], step)[1][0].member(1) for step in (1, 3, 5, 9)]
    assert [m.temperature for m in found] == [1.0, 1.5, 2.0, 2.0]
    assert [m.tags for m in found] == [{}] * 4


def test_count_bonus_matches_the_formula():
    assert count_bonus([], {}) == 0.0
    assert count_bonus(["a", "b", "a"], {"a": 3}) == pytest.approx((1 / 2 + 1 + 1 / math.sqrt(5)) / 3)
    one, other = attempt(anchors=("x", "y", "x")), attempt(1, anchors=("x",))
    assert len(set(visited_keys(one.task, one.trajectory, "state"))) == 2
    bonus = explorer(count_bonus__weight=0.1)
    state, ((first, second),) = bonus.assign_rewards(ExplorationState(), [[one, other]])
    assert first.trajectory.rewards["count_bonus"] == pytest.approx((1 + 1 + 1 / math.sqrt(2)) / 3)
    assert second.trajectory.reward == pytest.approx(0.1)  # the counts of siblings come after the step
    assert sorted(state.counts.values()) == [1, 3]
    _, ((again,),) = bonus.assign_rewards(state, [[other]])
    assert again.trajectory.rewards["count_bonus"] == pytest.approx(1 / 2)


def test_exploration_groups_are_rewarded_for_coverage():
    one = explorer(interleave__exploration=1)
    group = [attempt(0, 1.0, coverage=0.25, objective="exploration"), attempt(1, 1.0, coverage=0.25)]
    _, ((explored, played),) = one.assign_rewards(ExplorationState(), [group])
    assert (explored.trajectory.reward, played.trajectory.reward) == (0.25, 1.0)
    metrics = one.metrics(1, [Group(task(), (explored.trajectory, played.trajectory))], (), 0)
    assert metrics["exploration/share"] == 0.5
    assert (metrics["exploration/coverage"], metrics["exploration/task_success"]) == (0.25, 1.0)


def failed_call(tool):
    return (ToolOutcome("c", tool, ToolStatus.RAISED, "no"),)


def test_uniform_failures_are_those_of_one_kind():
    same = [attempt(i).trajectory for i in range(3)]
    assert fails_uniformly(same, "success")
    assert not fails_uniformly(same[:1], "success")
    assert not fails_uniformly([*same, attempt(3, 1.0).trajectory], "success")
    assert not fails_uniformly([*same, attempt(3, stop=StopReason.TRUNCATED).trajectory], "success")
    assert not fails_uniformly([*same, attempt(3, outcomes=failed_call("look")).trajectory], "success")
    calls = [attempt(i, outcomes=failed_call("look")).trajectory for i in range(2)]
    assert fails_uniformly(calls, "success")
    answers = [
        replace(one, stop_reason=StopReason.ANSWERED, messages=(assistant(str(i)),)) for i, one in enumerate(same)
    ]
    assert not fails_uniformly(answers, "success")


def test_a_uniform_failure_changes_the_next_group_of_its_task():
    hot = explorer(uniform_failures__action="temperature", uniform_failures__temperature=1.7)
    solved = [attempt(i, 1.0) for i in range(2)]
    state, _ = hot.assign_rewards(ExplorationState(), [solved])
    assert (state.solved, state.failing) == (("t",), ())
    failing = [attempt(i) for i in range(2)]
    state, _ = hot.assign_rewards(state, [failing])
    assert (state.solved, state.failing) == (("t",), ("t",))
    groups = [Group(task(), tuple(one.trajectory for one in failing))]
    assert hot.metrics(2, groups, state.solved, 0)["exploration/lost_tasks"] == 1.0
    assert hot.metrics(2, groups, (), 0)["exploration/uniform_failures"] == 1.0
    member = plans(hot, [task()], 2, state)[1][0].member(0)
    assert (member.temperature, member.tags) == (1.7, {"temperature": "1.7"})
    assert plans(hot, [task("other")], 2, state)[1][0].member(0).temperature is None
    shown = explorer(uniform_failures__action="prefix")
    assert len(plans(shown, [task()], 1, state)[1][0].prefix) == 8
    restored, _ = hot.assign_rewards(state, [solved])
    assert restored.failing == ()


def test_dropped_failures_do_not_train():
    one = explorer(uniform_failures__action="drop")
    mixed = [attempt(0, 1.0, name="b"), attempt(1, name="b")]
    samples = assign_credit(
        [[attempt(i) for i in range(2)], mixed], replace(PRESETS["grpo"], filter_zero_variance=False)
    )
    found = one.drop_failures(samples)
    assert [(c.outcome, c.reason) for c in found[:2]] == [(RolloutOutcome.MASKED, "uniform_failure")] * 2
    assert found[2:] == samples[2:]
    counting = explorer(uniform_failures__action="count")
    assert counting.drop_failures(samples) == samples


def test_state_survives_a_checkpoint():
    state = ExplorationState(3, {"a": 2}, ("t",), ("u", "v"))
    saved = AlgorithmState(exploration=state).to_json()
    assert AlgorithmState.start(PRESETS["grpo"], saved).exploration == state
    assert "exploration" not in json.loads(AlgorithmState().to_json())


TIS = {"algorithm__correction": "tis"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"exploration__group_temperatures": "[0.8, 1.2]"}, "correction is 'none'"),
        ({"exploration__diverse__tokens": 3}, "correction is 'none'"),
        ({"exploration__uniform_failures__action": "temperature"}, "correction is 'none'"),
        ({"exploration__group_top_p": "[0.8]", "engine__url": "http://x", **TIS}, "which servers do not send"),
        ({"exploration__diverse__tokens": 3, "rollout__top_p": 0.9, **TIS}, "untruncated"),
        ({"exploration__diverse__tokens": 3, "exploration__epsilon_tool": 0.1, **TIS}, "how members are sampled"),
        ({"exploration__interleave__exploration": 1}, "'coverage' is not a reward part"),
        ({"exploration__epsilon_tool": 0.1, "training__mode": "async"}, "training.mode = 'async'"),
        ({"exploration__epsilon_tool": 0.1, "training__mask_observations": "false"}, "mask_observations"),
        ({"exploration__count_bonus__weight": 1.0}, "not below the weight of the outcome"),
        (
            {"exploration__temperature__kind": "linear", "exploration__temperature__end": 1.0},
            "must be above 0 and differ",
        ),
        ({"exploration__entropy_coef__kind": "linear", "exploration__entropy_coef__end": 0.0}, "to the same value"),
    ],
)
def test_unsupported_settings_are_refused(changes, message):
    chosen = settings(**changes)
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        check_exploration(chosen, build_world(chosen.env, chosen.rollout))


@pytest.mark.parametrize(
    "changes",
    [
        {"exploration__diverse__tries": 3},
        {"exploration__interleave__task": 2},
        {"exploration__demonstration_prefix__start": 0.5},
        {"exploration__temperature__end": 2.0},
        {"exploration__temperature__kind": "linear"},
        {"exploration__group_temperatures": "[-1]"},
        {"exploration__group_top_p": "[1.5]"},
        {"exploration__uniform_failures__temperature": 2.0},
    ],
)
def test_settings_without_effect_are_refused(changes):
    with pytest.raises(ConfigError, match="exploration"):
        settings(**changes)


def test_valid_settings_pass_and_the_correction_is_not_called_useless():
    lists = {"exploration__group_temperatures": "[0.8, 1.2]", "exploration__epsilon_tool": 0.1}
    chosen = settings(**TIS, **lists, env__name=WORLD)
    world = build_world(chosen.env, chosen.rollout)
    check_exploration(chosen, world)
    assert not [text for text in [*config_warnings(chosen), *inactive_parts(chosen, world)] if "correction" in text]
    without = settings(**TIS, env__name=WORLD)
    assert [text for text in inactive_parts(without, world) if "correction tis has no effect" in text]


FULL = {
    "algorithm__correction": "tis",
    "algorithm__kl_coef": "0.01",
    "algorithm__entropy_coef": "0.01",
    "algorithm__filter_zero_variance": "false",
    "evaluation__tasks_before": "0",
    "training__steps": "3",
    "exploration__entropy_coef__kind": "linear",
    "exploration__entropy_coef__end": "0.0",
    "exploration__temperature__kind": "linear",
    "exploration__temperature__end": "1.6",
    "exploration__epsilon_tool": "0.5",
    "exploration__count_bonus__weight": "0.1",
    "exploration__count_bonus__of": "call",
    "exploration__demonstration_prefix__share": "0.5",
    "exploration__uniform_failures__action": "prefix",
}


def run(folder, reporter=None, **changes):
    chosen = config(folder, **(SMALLEST | FULL | changes))
    with lock_run(new_run(chosen, "search", "rl")):
        train(open_session(chosen), RunFolder(folder), reporter or RecordingReporter())


@pytest.mark.slow
def test_a_resumed_run_is_bit_identical(tmp_path):
    run(tmp_path / "whole")
    with pytest.raises(RunInterrupted):
        run(tmp_path / "cut", InterruptingReporter(2))
    assert main(["train", "--resume", str(tmp_path / "cut")]) == 0
    first, second = lasting_files(tmp_path / "whole"), lasting_files(tmp_path / "cut")
    assert [name for name in first if first[name] != second.get(name)] == []
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert [row["exploration/temperature"] for row in rows] == pytest.approx([1.0, 1.2, 1.4])
    assert [row["entropy/coef"] for row in rows] == pytest.approx([0.01, 0.02 / 3, 0.01 / 3])
    # engine and learner use one temperature, and forced tokens have no log-probabilities
    assert max(row["mismatch/logprob_diff_max"] for row in rows) < 1e-3
    assert max(row["exploration/forced_calls"] for row in rows) > 0
    assert rows[-1]["exploration/counted"] > 0


@pytest.mark.slow
def test_members_of_other_distributions_are_weighed_and_others_are_not(tmp_path):
    off = {name: value for name, value in FULL.items() if not name.startswith("exploration")}
    changes = off | {"exploration__group_temperatures": "[1.0, 1.5]", "training__steps": "1"}
    chosen = config(tmp_path, **(SMALLEST | changes))
    with lock_run(new_run(chosen, "search", "rl")):
        train(open_session(chosen), RunFolder(tmp_path), reporter := RecordingReporter())
    ((_, metrics),) = reporter.steps
    assert metrics["exploration/off_policy"] == 0.5
    assert metrics["mismatch/logprob_diff_max"] > 0.01
    assert metrics["is/ess"] < 1
    tags = [one.trajectory.tags.get("temperature") for one in read_rollouts(rollouts_path(tmp_path, 1))]
    assert sorted(tag or "" for tag in tags) == ["", "", "1.5", "1.5"]
