"""The GPU benchmark runs without a GPU, and its figures are consistent."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu")


def run(gpu, folder, *parts):
    out = folder / "gpu.json"
    status = gpu.main(["--device", "cpu", "--size", "tiny", "--parts", *parts, "--json", str(out)])
    return status, {part["name"]: part for part in json.loads(out.read_text())["parts"]}


@pytest.mark.scale
def test_parts_with_random_weights_run_on_the_cpu(gpu, tmp_path):
    status, found = run(gpu, tmp_path, "engine", "learner", "transfer", "sleep")
    assert (status, [part["error"] for part in found.values()]) == (0, [""] * 4)
    for row in found["engine"]["rows"]:
        assert 0 < row["share of the bound"] < 1
        assert row["decode step, ms"] * row["tokens/s"] == pytest.approx(1e3 * row["batch"])  # all passes decode
    (learner,), (transfer,) = found["learner"]["rows"], found["transfer"]["rows"]
    assert 0 < learner["MFU"] < 1
    assert 0 < transfer["largest difference on the probe, nats"] < 1e-3


def test_model_flops_count_weights_and_causal_attention(gpu):
    model = gpu.Setup("cpu", "tiny").model()
    weights = sum(p.numel() for p in model.parameters())
    attention = 2 * 4 * 8 * 32 / 2  # layers, heads, width, half of a row
    assert gpu.model_flops(model, 3, 32) == 6 * 3 * 32 * (weights + attention * 2)


@pytest.mark.scale
def test_a_failed_part_is_reported_and_the_others_run(gpu, tmp_path, monkeypatch, capsys):
    def fail(setup):
        raise gpu.PartFailed("wrong", [{"check": "one", "error": "why"}])

    monkeypatch.setitem(gpu.PARTS, "transfer", fail)
    status, found = run(gpu, tmp_path, "transfer", "sleep")
    assert status == 1
    assert found["transfer"]["error"] == "PartFailed: wrong"
    assert found["sleep"]["error"] == ""
    assert "| one | why |" in capsys.readouterr().out


@pytest.mark.scale
def test_conformance_and_training_parts_pass_on_the_cpu(gpu, tmp_path):
    status, found = run(gpu, tmp_path, "conformance", "train")
    assert (status, found["conformance"]["rows"][0]["failed"]) == (0, 0)
    assert found["train"]["rows"][0]["steps"] == 1
