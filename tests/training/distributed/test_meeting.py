"""Rendezvous of learner processes: silent, failed and missing ranks."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ludus.engines.temporary import TemporaryFolder
from ludus.errors import LearnerError
from ludus.training.distributed import launcher
from ludus.training.distributed.launcher import RankGroup, Rendezvous, destroy_group

CPU = torch.device("cpu")


def test_ranks_without_heartbeat_or_error_are_reported_as_lost(monkeypatch):
    monkeypatch.setattr(launcher, "HEARTBEAT_TIMEOUT_S", 1.5)
    leader = Rendezvous.create(1, 5.0)
    leader.form_group(CPU)
    destroy_group()
    place = Rendezvous(leader.store, 9, 4, 5.0)  # another's view of the same store
    for rank in (1, 2):
        leader.store.set(f"heartbeat/{rank}", f"7 {rank}000 on host")
    Rendezvous(leader.store, 2, 4, 5.0).store_error("StorageError: the disk is full")
    assert place.lost_ranks() == {1: "1000 on host", 3: ""}  # 0 gives signs, 2 left words
    assert place.errors() == "rank 2: StorageError: the disk is full"


def test_missing_rank_is_named_in_the_rendezvous_error():
    with pytest.raises(LearnerError, match=r"rendezvous failed: rank 1 did not join within 1 s"):
        Rendezvous.create(2, 1.0).form_group(CPU)


def test_ranks_do_not_wait_for_a_rank_0_that_did_not_start(monkeypatch):
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LearnerError, match="rendezvous failed"):
        Rendezvous.join(1.0)


def test_rank_that_does_not_start_is_named_and_killed():
    others = RankGroup(TemporaryFolder("ludus-ranks-"))
    others.processes.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
    with pytest.raises(LearnerError, match=r"rank 1 did not start within 0.1 s"):
        others.gather(Rendezvous.create(2, 0.1))
    others.close()
    assert others.processes[0].returncode == -9
    assert not others.folder.path.exists()


def test_other_ranks_are_stopped_if_one_fails_to_start():
    others, begin = RankGroup(TemporaryFolder("ludus-ranks-")), time.monotonic()
    for program in ("import time; time.sleep(60)", "raise SystemExit('no such model')"):
        with (others.folder.path / f"output-{len(others.processes) + 1}").open("wb") as said:
            others.processes.append(subprocess.Popen([sys.executable, "-c", program], stderr=said))
    with pytest.raises(LearnerError, match=r"rank 2 \(1\): no such model"):
        others.gather(Rendezvous.create(3, 60.0))
    others.close()
    assert time.monotonic() - begin < 15


_MEETS = """
import os, subprocess, sys, torch
from ludus.engines.temporary import TemporaryFolder
from ludus.errors import LearnerError
from ludus.training.distributed.launcher import RankGroup, Rendezvous, connect
rendezvous, others = Rendezvous.create(2, 120.0), RankGroup(TemporaryFolder("ludus-ranks-"))
with (others.folder.path / "output-1").open("wb") as said:
    command, environment = [sys.executable, "-c", sys.argv[1]], os.environ | rendezvous.variables(1)
    others.processes.append(subprocess.Popen(command, stdout=said, stderr=said, env=environment))
others.gather(rendezvous)
try:
    connect(rendezvous, others, torch.device("cpu"), None)
except LearnerError as error:
    print(error)
others.close()
"""
_FOLLOWER = """
import os, torch
from ludus.training.distributed.launcher import Rendezvous
rendezvous = Rendezvous.join(60.0)
rendezvous.form_group(torch.device("cpu"))
print("the GPU has fallen off the bus", flush=True)
os._exit(9)
"""


@pytest.mark.fault
def test_rank_exiting_after_rendezvous_is_named_with_its_output():
    """The line for commands is laid when they have met: nobody has come to that yet."""
    leader = [sys.executable, "-c", _MEETS, _FOLLOWER]
    said = subprocess.run(leader, capture_output=True, text=True, timeout=300)
    assert said.stdout.startswith("A learner rank has exited: rank 1 (9): the GPU has fallen off the bus"), said.stderr


_LEADER = """
import time, torch
from ludus.training.distributed.launcher import RankGroup
from ludus.training.distributed.launcher import Rendezvous
rendezvous, others = Rendezvous.create(3, 600.0), RankGroup()
others.start(rendezvous, torch.device("cpu"))
others.gather(rendezvous)
print(others.processes[0].pid, flush=True)
time.sleep(600)
"""


@pytest.mark.fault
def test_rank_exits_with_its_leader_before_the_rendezvous():
    with subprocess.Popen([sys.executable, "-c", _LEADER], stdout=subprocess.PIPE) as leader:
        follower = Path("/proc", leader.stdout.readline().decode().strip())
        assert follower.exists()
        leader.kill()
    begin = time.monotonic()
    while follower.exists() and time.monotonic() < begin + 20:
        time.sleep(0.1)
    assert not follower.exists()
