"""Sharded weights: the losses, gradients, steps and checkpoints of one process."""

from __future__ import annotations

import copy
import json
import re
import resource
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import distributed

import sharded_ranks
from ludus.engines.temporary import TemporaryFolder
from ludus.errors import LearnerError, StorageError, UserError
from ludus.training.batches.rows import balance_rows, row_of_segments
from ludus.training.distributed.collectives import decoder_layers, is_sharded
from ludus.training.distributed.launcher import LeaderRank, RankGroup, Rendezvous, destroy_group
from ludus.training.run import checkpoint as checkpoints
from ludus.types import Segment
from rank_processes import in_processes
from tests.training.learner.test_learner import learner, random_rows, tiny_model

SCRIPT = Path(sharded_ranks.__file__)
POLICIES = ["plain", "lora", "untied", "recomputed", "experts"]
LEARNERS = [f"{kind}:float64" for kind in POLICIES] + ["plain:float32", "lora:float32", "padded:float32"]
CRITICS = ["critic:float64", "critic:float32"]


@pytest.fixture
def group_of_one():
    """This process as the only one of a group."""
    rendezvous = Rendezvous.create(1, 60.0)
    rendezvous.form_group(torch.device("cpu"))
    yield rendezvous
    destroy_group()


def differences(found, expected):
    """The largest difference of each kind of number, by its name without the last part."""
    assert found.keys() == expected.keys()
    worst = {}
    for name, value in expected.items():
        kind = name.rpartition("/")[0]
        gap = float((found[name] - value).abs().max()) if value.numel() else 0.0
        worst[kind] = max(worst.get(kind, 0.0), gap)
    return worst


def gradient_differences(found, expected):
    """The largest difference of each case's gradients, as a share of the largest number in them."""
    size, gap = {}, {}
    for name, value in expected.items():
        kind, of_gradient, _ = name.partition("/gradient/")
        if of_gradient:
            size[kind] = max(size.get(kind, 0.0), float(value.abs().max()))
            gap[kind] = max(gap.get(kind, 0.0), float((found[name] - value).abs().max()))
    assert min(size.values()) > 1e-3
    return {kind: gap[kind] / size[kind] for kind in size}


@pytest.mark.slow
def test_one_rank_with_sharded_weights_equals_unsharded_training(group_of_one):
    cases = ["plain:float64", "critic:float64"]
    split = sharded_ranks.results(*cases)
    destroy_group()
    whole = sharded_ranks.results(*cases)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    assert max(differences(split, whole).values()) < 1e-10


@pytest.mark.slow
def test_sharded_checkpoint_loads_with_and_without_sharding(group_of_one, tmp_path):
    before, _, _ = sharded_ranks.saves("plain", tmp_path)
    destroy_group()
    checkpoint = tmp_path / "step-000002"
    found, _, _ = sharded_ranks.resumes("plain", checkpoint)
    model = tiny_model()
    sharded_ranks.load_weights(checkpoint, model)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    assert max(differences(found, before).values()) == 0
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[f"policy/{name}"])
    for path in (checkpoint / "trainer" / "shards").iterdir():
        path.write_bytes(b"no tensors")
    with pytest.raises(StorageError, match="broken"):
        sharded_ranks.resumes("plain", checkpoint)


@contextmanager
def full_disk(num_bytes):
    """No file may grow beyond so many bytes for the time of a block."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
def test_full_disk_while_writing_shards_raises_storage_error(group_of_one, tmp_path):
    with full_disk(1000), pytest.raises(StorageError, match=r"Rank 0 could not write its shards.*resume"):
        sharded_ranks.saves("plain", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_equal_shards_are_written_as_equal_files(group_of_one, tmp_path):
    shelves = [tmp_path / name for name in "ab"]
    for shelf in shelves:
        sharded_ranks.saves("plain", shelf)
    first, second = (
        {path.name: path.read_bytes() for path in (shelf / "step-000002" / "trainer" / "shards").iterdir()}
        for shelf in shelves
    )
    assert [name.endswith(".safetensors") for name in first] == [True]
    assert first == second


@pytest.mark.slow
def test_shards_are_files_of_bounded_size(group_of_one, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "SHARD_BYTES", 20_000)
    before, _, _ = sharded_ranks.saves("plain", tmp_path)
    folder = tmp_path / "step-000002"
    files = sorted((folder / "trainer" / "shards").iterdir())
    largest = max(p.numel() * p.element_size() for p in tiny_model().parameters())
    assert len(files) > 5
    assert all(len(contents(path)[1]) < 20_000 + largest for path in files)
    found, _, _ = sharded_ranks.resumes("plain", folder)
    assert max(differences(found, before).values()) == 0
    next(path for path in files if any(key.startswith("optimizer/") for key in contents(path)[0])).unlink()
    with pytest.raises(LearnerError, match="optimizer state does not match"):
        sharded_ranks.resumes("plain", folder)


def contents(path):
    """The header of a safetensors file, and its data."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:start]), data[start:]


@pytest.mark.fault
def test_two_ranks_with_sharded_weights_equal_one_rank():
    expected = sharded_ranks.results(*LEARNERS, *CRITICS)
    for found in in_processes(SCRIPT, "results", 2, *LEARNERS, *CRITICS):
        for kind, gap in differences(found, expected).items():
            exact = "float64" in kind
            # Adam divides by the size of a gradient, however small it is, and so enlarges its rounding
            moved_by_adam = kind.partition("/")[2] in ("weights", "score", "value")
            assert gap < (1e-10 if exact else 1e-4 if moved_by_adam else 1e-5), (kind, gap)
        for kind, gap in gradient_differences(found, expected).items():
            assert gap < (1e-10 if "float64" in kind else 1e-5), (kind, gap)


@pytest.mark.fault
def test_dry_run_on_two_ranks_estimates_their_total_memory():
    weights = sum(p.numel() * 4 for p in tiny_model(torch.float32).parameters())
    found = {split: in_processes(SCRIPT, "dry_runs", 2, split) for split in ("split", "whole")}
    for estimate, said, clean in [*found["split"], *found["whole"]]:
        assert estimate.tokens == 90
        assert estimate.gradients == estimate.weights
        assert clean
        assert "Not enough memory: the longest microbatch" in said
        assert "all 2 ranks here need" in said  # each alone would fit
    assert [estimate.weights for estimate, _, _ in found["whole"]] == [weights, weights]
    assert sum(estimate.weights for estimate, _, _ in found["split"]) == weights


@pytest.mark.fault
@pytest.mark.parametrize("kind", ["plain", "lora"])
def test_two_rank_checkpoint_resumes_on_one_two_and_four_ranks(tmp_path, kind):
    before, metrics, after = in_processes(SCRIPT, "saves", 2, kind, str(tmp_path))[0]
    checkpoint = str(tmp_path / "step-000002")
    for count in (1, 2, 4):
        if count == 1:
            results = [sharded_ranks.resumes(kind, checkpoint)]
        else:
            results = in_processes(SCRIPT, "resumes", count, kind, checkpoint)
        for found, found_metrics, found_after in results:
            assert max(differences(found, before).values()) == 0
            if count == 2:
                assert max(differences(found_after, after).values()) == 0
                assert found_metrics == metrics
            assert max(differences(found_after, after).values()) < 1e-10
            assert found_metrics == pytest.approx(metrics, abs=1e-10)
    for path in sorted((tmp_path / "step-000002" / "trainer" / "shards").iterdir()):
        moved = path.rename(path.with_suffix(".gone"))
        with pytest.raises(StorageError, match="broken: it lacks a part of optimizer/"):
            sharded_ranks.resumes(kind, checkpoint)
        moved.rename(path)


@pytest.mark.fault
def test_one_rank_checkpoint_resumes_on_two_ranks(tmp_path):
    before, metrics, after = sharded_ranks.saves("plain", str(tmp_path))
    for found, found_metrics, found_after in in_processes(SCRIPT, "resumes", 2, "plain", str(tmp_path / "step-000002")):
        assert max(differences(found, before).values()) == 0
        assert max(differences(found_after, after).values()) < 1e-10
        assert found_metrics == pytest.approx(metrics, abs=1e-10)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3, 12])
def test_rows_are_distributed_once_and_evenly(count, shared):
    rows = random_rows(num=9)
    parts = balance_rows(rows, count, shared=shared)
    assert len(parts) == count
    assert sorted(i for part in parts for i in part) == list(range(9))
    sizes = [sum(len(rows[i].tokens) for i in part) for part in parts]
    longest = max(len(row.tokens) for row in rows)
    assert max(sizes) - sum(sizes) / count <= longest


def test_rows_of_one_prompt_are_assigned_to_one_rank():
    prompts = [tuple(range(k, k + 40)) for k in (0, 100, 200, 300)]
    rows = [row_of_segments([Segment("prompt", (*p, t))]) for t in (7, 8) for p in prompts]
    for part in balance_rows(rows, 2):
        starts = [rows[i].tokens[0] for i in part]
        assert len(starts) == 4
        assert all(starts.count(start) == 2 for start in starts)


def test_decoder_layers_returns_the_model_layers():
    model = tiny_model()
    assert decoder_layers(model) == list(model.model.layers)
    with pytest.raises(UserError, match="no list of layers"):
        decoder_layers(torch.nn.Linear(2, 2))


@pytest.mark.fault
def test_an_out_of_memory_error_is_raised_on_all_ranks():
    """They would wait for it until their time is up."""
    for said, seconds in in_processes(SCRIPT, "short_of_memory", 2):
        assert len(said) == 2
        assert all(
            re.fullmatch(r"One row of \d+ tokens .* memory\. \(rank 1 of 2\) Set model\.act.*", words) for words in said
        ), said
        assert seconds < 60


def test_model_is_sharded_in_place_without_affecting_its_copy(group_of_one):
    model = tiny_model()
    other = copy.deepcopy(model)
    sharded_ranks.ranks_here().shard_model(model)
    assert is_sharded(model)
    assert not is_sharded(other)


def test_error_of_an_exited_rank_is_raised_on_rank_0(group_of_one):
    others = RankGroup(TemporaryFolder("ludus-ranks-"))
    with (others.folder.path / "output-1").open("wb") as said:
        command = [sys.executable, "-c", "raise SystemExit('the disk is full')"]
        others.processes.append(subprocess.Popen(command, stderr=said))
    with pytest.raises(LearnerError, match=r"rank 1 .* the disk is full"):
        others.gather(Rendezvous.create(2, 60.0))  # nobody waits to meet it
    leader = LeaderRank(group_of_one, others, None)
    with pytest.raises(LearnerError, match=r"rank 1 .* the disk is full"), leader.call_on_ranks("stop"):
        raise RuntimeError("Connection closed by peer")
    others.close()


def test_infinite_advantage_raises_with_a_sharded_model(group_of_one):
    model = tiny_model()
    sharded_ranks.ranks_here().shard_model(model)
    one = learner(model)
    rows = [replace(row, advantages=(float("inf"),) * len(row.tokens)) for row in random_rows()]
    with pytest.raises(LearnerError, match=r"An advantage of .* is inf"):
        one.train(rows, seed=0)
    assert all(parameter.grad is None for parameter in model.parameters())
