"""Actions of alarms that change the learning rate or the KL coefficient."""

import pytest
import torch
from torch import nn

from ludus.algorithms.spec.resolve import resolve
from ludus.cli.main import main
from ludus.config.schema import AlarmsConfig
from ludus.diagnostics.trackers import read_metrics
from ludus.training.distributed.collectives import ONE_PROCESS
from ludus.training.learner.optimizer import Optimizer, OptimizerSettings
from ludus.training.rl.build import make_parts, train
from ludus.training.rl.rank_worker import rank_methods
from ludus.training.run.checkpoint import MAX_KL, MIN_LEARNING_RATE, Adjustments, read_state
from ludus.training.run.run_dir import lock_run, new_run
from ludus.training.run.session import open_session
from small_runs import SMALLEST, RecordingReporter, config

EQUAL = SMALLEST | {
    "rollout__temperature": "0.01",
    "algorithm__filter_zero_variance": "false",
    "training__steps": "4",
    "training__checkpoint_every": "3",
    "run__alarms__cooldown_steps": "2",
}
"""Greedy sampling, so that `equal_rewards` is raised in every step."""


def run(folder, **changes):
    reporter, settings = RecordingReporter(), config(folder, **changes)
    made = new_run(settings, "search", "rl")
    with lock_run(made):
        train(open_session(settings), made, reporter)
    return reporter


def metric(folder, name):
    return [row.metrics[name] for row in read_metrics(folder / "metrics.jsonl")]


def test_alarm_adjustments_have_a_cooldown_and_bounds():
    settings = AlarmsConfig(learning_rate_factor=0.1, kl_factor=20, cooldown_steps=3)
    first = Adjustments().after("lower_learning_rate", 5, settings)
    assert first == Adjustments(0.1, 1.0, 5, None)
    assert first.after("lower_learning_rate", 7, settings) == first
    second = first.after("lower_learning_rate", 8, settings)
    assert second.learning_rate == pytest.approx(0.01)
    third = second.after("lower_learning_rate", 11, settings)
    assert third.learning_rate == MIN_LEARNING_RATE
    assert third.after("lower_learning_rate", 14, settings) == third
    raised = first.after("raise_kl", 6, settings)
    assert raised == Adjustments(0.1, 20, 5, 6)
    highest = raised.after("raise_kl", 9, settings)
    assert highest.kl == MAX_KL
    assert highest.after("raise_kl", 12, settings) == highest
    assert raised.after("warn", 99, settings) == raised


def test_optimizer_scales_the_scheduled_learning_rate():
    model = nn.Linear(1, 1)
    optimizer = Optimizer(model, OptimizerSettings(learning_rate=0.1, total_steps=1))
    optimizer.learning_rate_factor = 0.25
    before = model.weight.detach().clone()
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    # The first step of AdamW is the learning rate times the sign of the gradient.
    assert (before - model.weight).item() == pytest.approx(0.025, rel=1e-6)


def test_ranks_train_with_the_learning_rate_factor_of_rank_0(tmp_path):
    session = open_session(config(tmp_path / "run", **SMALLEST))
    parts = make_parts(session, resolve(session.config.algorithm), ONE_PROCESS, None)
    rank_methods(session, parts)["train"]([], 0, parts.learner.algorithm, 0.5)
    assert parts.learner.optimizer.learning_rate_factor == 0.5


@pytest.mark.slow
def test_learning_rate_lowered_by_an_alarm_persists_after_resume(tmp_path):
    folder = tmp_path / "run"
    reporter = run(folder, **EQUAL, run__alarms__actions='{equal_rewards = "lower_learning_rate"}')
    rates = metric(folder, "optim/learning_rate")
    assert rates == [pytest.approx(rates[0] * factor) for factor in (1, 0.5, 0.5, 0.25)]
    assert any("learning rate x 0.5, KL coefficient x 1" in text for text in reporter.alarms)
    assert read_state(folder / "checkpoints" / "step-000003").adjustments == Adjustments(0.25, 1.0, 3, None)
    for path in folder.glob("checkpoints/step-000004"):
        path.rename(tmp_path / "last")
    assert main(["train", "--resume", str(folder)]) == 0
    assert metric(folder, "optim/learning_rate") == rates


@pytest.mark.slow
def test_an_alarm_raises_the_kl_coefficient(tmp_path):
    actions = {"run__alarms__actions": '{equal_rewards = "raise_kl"}', "training__steps": "2"}
    run(tmp_path / "run", **EQUAL | actions, algorithm__kl_coef="0.1")
    assert metric(tmp_path / "run", "kl/coef") == [pytest.approx(0.1), pytest.approx(0.2)]


def test_raise_kl_action_without_a_kl_term_is_rejected(tmp_path, capsys):
    words = ["--run.alarms.actions.entropy_collapse", "raise_kl", "--run.dir", str(tmp_path / "run")]
    assert main(["train", "search", *words]) == 2
    assert "entropy_collapse is raise_kl, but the run has no KL term" in capsys.readouterr().err
