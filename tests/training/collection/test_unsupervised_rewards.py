"""Votes, GDPO and constraints in the combination of rewards, and the tasks that need tools."""

from __future__ import annotations

import json
import math
import shutil
import statistics
from dataclasses import replace

import pytest
from pydantic import ValidationError

from ludus.config.load import load_config
from ludus.config.schema import Config
from ludus.config.sections.rewards import RewardsConfig
from ludus.diagnostics.trackers import read_metrics
from ludus.envs.registry import build_world
from ludus.errors import ConfigError
from ludus.rewards.base import Reward
from ludus.rewards.tool_results import Necessity, write_necessity
from ludus.rollouts.ledger import RolloutKey
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path
from ludus.rollouts.scheduler import Episode
from ludus.training.collection.rewards.reward_mixing import RewardMixer
from ludus.training.collection.rewards.reward_plan import check_reward_settings, plan_parts
from ludus.training.collection.rewards.unsupervised_rewards import split_votes
from ludus.training.rl.sync_trainer import task_order
from ludus.types import Failure, Group, Message, Segment, StopReason, Task, Trajectory
from small_runs import lasting_files
from tiny_run import WORLD as TINY_WORLD
from tiny_run import cold_start, ludus, make_recipe, refused

PARTS = (
    Reward("right", lambda task, trajectory: 0.0, outcome=True),
    Reward("form", lambda task, trajectory: 0.0, weight=0.2),
    Reward("harm", lambda task, trajectory: 0.0, weight=0.1),
)


def mixer(**settings) -> RewardMixer:
    config = Config(rewards=RewardsConfig(**settings))
    return RewardMixer(config.rewards, plan_parts(config, PARTS), success="right")


def attempt(sample: int, text: str, *, right: float = 0.0, form: float = 0.0, harm: float = 0.0, **changes) -> Episode:
    segments = (Segment("prompt", (1,)), Segment("action", (2,), 0, logprobs=(-1.0,), versions=(0,)))
    messages = (Message(role="user", content="?"), Message(role="assistant", content=text))
    parts = {"right": right, "form": form, "harm": harm}
    greedy = changes.pop("greedy", False)
    one = Trajectory("t", sample, segments, messages, StopReason.ANSWERED, rewards=parts, reward=right)
    return Episode(RolloutKey(1, "t", sample), Task("t", (), None), replace(one, **changes), greedy)


def gone(sample: int) -> Episode:
    return attempt(sample, "", failure=Failure("engine", "gone", 1), stop_reason=StopReason.FAILED, rewards={})


def rewards_of(group) -> list[float]:
    return [episode.trajectory.reward for episode in group]


def as_groups(groups) -> list[Group]:
    return [Group(group[0].task, tuple(episode.trajectory for episode in group)) for group in groups]


def test_votes_replace_the_outcome_and_the_verifier_is_only_measured():
    one = mixer(unsupervised={"kind": "majority", "weight": 0.8})
    groups = [
        [attempt(0, "7", right=1), attempt(1, "8", form=1), attempt(2, "8"), gone(3), attempt(4, "7", greedy=True)],
        [attempt(0, "5", right=1), attempt(1, "5", right=1)],
    ]
    first, second = one.combine(1, groups)
    assert rewards_of(first)[:3] == pytest.approx([0.0, 0.8 + 0.2, 0.8])
    assert rewards_of(first)[4] == 0.0  # the greedy attempt does not vote
    assert first[3] == gone(3)
    assert rewards_of(second) == [0.8, 0.8]
    (silent,) = one.combine(1, [[attempt(0, ""), attempt(1, "", right=1)]])
    quiet = one.metrics(1, as_groups([first[:3], second, silent]))
    assert quiet["majority/labelled"] == pytest.approx(2 / 3)
    assert quiet["majority/ratio"] == pytest.approx((2 / 3 + 1) / 2)
    assert quiet["majority/label_accuracy"] == pytest.approx(1 / 3)
    found = one.metrics(1, as_groups([first[:3], second]))
    assert found["majority/ratio"] == pytest.approx((2 / 3 + 1) / 2)
    assert found["majority/label_accuracy"] == 0.5
    assert found["majority/reward_accuracy"] == pytest.approx((0 + 1) / 2)


def test_votes_can_be_added_to_the_outcome_and_open_the_gate():
    both = mixer(unsupervised={"kind": "majority", "weight": 0.2, "replaces_outcome": False})
    ((a, b, c),) = both.combine(1, [[attempt(0, "7", right=1), attempt(1, "8"), attempt(2, "8")]])
    assert rewards_of([a, b, c]) == pytest.approx([1.0, 0.2, 0.2])
    gated = mixer(unsupervised={"kind": "majority"}, aggregation="gated")
    ((a, b, c),) = gated.combine(1, [[attempt(0, "7", right=1, form=1), attempt(1, "8", form=1), attempt(2, "8")]])
    assert rewards_of([a, b, c]) == pytest.approx([0.0, 1.2, 1.0])  # the outcome opens no gate


def test_the_first_attempts_train_and_the_others_vote():
    group = [attempt(0, "a"), gone(1), *(attempt(i, "b") for i in range(2, 5)), attempt(5, "a", greedy=True)]
    trained, votes = split_votes(group, 2)
    assert [episode.key.sample for episode in trained] == [0, 2, 5]
    assert [episode.key.sample for episode in votes] == [1, 3, 4]
    trained, _ = split_votes(group, 5)
    assert [episode.key.sample for episode in trained] == [0, 1, 2, 3, 4, 5]


def test_gdpo_normalizes_parts_by_group_and_the_sum_over_the_batch():
    one = mixer(aggregation="gdpo", weights={"harm": 0.0})
    rows = [[(1.0, 0.0), (0.0, 1.0), (0.0, 0.0)], [(1.0, 1.0), (1.0, 0.0)]]
    groups = [[attempt(i, "", right=r, form=f) for i, (r, f) in enumerate(row)] for row in rows]
    combined = [episode for group in one.combine(1, groups) for episode in group]
    sums = []
    for row in rows:
        columns = [[pair[k] for pair in row] for k in (0, 1)]
        scaled = [
            [(x - statistics.fmean(column)) / (statistics.stdev(column) + 1e-4) for x in column] for column in columns
        ]
        sums += [a + 0.2 * b for a, b in zip(*scaled, strict=True)]
    assert rewards_of(combined) == pytest.approx(sums)
    mean, std = statistics.fmean(sums), statistics.stdev(sums)
    assert rewards_of(one.normalize_batch(combined)) == pytest.approx([(x - mean) / (std + 1e-4) for x in sums])


def test_a_cost_above_its_limit_raises_the_multiplier():
    one = mixer(constraint={"part": "harm", "limit": 0.25, "lambda_init": 0.5, "lambda_lr": 2.0, "lambda_max": 0.9})
    groups = [[attempt(0, "", right=1, harm=-1), attempt(1, "", form=1)]]
    (group,) = one.combine(1, groups)
    assert rewards_of(group) == pytest.approx([(1 - 0.5) / 1.5, 0.2 / 1.5])  # the cost has no weight in the sum
    assert one.normalize_batch(group) == group
    raised = math.exp(math.log(0.5) + 2.0 * 0.5 * (0.5 - 0.25))
    (following,) = one.combine(2, groups)
    assert rewards_of(following)[0] == pytest.approx((1 - raised) / (1 + raised))
    # the metrics of a step have its multiplier, also if the next one is sampled before
    assert one.metrics(1, as_groups([group])) == pytest.approx(
        {"constraint/lambda": 0.5, "constraint/saturated": 0.0, "constraint/cost": 0.5}
        | {"reward/dominance_violations": 0.0}
    )
    assert one.metrics(2, as_groups([following]))["constraint/lambda"] == pytest.approx(raised)
    resumed = mixer(constraint={"part": "harm", "limit": 0.25, "lambda_lr": 2.0})
    resumed.restore(one.state)
    assert resumed.state == one.state
    for step in range(3, 9):
        one.normalize_batch(one.combine(step, groups)[0])
    one.combine(9, groups)
    assert one.metrics(9, as_groups([group]))["constraint/saturated"] == 1.0


REFUSED = [
    ("--rewards.aggregation gdpo", "divides by the deviation of each group again"),
    (
        "--rewards.aggregation gdpo --algorithm.preset dr_grpo --rollout.branch.branches 2 --rollout.branch.turns [0]",
        "rollout.branch",
    ),
    ("--rewards.constraint.part nothing", "not a part of the reward"),
    ("--rewards.constraint.part exact_match", "not a part of the reward"),
    ("--rewards.constraint.part well_formed --rewards.weights.well_formed 0.1", "would have no effect"),
    ("--rewards.unsupervised.kind majority --rewards.unsupervised.votes 2", "below algorithm.group_size"),
    ("--rewards.unsupervised.kind majority --rewards.weights.exact_match 0.5", "replaces the outcome"),
    ("--rewards.unsupervised.kind entropy --algorithm.max_resample_rounds 2", "algorithm.max_resample_rounds"),
    ("--rewards.unsupervised.kind entropy --rewards.aggregation gated", "rewards.aggregation = gated"),
    ("--rewards.unsupervised.kind entropy --rewards.unsupervised.replaces_outcome false", "in nats"),
    ("--rewards.unsupervised.kind confidence --algorithm.preset pass_at_k --rewards.weights.well_formed 0", "0 and 1"),
    ("--rewards.unsupervised.kind metacognition --rewards.unsupervised.replaces_outcome false", "Shaping"),
]


@pytest.mark.parametrize(("words", "reason"), REFUSED)
def test_combinations_without_a_meaning_are_refused(words, reason):
    config = load_config(None, ["--env.name", str(TINY_WORLD), *words.split()])
    with pytest.raises(ConfigError, match=reason):
        check_reward_settings(config, build_world(config.env, config.rollout))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"constraint": {"limit": 0.1}}, "needs rewards.constraint.part"),
        ({"constraint": {"part": "x", "lambda_init": 9}}, "is above rewards.constraint.lambda_max"),
        ({"constraint": {"part": "x"}, "aggregation": "pareto"}, "needs a sum of parts"),
        ({"aggregation": "gdpo", "normalise_by": "family"}, "unset rewards.normalise_by"),
        ({"unsupervised": {"votes": 8}}, "is for the kind majority"),
        ({"unsupervised": {"kind": "majority", "span": "last_turn"}}, "is for the kind self_certainty or entropy"),
    ],
)
def test_settings_without_effect_are_refused(settings, reason):
    with pytest.raises(ValidationError, match=reason):
        RewardsConfig(**settings)


def test_tasks_below_the_necessity_are_not_sampled(tmp_path):
    path = tmp_path / "necessity.jsonl"
    config = load_config(make_recipe(tmp_path), ["--env.necessity", str(path), "--env.min_necessity", "0.5"])
    world = build_world(config.env, config.rollout)
    tasks = [task.id for task in world.tasks("train")]
    found = {task: Necessity(1.0, 0.25 if i < 4 else 0.75) for i, task in enumerate(tasks[:-1])}
    write_necessity(path, found)
    order = task_order(config, world)
    assert {task.id for task in order.take(0, 12)} == set(tasks[:4])
    strict = load_config(make_recipe(tmp_path), ["--env.necessity", str(path), "--env.min_necessity", "0.8"])
    with pytest.raises(ConfigError, match=r"has 0 of at least env.min_necessity = 0.8"):
        task_order(strict, world)


@pytest.mark.slow
def test_run_with_votes_and_a_constraint_resumes_bit_for_bit(tiny_run, tmp_path):
    words = ["--evaluation.splits", "[]", "--rewards.unsupervised.kind", "majority"]
    words += ["--rewards.unsupervised.votes", "5", "--rewards.constraint.part", "well_formed"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    said = ludus("train", make_recipe(tmp_path), "--model", cold_start(tiny_run), "--run.dir", whole, *words)
    assert said.code == 0, said
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints" / "step-000002")
    assert ludus("train", "--resume", cut).code == 0
    assert lasting_files(cut) == lasting_files(whole)
    state = json.loads((whole / "checkpoints" / "step-000001" / "trainer" / "state.json").read_text())
    rows = [row.metrics for row in read_metrics(whole / "metrics.jsonl")]
    after_first = math.exp(json.loads(state["reward_moments"])["log_lambda"])
    assert rows[0]["constraint/lambda"] == pytest.approx(1.0)
    assert rows[1]["constraint/lambda"] == pytest.approx(after_first)
    records = list(read_rollouts(rollouts_path(whole, 1)))
    assert len(records) == 15
    assert sum(record.reason == "vote" for record in records) == 6
    assert all(record.trajectory.sample >= 3 for record in records if record.reason == "vote")
    assert rows[0]["ledger/dropped"] >= 6
    assert "bit for bit" in ludus("rewards", "replay", whole).out


@pytest.mark.slow
def test_necessity_is_measured_by_evaluations_with_and_without_tools(tiny_run, tmp_path):
    same = ("eval", "--run", tiny_run, "--evaluation.splits", '["train"]', "--evaluation.temperatures", "[0.0]")
    folders = {False: tmp_path / "tools", True: tmp_path / "no_tools"}
    for hides, folder in folders.items():
        assert ludus(*same, "--out", folder, "--rollout.hide_tools", str(hides).lower()).code == 0
    said = ludus("necessity", *folders.values(), "--out", tmp_path / "necessity.jsonl")
    assert said.code == 0, said
    rows = [json.loads(line) for line in (tmp_path / "necessity.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    files = {hides: next(folder.rglob("step-*.json")) for hides, folder in folders.items()}
    rates = [json.loads(files[key].read_text())["success"] for key in (False, True)]
    assert statistics.fmean(row["necessity"] for row in rows) == pytest.approx(rates[0] - rates[1])
    records = list(read_rollouts(files[True].with_suffix(".jsonl.gz")))
    assert not any(record.trajectory.outcomes for record in records)
    assert "Name first the evaluation with tools" in refused("necessity", files[True], files[False])
