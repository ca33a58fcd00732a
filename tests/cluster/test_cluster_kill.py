"""A learner with a cluster is killed at random times and resumed, with and without a cluster."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from datetime import datetime
from pathlib import Path

import pytest

from cluster_runs import CLUSTER, all_gone, started
from ludus.training.run.run_dir import RunFolder
from small_runs import SMALLEST, lasting_files, start, words
from tests.training.run.test_kill import NUM_KILLS, finish

pytestmark = pytest.mark.cluster

RUN = SMALLEST | CLUSTER | {"cluster__engines": "1", "cluster__reward_workers": "1", "training__steps": "3"}
NUM_ROLES = 4


def nothing_is_left(folder: Path) -> bool:
    """Whether the roles that a run's log names are gone with their learner."""
    if not (folder / "log.txt").exists():
        return True
    return all_gone(set().union(*started(RunFolder(folder)).values()), 60)


def seconds_of_work(folder: Path) -> float:
    """From the start of the last role to the last checkpoint, by the log."""
    lines = (folder / "log.txt").read_text().splitlines()
    ends = [[line for line in lines if words in line][-1] for words in (" runs at ", "checkpoint of")]
    begin, end = (datetime.strptime(line.partition(",")[0], "%Y-%m-%d %H:%M:%S") for line in ends)
    return max(1.0, (end - begin).total_seconds())


def num_started(folder: Path) -> int:
    """Roles that have begun in this folder, in all its runs."""
    log = folder / "log.txt"
    return log.read_text().count(" runs at ") if log.exists() else 0


def kill_while_it_trains(process: subprocess.Popen[bytes], folder: Path, rng: random.Random, seconds: float) -> bool:
    """Kill at a random moment once all roles are there, or now and then before; False where it has ended."""
    wanted = num_started(folder) + rng.choice([1, NUM_ROLES, NUM_ROLES, NUM_ROLES])
    while process.poll() is None and num_started(folder) < wanted:
        time.sleep(0.02)
    deadline = time.monotonic() + rng.uniform(0, seconds)
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    if process.poll() is not None:
        assert process.returncode == 0
        return False
    process.send_signal(signal.SIGKILL)
    process.wait()
    return True


def test_repeatedly_killed_and_resumed_run_matches_the_single_process_run(tmp_path):
    """Each run is killed some times, and then ends with its cluster or without, in turn."""
    alone, whole = tmp_path / "alone", tmp_path / "whole"
    finish("train", "search", *words(alone, **RUN | {"cluster__kind": "none"}))
    finish("train", "search", *words(whole, **RUN))
    expected, rng = lasting_files(alone), random.Random(17)
    assert lasting_files(whole) == expected
    seconds = seconds_of_work(whole)
    kills = rounds = resumed = 0
    while kills < NUM_KILLS:
        folder = tmp_path / str(rounds)
        arguments = ["train", "search", *words(folder, **RUN)]
        for _ in range(rng.randint(2, 4)):
            if not kill_while_it_trains(start(*arguments), folder, rng, seconds):
                break
            kills += 1
            assert nothing_is_left(folder)
            resumed += any((folder / "checkpoints").glob("step-*"))
            arguments = ["train", "--resume", str(folder)]
        finish("train", "--resume", str(folder), "--cluster", ("local", "none")[rounds % 2])
        assert lasting_files(folder) == expected
        rounds += 1
    assert resumed >= NUM_KILLS / 8  # and not only begun anew
