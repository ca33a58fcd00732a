"""Refresh of reward models during a run: effect, bit-identical resume, pairs of verified outcomes, and metrics."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch
from safetensors.torch import save_file

from ludus.config import load_config
from ludus.config.sections.rewards import RewardsConfig
from ludus.diagnostics.trackers import read_metrics
from ludus.recipes import recipe_folder
from ludus.rewards.base import Reward
from ludus.rollouts.ledger import RolloutOutcome
from ludus.rollouts.rollout_files import RolloutRecord
from ludus.training.learner.optimizer import Optimizer, OptimizerSettings
from ludus.training.run.checkpoint import checkpoint_path, load_part
from ludus.training.value_models.base import HeadModel
from ludus.training.value_models.labels import TurnLabels
from ludus.training.value_models.model_refresh import (
    REFRESH_FILE,
    RewardModelRefresh,
    model_quality,
    training_labels,
    verified_examples,
)
from ludus.training.value_models.reward_model import RewardEnsemble, RewardModel
from ludus.types import Segment, StopReason, Trajectory
from small_runs import lasting_files
from tests.training.learner.test_learner import tiny_model
from tiny_run import ludus, refused

REWARDS = (Reward("right", lambda task, trajectory: 0.0, outcome=True),)


def record(last: int, right: bool, task: str = "a", step: int = 1, reward: float = 0.0) -> RolloutRecord:
    segments = (
        Segment("prompt", (1, 2)),
        Segment("action", (3, last), 0, logprobs=(-1.0, -1.0), versions=(0, 0), finish_reason="stop"),
    )
    one = Trajectory(task, 0, segments, (), StopReason.ANSWERED, rewards={"right": float(right)}, reward=reward)
    return RolloutRecord(step, task, RolloutOutcome.TRAINED, "trained", one)


def ensemble(kind, size: int = 1) -> RewardEnsemble:
    return RewardEnsemble(tuple(RewardModel(HeadModel(tiny_model(), "reward model", ""), kind) for _ in range(size)))


def refresh_of(models: RewardEnsemble, **settings) -> RewardModelRefresh:
    chosen = RewardsConfig.model_validate({"model": "x", "model_refresh": settings}).model_refresh
    rate = OptimizerSettings(learning_rate=chosen.learning_rate, total_steps=1)
    optimizers = tuple(Optimizer(one.states.model, rate) for one in models.members)
    return RewardModelRefresh(models, REWARDS, chosen, 0, 4096, 99, TurnLabels(), optimizers)


def add(refresh: RewardModelRefresh, step: int, records) -> None:
    class Sample:
        def __init__(self, record):
            self.record = record

    refresh.add(step, [Sample(one) for one in records])


@pytest.mark.parametrize("kind", ["pointwise", "pairwise", "process"])
def test_refresh_learns_the_verified_outcomes_of_the_window(kind):
    models = ensemble(kind, 2)
    refresh = refresh_of(models, every=2, steps=20, learning_rate=1e-2, batch_size=4)
    batch = [record(4, True), record(5, False), record(6, True, "b"), record(7, False, "b")]
    add(refresh, 1, batch[:2])
    assert refresh.update(1) == {}
    before = [one.mean for one in models.predict_trajectories([r.trajectory for r in batch], 99)]
    assert before == pytest.approx([0.5] * 4)
    add(refresh, 2, batch[2:])
    metrics = refresh.update(2)
    assert metrics["reward_model/refresh_examples"] == (2 if kind == "pairwise" else 4)
    assert 0 < metrics["reward_model/refresh_loss"] < math.log(2)
    after = [one.mean for one in models.predict_trajectories([r.trajectory for r in batch], 99)]
    assert min(after[0], after[2]) > max(after[1], after[3]) + 0.1
    states = [list(one.states.model.parameters()) for one in models.members]
    assert not all(torch.equal(a, b) for a, b in zip(*states, strict=True))  # members have other batches
    add(refresh, 3, [])
    assert [*refresh.examples] == [2, 3]
    add(refresh, 4, [])
    assert refresh.update(4) == {"reward_model/refresh_examples": 0.0}


def test_pairs_are_of_verified_outcomes_and_not_of_the_reward():
    records = [record(4, False, reward=9.0), record(5, True), record(6, True), record(7, True, "b"), record(8, False)]
    found = verified_examples(ensemble("pairwise"), records, REWARDS, TurnLabels())
    assert [[s.tokens[-1] for s in one.sequences] for one in found] == [[5, 4], [6, 8]]
    assert [(s.positions, s.targets) for s in found[0].sequences] == [((3,), (1.0,)), ((3,), (0.0,))]
    assert found[0].prompt_length == 2


def test_quality_of_the_part_matches_independent_formulas():
    pairs = [(0.9, 1.0), (0.2, 0.0), (0.6, 0.0), (0.6, 1.0), (0.1, 0.0)]
    members = [
        replace(record(4, bool(right)).trajectory, rewards={"right": right, "reward_model": value})
        for value, right in pairs
    ]
    found = model_quality([*members, record(4, True).trajectory], "right")
    wins = [1.0 if a > b else 0.5 if a == b else 0.0 for a, right in pairs if right for b, other in pairs if not other]
    assert found["reward_model/auc"] == pytest.approx(fmean(wins))
    table = torch.tensor(pairs, dtype=torch.float64).T
    assert found["reward_model/correlation"] == pytest.approx(float(torch.corrcoef(table)[0, 1]))
    assert model_quality(members[:1], "right") == {}


@pytest.fixture(scope="module")
def judge(tmp_path_factory) -> Path:
    """A run folder with an untrained pointwise reward model: the packaged cold start of `guess` with a zero head."""
    folder = tmp_path_factory.mktemp("judge")
    checkpoint = folder / "checkpoints" / "step-000002"
    shutil.copytree(recipe_folder("guess") / "cold_start", checkpoint)
    (checkpoint / "trainer").mkdir()
    size = load_config("guess").model.init.hidden_size
    head = {"weight": torch.zeros(1, size), "bias": torch.zeros(1)}
    save_file(head, checkpoint / "trainer" / "reward_pointwise.safetensors")
    settings = '[env]\nname = "guess"\n[reward_model]\nkind = "process"\ndiscount = 0.5\n'
    (folder / "config.toml").write_text(settings)
    return folder


RUN = {
    "training.prompts_per_step": "3",
    "training.checkpoint_every": "1",
    "algorithm.group_size": "4",
    "evaluation.tasks": "2",
    "evaluation.every": "9",
    "env.check": "false",
    "run.threads": "1",
    "training.keep_checkpoints": "9",
}


def start(judge, folder, *words):
    given = [word for key, value in RUN.items() for word in (f"--{key}", value)]
    return ludus("train", "guess", *given, "--rewards.model", judge, "--run.dir", folder, *words)


def head(folder: Path, step: int) -> torch.Tensor:
    return load_part(checkpoint_path(folder / "checkpoints", step), "reward_model_0")["model/head.weight"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_refreshed_run_resumes_bit_for_bit(judge, tmp_path, mode):
    words = ("--rewards.model_refresh.every", "2", "--rewards.model_refresh.learning_rate", "1e-2")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    said = start(judge, whole, *words, "--training.steps", "4", "--training.mode", mode)
    assert said.code == 0, said
    rows = [row.metrics for row in read_metrics(whole / "metrics.jsonl")]
    assert [row.get("reward_model/refresh_examples") for row in rows] == [None, 24, None, 24]
    assert all("reward_model/auc" in row for row in rows[2:])
    assert len({row["reward/reward_model"] for row in rows[:2]}) == 1  # the zero head
    assert not torch.equal(head(whole, 2), head(whole, 1))
    assert not torch.equal(head(whole, 4), head(whole, 2))
    if mode == "async":  # not reproducible
        return
    said = start(judge, cut, *words, "--training.steps", "3")
    assert said.code == 0, said
    stored = json.loads((cut / "checkpoints/step-000003/trainer" / REFRESH_FILE).read_text())
    assert {step: len(own) for step, own in stored["examples"].items()} == {"2": 12, "3": 12}
    assert ludus("train", "--resume", cut, "--training.steps", "4").code == 0
    files = [
        {name: data for name, data in lasting_files(one).items() if "step-000003" not in name} for one in (whole, cut)
    ]
    assert files[0].keys() == files[1].keys()
    assert [name for name, data in files[0].items() if data != files[1][name]] == []
    off = ("--rewards.model_refresh.every", "0", "--rewards.model_refresh.learning_rate", "1e-4")
    said = ludus("train", "--resume", cut, "--training.steps", "5", *off)
    assert said.code == 0, said
    assert torch.equal(head(cut, 5), head(whole, 4))


def test_settings_without_effect_are_refused(judge):
    every = ("--rewards.model_refresh.every", "2")
    assert "needs rewards.model, which is unset" in refused("train", "guess", *every)
    words = ("train", "guess", "--rewards.model", judge)
    assert "needs rewards.model_refresh.every above 0" in refused(*words, "--rewards.model_refresh.steps", "9")
    assert "window is below" in refused(*words, *every, "--rewards.model_refresh.window", "1")
    shard = ("--training.learner.shard", "true")
    assert "trains in one process" in refused(*words, *every, *shard)


def test_discount_is_that_of_the_run_of_the_model(judge, tmp_path):
    assert training_labels(judge) == training_labels(judge / "checkpoints" / "step-000002") == TurnLabels(discount=0.5)
    assert training_labels(tmp_path / "a" / "b") == TurnLabels()
