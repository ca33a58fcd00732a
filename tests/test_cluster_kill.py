"""A learner with a cluster that is killed at random moments, and resumed, with its cluster or without."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cluster_runs import CLUSTER, all_gone, started
from ludus.training.run import RunFolder
from small_runs import SMALLEST, lasting_files, start, words
from test_kill import NUM_KILLS, finish, kill_after

pytestmark = pytest.mark.cluster

RUN = SMALLEST | CLUSTER | {"cluster__engines": "1", "cluster__reward_workers": "1", "training__steps": "3"}


def nothing_is_left(folder: Path) -> bool:
    """Whether the roles that a run's log names are gone with their learner."""
    if not (folder / "log.txt").exists():
        return True
    return all_gone(set().union(*started(RunFolder(folder)).values()), 60)


def test_a_learner_killed_twenty_times_and_resumed_writes_the_files_of_one_process(tmp_path):
    alone, whole = tmp_path / "alone", tmp_path / "whole"
    finish("train", "search", *words(alone, **RUN | {"cluster__kind": "none"}))
    seconds = finish("train", "search", *words(whole, **RUN))
    expected, rng = lasting_files(alone), random.Random(17)
    assert lasting_files(whole) == expected
    kills = rounds = resumed = 0
    while kills < NUM_KILLS:
        folder = tmp_path / str(rounds)
        arguments = ["train", "search", *words(folder, **RUN)]
        ended = False
        while kills < NUM_KILLS and not ended:
            ended = kill_after(start(*arguments), folder, rng, seconds) == "finished"
            assert nothing_is_left(folder)
            kills += not ended
            if (folder / "config.toml").is_file() and (folder / "run.json").is_file():
                kind = rng.choice(["local", "local", "none"])
                arguments = ["train", "--resume", str(folder), "--cluster", kind]
                resumed += (folder / "checkpoints" / "step-000001").is_dir()
        if not ended:
            finish(*arguments)
        assert lasting_files(folder) == expected
        rounds += 1
    assert resumed >= 3  # and not only begun anew
