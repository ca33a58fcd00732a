"""Branching trajectories: advantages of leaves, shared actions trained once, and the gradient of a slow reference."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ludus.algorithms.filters import GresoState
from ludus.algorithms.spec.resolve import PRESETS
from ludus.config.schema import Config
from ludus.config.sections.rewards import LengthConfig, RewardsConfig
from ludus.config.sections.training import ReplayConfig
from ludus.diagnostics.metrics import rollout_metrics
from ludus.envs.base import TaskOrder
from ludus.errors import LearnerError
from ludus.rewards.base import Reward
from ludus.rollouts.ledger import RolloutKey, RolloutOutcome
from ludus.rollouts.rollout_files import RolloutRecord, parse_rollout, rollout_line
from ludus.rollouts.scheduler import Episode
from ludus.training.batches.rows import BREAK, microbatches, new_actions, num_unique_tokens, row_of_trajectory
from ludus.training.collection.filters import AlgorithmState, filter_low_variance, mask_over_age, record_greso_visits
from ludus.training.collection.prompt_stream import PromptStream
from ludus.training.collection.replay_buffer import ReplayBuffer
from ludus.training.collection.rewards.reward_mixing import RewardMixer
from ludus.training.collection.rewards.reward_plan import plan_parts
from ludus.training.credit.advantages import assign_credit, training_rows
from ludus.training.learner.learner import LearnerSettings
from ludus.training.learner.logprobs import LogprobScorer
from ludus.training.learner.moe_routing_replay import RoutingReplay
from ludus.training.rl.train_step import filter_and_estimate
from ludus.training.value_models.factory import train_value_model
from ludus.types import Group, Segment, StopReason, Task, Trajectory
from tests.training.learner.test_learner import learner, tiny_model
from tests.training.value_models.test_critic import critic

PROMPT = tuple(range(20, 30))
"""Long enough that paths share a node of the forest."""


def action(parent, *tokens, turn=0):
    return Segment("action", tokens, turn, parent, logprobs=(-1.0,) * len(tokens), versions=(0,) * len(tokens))


def tree(sample=0, leaves=(1.0, 0.0, 0.5)):
    """An action of two tokens, an observation, then three ways on; the last of them through one more turn.

    The segments stand in another order than the paths meet them.
    """
    segments = (
        Segment("prompt", PROMPT),
        action(0, 4, 5 + sample),
        Segment("observation", (6, 7), 0, 1),
        action(2, 8, 9, 10, turn=1),
        action(2, 11, turn=1),
        action(2, 8, 12, turn=1),
        Segment("observation", (13,), 1, 4),
        action(6, 14, 15, turn=2),
    )
    return Trajectory(
        "t",
        sample,
        segments,
        (),
        StopReason.ANSWERED,
        reward=sum(leaves) / 3,
        leaf_rewards=leaves,
        turn_rewards=(0.1, 0.2, 0.3, 0.4, 0.5),
    )


def chain(sample, reward):
    segments = (Segment("prompt", PROMPT), action(0, 16, 17, 18 + sample))
    return Trajectory("t", sample, segments, (), StopReason.ANSWERED, reward=reward, turn_rewards=(0.0,))


def episodes(*trajectories):
    return [Episode(RolloutKey(1, "t", i), Task("t", (), None), t) for i, t in enumerate(trajectories)]


def test_row_of_a_tree_trains_each_action_once():
    row = row_of_trajectory(tree(), tuple(range(1, 11)))
    assert tree().rows == ((0, 1, 2, 3), (0, 1, 2, 5), (0, 1, 2, 4, 6, 7))
    stem = (*PROMPT, 4, 5, 6, 7)
    assert row.tokens == (*stem, 8, 9, 10, BREAK, *stem, 8, 12, BREAK, *stem, 11, 13, 14, 15)
    assert sum(row.sampled) == sum(row.trains) == tree().num_action_tokens == 10
    trained = [(t, a) for t, a, own in zip(row.tokens, row.advantages, row.trains, strict=True) if own]
    assert [token for token, _ in trained] == [4, 5, 8, 9, 10, 8, 12, 11, 14, 15]
    assert [a for _, a in trained] == list(range(1, 11))
    assert [s.tokens for s in new_actions(tree())] == [(4, 5), (8, 9, 10), (8, 12), (11,), (14, 15)]
    assert num_unique_tokens(row.tokens) == len(PROMPT) + 4 + 3 + 1 + 4  # the paths share an 8
    assert sum(row.observed) == 3


def test_paths_have_their_leaf_reward_and_turn_rewards():
    own = tree().paths()
    assert [path.trajectory.reward for path in own] == [1.0, 0.0, 0.5]
    assert [path.places for path in own] == [(0, 1, 2, 3, 4), (0, 1, 5, 6), (0, 1, 7, 8, 9)]
    assert [path.trajectory.turn_rewards for path in own] == [(0.1, 0.2), (0.1, 0.4), (0.1, 0.3, 0.5)]
    assert own[2].trajectory.token_ids == (*PROMPT, 4, 5, 6, 7, 11, 13, 14, 15)
    assert replace(tree(), leaf_rewards=()).paths()[0].trajectory.reward == 0.5


def test_token_advantage_is_the_mean_over_leaves_below_it():
    credits = assign_credit([episodes(tree(), chain(1, 0.2))], PRESETS["dr_grpo"])
    mean = (1.0 + 0.0 + 0.5 + 0.2) / 4
    stem = [(1.0 + 0.0 + 0.5) / 3 - mean] * 2
    expected = [*stem, *[1.0 - mean] * 3, *[0.0 - mean] * 2, *[0.5 - mean] * 3]
    assert credits[0].advantages == pytest.approx(expected, abs=1e-12)
    assert credits[1].advantages == pytest.approx([0.2 - mean] * 3, abs=1e-12)
    assert all(credit.outcome is RolloutOutcome.TRAINED for credit in credits)


def test_differing_leaf_rewards_count_as_group_variance():
    two = episodes(tree(), replace(tree(1), reward=0.5))
    assert all(c.outcome is RolloutOutcome.TRAINED for c in assign_credit([two], PRESETS["grpo"]))
    equal = episodes(tree(leaves=(1.0, 1.0, 1.0)), tree(1, leaves=(1.0, 1.0, 1.0)))
    assert {c.reason for c in assign_credit([equal], PRESETS["grpo"])} == {"zero_variance"}


def of_two(name, *leaves):
    """A group of trees whose leaves earn these, and the parts as their trajectories have them."""
    return [replace(e, task=Task(name, (), None)) for e in episodes(*(tree(i, own) for i, own in enumerate(leaves)))]


def test_variance_filter_keeps_groups_with_differing_leaf_rewards():
    split, near = of_two("split", (1.0, 0.0, 0.5), (0.5, 1.0, 0.0)), of_two("near", (0.4,) * 3, (0.6,) * 3)
    credits = filter_low_variance(
        assign_credit([near, split], PRESETS["grpo"]), replace(PRESETS["grpo"], top_variance_fraction=0.5)
    )
    assert {c.episode.task.id for c in credits if c.outcome is RolloutOutcome.TRAINED} == {"split"}


def test_greso_does_not_skip_tasks_with_differing_leaf_rewards():
    start = AlgorithmState(greso=GresoState(streaks={"split": -1}))
    groups = [of_two("split", (1.0, 0.0, 0.5), (0.5, 1.0, 0.0)), of_two("flat", (0.5,) * 3, (0.5,) * 3)]
    after = record_greso_visits(start, assign_credit(groups, PRESETS["grpo"]), "right", PRESETS["grpo"])
    assert after.greso.streaks == {"flat": -1}


def test_zero_variance_metric_excludes_groups_with_differing_leaf_rewards():
    split, flat = of_two("split", (1.0, 0.0, 0.5), (1.0, 0.0, 0.5)), of_two("flat", (0.5,) * 3, (0.5,) * 3)
    groups = [Group(g[0].task, tuple(e.trajectory for e in g)) for g in (split, flat)]
    assert rollout_metrics(groups)["groups/zero_variance"] == 0.5


def test_priority_replay_prefers_groups_with_largest_leaf_deviation():
    buffer = ReplayBuffer(ReplayConfig(share=0.5, order="priority", max_age=99), 1)
    near, split = of_two("near", (0.4,) * 3, (0.6,) * 3), of_two("split", (1.0, 0.0, 0.5), (0.5, 1.0, 0.0))
    buffer.add(assign_credit([near, split], PRESETS["grpo"]))
    assert {c.episode.task.id for c in buffer.draw(1, PRESETS["grpo"], 0, 0)} == {"split"}


def test_group_with_differing_leaf_rewards_counts_towards_the_batch():
    sampler = SimpleNamespace(algorithm=PRESETS["dapo"], reward_mixer=None, curriculum=None)
    stream = PromptStream(sampler, TaskOrder([Task("a", (), None)], 0), 1)
    assert stream.counts(of_two("split", (1.0, 0.0, 0.5), (1.0, 0.0, 0.5)))
    assert not stream.counts(of_two("flat", (0.5,) * 3, (0.5,) * 3))


def test_combining_reward_parts_with_leaf_rewards_raises():
    config = Config(rewards=RewardsConfig(length=LengthConfig(kind="linear")))
    one = RewardMixer(config.rewards, plan_parts(config, (Reward("right", lambda t, a: 0.0, outcome=True),)))
    with pytest.raises(LearnerError, match="has leaf_rewards"):
        one.combine(1, [episodes(tree(), chain(1, 0.2))])
    ((plain, _),) = one.combine(1, [episodes(tree(leaves=()), chain(1, 0.2))])
    assert [path.trajectory.reward for path in plain.trajectory.paths()] == [plain.trajectory.reward] * 3


def each_path(model, trajectory):
    """The log-probability of each action token, counted once, by the plain model on each path alone."""
    found = {}
    for path in trajectory.paths():
        one = path.trajectory
        ids = torch.tensor([one.token_ids])
        table = torch.log_softmax(model(input_ids=ids).logits[0], -1)
        own = [i for i, is_action in enumerate(one.action_mask) if is_action]
        for place, i in zip(path.places, own, strict=True):
            found[place] = table[i - 1, one.token_ids[i]]
    return torch.stack([found[place] for place in sorted(found)])


@pytest.mark.parametrize("planted", [True, False])
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_gradient_of_trees_equals_a_loop_over_paths(aggregation, planted):
    model = tiny_model()
    if not planted:
        model.set_attn_implementation("eager")
    algorithm = replace(PRESETS["rloo"], aggregation=aggregation)
    trajectories = [tree(), chain(1, 0.2), tree(2, (0.0, 0.0, 1.0))]
    credits = assign_credit([episodes(*trajectories)], algorithm)
    total = torch.zeros((), dtype=torch.float64)
    num_tokens = sum(t.num_action_tokens for t in trajectories)
    for credit, one in zip(credits, trajectories, strict=True):
        loss = -(torch.tensor(credit.advantages, dtype=torch.float64) * each_path(model, one)).sum()
        weight = num_tokens if aggregation == "token_mean" else 3 * one.num_action_tokens
        total = total + loss / weight
    expected = torch.autograd.grad(total, list(model.parameters()))
    rows = training_rows(credits, mask_observations=True)
    for tokens in (4096, 20):
        one = learner(model, algorithm, LearnerSettings(microbatch_tokens=tokens))
        assert one.scorer.shares_prefixes == planted
        statistics, trained = one.gradient(rows)
        assert trained == num_tokens
        assert statistics.loss == pytest.approx(total.item(), abs=1e-7)
        for p, wanted in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, wanted, atol=1e-7, rtol=0)  # norms compute in float32
        model.zero_grad(set_to_none=True)


def test_shared_prefix_counts_once_in_the_microbatch_budget():
    rows = [row_of_trajectory(tree(i), 1.0) for i in range(3)]
    assert sum(num_unique_tokens(row.tokens) for row in rows) < 70 < 2 * len(rows[0].tokens)
    assert len(microbatches(rows, 70, torch.device("cpu"), torch.float64)) == 1


def test_critic_and_reward_kl_support_trees():
    model = tiny_model()
    algorithm = PRESETS["search_r1"]
    one = learner(model, algorithm, scorers={"reference": LogprobScorer(tiny_model(seed=1))})
    group = episodes(tree(), chain(1, 0.2), tree(2, (0.0, 0.0, 1.0)))
    judge = critic(model, clip=None)
    losses = []
    for _ in range(4):
        credits = filter_and_estimate(assign_credit([group], algorithm), one, 0, judge)
        losses.append(train_value_model(judge, credits)["critic/loss"])
    assert losses[-1] < losses[0]
    assert [len(c.advantages) for c in credits] == [len(c.targets) for c in credits] == [10, 3, 10]
    metrics = one.train(training_rows(credits, mask_observations=True), seed=0)
    assert math.isfinite(metrics["loss/total"])
    assert metrics["batch/trained_rows"] == 3


@pytest.mark.parametrize("name", ["gspo", "turn_return", "gtpo", "reinforce_pp"])
def test_presets_train_trees(name):
    algorithm = replace(PRESETS[name], kl_coef=0.0, filter_zero_variance=False)
    one = learner(tiny_model(), algorithm)
    credits = assign_credit([episodes(tree(), tree(1, (0.0, 0.0, 1.0)))], algorithm)
    metrics = one.train(training_rows(credits, mask_observations=True), seed=0)
    assert metrics["batch/trained_tokens"] == 20
    assert metrics["optim/grad_norm"] > 0


def test_tree_tokens_over_age_are_masked_in_place():
    def aged(one, old=-1):
        ages = [(0 if i == old else 4,) * len(s.versions) for i, s in enumerate(one.segments)]
        both = zip(one.segments, ages, strict=True)
        return replace(one, segments=tuple(replace(s, versions=v) for s, v in both))

    group = episodes(aged(tree(), old=3), aged(tree(1, (0.0, 0.0, 1.0))))
    credits = mask_over_age(assign_credit([group], PRESETS["dr_grpo"]), 5, 2)
    first, second = training_rows(credits, mask_observations=True)
    trained = [t for t, own in zip(first.tokens, first.trains, strict=True) if own]
    assert trained == [4, 5, 8, 12, 11, 14, 15]
    assert sum(second.trains) == 10


def test_leaf_rewards_are_stored():
    for one in (tree(), chain(0, 1.0)):
        line = rollout_line(RolloutRecord(1, "t", RolloutOutcome.TRAINED, "trained", one))
        assert parse_rollout(json.loads(line)).trajectory == one


def test_unsupported_operations_on_trees_are_reported():
    second = Trajectory("t", 0, (Segment("prompt", PROMPT), action(0, 4), action(-1, 5)), (), StopReason.ANSWERED)
    with pytest.raises(ValueError, match="path 1 of task t begins with an action"):
        row_of_trajectory(second, 1.0)
    model = tiny_model()
    scorer = LogprobScorer(model, routing=RoutingReplay([], []))
    part = microbatches([row_of_trajectory(tree(), 1.0)], 99, torch.device("cpu"), torch.float64)[0]
    with pytest.raises(LearnerError, match="does not support branching"):
        scorer.score(part.tokens, part.trains)
