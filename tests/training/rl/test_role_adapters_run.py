"""Runs with an adapter for each role: games by two adapters, sub-agents with their own, refused settings."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from ludus.cli.main import main
from ludus.envs.registry import build_world
from ludus.errors import ConfigError
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path
from ludus.training.rl.build import train
from ludus.training.rl.validate import check_settings
from ludus.training.run.checkpoint import checkpoint_path
from ludus.training.run.run_dir import RunFolder, lock_run, new_run
from ludus.training.run.session import open_session
from small_runs import SMALLEST, InterruptingReporter, RecordingReporter, RunInterrupted, config, lasting_files
from tiny_run import refused

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


def test_interrupted_run_resumes_with_all_adapters(played, tmp_path):
    with pytest.raises(RunInterrupted):
        play(tmp_path / "cut", InterruptingReporter(1))
    assert main(["train", "--resume", str(tmp_path / "cut")]) == 0
    first, second = lasting_files(played[0]), lasting_files(tmp_path / "cut")
    assert [name for name in first if first[name] != second.get(name)] == []
