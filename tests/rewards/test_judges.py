"""Value models: PRIME's process rewards and CodeRL's outcome predictions train, count, and resume bit for bit."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from ludus.algorithms import advantages
from ludus.algorithms.spec.resolve import PRESETS
from ludus.cli.main import main
from ludus.config.sections.model import LoraConfig
from ludus.errors import LearnerError
from ludus.rollouts.ledger import RolloutOutcome
from ludus.training.batches.rows import row_of_trajectory
from ludus.training.credit.advantages import assign_credit
from ludus.training.learner.optimizer import OptimizerSettings
from ludus.training.rl.build import train
from ludus.training.rl.train_step import filter_and_estimate
from ludus.training.run.run_dir import RunFolder, lock_run, new_run
from ludus.training.run.session import add_lora, open_session
from ludus.training.value_models.base import ValueModelSettings
from ludus.training.value_models.critic import OutcomeCritic, ProcessReward
from ludus.training.value_models.factory import train_value_model
from small_runs import SMALLEST, InterruptingReporter, RunInterrupted, config, lasting_files
from tests.training.credit.test_credit import REWARDS, real_group, same, table
from tests.training.learner.test_learner import learner, random_rows, tiny_model
from tests.training.rl.test_baselines import run

RATE = OptimizerSettings(learning_rate=6e-3, total_steps=100)


def process_reward(model=None, **settings):
    return ProcessReward(model or tiny_model(), RATE, ValueModelSettings(success="right", **settings))


def outcome_critic(model=None, **settings):
    return OutcomeCritic(model or tiny_model(), RATE, ValueModelSettings(success="right", **settings))


def labels(rows):
    """Something that the tokens tell: the parity of the first sampled one."""
    return [row.tokens[row.trains.index(True)] % 2 == 0 for row in rows]


def learn(one, rows):
    """One step of either; gives its metrics."""
    if isinstance(one, OutcomeCritic):
        return one.train(rows, (), labels(rows))
    reference = [torch.zeros(len(row.tokens)) for row in rows]
    first = process_reward().score(rows)
    return one.train(rows, [[f + r for f, r in zip(first, reference, strict=True)]], labels(rows))


def test_implicit_reward_loss_is_cross_entropy_of_the_action_token_sum():
    rows, model = random_rows(6), tiny_model()
    one, other = process_reward(model, beta=2.0), tiny_model(seed=1)
    references = learner(other, PRESETS["grpo"]).score(rows)
    own = one.score(rows)
    sums = []
    for row, a, b in zip(rows, own, references, strict=True):
        trains = torch.tensor(row.trains)
        trains[0] = False
        sums.append(2.0 * (a - b)[trains].sum())
    wanted = torch.tensor([float(x) for x in labels(rows)], dtype=torch.float64)
    loss = binary_cross_entropy_with_logits(torch.stack(sums).double(), wanted)
    metrics = one.train(rows, [references], labels(rows))
    assert metrics["prime/loss"] == pytest.approx(float(loss), rel=1e-5)
    right = [(s > 0) == (w > 0.5) for s, w in zip(sums, wanted, strict=True)]
    assert metrics["prime/accuracy"] == pytest.approx(sum(map(bool, right)) / 6)


def test_critic_predicts_the_outcome_from_the_state_after_each_action_token():
    rows, one = random_rows(6), outcome_critic()
    learn(one, rows)
    solved, failed = one.score(rows, [True] * 6), one.score(rows, [False] * 6)
    for row, yes, no in zip(rows, solved, failed, strict=True):
        trains = torch.tensor(row.trains)
        torch.testing.assert_close((yes + no)[trains], torch.ones(int(trains.sum()), dtype=yes.dtype))
        assert not yes[~trains].any()
    losses = []
    for row, yes, no, right in zip(rows, solved, failed, labels(rows), strict=True):
        logs = torch.stack([no, yes], 1).log()[torch.tensor(row.trains)]
        losses.append(cross_entropy(logs, torch.full((len(logs),), int(right)), reduction="sum"))
    tokens = sum(sum(row.trains) for row in rows)
    assert learn(one, rows)["critic/loss"] == pytest.approx(float(sum(losses)) / tokens, rel=1e-5)
    first = rows[0]
    last = max(i for i, trains in enumerate(first.trains) if trains)
    changed = replace(first, tokens=(*first.tokens[:last], (first.tokens[last] + 1) % 50, *first.tokens[last + 1 :]))
    assert one.score([first], [True])[0][last] != one.score([changed], [True])[0][last]


@pytest.mark.parametrize("make", [process_reward, outcome_critic])
def test_judge_training_reduces_its_loss_and_leaves_the_policy_unchanged(make):
    model, rows = tiny_model(), random_rows(6)
    before = copy.deepcopy(model.state_dict())
    settings = {"beta": 1.0} if make is process_reward else {}
    one = make(model, **settings)
    reports = [learn(one, rows) for _ in range(16)]
    name = "prime" if make is process_reward else "critic"
    assert reports[-1][f"{name}/loss"] < 0.5 * reports[0][f"{name}/loss"]
    assert reports[-1][f"{name}/accuracy"] > 0.8
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize("make", [process_reward, outcome_critic])
def test_microbatch_size_does_not_change_the_learned_judge(make):
    rows = random_rows(10)
    small = {"microbatch_tokens": 20}
    whole, parts = make(), make(**small)
    for one in (whole, parts):
        learn(one, rows)
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


@pytest.mark.parametrize("make", [process_reward, outcome_critic])
def test_judge_state_is_restored_bit_for_bit(make):
    rows = random_rows(5)
    one, other = make(), make(tiny_model(seed=1))
    for _ in range(2):
        learn(one, rows)
    other.load_state(one.state(), one.optimizer.num_steps)
    for each in (one, other):
        learn(each, rows)
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(LearnerError, match="does not match"):
        other.load_state({}, 1)


def test_with_lora_only_the_adapters_of_the_process_reward_train():
    model = add_lora(tiny_model(), LoraConfig(rank=2, target_modules=["q_proj", "v_proj"]))
    rows, one = random_rows(6), process_reward(model, beta=1.0)
    frozen = [p.clone() for p in one.model.parameters() if not p.requires_grad]
    reports = [learn(one, rows) for _ in range(15)]
    assert reports[-1]["prime/loss"] < reports[0]["prime/loss"]
    assert all("lora" in name for name in one.state())
    still = [p for p in one.model.parameters() if not p.requires_grad]
    assert all(torch.equal(a, b) for a, b in zip(frozen, still, strict=True))
    other = process_reward(model, beta=1.0)
    other.load_state(one.state(), one.optimizer.num_steps)
    for a, b in zip(one.score(rows), other.score(rows), strict=True):
        assert torch.equal(a, b)


def labelled(episodes):
    """A reward of 1 is right."""
    return [replace(e, trajectory=replace(e.trajectory, rewards={"right": e.trajectory.reward})) for e in episodes]


def test_prime_adds_the_implicit_rewards_to_the_outcome():
    episodes, one = real_group()
    algorithm, reference = PRESETS["prime"], tiny_model(seed=1)
    one.algorithm, one.scorers = algorithm, {"reference": learner(reference, algorithm).scorer}
    judge = process_reward(one.scorer.model)
    groups = [labelled(episodes)]
    credits = filter_and_estimate(assign_credit(groups, algorithm), one, 0, judge)
    rows = [row_of_trajectory(e.trajectory, 0.0) for e in episodes]
    _, mask = table(credits)
    prm, ref = (torch.zeros(mask.shape, dtype=torch.float64) for _ in range(2))
    said = judge.score(rows, [])
    for i, (row, p, r) in enumerate(zip(rows, said, one.reference(rows), strict=True)):
        trains = torch.tensor(row.trains)
        prm[i, : int(trains.sum())], ref[i, : int(trains.sum())] = p[trains].double(), r[trains].double()
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    ids = torch.zeros(4, dtype=torch.int64)
    expected = advantages.prime(rewards=rewards, group=ids, prm_logprobs=prm, ref_logprobs=ref, mask=mask)
    found, _ = table(credits)
    same(found, expected)
    assert not torch.allclose(found, advantages.rloo(rewards=rewards, group=ids, mask=mask))
    before = judge.score(rows)
    metrics = train_value_model(judge, credits)
    assert metrics["prime/loss"] > 0
    grown = [float((a - b).sum()) for a, b in zip(judge.score(rows), before, strict=True)]
    assert grown[0] > max(grown[1:])


def test_coderl_advantage_is_greedy_baseline_difference_weighted_by_outcome_probability():
    episodes, one = real_group()
    algorithm = one.algorithm = PRESETS["coderl"]
    greedy = replace(
        episodes[1], key=replace(episodes[1].key, sample=4), greedy=True, trajectory=episodes[1].trajectory
    )
    groups = [[*labelled(episodes), greedy]]
    judge = outcome_critic(one.scorer.model)
    first = [c for c in filter_and_estimate(assign_credit(groups, algorithm), one, 0, judge) if not c.episode.greedy]
    assert first[0].advantages == (0.5,) * len(first[0].advantages)
    for _ in range(3):
        train_value_model(judge, first)
    credits = [c for c in filter_and_estimate(assign_credit(groups, algorithm), one, 0, judge) if not c.episode.greedy]
    rows = [row_of_trajectory(e.trajectory, 0.0) for e in episodes]
    chances = judge.score(rows, [r >= 1 for r in REWARDS])
    for credit, reward, chance, row in zip(credits, REWARDS, chances, rows, strict=True):
        expected = (reward - REWARDS[1]) * chance[torch.tensor(row.trains)].double()
        assert credit.advantages == pytest.approx(expected.tolist(), abs=1e-12)
    assert len(set(credits[0].advantages)) > 1


def test_judge_training_skips_masked_and_dropped_episodes():
    episodes, one = real_group()
    judge = outcome_critic(one.scorer.model)
    credits = assign_credit([[*labelled(episodes), replace(episodes[0], greedy=True)]], PRESETS["coderl"])
    assert [c.outcome for c in credits].count(RolloutOutcome.MASKED) == 1
    dropped = [replace(c, outcome=RolloutOutcome.DROPPED) for c in credits]
    assert train_value_model(judge, dropped) == {}
    train_value_model(judge, credits)
    own = outcome_critic(one.scorer.model)
    rows = [row_of_trajectory(e.trajectory, 0.0) for e in episodes]
    own.train(rows, [], [r >= 1 for r in REWARDS])
    for a, b in zip(judge.model.parameters(), own.model.parameters(), strict=True):
        assert torch.equal(a, b)


CHANGES = {
    "prime": {
        "algorithm__filter_zero_variance": "false",
        "critic__prime__epochs": "4",
        "algorithm__options__advantage__beta": "1",
    },
    "coderl": {"critic__epochs": "4"},
}


@pytest.mark.fault
@pytest.mark.parametrize("name", ["prime", "coderl"])
def test_resumed_run_with_a_learning_judge_equals_the_uninterrupted_run(name, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    changes = CHANGES[name] | {
        "algorithm__preset": name,
        "rollout__temperature": "2",
        "training__learning_rate": "1e-6",
    }
    reporter = run(whole, **changes)
    metric = "prime/loss" if name == "prime" else "critic/loss"
    first, second = (metrics[metric] for _, metrics in reporter.steps)
    assert second < first

    settings = config(cut, **(SMALLEST | changes))
    with lock_run(new_run(settings, "search", "rl")), pytest.raises(RunInterrupted):
        train(open_session(settings), RunFolder(cut), InterruptingReporter(2))
    assert main(["train", "--resume", str(cut)]) == 0
    one, two = lasting_files(whole), lasting_files(cut)
    part = "process_reward" if name == "prime" else "critic"
    assert any(file.endswith(f"trainer/{part}.safetensors") for file in one)
    assert [file for file in one if one[file] != two.get(file)] == []
