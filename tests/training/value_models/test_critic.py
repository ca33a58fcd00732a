"""The critic: values of states, their training, and whole runs of PPO that resume bit for bit."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from algorithm_parts import CRITIC_ADVANTAGES
from ludus.algorithms import advantages
from ludus.algorithms.spec.resolve import PRESETS, algorithm_of
from ludus.cli.main import main
from ludus.config.load import load_config
from ludus.config.schema import Config
from ludus.errors import ConfigError, LearnerError, UserError
from ludus.rollouts.ledger import RolloutOutcome
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path
from ludus.rollouts.scheduler import Episode
from ludus.training.credit.advantages import assign_credit
from ludus.training.learner.learner import Learner, LearnerSettings
from ludus.training.learner.logprobs import LogprobScorer
from ludus.training.learner.optimizer import Optimizer, OptimizerSettings
from ludus.training.rl.build import train
from ludus.training.rl.train_step import filter_and_estimate
from ludus.training.rl.validate import check_critic
from ludus.training.run.run_dir import RunFolder, lock_run, new_run
from ludus.training.run.session import open_session
from ludus.training.value_models.base import ValueModelSettings, batches
from ludus.training.value_models.critic import Critic
from ludus.training.value_models.factory import make_value_model, train_value_model, warmup_steps
from small_runs import SMALLEST, InterruptingReporter, RecordingReporter, RunInterrupted, config, lasting_files
from tests.rewards.test_judges import outcome_critic
from tests.training.credit.test_credit import group, real_group
from tests.training.learner.test_learner import random_rows, tiny_model
from tiny_run import cold_start, ludus, make_recipe

PPO = SMALLEST | {"algorithm__preset": "ppo"}


def critic(model=None, rate=6e-3, **settings):
    return Critic(
        model or tiny_model(), OptimizerSettings(learning_rate=rate, total_steps=100), ValueModelSettings(**settings)
    )


def targets_of(rows):
    """A number that depends on the tokens seen: learnable, and different at each position."""
    return [torch.tensor([float((t % 7) > 3) for t in (0, *row.tokens[:-1])], dtype=torch.float64) for row in rows]


def test_initial_values_are_zero_and_only_on_training_tokens():
    rows = random_rows()
    one = critic()
    assert all(not values.any() for values in one.score(rows))
    one.train(rows, (targets_of(rows), one.score(rows)))
    for values, row in zip(one.score(rows), rows, strict=True):
        trains = torch.tensor(row.trains)
        assert values[trains].all()
        assert not values[~trains].any()


def test_value_does_not_depend_on_its_token():
    rows = random_rows()
    one = critic()
    one.train(rows, (targets_of(rows), one.score(rows)))
    first = rows[0]
    last = max(i for i, trains in enumerate(first.trains) if trains)
    other = replace(first, tokens=(*first.tokens[:last], (first.tokens[last] + 1) % 50, *first.tokens[last + 1 :]))
    assert one.score([first])[0][last] == one.score([other])[0][last]
    changed = replace(first, tokens=((first.tokens[0] + 1) % 50, *first.tokens[1:]))
    assert one.score([first])[0][last] != one.score([changed])[0][last]


@pytest.mark.slow
def test_critic_learns_and_leaves_the_policy_unchanged():
    model, rows = tiny_model(), random_rows(16)
    before = copy.deepcopy(model.state_dict())
    one = critic(model, clip=None)
    reports = [one.train(rows, (targets_of(rows), one.score(rows))) for _ in range(30)]
    assert reports[-1]["critic/loss"] < 0.3 * reports[0]["critic/loss"]
    assert reports[-1]["critic/explained_variance"] > 0.5 > reports[0]["critic/explained_variance"]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_critic_training_is_independent_of_microbatches():
    rows = random_rows(12)
    whole, parts = critic(), critic(microbatch_tokens=20)
    for one in (whole, parts):
        one.train(rows, (targets_of(rows), one.score(rows)))
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_a_value_moves_no_further_than_the_clip_in_one_step():
    rows = random_rows(12)
    one = critic(rate=1.0, clip=0.1, epochs=3)
    far = [100 * values for values in targets_of(rows)]
    loss = one.train(rows, (far, one.score(rows)))["critic/loss"]
    assert loss > 100


def test_the_first_batch_sets_the_scale_of_the_values():
    """Values of 0 under returns of 7 would be learned over many steps, and the clip of 0.2 slows that."""
    rows = random_rows(16)
    one = critic(rate=1e-4)
    one.train(rows, ([7 + values for values in targets_of(rows)], one.score(rows)))
    found = torch.cat([v[torch.tensor(r.trains)] for v, r in zip(one.score(rows), rows, strict=True)])
    assert 7 < float(found.mean()) < 8
    before = found.mean()
    for _ in range(2):
        one.train(rows, ([values - 50 for values in targets_of(rows)], one.score(rows)))
    after = torch.cat([v[torch.tensor(r.trains)] for v, r in zip(one.score(rows), rows, strict=True)])
    assert abs(float(after.mean() - before)) < 0.1  # it is set once


@pytest.mark.parametrize("make", [critic, outcome_critic])
def test_each_epoch_takes_one_gradient_step_per_minibatch(make):
    rows, solved = random_rows(13), [i % 2 == 0 for i in range(13)]
    one = make(epochs=2, minibatches=4)
    for taken in (8, 16):
        if make is critic:
            one.train(rows, (targets_of(rows), one.score(rows)))
        else:
            one.train(rows, (), solved)
        assert one.optimizer.num_steps == taken
    few = make(minibatches=8)
    few.train(rows[:3], (targets_of(rows[:3]),) * 2, solved[:3])
    assert few.optimizer.num_steps == 3


def test_minibatches_are_a_partition_per_pass_and_repeat_by_seed():
    parts = list(batches(13, 2, 4, seed=3))
    assert [len(part) for part in parts] == [4, 3, 3, 3] * 2
    first, second = ([i for part in half for i in part] for half in (parts[:4], parts[4:]))
    assert sorted(first) == sorted(second) == list(range(13))
    assert first != second
    assert parts == list(batches(13, 2, 4, seed=3)) != list(batches(13, 2, 4, seed=4))
    assert list(batches(3, 2, 1, seed=0)) == [[0, 1, 2]] * 2
    assert list(batches(0, 2, 4, seed=0)) == []


def test_more_gradient_steps_per_batch_explain_more_after_as_many_batches():
    stream = [random_rows(16, seed=seed) for seed in range(3)]
    found = []
    for minibatches in (1, 8):
        one = critic(rate=1e-3, minibatches=minibatches)
        reports = [one.train(rows, (targets_of(rows), one.score(rows))) for rows in stream]
        found.append(reports[-1]["critic/explained_variance"])
    assert found[1] > found[0] + 0.2


def test_value_clip_uses_values_before_the_update():
    rows = random_rows(12)
    targets = targets_of(rows)
    losses = [critic(minibatches=n).train(rows, (targets, [0.0 * v for v in targets]))["critic/loss"] for n in (1, 5)]
    wanted = torch.cat([t[torch.tensor(r.trains)] for t, r in zip(targets, rows, strict=True)])
    assert losses == pytest.approx([0.5 * float(wanted.square().mean())] * 2)


def test_critic_state_restores_bit_for_bit():
    rows = random_rows()
    one, other = critic(), critic(tiny_model(seed=1))
    for _ in range(3):
        one.train(rows, (targets_of(rows), one.score(rows)))
    other.load_state(one.state(), one.optimizer.num_steps)
    for each in (one, other):
        each.train(rows, (targets_of(rows), each.score(rows)))
    for a, b in zip(one.score(rows), other.score(rows), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(LearnerError, match="does not match"):
        other.load_state({}, 1)


@pytest.mark.slow
def test_value_head_alone_trains_on_frozen_policy_states():
    model, rows = tiny_model(), random_rows(16)
    before = copy.deepcopy(model.state_dict())
    one = critic(model, rate=0.05, clip=None, on_policy=True)
    assert {name for name, _ in one.model.named_parameters()} == {"head.weight", "head.bias"}
    reports = [one.train(rows, (targets_of(rows), one.score(rows))) for _ in range(30)]
    assert reports[-1]["critic/loss"] < 0.7 * reports[0]["critic/loss"]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    values = one.score(rows)[0]
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)
    assert not torch.equal(values, one.score(rows)[0])


@pytest.mark.parametrize(
    ("preset", "settings", "words"),
    [
        ("grpo", {"model": "head"}, "critic.model = head would have no effect: the advantage grpo has no"),
        ("grpo", {"learning_rate": 0.1}, "critic.learning_rate = 0.1 would have no effect"),
        ("rloo", {"warmup_steps": 0}, "critic.warmup_steps = 0 would have no effect"),
        ("coderl", {"clip": 0.1}, "critic.clip = 0.1 would have no effect: the critic of coderl"),
        ("prime", {"epochs": 2}, "critic.epochs = 2 would have no effect: the advantage prime has a process"),
        ("ppo", {"prime": {"epochs": 2}}, "critic.prime = .* the advantage gae has no process reward model"),
    ],
)
def test_settings_of_a_critic_that_is_not_there_are_refused(preset, settings, words):
    one = Config.model_validate({"algorithm": {"preset": preset}, "critic": settings})
    with pytest.raises(ConfigError, match=words):
        check_critic(one, algorithm_of(one))


@pytest.mark.parametrize(
    ("preset", "settings"),
    [
        ("grpo", {"clip": 0.2}),
        ("coderl", {"learning_rate": 0.1, "epochs": 2, "warmup_steps": 1, "model": "head"}),
        ("prime", {"prime": {"epochs": 2, "learning_rate": 0.1}}),
        ("vapo", {"clip": 0.1, "learning_rate": 0.1, "epochs": 2, "warmup_steps": 1, "model": "head"}),
    ],
)
def test_read_or_default_critic_settings_are_accepted(preset, settings):
    one = Config.model_validate({"algorithm": {"preset": preset}, "critic": settings})
    check_critic(one, algorithm_of(one))


def test_a_value_head_is_refused_on_split_weights():
    learner_settings = {"learner": {"shard": True, "ranks": 2}}
    one = {"algorithm": {"preset": "ppo"}, "training": learner_settings, "critic": {"model": "head"}}
    config = Config.model_validate(one)
    with pytest.raises(ConfigError, match="shards"):
        check_critic(config, algorithm_of(config))


WITH_VALUES = sorted(name for name, one in PRESETS.items() if one.advantage in CRITIC_ADVANTAGES)


@pytest.mark.parametrize("preset", WITH_VALUES)
def test_a_critic_is_warmed_up_by_default(preset):
    def steps(total=30, started=None, **settings):
        one = {"algorithm": {"preset": preset}, "training": {"steps": total}, "critic": settings}
        return warmup_steps(Config.model_validate(one), started)

    assert [steps(total) for total in (1, 9, 10, 30, 39, 400)] == [0, 0, 1, 3, 3, 40]
    assert [steps(warmup_steps=n) for n in (0, 7)] == [0, 7]
    assert [steps(total=900, started=n) for n in (0, 3)] == [0, 3]
    assert steps(started=1, warmup_steps=4) == 4


@pytest.mark.parametrize("preset", sorted(set(PRESETS) - set(WITH_VALUES)))
def test_presets_without_a_critic_have_no_warmup(preset):
    assert warmup_steps(Config.model_validate({"algorithm": {"preset": preset}})) == 0


@pytest.mark.parametrize("preset", ["ppo", "coderl"])
def test_critic_learning_rate_defaults_to_the_policy_rate(preset):
    def made(**critic_settings):
        one = {
            "algorithm": {"preset": preset},
            "training": {"learning_rate": 2e-4, "steps": 10},
            "critic": critic_settings,
        }
        config = Config.model_validate(one)
        return make_value_model(config, algorithm_of(config), tiny_model(), "success").optimizer.settings

    assert made().learning_rate == pytest.approx(4e-4)
    assert made(learning_rate=3e-5).learning_rate == 3e-5
    assert made(epochs=2, minibatches=3).total_steps == 60


@pytest.fixture(scope="module")
def sampled(tiny_run, tmp_path_factory) -> Path:
    """A run of one step of PPO, with rewards that differ."""
    folder = tmp_path_factory.mktemp("sampled")
    settings = {
        "model.path": cold_start(tiny_run),
        "run.dir": folder / "run",
        "algorithm.preset": "ppo",
        "training.steps": "1",
        "training.prompts_per_step": "6",
        "rollout.temperature": "0.7",
        "env.settings.well_formed_weight": "0.45",
        "evaluation.tasks": "1",
        "evaluation.every": "9",
    }
    words = [word for key, value in settings.items() for word in (f"--{key}", value)]
    assert ludus("train", make_recipe(folder), *words).code == 0
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["ppo", pytest.param("vapo", marks=pytest.mark.learning)])
def test_value_loss_falls_on_sampled_episodes(preset, sampled):
    session = open_session(load_config(sampled / "config.toml"))
    algorithm = PRESETS[preset]
    groups: dict[str, list[Episode]] = {}
    tasks = {task.id: task for task in session.world.tasks("train")}
    for record in read_rollouts(rollouts_path(sampled, 1)):
        episode = Episode(record.key, tasks[record.group], record.trajectory)
        groups.setdefault(record.group, []).append(episode)
    rewards = [episode.trajectory.reward for group in groups.values() for episode in group]
    assert len(set(rewards)) > 1
    learner = Learner(
        LogprobScorer(session.model, 0.7),
        Optimizer(session.model, OptimizerSettings(learning_rate=1e-3, total_steps=1)),
        algorithm,
        LearnerSettings(),
    )
    one = critic(session.model, rate=3e-3)
    losses = []
    for _ in range(24):
        credits = filter_and_estimate(assign_credit(list(groups.values()), algorithm), learner, 300, one)
        losses.append(train_value_model(one, credits)["critic/loss"])
    print([round(x, 4) for x in losses])
    assert sum(losses[-5:]) / 5 < 0.7 * losses[0]


def test_a_model_without_states_to_read_gets_no_critic():
    model = tiny_model()
    model.set_attn_implementation("eager")
    with pytest.raises(UserError, match="cannot be used for a critic"):
        critic(model)


def test_ppo_uses_advantages_and_targets_from_critic_values():
    episodes, one = real_group()
    algorithm = PRESETS["ppo"]
    one.algorithm = algorithm
    judge = critic(one.scorer.model)
    for _ in range(3):
        train_value_model(judge, filter_and_estimate(assign_credit([episodes], algorithm), one, 0, judge))
    credits = filter_and_estimate(assign_credit([episodes], algorithm), one, 0, judge)
    width = max(len(c.advantages) for c in credits)
    mask = torch.zeros(len(credits), width, dtype=torch.bool)
    values = torch.zeros(len(credits), width, dtype=torch.float64)
    for i, credit in enumerate(credits):
        mask[i, : len(credit.values)] = True
        values[i, : len(credit.values)] = torch.tensor(credit.values, dtype=torch.float64)
    assert values[mask].all()
    given = {"rewards": torch.tensor([e.trajectory.reward for e in group()], dtype=torch.float64)}
    turns = [[k for k in range(2 + i % 2) for _ in range(3 + k)] for i in range(4)]
    turn, turn_rewards = torch.zeros(mask.shape, dtype=torch.int64), torch.zeros(4, 3, dtype=torch.float64)
    for i, row in enumerate(turns):
        turn[i, : len(row)] = torch.tensor(row)
        own = episodes[i].trajectory.turn_rewards
        turn_rewards[i, : len(own)] = torch.tensor(own, dtype=torch.float64)
    raw = advantages.gae(values=values, mask=mask, turn=turn, turn_rewards=turn_rewards, **given)
    whitened = advantages.whiten(values=raw, mask=mask)
    for i, credit in enumerate(credits):
        n = len(credit.advantages)
        assert credit.outcome is RolloutOutcome.TRAINED
        assert credit.advantages == pytest.approx(whitened[i, :n].tolist(), abs=1e-10)
        assert credit.targets == pytest.approx((raw + values)[i, :n].tolist(), abs=1e-10)


def run(folder, **changes):
    reporter = RecordingReporter()
    settings = config(folder, **(PPO | changes))
    with lock_run(new_run(settings, "search", "rl")):
        train(open_session(settings), RunFolder(folder), reporter)
    return reporter


@pytest.mark.fault
@pytest.mark.parametrize("model", ["separate", "head"])
def test_a_run_of_ppo_that_is_cut_and_resumed_equals_the_uninterrupted_one(model, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    reporter = run(whole, critic__model=model)
    assert {"critic/loss", "critic/explained_variance", "policy/ratio_mean"} <= set(reporter.steps[-1][1])

    settings = config(cut, **PPO, critic__model=model)
    with lock_run(new_run(settings, "search", "rl")), pytest.raises(RunInterrupted):
        train(open_session(settings), RunFolder(cut), InterruptingReporter(2))
    assert main(["train", "--resume", str(cut)]) == 0
    first, second = lasting_files(whole), lasting_files(cut)
    assert any(name.endswith("trainer/critic.safetensors") for name in first)
    assert [name for name in first if first[name] != second.get(name)] == []


@pytest.mark.fault
def test_only_the_critic_trains_during_warmup(tmp_path):
    reporter = run(tmp_path / "run", critic__warmup_steps="1")
    first, second = (metrics for _, metrics in reporter.steps)
    assert "critic/loss" in first
    assert "optim/grad_norm" not in first
    assert second["optim/grad_norm"] > 0
