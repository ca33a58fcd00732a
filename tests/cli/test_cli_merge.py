"""`ludus merge` and the formulas of merging."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from ludus.engines.models.merging import merge_tensors, merge_weights
from tiny_run import cold_start, ludus, refused


def test_linear_and_task_arithmetic_against_their_formulas():
    torch.manual_seed(0)
    a, b, base = (torch.randn(3, 4, dtype=torch.float64) for _ in range(3))
    mean = merge_tensors([a, b], [1.0, 3.0])
    assert torch.allclose(mean, (a + 3 * b) / 4, atol=1e-6)
    added = merge_tensors([a, b], [0.5, 1.0], "task_arithmetic", base)
    assert torch.allclose(added, base + 0.5 * (a - base) + (b - base), atol=1e-6)
    with pytest.raises(ValueError, match="needs a base"):
        merge_tensors([a, b], [1.0, 1.0], "ties")


def test_ties_trims_elects_signs_and_averages_the_agreeing_entries():
    base = torch.tensor([1.0, 1.0, 1.0, 1.0])
    a = base + torch.tensor([4.0, -3.0, 0.1, 2.0])  # half of the entries: 4, -3
    b = base + torch.tensor([2.0, 5.0, 0.2, -0.1])  # half of the entries: 2, 5
    merged = merge_tensors([a, b], [1.0, 1.0], "ties", base, density=0.5)
    assert merged.tolist() == pytest.approx([1 + 3.0, 1 + 5.0, 1.0, 1.0])
    weighted = merge_tensors([a, b], [3.0, 1.0], "ties", base, density=0.5)
    assert weighted.tolist() == pytest.approx([1 + (3 * 4 + 2) / 4, 1 - 3.0, 1.0, 1.0])


def test_models_of_other_shapes_are_rejected():
    with pytest.raises(ValueError, match="w is"):
        merge_weights([{"w": torch.zeros(2)}, {"w": torch.zeros(3)}], [1.0, 1.0])


def test_command_writes_a_model_that_loads(tiny_run, tmp_path):
    out, run, start = tmp_path / "merged", tiny_run, cold_start(tiny_run)
    said = ludus("merge", run, start, "--weights", "1", "3", "--out", out)
    assert said.code == 0, said
    newest = sorted((tiny_run / "checkpoints").iterdir())[-1]
    first, second = (load_file(next(path.glob("model*.safetensors"))) for path in (newest, start))
    merged = load_file(out / "model.safetensors")
    for name, tensor in merged.items():
        assert torch.allclose(tensor, (first[name] + 3 * second[name]) / 4, atol=1e-6)
    assert (out / "tokenizer.json").is_file()
    assert "exists" in refused("merge", run, start, "--out", out)
    assert "2 models and 1 weights" in refused("merge", run, start, "--weights", "1", "--out", tmp_path / "x")
    assert "do not fit" in refused("merge", run, start, "--method", "ties", "--out", tmp_path / "x")
