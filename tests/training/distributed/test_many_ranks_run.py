"""Whole runs with a learner of two processes: equal to one process, and cleanup after the death of one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load
from torch.distributed import TCPStore

import small_runs
from ludus.diagnostics.trackers import read_metrics
from ludus.errors import LearnerError
from ludus.training.distributed.launcher import HEARTBEAT_TIMEOUT_S
from ludus.training.run.run_dir import RunFolder

pytestmark = pytest.mark.fault

SPLIT = {"training__learner__ranks": "2", "training__learner__shard": "true"}
SAME = ("reward/mean", "loss/total", "optim/grad_norm", "batch/trained_tokens", "critic/loss", "sync/probe_gap")


def start(folder: Path, *words: str, **changes: str) -> subprocess.Popen[str]:
    """`ludus train` of a small run, or of what is there."""
    command = ["train", "--resume", str(folder), *words]
    if not folder.exists():
        settings = small_runs.SMALLEST | changes
        command = ["train", "search", *small_runs.words(folder, **settings), *words]
    return subprocess.Popen(
        [sys.executable, "-m", "ludus", *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def run(folder: Path, *words: str, **changes: str) -> list[dict[str, float]]:
    process = start(folder, *words, **changes)
    _, error = process.communicate(timeout=500)
    assert process.returncode == 0, error
    return [row.metrics for row in read_metrics(RunFolder(folder).metrics)]


def wait_for(holds, seconds=300.0):
    """Wait until `holds()` is true; return its value."""
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def follower(leader: int) -> Path | None:
    """The process that follows, in /proc."""
    for name in Path(f"/proc/{leader}/task/{leader}/children").read_text().split():
        place = Path("/proc") / name
        if b"ludus.training.rl.rank_worker" in (place / "cmdline").read_bytes():
            return place
    return None


@pytest.mark.parametrize("shard", ["true", "false"])
def test_run_with_two_ranks_equals_the_run_with_one(tmp_path, shard):
    with_critic = {"algorithm__preset": "ppo", "training__minibatches": "2"}
    two = run(tmp_path / "two", **with_critic, **SPLIT | {"training__learner__shard": shard})
    one = run(tmp_path / "one", **with_critic)
    assert len(two) == len(one) == 2
    for name in SAME:
        assert two[0][name] == pytest.approx(one[0][name], abs=1e-4), name
    found = run(tmp_path / "two", "--training.steps", "3", "--training.learner.ranks", "1")
    assert len(found) == 3


def test_run_under_torchrun_writes_the_same_files(tmp_path):
    """New and resumed: what follows a leader under torchrun goes another way than a follower of ours."""
    ours, theirs = tmp_path / "ours", tmp_path / "torchrun"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    new = ["search", *small_runs.words(theirs, **small_runs.SMALLEST, training__learner__shard="true")]
    more = ["--training.steps", "3"]
    run(ours, **SPLIT)
    run(ours, *more)
    for words in (new, ["--resume", str(theirs), *more]):
        command = [*torchrun, "-m", "ludus", "train", *words]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=500)
        assert ended.returncode == 0, ended.stderr
    found, expected = small_runs.lasting_files(theirs), small_runs.lasting_files(ours)
    assert found.keys() == expected.keys()
    shards = [name for name in expected if "/shards/" in name]  # the order of their metadata is random
    assert shards
    for name in shards:
        ours_by_name, theirs_by_name = load(expected.pop(name)), load(found[name])
        assert ours_by_name.keys() == theirs_by_name.keys()
        assert [key for key, tensor in ours_by_name.items() if not torch.equal(tensor, theirs_by_name[key])] == []
    differing = {name for name in expected if found[name] != expected[name]}
    assert differing <= {f"{Path(name).parents[1]}/manifest.json" for name in shards}  # it has digests of the shards


def test_one_step_mode_with_two_ranks_equals_one_rank(tmp_path):
    behind = {"training__mode": "one_step", "training__steps": "3"}
    two = run(tmp_path / "two", **behind, **SPLIT)
    one = run(tmp_path / "one", **behind)
    assert len(two) == len(one) == 3
    for name in SAME:
        if name in one[1]:
            assert two[1][name] == pytest.approx(one[1][name], abs=1e-3), name


def test_dry_run_on_two_ranks_does_not_change_the_run(tmp_path):
    with_one, without = (
        run(tmp_path / word, **SPLIT, training__steps="1", training__learner__dry_run=word)
        for word in ("always", "never")
    )
    for name in (*SAME, "sync/probe_gap"):
        if name in without[0]:
            assert with_one[0][name] == without[0][name], name
    lines = [line for line in (tmp_path / "always" / "log.txt").read_text().splitlines() if "dry run:" in line]
    assert sorted("rank 1:" in line for line in lines) == [False, True]


def test_async_run_works_with_two_learner_ranks(tmp_path):
    folder = tmp_path / "run"
    streamed = {"training__mode": "async", "staleness__max_staleness": "2"}
    found = run(folder, **streamed, training__steps="4", **SPLIT)
    assert len(found) == 4
    assert max(row["staleness/max"] for row in found) <= 2
    gaps = [row["sync/probe_gap"] for row in found if "sync/probe_gap" in row]  # proved beside the next step
    assert gaps
    assert max(gaps) < 1e-3
    assert len(run(folder, "--training.steps", "6", "--training.learner.ranks", "1")) == 6


def test_run_reports_an_exited_rank_and_can_resume(tmp_path):
    folder = tmp_path / "run"
    process = start(folder, training__steps="40", **SPLIT)
    place = wait_for(lambda: folder.exists() and follower(process.pid))
    wait_for((folder / "checkpoints" / "step-000001").exists)
    subprocess.run(["kill", "-9", place.name], check=True)
    _, error = process.communicate(timeout=300)
    assert process.returncode not in (0, None)
    assert "A learner rank has exited: rank 1 (-9)" in error
    assert "ludus train --resume" in error
    log = (folder / "log.txt").read_text().splitlines()
    assert any("rank 1: ready" in line for line in log)
    assert "learner failed: A learner rank has exited: rank 1 (-9)" in log[-2]
    assert "Loading weights" not in error  # progress bars are no reason
    done = len(read_metrics(RunFolder(folder).metrics))
    assert len(run(folder, "--training.steps", str(done + 1))) == done + 1


@pytest.mark.parametrize("shard", ["true", "false"])
def test_stopped_rank_is_named_within_the_timeout(tmp_path, shard):
    folder, limit_s = tmp_path / "run", 30.0
    settings = {"training__learner__shard": shard, "training__learner__rank_timeout_s": str(limit_s)}
    process = start(folder, training__steps="40", **SPLIT | settings)
    place = wait_for(lambda: folder.exists() and follower(process.pid))
    wait_for((folder / "checkpoints" / "step-000001").exists)
    os.kill(int(place.name), signal.SIGSTOP)
    begin = time.monotonic()
    _, error = process.communicate(timeout=300)
    assert time.monotonic() - begin < limit_s + HEARTBEAT_TIMEOUT_S + 20  # of a step before, and of the end
    assert process.returncode == LearnerError.exit_code
    assert f"is suspended or lost: rank 1 ({place.name} on " in error
    assert not place.exists()


def test_stopped_rank_under_torchrun_is_named(tmp_path):
    folder = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    changes = {"training__steps": "40", "training__learner__rank_timeout_s": "30"}
    words = ["search", *small_runs.words(folder, **small_runs.SMALLEST | changes)]
    process = subprocess.Popen(
        [*torchrun, "-m", "ludus", "train", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    wait_for((folder / "checkpoints" / "step-000001").exists)
    said = (folder / "log.txt").read_text()
    other = int(re.search(r"rank 1: ready \(process (\d+)\)", said)[1])
    os.kill(other, signal.SIGSTOP)
    _, error = process.communicate(timeout=300)
    assert process.returncode != 0
    assert f"is suspended or lost: rank 1 ({other} on " in error
    assert not (Path("/proc") / str(other)).exists()


def test_torchrun_rank_times_out_waiting_for_a_missing_leader(tmp_path):
    """On another machine than the leader's nobody else would end it."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "RANK": "1", "WORLD_SIZE": "2"}
    launched = {"TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    words = small_runs.words(tmp_path / "run", training__learner__rank_timeout_s="3")
    ended = subprocess.run(
        [sys.executable, "-m", "ludus", "train", "search", *words],
        env=os.environ | place | launched,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == LearnerError.exit_code
    assert "rendezvous failed: rank 0 did not join within 3 s" in ended.stderr


def test_ranks_exit_with_rank_0(tmp_path):
    folder = tmp_path / "run"
    process = start(folder, training__steps="40", **SPLIT)
    place = wait_for(lambda: folder.exists() and follower(process.pid))
    wait_for((folder / "checkpoints" / "step-000001").exists)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait_for(lambda: not place.exists() or "Z" in (place / "stat").read_text().split()[2], 60)
