"""A run over three hosts: the learner on one, engines on another, workers on the third, one of which dies."""

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
from cluster_runs import CLUSTER, keys
from ludus.diagnostics.trackers import read_metrics
from ludus.training.run import RunFolder
from small_runs import SMALLEST, lasting_files

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "nothing"),
]

_PLACE = re.compile(r"(engine|worker) (\d+) runs at (\S+) \((\d+)\)")


def places(folder: RunFolder) -> list[tuple[str, str, int]]:
    """What runs where: kind, address and process."""
    text = (folder.path / "log.txt").read_text() if (folder.path / "log.txt").exists() else ""
    return [(kind, host, int(pid)) for kind, _, host, pid in _PLACE.findall(text)]


def test_three_hosts_train_together_and_a_worker_and_an_engine_die(tmp_path):
    folder = RunFolder(tmp_path / "run")
    alone = RunFolder(tmp_path / "alone")
    settings = SMALLEST | CLUSTER | {"cluster__kind": "ray", "training__steps": "3"}
    one = ["train", "search", *small_runs.words(alone.path, **settings | {"cluster__kind": "none"})]
    subprocess.run([sys.executable, "-m", "ludus", *one], stdout=subprocess.DEVNULL, check=True)
    with ray_hosts({"learner": 1}, {"engines": 4}, {"workers": 4}) as hosts:
        head, engines, workers = hosts.hosts
        words = small_runs.words(
            folder.path,
            **settings,
            cluster__address=f"{head.address}:{PORT}",
            cluster__engine_resources=json.dumps({"engines": 1}).replace(":", " ="),
            cluster__worker_resources=json.dumps({"workers": 1}).replace(":", " ="),
        )
        command = head.command(sys.executable, "-m", "ludus", "train", "search", *words)
        with (tmp_path / "said").open("wb") as said:
            process = subprocess.Popen(command, stdout=said, stderr=said)
        deadline = time.monotonic() + 500
        while not (folder.path / "checkpoints" / "step-000001").exists():
            assert time.monotonic() < deadline
            assert process.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.1)
        first = places(folder)
        assert sorted((kind, host) for kind, host, _ in first) == sorted(
            [("engine", engines.address)] * 2 + [("worker", workers.address)] * 2
        )
        for wanted in ("worker", "engine"):
            os.kill(next(pid for kind, _, pid in first if kind == wanted), signal.SIGKILL)
        assert process.wait(500) == 0, (tmp_path / "said").read_text()
    assert len(read_metrics(folder.metrics)) == 3
    trained = keys(folder, 3)
    assert len(set(trained)) == len(trained) == 12
    for row in read_metrics(folder.metrics):
        ended = [row.metrics[f"ledger/{name}"] for name in ("trained", "masked", "dropped", "failed")]
        assert row.metrics["ledger/started"] == sum(ended) == 4 + row.metrics["ledger/failed"]
    ours, theirs = lasting_files(folder.path), lasting_files(alone.path)
    weights = [name for name in theirs if name.endswith("model.safetensors")]
    assert weights
    assert [name for name in weights if ours[name] != theirs[name]] == []
