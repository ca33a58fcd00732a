"""`ludus cluster`: list and change the engines of a running run from another process."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

import small_runs
from cluster_runs import CLUSTER, InterveningReporter, all_gone, pids, run, started
from ludus.cluster.cluster import Cluster, EventLoopThread
from ludus.cluster.control import controlled
from ludus.cluster.supervisor import WorkerGroup
from ludus.training.run.run_dir import RunFolder, lock_run, new_run
from small_runs import SMALLEST
from tests.cluster.test_cluster_moments import STATE, FakeLauncher, plan, serving
from tests.engines.test_rolling import Vllm
from tiny_run import ludus, refused


def made(folder: Path, **changes: str) -> RunFolder:
    return new_run(small_runs.config(folder, **SMALLEST | CLUSTER | changes), "run", "rl", "search")


@contextmanager
def running(folder: RunFolder):
    """A run's cluster whose engines are small servers and whose weights have been sent, under its lock."""
    fakes, background = [Vllm() for _ in range(3)], EventLoopThread("test-control")
    with serving(*fakes):
        launcher = FakeLauncher([fake.url for fake in fakes])

        async def begin() -> WorkerGroup:
            group = WorkerGroup(plan(), launcher)
            await group.open()
            await group.load_weights(7, STATE)
            return group

        group = background.wait(begin())
        cluster = Cluster(folder.load_config(), None, group, background)
        with lock_run(folder), controlled(folder.path, cluster):
            yield group, fakes
        background.wait(group.close())
        background.close()


def test_cluster_commands_add_and_remove_engines_but_keep_the_last_one(tmp_path):
    folder = made(tmp_path / "run")
    with running(folder) as (group, fakes):
        assert "engines: 2" in ludus("cluster", "list", folder.path).out
        assert "engines: 3" in ludus("cluster", "add-engine", folder.path).out
        assert [fake.label for fake in fakes] == ["7", "7", "7"]  # it had the weights before it was one
        assert "no engine 9" in refused("cluster", "remove-engine", folder.path, "--number", 9)
        numbers = sorted(group.engines.members)
        said = ludus("cluster", "remove-engine", folder.path, "--number", numbers[0])
        assert said.code == 0
        assert sorted(group.engines.members) == numbers[1:]
        assert "engines: 1" in ludus("cluster", "remove-engine", folder.path).out
        assert "last engine" in refused("cluster", "remove-engine", folder.path)
    assert not (folder.path / "cluster").exists()


def test_cluster_command_on_a_stopped_or_single_process_run_is_rejected(tmp_path):
    folder = made(tmp_path / "run")
    assert "is not running" in refused("cluster", "list", folder.path)
    assert "--number is for remove-engine" in refused("cluster", "list", folder.path, "--number", 1)
    assert "does not exist" in refused("cluster", "list", tmp_path / "none")
    alone = made(tmp_path / "alone", cluster__kind="none")
    assert "has no cluster" in refused("cluster", "add-engine", alone.path)


@pytest.mark.cluster
def test_add_and_remove_engine_commands_change_the_engines_of_a_run(tmp_path):
    sizes = []

    def changes(cluster):
        with controlled(tmp_path / "run", cluster):
            done = threading.Thread(target=change, args=(cluster,))
            done.start()
            done.join()

    def change(cluster):
        for act in ("add-engine", "remove-engine"):
            said = ludus("cluster", act, tmp_path / "run")
            sizes.append((said.code, len(pids(cluster, "engine"))))

    folder = run(tmp_path / "run", InterveningReporter(3, changes), cluster__engines="1")
    assert sizes == [(0, 2), (0, 1)]
    assert all_gone(set().union(*started(folder).values()))
