"""`ludus rewards auc`: rows by step and evaluation, AUC equal to a count over pairs, relations, and errors."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ludus.rollouts.rollout_files import read_rollouts, rollouts_path, write_rollouts
from ludus.training.reward_model.later_policies import bin_auc, load_single, rollout_bins
from ludus.training.run.run_dir import RunFolder
from tiny_run import cold_start, ludus, refused


@pytest.fixture(scope="module")
def run(tiny_run, tmp_path_factory) -> Path:
    """A copy of the tiny run in which the first sample of each group was right."""
    folder = Path(shutil.copytree(tiny_run, tmp_path_factory.mktemp("auc") / "policy"))
    for step in (1, 2):
        path = rollouts_path(folder, step)
        records = [
            replace(r, trajectory=replace(r.trajectory, rewards={"exact_match": float(r.trajectory.sample == 0)}))
            for r in read_rollouts(path)
        ]
        write_rollouts(path, records)
    return folder


@pytest.fixture(scope="module")
def model(run, tiny_run) -> Path:
    """A reward model of the same run with a random head."""
    folder = run.parent / "judge"
    shutil.copytree(cold_start(tiny_run), folder / "checkpoints" / "step-000001")
    generator = torch.Generator().manual_seed(0)
    head = {"weight": torch.randn(1, 48, generator=generator), "bias": torch.zeros(1)}
    save_file(head, folder / "checkpoints" / "step-000001" / "trainer" / "reward_pointwise.safetensors")
    text = (run / "config.toml").read_text()
    own = f'[reward_model]\nkind = "pointwise"\nrun = "{run}"\n'
    (folder / "config.toml").write_text(re.sub(r"\[reward_model\][^\[]*", "", text) + f"\n{own}")
    return folder


def test_rows_are_steps_and_evaluations_with_the_area_of_counted_pairs(run, model):
    said = ludus("rewards", "auc", run, "--model", model, "--every", "1")
    assert said.code == 0, said
    assert "trained on it" in said.out
    bins = rollout_bins(RunFolder(run), 1)
    assert [one.where for one in bins][:2] == ["steps 1 to 1", "steps 2 to 2"]
    assert any(one.where.startswith("evaluation ") for one in bins)
    ensemble = load_single(model, RunFolder(run))
    for one in bins[:2]:
        values = [p.mean for p in ensemble.predict_trajectories([r.trajectory for r in one.records], 4096)]
        right = [v for v, r in zip(values, one.records, strict=True) if r.trajectory.sample == 0]
        wrong = [v for v, r in zip(values, one.records, strict=True) if r.trajectory.sample]
        area = sum((a > b) + (a == b) / 2 for a in right for b in wrong) / (len(right) * len(wrong))
        assert bin_auc(ensemble, one, 4096).mean == pytest.approx(area)
        assert f"{area:.3f} [" in said.out
    (whole,) = [one for one in rollout_bins(RunFolder(run), 10) if one.where == "steps 1 to 10"]
    assert len(whole.records) == sum(len(one.records) for one in bins[:2])


def test_auc_needs_models_and_runs_with_rollouts(run, model, tmp_path):
    assert "needs a reward model" in refused("rewards", "auc", run)
    assert "--every is 0" in refused("rewards", "auc", run, "--model", model, "--every", "0")
    assert "does not contain a reward model" in refused("rewards", "auc", run, "--model", tmp_path)
    assert "takes no settings" in refused("rewards", "auc", run, "--model", model, "--run.seed", "1")
    assert "reads one run" in refused("rewards", "replay", run, run)
