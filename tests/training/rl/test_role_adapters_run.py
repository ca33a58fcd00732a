"""Runs with an adapter for each role: games by two adapters, sub-agents with their own, refused settings."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file

from ludus.algorithms.spec.resolve import algorithm_of
from ludus.cli.main import main
from ludus.envs.registry import build_world
from ludus.errors import ConfigError
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path
from ludus.training.rl.build import train
from ludus.training.rl.role_checks import check_role_policies
from ludus.training.run.checkpoint import checkpoint_path
from ludus.training.run.run_dir import RunFolder, list_checkpoints, lock_run, new_run
from ludus.training.run.session import open_session
from small_runs import SMALLEST, InterruptingReporter, RecordingReporter, RunInterrupted, config, lasting_files
from tiny_run import ludus, refused

pytest.importorskip("peft")
GAME = SMALLEST | {
    "env__name": "games",
    "env__settings__game": "kuhn",
    "algorithm__preset": "rae",
    "algorithm__kl_coef": "0.01",
    "model__lora__rank": "2",
    "model__lora__roles": '["first", "second"]',
    "training__learning_rate": "0.01",
}


def play(folder, reporter=None, **changes):
    settings, reporter = config(folder, **(GAME | changes)), reporter or RecordingReporter()
    with lock_run(new_run(settings, "games", "rl")):
        train(open_session(settings), RunFolder(folder), reporter)
    return reporter


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    folder = tmp_path_factory.mktemp("roles") / "run"
    return folder, play(folder)


def test_each_player_samples_and_trains_its_adapter(played):
    folder, reporter = played
    segments = [s for one in read_rollouts(rollouts_path(folder, 1)) for s in one.trajectory.segments]
    assert {(one.agent, one.policy) for one in segments} == {("first", "role_first"), ("second", "role_second")}
    for _, metrics in reporter.steps:
        assert metrics["mismatch/logprob_diff"] < 1e-5
        assert metrics["sync/probe_gap"] < 1e-4
        assert {"agent/reward/first", "agent/reward/second", "policy/kl_reference"} <= metrics.keys()
    ups = {}
    for step in (1, 2):
        saved = checkpoint_path(folder / "checkpoints", step)
        for place in (".", "role_first", "role_second"):
            tensors = load_file(saved / place / "adapter_model.safetensors")
            ups[step, place] = torch.cat([t.flatten() for name, t in sorted(tensors.items()) if "lora_B" in name])
        manifest = json.loads((saved / "trainer" / "manifest.json").read_text())
        assert "role_second/adapter_model.safetensors" in json.dumps(manifest)
    assert not ups[2, "."].any()
    assert not torch.equal(ups[1, "role_first"], ups[1, "role_second"])
    assert all(not torch.equal(ups[1, name], ups[2, name]) for name in ("role_first", "role_second"))


@pytest.mark.fault
def test_interrupted_run_resumes_with_all_adapters(played, tmp_path):
    with pytest.raises(RunInterrupted):
        play(tmp_path / "cut", InterruptingReporter(2))
    assert [step for step, _ in list_checkpoints(tmp_path / "cut" / "checkpoints")] == [1]
    assert main(["train", "--resume", str(tmp_path / "cut")]) == 0
    first, second = lasting_files(played[0]), lasting_files(tmp_path / "cut")
    assert [name for name in first if first[name] != second.get(name)] == []


REFUSED = {
    "engine.url": {"engine__url": "http://127.0.0.1:1"},
    "cluster.enabled": {"cluster__kind": "local"},
    "training.learner.shard": {"training__learner__shard": "true", "training__learner__ranks": "2"},
    "training.learner.replay_routing": {"training__learner__replay_routing": "true"},
    "staleness.replay.sources": {"staleness__replay__sources": '["runs/other"]'},
    "algorithm.loss = 'mixed_policy'": {"algorithm__preset": "mixed_policy"},
    "algorithm.advantage = 'gae'": {"algorithm__preset": "ppo"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_an_adapter_per_role_does_not_support_are_refused(tmp_path, name):
    with pytest.raises(ConfigError, match=rf"model\.lora\.roles cannot be combined with {re.escape(name)}\."):
        checked(tmp_path, **REFUSED[name])


def checked(folder, **changes):
    settings = config(folder, **(GAME | changes))
    check_role_policies(settings, algorithm_of(settings), build_world(settings.env, settings.rollout))


def test_roles_are_those_of_the_world(tmp_path):
    checked(tmp_path)
    checked(tmp_path, model__lora__roles='["first", "policy"]')
    with pytest.raises(ConfigError, match="names 'third', which is not a role of the world 'games'") as error:
        checked(tmp_path, model__lora__roles='["third"]')
    assert "first, second" in error.value.hint
    search = {"env__name": "search", "env__settings__game": "", "model__lora__roles": '["sub"]'}
    search = {name: value for name, value in (GAME | search).items() if not name.startswith("env__settings")}
    for depth, refusal in (("0", pytest.raises(ConfigError, match="names 'sub'")), ("1", nullcontext())):
        settings = config(tmp_path, **search, rollout__subagents__max_depth=depth)
        with refusal:
            check_role_policies(settings, algorithm_of(settings), build_world(settings.env, settings.rollout))


@pytest.mark.parametrize(("roles", "why"), [('["x", "x"]', "has 'x' twice"), ('["solver:code"]', "not solver:code")])
def test_names_of_roles_are_checked(tmp_path, roles, why):
    with pytest.raises(ConfigError, match=why):
        config(tmp_path, **(GAME | {"model__lora__roles": roles}))


def test_other_kinds_of_training_and_of_engines_refuse_roles(played):
    folder, _ = played
    words = ("--model.lora.roles", '["a"]', "--run.dir", folder / "no")
    assert "model.lora.roles needs agents, which only `ludus train` trains" in refused("sft", "search", *words)
    saved = checkpoint_path(folder / "checkpoints", 2)
    assert f"{saved} holds an adapter for each of several roles" in refused("eval", "games", "--model", saved)
    served = ("--run", folder, "--engine.url", "http://127.0.0.1:1")
    assert "model.lora.roles needs the embedded engine" in refused("eval", *served)


def test_evaluation_of_a_run_uses_its_adapters(played, tmp_path):
    said = ludus("eval", "--run", played[0], "--evaluation.tasks", "2", "--out", tmp_path)
    assert said.code == 0, said
    stored = list(tmp_path.rglob("*.jsonl.gz"))
    policies = {s.policy for path in stored for one in read_rollouts(path) for s in one.trajectory.segments}
    assert policies <= {"role_first", "role_second"}
    assert policies
