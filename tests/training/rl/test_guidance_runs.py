"""Guidance, SDPO and SDFT in whole runs of the guess world: metrics, accounting, bit-identical resumption."""

from __future__ import annotations

import json

import pytest

from ludus.cli.main import main
from ludus.config.load import load_config
from ludus.rollouts.rollout_files import read_rollouts
from ludus.training.rl.build import train
from ludus.training.run.run_dir import RunFolder, lock_run, new_run
from ludus.training.run.session import open_session
from small_runs import InterruptingReporter, RecordingReporter, RunInterrupted, lasting_files
from tiny_run import cold_start, make_recipe

WORDS = {
    "env.name": "guess",
    "env.settings.sizes": "[5]",
    "env.settings.largest": "7",
    "rollout.max_turns": "2",
    "rollout.max_tokens_per_turn": "8",
    "evaluation.tasks": "2",
    "evaluation.every": "9",
    "evaluation.temperatures": "[0.0]",
    "training.prompts_per_step": "4",
    "algorithm.group_size": "2",
}
KINDS = {
    "guidance": {"training.guidance.samples": "4", "training.guidance.actions": "2"},
    "sdpo": {"algorithm.preset": "sdpo", "algorithm.options.loss.weight": "0.5"},
    "sdft": {"algorithm.preset": "sdft", "model.lora.rank": "2"},
}


def run(tiny_run, folder, kind, reporter):
    settings = WORDS | KINDS[kind] | {"run.dir": str(folder), "model.path": str(cold_start(tiny_run))}
    words = [word for key, value in settings.items() for word in (f"--{key}", value)]
    config = load_config(make_recipe(folder.parent), words)
    with lock_run(new_run(config, "guess", "rl")):
        train(open_session(config), RunFolder(folder), reporter)
    return [metrics for _, metrics in reporter.steps]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_run_equals_the_uninterrupted_one(kind, tiny_run, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    steps = run(tiny_run, whole, kind, RecordingReporter())
    for number, metrics in enumerate(steps, start=1):
        assert metrics["ledger/started"] == metrics["episodes/count"] == 8
        records = list(read_rollouts(whole / "rollouts" / f"step-{number:06d}.jsonl.gz"))
        assert len(records) == 8
        if "training.guidance.samples" in KINDS[kind]:
            attempts = metrics["guidance/failed_groups"] * int(KINDS[kind]["training.guidance.samples"])
            assert metrics["guidance/attempts"] == attempts > 0
            trained = metrics["ledger/trained"] + metrics["guidance/trained"]
            assert metrics["batch/trained_rows"] == trained
            assert metrics["mismatch/logprob_diff"] < 1e-4
        else:
            assert metrics["sdpo/taught"] > 0
            assert 0 < metrics["sdpo/divergence"] < 0.7
    if kind == "guidance":
        assert sum(metrics["guidance/trained"] for metrics in steps) > 0
    assert ("experts/count" in steps[0]) is False
    with pytest.raises(RunInterrupted):
        run(tiny_run, cut, kind, InterruptingReporter(2))
    assert main(["train", "--resume", str(cut)]) == 0
    one, other = lasting_files(whole), lasting_files(cut)
    assert [name for name in one if one[name] != other.get(name)] == []
    state = json.loads((whole / "checkpoints" / "step-000002" / "trainer" / "state.json").read_text())
    assert state["step"] == 2
