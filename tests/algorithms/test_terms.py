"""Auxiliary losses, VAPO and distillation: gradients against the formulas, and whole runs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from ludus.algorithms import advantages
from ludus.algorithms.algorithm import PartOptions
from ludus.algorithms.spec.resolve import PRESETS, resolve
from ludus.cli.main import main
from ludus.config.schema import Config
from ludus.config.sections.algorithm import AlgorithmConfig
from ludus.engines.models.loading import load_tokenizer
from ludus.errors import ConfigError
from ludus.recipes import recipe_folder
from ludus.rewards.base import Reward
from ludus.training.batches.rows import Row
from ludus.training.credit.advantages import assign_credit, training_rows
from ludus.training.learner.learner import LearnerSettings
from ludus.training.learner.logprobs import model_precision
from ludus.training.learner.optimizer import Optimizer, OptimizerSettings
from ludus.training.rl.build import load_teacher, train
from ludus.training.rl.train_step import filter_and_estimate
from ludus.training.rl.validate import check_settings, config_warnings
from ludus.training.run.run_dir import RunFolder, lock_run, new_run
from ludus.training.run.session import open_session
from ludus.training.value_models.factory import train_value_model
from small_runs import SMALLEST, InterruptingReporter, RecordingReporter, RunInterrupted, config, lasting_files
from tests.training.credit.test_credit import real_group, trajectory
from tests.training.learner.test_learner import gradients, largest_difference, learner, random_rows, tiny_model
from tests.training.value_models.test_critic import critic

COLD_START = recipe_folder("search") / "cold_start"


def gradient_of(model, rows, algorithm, tokens=10**6, scorers=None):
    one = learner(model, algorithm, LearnerSettings(microbatch_tokens=tokens), scorers)
    statistics, _ = one.gradient(rows)
    return gradients(model), statistics


def plain_logprobs(model, row):
    """`[T]`, straight from the model's logits; 0 for the first token."""
    with model_precision(model):
        logits = model(torch.tensor([row.tokens])).logits[0, :-1]
    found = torch.log_softmax(logits, -1).gather(1, torch.tensor(row.tokens[1:])[:, None])[:, 0]
    return torch.cat([found.new_zeros(1), found])


def marked_rows():
    chance = random.Random(1)
    return [replace(row, positive=chance.random() < 0.5) for row in random_rows()]


def echoed(rows):
    return [row.observed for row in rows]


def successes(rows):
    return [tuple(trains and row.positive for trains in row.trains) for row in rows]


@pytest.mark.parametrize(("name", "marks"), [("echo", echoed), ("positive_nll", successes)])
def test_loss_term_is_averaged_over_its_own_tokens_across_microbatches(name, marks):
    model, rows = tiny_model(), marked_rows()
    bare = PRESETS["grpo"]
    algorithm = replace(bare, options=PartOptions(terms={name: 0.3}))
    tokens = sum(sum(mask[1:]) for mask in marks(rows))
    logprobs = [plain_logprobs(model, row) for row in rows]
    nll = -sum((lp * torch.tensor(m)).sum() for lp, m in zip(logprobs, marks(rows), strict=True))
    gain = sum(
        (lp * torch.tensor(row.advantages, dtype=torch.float64) * torch.tensor(row.trains)).sum()
        for lp, row in zip(logprobs, rows, strict=True)
    )
    (0.3 * nll / tokens - gain / sum(sum(row.trains[1:]) for row in rows)).backward()
    expected = gradients(model)
    for size in (10**6, 40, 1):
        found, statistics = gradient_of(model, rows, algorithm, size)
        assert largest_difference(found, expected) < 1e-10
        assert statistics.terms[name] == pytest.approx(0.3 * float(nll.detach()) / tokens, abs=1e-10)
        assert statistics.loss == pytest.approx(statistics.policy_loss + statistics.terms[name], abs=1e-10)
    without, _ = gradient_of(model, rows, bare)
    assert largest_difference(without, expected) > 1e-4


def test_positive_trajectories_have_an_outcome_above_zero():
    credits = assign_credit([real_group()[0]], PRESETS["vapo"])
    assert [row.positive for row in training_rows(credits, mask_observations=True)] == [True, False, True, False]
    parts = (Reward("solved", len, outcome=True), Reward("neat", len, weight=0.1))
    shaped = replace(trajectory(0, 0.1), rewards={"solved": 0.0, "neat": 1.0})
    episode = replace(credits[0].episode, trajectory=shaped)
    given = [replace(credits[0], episode=episode)]
    assert [r.positive for r in training_rows(given, mask_observations=True, rewards=parts)] == [False]


def test_vapo_has_a_lam_for_the_policy_and_one_for_the_critic():
    episodes, one = real_group()
    one.algorithm = PRESETS["vapo"]
    one.algorithm = replace(one.algorithm, options=PartOptions(advantage={"alpha": 0.2}))
    judge = critic(one.scorer.model)
    for _ in range(3):
        train_value_model(judge, filter_and_estimate(assign_credit([episodes], one.algorithm), one, 0, judge))
    for credit in filter_and_estimate(assign_credit([episodes], one.algorithm), one, 0, judge):
        n = len(credit.values)
        values = torch.tensor(credit.values, dtype=torch.float64)
        assert values.all()
        ended = torch.tensor(credit.targets, dtype=torch.float64)
        given = credit.episode.trajectory
        to_go = [sum(given.turn_rewards[k:]) for k in range(len(given.turn_rewards))]
        turns = [turn for turn in range(len(given.turn_rewards)) for _ in range(3 + turn)]
        expected = torch.tensor([to_go[turn] + given.reward for turn in turns], dtype=torch.float64)
        torch.testing.assert_close(ended, expected, atol=1e-12, rtol=0)
        assert 1 - 1 / (0.2 * n) < 1
    bare = replace(one.algorithm, options=PartOptions(advantage={"alpha": 0.2, "whiten": 0.0}))
    one.algorithm = bare
    credit = filter_and_estimate(assign_credit([episodes], bare), one, 0, judge)[0]
    n, rewards = len(credit.values), torch.tensor([1.0], dtype=torch.float64)
    turn = torch.tensor([[0] * 3 + [1] * 4])
    expected = advantages.gae(
        values=torch.tensor([credit.values], dtype=torch.float64),
        mask=torch.ones(1, n, dtype=torch.bool),
        rewards=rewards,
        turn=turn,
        turn_rewards=torch.tensor([credit.episode.trajectory.turn_rewards], dtype=torch.float64),
        lam=max(0.0, 1 - 1 / (0.2 * n)),
    )
    assert credit.advantages == pytest.approx(expected[0].tolist(), abs=1e-10)


def test_distillation_has_the_gradient_of_the_reverse_kl():
    model, teacher, rows = tiny_model(), tiny_model(seed=1), random_rows()
    tokens = sum(sum(row.trains[1:]) for row in rows)
    total, cost = torch.zeros((), dtype=torch.float64), 0.0
    for row in rows:
        own = plain_logprobs(model, row)
        gap = (own - plain_logprobs(teacher, row)).detach() * torch.tensor((False, *row.trains[1:]))
        total, cost = total + (gap * own).sum() / tokens, cost + float(gap.sum()) / tokens
    total.backward()
    expected = gradients(model)
    scorers = {"teacher": learner(teacher).scorer}
    for size in (10**6, 40):
        found, statistics = gradient_of(model, rows, PRESETS["distill"], size, scorers)
        assert largest_difference(found, expected) < 1e-10
        assert statistics.teacher_sum / statistics.clip.tokens == pytest.approx(cost, abs=1e-10)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"options": {"terms": {"ecko": 0.1}}}, "'echo'"),
        ({"options": {"terms": {"echo": -0.1}}}, "echo is -0.1, but must be from 0 on"),
    ],
)
def test_invalid_loss_terms_are_rejected(settings, words):
    with pytest.raises(ConfigError) as caught:
        resolve(AlgorithmConfig(**settings))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"algorithm": {"preset": "distill"}}, "path is not set"),
        ({"teacher": {"path": "some"}}, "would have no effect"),
        ({"algorithm": {"preset": "echo"}, "training": {"mask_observations": False}}, "observations already"),
    ],
)
def test_contradictions_are_refused_before_anything_is_loaded(settings, words):
    with pytest.raises(ConfigError, match=words):
        check_settings(Config.model_validate(settings), None)


def test_vapo_without_critic_warmup_emits_config_warning():
    cold = {"algorithm": {"preset": "vapo"}, "critic": {"warmup_steps": 0}}
    assert any("critic.warmup_steps" in text for text in config_warnings(Config.model_validate(cold)))
    assert config_warnings(Config.model_validate({"algorithm": {"preset": "vapo"}})) == []


def test_critic_warmup_covering_all_steps_emits_config_warning():
    short = {"algorithm": {"preset": "ppo"}, "training": {"steps": 2}, "critic": {"warmup_steps": 2}}
    assert any("The policy is never trained" in text for text in config_warnings(Config.model_validate(short)))
    short["training"]["steps"] = 3
    assert config_warnings(Config.model_validate(short)) == []


def run(folder, reporter=None, **changes):
    reporter = reporter or RecordingReporter()
    settings = config(folder, **(SMALLEST | {"evaluation__tasks": "1"} | changes))
    with lock_run(new_run(settings, "search", "rl")):
        train(open_session(settings), RunFolder(folder), reporter)
    return [metrics for _, metrics in reporter.steps]


@pytest.mark.learning
def test_echo_loss_on_tool_output_decreases_during_run(tmp_path):
    steps = run(
        tmp_path / "run",
        algorithm__preset="echo",
        algorithm__options__terms__echo="1.0",
        training__steps="3",
        training__learning_rate="1e-3",
    )
    assert 0 < steps[-1]["loss/echo"] < 0.9 * steps[0]["loss/echo"]


@pytest.mark.fault
def test_a_run_of_vapo_that_is_cut_and_resumed_equals_the_uninterrupted_one(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    vapo = {"algorithm__preset": "vapo", "critic__warmup_steps": "1"}
    first, second = run(whole, **vapo)
    assert "critic/loss" in first
    assert "loss/total" not in first
    assert second["loss/positive_nll"] > 0

    with pytest.raises(RunInterrupted):
        run(cut, InterruptingReporter(2), **vapo)
    assert main(["train", "--resume", str(cut)]) == 0
    one, other = lasting_files(whole), lasting_files(cut)
    assert [name for name in one if one[name] != other.get(name)] == []


@torch.no_grad()
def played(model, seed, num=48, length=6):
    """Rows that the model samples after one token of prompt."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.arange(num)[:, None] % 50
    for _ in range(length):
        odds = torch.softmax(model(tokens).logits[:, -1], -1)
        tokens = torch.cat([tokens, torch.multinomial(odds, 1, generator=generator)], 1)
    action = (False, *(True,) * length)
    zeros = (0.0,) * (length + 1)
    return [Row(tuple(row), action, (False,) * (length + 1), zeros, zeros) for row in tokens.tolist()]


@pytest.mark.slow
def test_distill_training_reduces_reverse_kl_to_teacher():
    student, teacher = tiny_model(torch.float32), tiny_model(torch.float32, seed=1)
    with torch.no_grad():
        teacher.get_input_embeddings().weight *= 20
    one = learner(student, PRESETS["distill"], scorers={"teacher": learner(teacher).scorer})
    one.optimizer = Optimizer(student, OptimizerSettings(learning_rate=2e-2, total_steps=40))
    costs = [one.train(played(student, step), seed=step)["distill/reverse_kl"] for step in range(40)]
    assert costs[0] > 0.3
    assert costs[-1] < 0.8 * costs[0], costs


@pytest.mark.scale
def test_distill_run_from_identical_teacher_starts_with_zero_kl(tmp_path):
    """The teacher is the student as it was: the cost begins at 0, and rewards move nothing."""
    steps = run(tmp_path / "run", algorithm__preset="distill", teacher__path=str(COLD_START), training__epochs="2")
    assert steps[0]["distill/reverse_kl"] == pytest.approx(0.0, abs=1e-6)
    assert steps[0]["optim/grad_norm"] < 1e-3


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path):
    tokenizer = load_tokenizer(str(COLD_START))
    tokenizer.add_tokens(["<odd>"])
    tokenizer.save_pretrained(tmp_path / "teacher")
    settings = config(tmp_path / "run", algorithm__preset="distill", teacher__path=str(tmp_path / "teacher"))
    with pytest.raises(ConfigError, match=r"different vocabulary from the policy.*'<odd>'"):
        load_teacher(open_session(settings))
