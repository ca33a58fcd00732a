"""Reward mixing: weights over steps, gates, ranks, scales, reward models."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import statistics
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from pydantic import ValidationError

from algorithm_parts import GREEDY_ADVANTAGES
from ludus.algorithms.advantages.running_baselines import DomainMoments
from ludus.algorithms.spec.resolve import PRESETS
from ludus.config.load import load_config
from ludus.config.schema import Config
from ludus.config.sections.rewards import RewardsConfig
from ludus.diagnostics.trackers import read_metrics
from ludus.envs.base import TaskOrder
from ludus.envs.registry import build_world
from ludus.errors import ConfigError
from ludus.rewards.base import Reward
from ludus.rollouts.ledger import RolloutKey, RolloutOutcome
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path
from ludus.rollouts.scheduler import Episode
from ludus.training.collection.prompt_stream import PromptStream
from ludus.training.collection.rewards.reward_mixing import RewardMixer
from ludus.training.collection.rewards.reward_plan import check_reward_settings, plan_parts
from ludus.training.collection.rollout_collector import RolloutCollector
from ludus.training.credit.advantages import TrainingSample, assign_credit
from ludus.training.value_models.base import HeadModel
from ludus.training.value_models.reward_model import RewardEnsemble, RewardModel
from ludus.types import Failure, Group, Segment, StopReason, Task, Trajectory
from small_runs import lasting_files
from tests.training.credit.test_credit import group as attempts
from tests.training.learner.test_learner import tiny_model
from tiny_run import ludus, make_recipe, refused

WORLD = (
    Reward("right", lambda task, trajectory: 0.0, outcome=True),
    Reward("form", lambda task, trajectory: 0.0, weight=0.2),
    Reward("short", lambda task, trajectory: 0.0, weight=0.1),
)


def combiner(**settings) -> RewardMixer:
    config = Config(rewards=RewardsConfig(**settings))
    return RewardMixer(config.rewards, plan_parts(config, WORLD))


def episode(right: float, form: float, short: float, tag: str = "a", **changes) -> Episode:
    segments = (
        Segment("prompt", (1, 2)),
        Segment("action", (3, 4), 0, logprobs=(-1.0, -1.0), versions=(0, 0)),
        Segment("observation", (9,), 0),
        Segment("action", (5,), 1, logprobs=(-1.0,), versions=(0,)),
    )
    parts = {"right": right, "form": form, "short": short}
    trajectory = Trajectory("t", 0, segments, (), StopReason.ANSWERED, rewards=parts, reward=right)
    task = Task("t", (), None, {"family": tag})
    return Episode(RolloutKey(1, "t", 0), task, replace(trajectory, **changes))


def rewards_of(one: RewardMixer, *groups: list[Episode], step: int = 1) -> list[list[float]]:
    return [[e.trajectory.reward for e in group] for group in one.combine(step, groups)]


def test_weights_and_caps_apply_to_parts_by_name():
    one = combiner(weights={"form": 0.3, "short": 0.5}, caps={"short": 0.2})
    ((first, second),) = rewards_of(one, [episode(1, 0.5, -3), episode(0, 1, 0.1)])
    assert first == pytest.approx(1 + 0.3 * 0.5 - 0.5 * 0.2)
    assert second == pytest.approx(0.3 + 0.5 * 0.1)


def test_part_weights_follow_their_schedule():
    one = combiner(weights={"form": 0.36}, weights_end={"form": 0.0, "short": 0.3}, schedule_steps=4)
    found = [rewards_of(one, [episode(0, 1, 1)], step=step)[0][0] for step in (1, 2, 3, 5, 9)]
    assert found == pytest.approx([0.36 + 0.1, 0.27 + 0.15, 0.18 + 0.2, 0.3, 0.3])
    assert one.metrics(3, [])["reward/weight/form"] == pytest.approx(0.18)
    curved = combiner(weights={"form": 0.3}, weights_end={"form": 0}, schedule="cosine", schedule_steps=4)
    assert rewards_of(curved, [episode(0, 1, 0)], step=2)[0][0] == pytest.approx(0.3 * (1 + math.cos(math.pi / 4)) / 2)


def test_gated_shaping_counts_only_with_a_full_gate_reward():
    group = [episode(1, 1, 1), episode(0, 1, 1), episode(0.9, 1, -1), episode(1, 0.5, 1)]
    assert rewards_of(combiner(aggregation="gated"), group)[0] == pytest.approx([1.3, 0.0, 0.9, 1.2])
    behind_form = combiner(aggregation="gated", gate="form")
    assert rewards_of(behind_form, group)[0] == pytest.approx([1.3, 0.3, 0.9 + 0.2 - 0.1, 1.0])


def test_pareto_rewards_are_ranks_within_the_group():
    # b dominates c; a and b do not dominate each other. Two fronts: 1 and 1 - 1/2.
    a, b, c = episode(1, 0, 0), episode(0, 1, 1), episode(0, 1, 0)
    alone = episode(0, 0, 0)
    one = combiner(aggregation="pareto")
    assert rewards_of(one, [a, b, c], [alone]) == [[1.0, 1.0, 0.5], [1.0]]
    # A weight below 0 turns a part round: now c is as good as b in form and better in short.
    turned = combiner(aggregation="pareto", weights={"short": -0.1})
    assert rewards_of(turned, [b, c]) == [[0.5, 1.0]]


def test_dominance_violations_are_counted():
    one = combiner(aggregation="gated")
    (group,) = one.combine(1, [[episode(0, 1, 0), episode(0, 0, 0), episode(1, 0, 0)]])
    played = [Group(group[0].task, tuple(e.trajectory for e in group))]
    # Both failures earn 0 although one is better in form: one pair.
    assert one.metrics(1, played) == {"reward/dominance_violations": 1.0}


def test_rewards_are_normalised_by_domain_with_persistent_moments():
    one = combiner(normalise_by="family")
    groups = [[episode(1, 0, 0, "x"), episode(0, 0, 0, "x")], [episode(1, 1, 1, "y"), episode(1, 0, 0, "y")]]
    found = rewards_of(one, *groups)
    root = math.sqrt(0.5)  # of (1, 0): mean 0.5, variance 0.5; of (1.3, 1): mean 1.15, variance 0.045
    assert found[0] == pytest.approx([0.5 / root, -0.5 / root])
    assert found[1] == pytest.approx([0.15 / math.sqrt(0.045), -0.15 / math.sqrt(0.045)])
    (after,) = one.combine(2, [[episode(0, 0, 0, "x")]])
    # 1, 0, 0: mean 1/3, variance 1/3.
    assert after[0].trajectory.reward == pytest.approx(-(1 / 3) / math.sqrt(1 / 3))
    assert after[0].trajectory.rewards["combined"] == 0.0
    resumed = combiner(normalise_by="family")
    resumed.restore(DomainMoments.from_json(one.moments.to_json()).to_json())
    assert resumed.moments == one.moments


def test_failed_episodes_are_not_combined():
    failed = episode(0, 0, 0, failure=Failure("engine", "gone", 1), stop_reason=StopReason.FAILED, rewards={})
    (group,) = combiner(weights={"form": 0.3}).combine(1, [[failed, episode(0, 1, 0)]])
    assert group[0] == failed
    assert group[1].trajectory.reward == pytest.approx(0.3)


def judged(kind, aggregation: str = "weighted_sum", takes_turns: bool = False) -> RewardMixer:
    settings = RewardsConfig(model="x", model_weight=0.3, aggregation=aggregation)
    states = HeadModel(tiny_model(), "reward model", "")
    with torch.no_grad():
        states.head.bias.fill_(math.log(3))  # the head's weights are 0: sigmoid(score) is 3/4 everywhere
    parts = plan_parts(Config(rewards=settings), WORLD)
    return RewardMixer(settings, parts, takes_turns=takes_turns, model=RewardEnsemble((RewardModel(states, kind),)))


def test_reward_model_score_is_a_separate_weighted_part():
    (group,) = judged("pointwise").combine(1, [[episode(1, 0, 0), episode(0, 0, 0, segments=())]])
    assert group[0].trajectory.rewards["reward_model"] == pytest.approx(0.75)
    assert group[0].trajectory.reward == pytest.approx(1 + 0.3 * 0.75)
    assert group[1].trajectory.rewards["reward_model"] == 0.0
    one = judged("pointwise")
    for threshold, label in ((0.7, 1.0), (0.8, 0.0)):
        one.settings = one.settings.model_copy(update={"model_threshold": threshold})
        (group,) = one.combine(1, [[episode(1, 0, 0)]])
        assert group[0].trajectory.reward == pytest.approx(1 + 0.3 * label)
    (group,) = judged("pointwise", "gated").combine(1, [[episode(1, 0, 0), episode(0, 0, 0)]])
    assert [e.trajectory.reward for e in group] == pytest.approx([1.225, 0.0])


def test_process_reward_model_sets_turn_rewards_if_the_algorithm_uses_them():
    ((plain,),) = judged("process").combine(1, [[episode(1, 0, 0)]])
    assert plain.trajectory.reward == pytest.approx(1.225)
    assert plain.trajectory.turn_rewards == ()
    ((found,),) = judged("process", takes_turns=True).combine(1, [[episode(1, 0, 0, turn_rewards=(0.5,))]])
    assert found.trajectory.reward == pytest.approx(1.0)
    assert found.trajectory.turn_rewards == pytest.approx((0.5 + 0.1125, 0.1125))
    closed = judged("process", "gated", takes_turns=True)
    ((found,),) = closed.combine(1, [[episode(0, 0, 0)]])
    assert found.trajectory.turn_rewards == ()


@pytest.mark.parametrize(
    ("said", "settings"),
    [
        ("can move a reward by 1.2", {"weights": {"form": 0.5}}),
        ("can move a reward by 1.2", {"weights_end": {"form": 0.5}}),
        ("names 'fromm'", {"weights": {"fromm": 0.5}}),
        ("names 'fromm'", {"aggregation": "gated", "gate": "fromm"}),
        ("must not cap an outcome", {"caps": {"right": 0.5}}),
        ("caps.form is -0.5", {"caps": {"form": -0.5}}),
        ("caps.form is 3", {"caps": {"form": 3.0}}),
        ("starts or ends at 0", {"weights_end": {"right": 0.0}}),
        ("No outcome has a weight above 0", {"weights": {"right": 0.0}}),
        ("No outcome has a weight above 0", {"weights": {"right": 0.0}, "aggregation": "pareto"}),
        ("can move a reward by 1.1", {"model": "x", "model_weight": 0.5}),
        ("Its weight is rewards.model_weight", {"model": "x", "weights": {"reward_model": 0.1}}),
    ],
)
def test_inconsistent_reward_settings_are_rejected(said, settings):
    with pytest.raises(ConfigError, match=said):
        plan_parts(Config(rewards=RewardsConfig(**settings)), WORLD)


def test_gated_or_allowed_shaping_may_have_larger_weights():
    for settings in (
        {"aggregation": "gated", "weights": {"form": 0.8}},
        {"weights": {"form": 0.5}, "allow_outweigh": True},
        {"weights": {"form": 0.5}, "caps": {"form": 0.7}},
        {"model": "x", "model_weight": 0.3},
    ):
        assert plan_parts(Config(rewards=RewardsConfig(**settings)), WORLD)
    with pytest.raises(ConfigError):
        plan_parts(Config(rewards=RewardsConfig(aggregation="gated", weights={"form": 0.95})), WORLD)


@pytest.mark.fault
def test_resumed_run_with_reward_moments_equals_the_uninterrupted_one(tiny_run, tmp_path):
    model = sorted((tiny_run / "cold_start" / "checkpoints").iterdir())[-1]
    settings = {
        "evaluation.splits": "[]",
        "algorithm.preset": "dr_grpo",
        "rewards.normalise_by": "family",
        "rewards.aggregation": "gated",
        "rewards.gate": "well_formed",
        "rewards.weights_end.well_formed": "0.0",
    }
    words = [word for key, value in settings.items() for word in (f"--{key}", value)]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    said = ludus("train", make_recipe(tmp_path), "--model", model, "--run.dir", whole, *words)
    assert said.code == 0, said
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints" / "step-000002")
    assert ludus("train", "--resume", cut).code == 0
    assert lasting_files(cut) == lasting_files(whole)
    state = json.loads((whole / "checkpoints" / "step-000001" / "trainer" / "state.json").read_text())
    first = DomainMoments.from_json(state["reward_moments"])
    assert sum(moments.count for moments in first.moments.values()) == 9
    (record, *_) = read_rollouts(rollouts_path(whole, 2))
    assert "combined" in record.trajectory.rewards
    rows = [row.metrics for row in read_metrics(whole / "metrics.jsonl")]
    assert [row["reward/weight/well_formed"] for row in rows] == pytest.approx([0.1, 0.05])


@dataclass(frozen=True)
class ConstantJudge:
    """A member of an ensemble that has made up its mind."""

    values: tuple[tuple[float, ...], ...]
    kind: str = "process"

    def predict(self, sequences, max_tokens):
        return list(self.values[: len(sequences)])


def test_ensemble_value_is_the_mean_minus_scaled_std():
    members = (
        ConstantJudge(((0.9, 0.5), (0.1,))),
        ConstantJudge(((0.5, 0.5), (0.5,))),
        ConstantJudge(((0.1, 0.5), (0.0,))),
    )
    first, second = RewardEnsemble(members, 0.5).predict([None, None], 100)
    std = ((0.4**2 + 0 + 0.4**2) / 3) ** 0.5
    assert first.values == pytest.approx((0.5 - 0.5 * std, 0.5), abs=1e-15)
    assert first.std == pytest.approx(std / 2, abs=1e-15)
    far = statistics.pstdev((0.1, 0.5, 0.0))
    assert second.values == pytest.approx((0.2 - 0.5 * far,), abs=1e-15)
    assert RewardEnsemble(members, 5.0).predict([None, None], 100)[1].values == (0.0,)
    (alone, _) = RewardEnsemble(members[:1]).predict([None, None], 100)
    assert (alone.values, alone.std) == (members[0].values[0], 0.0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": []}, "is an empty list"),
        ({"model": ["a", "a"]}, "names a reward model twice"),
        ({"model": "a", "model_std_coef": 1.0}, "needs an ensemble"),
        ({"model_std_coef": 1.0}, "needs an ensemble"),
        ({"model_threshold": 0.5}, "needs rewards.model"),
    ],
)
def test_invalid_ensemble_settings_are_rejected(settings, words):
    with pytest.raises(ValidationError, match=words):
        RewardsConfig(**settings)


@pytest.mark.slow
def test_trained_reward_model_ensemble_scores_rollouts_in_training(tiny_run, tmp_path):
    recipe = make_recipe(tmp_path)
    model = sorted((tiny_run / "cold_start" / "checkpoints").iterdir())[-1]
    start = ("--model", model)
    made = ludus(
        "reward-model", recipe, "--run", tiny_run, *start, "--run.dir", tmp_path / "judge",
        "--reward_model.kind", "process", "--reward_model.steps", "2",
        "--reward_model.checkpoint_every", "1", "--reward_model.keep_checkpoints", "2",
        "--reward_model.learning_rate", "1e-2",
    )  # fmt: skip
    assert made.code == 0, made
    members = [str(folder) for folder in sorted((tmp_path / "judge" / "checkpoints").iterdir())]
    assert len(members) == 2
    use = ("--rewards.model", json.dumps(members), "--rewards.model_std_coef", "1.0")
    use += ("--evaluation.splits", "[]", "--training.steps", "1")
    said = ludus("train", recipe, *start, *use, "--run.dir", tmp_path / "run")
    assert said.code == 0, said
    records = list(read_rollouts(rollouts_path(tmp_path / "run", 1)))
    for trajectory in (record.trajectory for record in records):
        value = trajectory.rewards["reward_model"]
        assert 0 < value < 1
        assert trajectory.rewards["reward_model_std"] > 1e-6
        world = trajectory.rewards["exact_match"] + 0.1 * trajectory.rewards["well_formed"]
        assert trajectory.reward == pytest.approx(world + 0.2 * value)
    (row,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    mean = sum(r.trajectory.rewards["reward_model"] for r in records) / len(records)
    assert row.metrics["reward/reward_model"] == pytest.approx(mean)
    missing = json.dumps([members[0], str(tmp_path / "run")])
    assert "does not contain a reward model" in refused("train", recipe, *start, "--rewards.model", missing)
    other = ("--rewards.normalise_by", "colour")
    assert "no tag 'colour'" in refused("train", recipe, *start, *other)


def test_rewards_incompatible_with_the_advantage_are_rejected_early():
    words = ["--algorithm.preset", "pass_at_k", "--rewards.length.kind", "linear"]
    config = load_config("guess", words)
    with pytest.raises(ConfigError, match="needs rewards of 0 and 1, and rewards"):
        check_reward_settings(config, build_world(config.env, config.rollout, config.sandbox))
    assert "the part well_formed has the weight 0.1" in refused("config", "search", *words[:2])


def test_group_differing_only_in_length_rewards_counts_when_streaming():
    shaped = combiner(length={"kind": "linear", "target": 8, "cap": 0.1})
    stream = PromptStream(
        SimpleNamespace(algorithm=PRESETS["dapo"], reward_mixer=shaped, curriculum=None),
        TaskOrder([Task("t", (), None)], 0),
        1,
    )
    uneven, even = attempts((0.5,) * 4), attempts((0.5,) * 4)[::2]
    assert stream.counts(uneven)
    assert not stream.counts(even)
    for own, trains in ((uneven, True), (even, False)):
        credits = assign_credit(shaped.combine(1, [own]), PRESETS["dapo"])
        assert all((credit.outcome is RolloutOutcome.TRAINED) == trains for credit in credits)


def test_unweighted_part_does_not_make_a_group_count_when_streaming():
    """Without settings of its own the reward is what it will be; with some, weights may be others."""
    group = [
        replace(e, trajectory=replace(e.trajectory, rewards={"form": float(i)}))
        for i, e in enumerate(attempts((0.5,) * 4))
    ]
    for own, counts in ((None, False), (combiner(weights={"form": 0.3}), True)):
        sampler = SimpleNamespace(algorithm=PRESETS["dapo"], reward_mixer=own, curriculum=None)
        assert PromptStream(sampler, TaskOrder([Task("t", (), None)], 0), 1).counts(group) == counts
    assert {c.reason for c in assign_credit([group], PRESETS["dapo"])} == {"zero_variance"}


class RecordedCollector(RolloutCollector):
    """Its rounds are played already."""

    rounds: ClassVar[list[list[list[Episode]]]] = []

    async def roll_out(self, step, tasks):
        return self.rounds.pop(0)


def named(name: str, tag: str, *rights: float) -> list[Episode]:
    task = Task(name, (), None, {"family": tag})
    return [
        replace(episode(right, 0, 0), key=RolloutKey(1, name, i), task=task, greedy=name == "a" and i == 2)
        for i, right in enumerate(rights)
    ]


def sampled(algorithm, rounds: list[list[list[Episode]]]) -> list[TrainingSample]:
    """The credits of a step of two tasks, from such rounds."""
    words = ["--training.prompts_per_step", "2", "--rewards.normalise_by", "family"]
    config = load_config("guess", [*words, "--rewards.normalise_over", "batch"])
    one = RewardMixer(config.rewards, plan_parts(config, WORLD))
    ledger = SimpleNamespace(trained_ahead=lambda step: set())
    session = SimpleNamespace(config=config)
    sampler = RecordedCollector(
        session, None, replace(algorithm, max_resample_rounds=1), None, ledger, reward_mixer=one
    )
    sampler.rounds = rounds
    order = TaskOrder([Task("t", (), None)], 0)
    return asyncio.run(sampler.sample(1, order))


def test_batch_normalised_rewards_use_all_sampling_rounds():
    equal, first, second = named("b", "x", 1, 1), named("a", "x", 1, 0), named("c", "x", 0.5, 0)
    algorithm = replace(PRESETS["dr_grpo"], filter_zero_variance=True)
    credits = sampled(algorithm, [[first, equal], [second]])
    raw = [1.0, 0.0, 1.0, 1.0, 0.5, 0.0]
    mean, deviation = statistics.mean(raw), statistics.stdev(raw)
    expected = [(value - mean) / deviation for value in raw]
    rewards = [credit.episode.trajectory.reward for credit in credits]
    assert rewards == pytest.approx(expected, abs=1e-6)
    assert [c.advantages[0] for c in credits] == pytest.approx(
        [0.5 / deviation, -0.5 / deviation, 0, 0, 0.25 / deviation, -0.25 / deviation], abs=1e-6
    )
    assert [c.reason for c in credits] == ["trained"] * 2 + ["zero_variance"] * 2 + ["trained"] * 2
    rescored = one_round(first, equal, second)
    assert rescored == pytest.approx(rewards, abs=1e-12)


def one_round(*groups: list[Episode]) -> list[float]:
    one = combiner(normalise_by="family", normalise_over="batch")
    combined = one.combine(1, groups)
    return [e.trajectory.reward for e in one.normalize_batch([e for group in combined for e in group])]


def test_greedy_baseline_uses_the_batch_normalised_scale():
    """The third attempt at `a` is the greedy one: the others earn what they are above it."""
    greedy = next(name for name in sorted(PRESETS) if PRESETS[name].advantage in GREEDY_ADVANTAGES)
    credits = sampled(PRESETS[greedy], [[named("a", "x", 1, 0, 1)], []])
    deviation = statistics.stdev([1, 0, 1])
    found = [c.advantages[0] for c in credits if c.advantages is not None]
    assert found == pytest.approx([0.0, -1 / deviation], abs=1e-6)
