"""Runs with a separate model for a role: both are sampled, trained, saved and resumed in one run."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file

from ludus.algorithms.spec.resolve import algorithm_of
from ludus.cli.main import main
from ludus.engines.models.loading import load_model, load_tokenizer, save_model
from ludus.envs.registry import build_world
from ludus.errors import ConfigError, UserError
from ludus.recipes import recipe_folder
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path
from ludus.training.rl.build import train
from ludus.training.rl.role_checks import check_role_policies
from ludus.training.run.checkpoint import checkpoint_path
from ludus.training.run.run_dir import RunFolder, lock_run, new_run
from ludus.training.run.session import open_session
from small_runs import SMALLEST, InterruptingReporter, RecordingReporter, RunInterrupted, config, lasting_files
from tiny_run import ludus, refused

START = recipe_folder("games") / "cold_start"
GAME = SMALLEST | {
    "env__name": "games",
    "env__settings__game": "kuhn",
    "algorithm__preset": "rae",
    "algorithm__kl_coef": "0.01",
    "training__learning_rate": "0.001",
}


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A model with other weights than the cold start."""
    model, folder = load_model(str(START)), tmp_path_factory.mktemp("models") / "other"
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=source) * 0.05 * p.std())
    save_model(model, load_tokenizer(str(START)), folder)
    return folder


def play(folder, other, reporter=None, **changes):
    settings = config(folder, **(GAME | {"model__roles__second": str(other)} | changes))
    reporter = reporter or RecordingReporter()
    with lock_run(new_run(settings, "games", "rl")):
        train(open_session(settings), RunFolder(folder), reporter)
    return reporter


@pytest.fixture(scope="module")
def played(tmp_path_factory, other):
    folder = tmp_path_factory.mktemp("roles") / "run"
    return folder, play(folder, other)


def saved(folder, step, place="."):
    return load_file(checkpoint_path(folder / "checkpoints", step) / place / "model.safetensors")


def equal(left, right):
    return all(torch.equal(tensor, right[name]) for name, tensor in left.items())


def test_each_player_samples_and_trains_its_model(played, other):
    folder, reporter = played
    segments = [s for one in read_rollouts(rollouts_path(folder, 1)) for s in one.trajectory.segments]
    assert {(one.agent, one.policy) for one in segments} == {("first", ""), ("second", "role_second")}
    assert {
        v for one in read_rollouts(rollouts_path(folder, 2)) for s in one.trajectory.segments for v in s.versions
    } == {1}
    for _, metrics in reporter.steps:
        assert metrics["sync/probe_gap"] < 1e-4
        for prefix in ("", "role_second/"):
            assert metrics[f"{prefix}mismatch/logprob_diff"] < 1e-5
            assert {f"{prefix}policy/kl_reference", f"{prefix}optim/grad_norm"} <= metrics.keys()
        assert metrics["optim/grad_norm"] != metrics["role_second/optim/grad_norm"]
    assert not equal(saved(folder, 1), saved(folder, 1, "role_second"))
    assert not equal(saved(folder, 1, "role_second"), load_file(other / "model.safetensors"))
    assert not equal(saved(folder, 1, "role_second"), saved(folder, 2, "role_second"))
    assert load_model(str(checkpoint_path(folder / "checkpoints", 2) / "role_second"))


@pytest.mark.slow
def test_first_step_equals_that_of_a_run_with_the_other_model_frozen(played, other, tmp_path):
    folder, _ = played
    reporter = play(tmp_path / "run", other, training__steps="1", model__frozen_roles='["second"]')
    assert equal(saved(folder, 1), saved(tmp_path / "run", 1))
    assert equal(load_file(other / "model.safetensors"), saved(tmp_path / "run", 1, "role_second"))
    assert "role_second/optim/grad_norm" not in reporter.steps[0][1]


@pytest.mark.fault
def test_interrupted_run_resumes_bit_for_bit(played, other, tmp_path):
    with pytest.raises(RunInterrupted):
        play(tmp_path / "cut", other, InterruptingReporter(2))
    assert main(["train", "--resume", str(tmp_path / "cut")]) == 0
    first, second = lasting_files(played[0]), lasting_files(tmp_path / "cut")
    assert "checkpoints/step-000002/trainer/role_second.safetensors" in first
    assert [name for name in first if first[name] != second.get(name)] == []


@pytest.mark.slow
def test_evaluation_of_a_run_uses_the_models_of_its_checkpoint(played, other, tmp_path):
    said = ludus("eval", "--run", played[0], "--evaluation.tasks", "4", "--out", tmp_path)
    assert said.code == 0, said
    stored = list(tmp_path.rglob("*.jsonl.gz"))
    policies = {s.policy for path in stored for one in read_rollouts(path) for s in one.trajectory.segments}
    assert policies <= {"", "role_second"}
    settings = config(tmp_path, **(GAME | {"model__roles__second": str(other)}))
    session = open_session(settings, checkpoint_path(played[0] / "checkpoints", 2))
    assert equal(saved(played[0], 2, "role_second"), dict(session.role_models["role_second"].named_parameters()))


REFUSED = {
    "engine.url": {"engine__url": "http://127.0.0.1:1"},
    "cluster.enabled": {"cluster__kind": "local"},
    "training.learner.ranks": {"training__learner__ranks": "2"},
    "training.mode = 'async'": {"training__mode": "async"},
    "run.token_values": {"run__token_values": "true"},
    "algorithm.advantage = 'gae'": {"algorithm__preset": "ppo"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_a_model_per_role_does_not_support_are_refused(tmp_path, name):
    with pytest.raises(ConfigError, match=rf"model\.roles cannot be combined with {re.escape(name)}\."):
        checked(tmp_path, **REFUSED[name])


def checked(folder, **changes):
    settings = config(folder, **(GAME | {"model__roles__second": "other"} | changes))
    check_role_policies(settings, algorithm_of(settings), build_world(settings.env, settings.rollout))


def test_roles_and_vocabularies_are_checked(other, tmp_path):
    checked(tmp_path)
    with pytest.raises(ConfigError, match="names 'third', which is not a role of the world 'games'"):
        checked(tmp_path, model__roles__third="other")
    for changes, why in (
        ({"model__frozen_roles": '["first"]'}, "model.frozen_roles has 'first'"),
        ({"model__lora__rank": "2"}, "mutually exclusive"),
    ):
        with pytest.raises(ConfigError, match=why):
            checked(tmp_path, **changes)
    search = recipe_folder("search") / "cold_start"
    with pytest.raises(UserError, match=r"model\.roles\.second has a different vocabulary"):
        open_session(config(tmp_path, **(GAME | {"model__roles__second": str(search)})))
    words = ("--model.roles.sub", other, "--run.dir", tmp_path / "no")
    assert "model.roles needs agents, which only `ludus train` trains" in refused("sft", "search", *words)
