"""Two models that play against each other are trained by two runs in one process."""

import asyncio
import runpy
from importlib import resources
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

EXAMPLE = Path(__file__).parents[1] / "examples" / "two_models.py"


@pytest.mark.slow
def test_both_models_of_a_game_are_trained(tmp_path):
    start = resources.files("ludus.recipes") / "games" / "cold_start"
    example = runpy.run_path(str(EXAMPLE))
    runs = asyncio.run(example["train"]([str(start)] * 2, steps=2, folder=tmp_path, group_size=4))
    for first, second in zip(*(run.metrics for run in runs), strict=True):
        assert first["episodes/count"] == second["episodes/count"] == 24
        assert 0.8 < first["reward/mean"] + second["reward/mean"] < 1.0001  # 1/2 in a game with an illegal move
    before, *after = (load_file(path / "model.safetensors") for path in (start, *(run.checkpoint for run in runs)))
    assert not any(all(torch.equal(own[name], tensor) for name, tensor in before.items()) for own in after)
    assert not all(torch.equal(after[0][name], after[1][name]) for name in before)
