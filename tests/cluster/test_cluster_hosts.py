"""Runs over three hosts: remote processes die and hang, and a whole host disappears."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

import small_runs
from cluster_hosts import PORT, ray_hosts, why_not
from cluster_runs import CLUSTER, all_gone, keys
from ludus.diagnostics.trackers import read_metrics
from ludus.training.run.run_dir import RunFolder
from small_runs import SMALLEST, lasting_files

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(why_not()), reason=why_not() or "nothing")]

_PLACE = re.compile(r"(engine|worker) (\d+) runs at (\S+) \((\d+)\)")


def places(folder: RunFolder) -> list[tuple[str, str, int]]:
    """What runs where: kind, address and process."""
    text = (folder.path / "log.txt").read_text() if (folder.path / "log.txt").exists() else ""
    return [(kind, host, int(pid)) for kind, _, host, pid in _PLACE.findall(text)]


def started(head, folder: RunFolder, said, **changes: str) -> subprocess.Popen[bytes]:
    """A run on the hosts, once its first step is done."""
    settings = SMALLEST | CLUSTER | {"cluster__kind": "ray", "cluster__address": f"{head.address}:{PORT}"}
    words = small_runs.words(folder.path, **settings | changes)
    command = head.command(sys.executable, "-m", "ludus", "train", "search", *words)
    with said.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    deadline = time.monotonic() + 500
    while not (folder.path / "checkpoints" / "step-000001").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, said.read_text()
        time.sleep(0.1)
    return process


def needing(**count: float) -> str:
    """Resources, as a setting."""
    return json.dumps(count).replace(":", " =")


def in_order(folder: RunFolder, steps: int) -> None:
    """Each episode trained once, and what started has ended."""
    assert len(read_metrics(folder.metrics)) == steps
    trained = keys(folder, steps)
    assert len(set(trained)) == len(trained) == steps * 4
    for row in read_metrics(folder.metrics):
        ended = [row.metrics[f"ledger/{name}"] for name in ("trained", "masked", "dropped", "failed")]
        assert row.metrics["ledger/started"] == sum(ended) == 4 + row.metrics["ledger/failed"]


def test_run_survives_engine_death_and_worker_hang_on_remote_hosts(tmp_path):
    """There is no room for another worker before the one that hangs is killed over there."""
    folder, alone, said = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "alone"), tmp_path / "said"
    steps = {"training__steps": "3"}
    one = ["train", "search", *small_runs.words(alone.path, **SMALLEST | steps)]
    subprocess.run([sys.executable, "-m", "ludus", *one], stdout=subprocess.DEVNULL, check=True)
    with ray_hosts({"learner": 1}, {"engines": 4}, {"workers": 2}) as hosts:
        head, engines, workers = hosts.hosts
        process = started(
            head,
            folder,
            said,
            cluster__engine_resources=needing(engines=1),
            cluster__worker_resources=needing(workers=1),
            cluster__heartbeat_timeout_s="40",
            **steps,
        )
        first = places(folder)
        assert sorted((kind, host) for kind, host, _ in first) == sorted(
            [("engine", engines.address)] * 2 + [("worker", workers.address)] * 2
        )
        hanging = next(pid for kind, _, pid in first if kind == "worker")
        os.kill(hanging, signal.SIGSTOP)
        os.kill(next(pid for kind, _, pid in first if kind == "engine"), signal.SIGKILL)
        assert all_gone({hanging}, 300)
        assert process.wait(500) == 0, said.read_text()
    in_order(folder, 3)
    ours, theirs = lasting_files(folder.path), lasting_files(alone.path)
    weights = [name for name in theirs if name.endswith("model.safetensors")]
    assert weights
    assert [name for name in weights if ours[name] != theirs[name]] == []


def test_engines_and_workers_of_a_dead_host_restart_on_another(tmp_path):
    folder, said = RunFolder(tmp_path / "run"), tmp_path / "said"
    with ray_hosts({"learner": 1}, {"roles": 4}, {"roles": 4}) as hosts:
        head, _, dies = hosts.hosts
        needs = {f"cluster__{role}_resources": needing(roles=1) for role in ("engine", "worker")}
        process = started(head, folder, said, training__steps="4", cluster__heartbeat_timeout_s="40", **needs)
        assert dies.address in {host for _, host, _ in places(folder)}
        for pid in hosts.processes(dies):
            os.kill(pid, signal.SIGKILL)
        assert process.wait(500) == 0, said.read_text()
    in_order(folder, 4)
