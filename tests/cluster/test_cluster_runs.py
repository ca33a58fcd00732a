"""Whole runs on a cluster of processes: equal to one process, and robust to the death of one."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import small_runs
from cluster_runs import CLUSTER, InterveningReporter, all_gone, cluster_threads, keys, pids, run, sends, started
from ludus.cluster.protocol import ResourceRequest, WorkerCommand, WorkerDied, WorkerResponse
from ludus.config import load_config
from ludus.diagnostics.trackers import read_metrics
from ludus.errors import LudusError
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path
from ludus.training.run.run_dir import RunFolder
from served import COLD_START
from small_runs import SMALLEST, lasting_files

pytestmark = pytest.mark.cluster

SECONDS = 40.0
"""Of silence after which a stopped process counts as dead in these tests."""


def ledger_adds_up(folder, steps) -> dict[str, float]:
    """Each episode trained once, and all that started have ended; gives the failures by their reason."""
    found = keys(folder, steps)
    assert len(set(found)) == len(found) == steps * 4
    failed: dict[str, float] = {}
    for row in read_metrics(folder.metrics):
        ended = [row.metrics[f"ledger/{name}"] for name in ("trained", "masked", "dropped", "failed")]
        assert row.metrics["ledger/started"] == sum(ended) == 4 + row.metrics["ledger/failed"]
        for name, count in row.metrics.items():
            if name.startswith("ledger/failed/"):
                failed[name] = failed.get(name, 0.0) + count
    return failed


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The files of a run in one process."""
    folder = run(tmp_path_factory.mktemp("alone") / "run", cluster__kind="none")
    return lasting_files(folder.path)


@pytest.mark.parametrize("kind", ["local", "ray"])
def test_cluster_run_writes_the_same_files_as_a_single_process(alone, tmp_path, kind):
    folder = run(tmp_path / "run", cluster__kind=kind)
    assert lasting_files(folder.path) == alone
    found = started(folder)
    assert [len(found["engine"]), len(found["worker"])] == [2, 2]
    assert all_gone(found["engine"] | found["worker"])
    assert cluster_threads() == []


@pytest.mark.parametrize("kind", ["local", "ray"])
@pytest.mark.parametrize("role", ["worker", "engine"])
def test_killed_process_is_replaced_and_its_episodes_are_replayed(alone, tmp_path, kind, role):
    """Two episodes before training, then the first of the first step ends and three are under way."""
    reporter = InterveningReporter(3, sends(signal.SIGKILL, role))
    folder = run(tmp_path / "run", reporter, cluster__kind=kind)
    found = started(folder)
    other = "engine" if role == "worker" else "worker"
    assert [len(found[role]), len(found[other])] == [3, 2]
    failed = ledger_adds_up(folder, 2)
    assert set(failed) <= {f"ledger/failed/{role}"}
    assert failed or role == "engine"  # an engine may have answered before it went
    ours = lasting_files(folder.path)
    weights = [name for name in alone if name.endswith("model.safetensors")]
    assert weights
    assert [name for name in weights if ours[name] != alone[name]] == []
    assert all_gone(found["engine"] | found["worker"])


@pytest.mark.parametrize("kind", ["local", "ray"])
def test_reward_workers_score_played_episodes_and_a_dead_one_is_replaced(alone, tmp_path, kind):
    kills = InterveningReporter(3, sends(signal.SIGKILL, "reward worker"))
    folder = run(tmp_path / "run", kills, cluster__kind=kind, cluster__reward_workers="2")
    found = started(folder)
    assert {role: len(pids) for role, pids in found.items()} == {"engine": 2, "worker": 2, "reward worker": 3}
    assert ledger_adds_up(folder, 2) == {}  # what was played is scored elsewhere, and not played again
    assert lasting_files(folder.path) == alone
    assert all_gone(set().union(*found.values()))


@pytest.mark.parametrize("kind", ["local", "ray"])
@pytest.mark.parametrize("role", ["worker", "engine"])
def test_unresponsive_process_is_replaced_after_the_heartbeat_timeout(tmp_path, kind, role):
    reporter = InterveningReporter(4, sends(signal.SIGSTOP, role))
    folder = run(tmp_path / "run", reporter, cluster__kind=kind, cluster__heartbeat_timeout_s=str(SECONDS))
    found = started(folder)
    assert len(found[role]) == 3
    ledger_adds_up(folder, 2)
    assert all_gone(found["engine"] | found["worker"])


@pytest.mark.parametrize("mode", ["one_step", "async"])
def test_one_step_and_async_runs_survive_worker_and_engine_death(tmp_path, mode):
    kills = InterveningReporter(4, sends(signal.SIGKILL, "worker", "engine"))
    folder = run(tmp_path / "run", kills, training__mode=mode, training__steps="4")
    found = started(folder)
    assert [len(found["engine"]), len(found["worker"])] == [3, 3]
    trained = keys(folder, 4)
    assert len(set(trained)) == len(trained) == 16
    bound = 0 if mode == "one_step" else load_config("search").staleness.max_staleness
    for step in range(1, 5):
        for record in read_rollouts(rollouts_path(folder.path, step)):
            versions = {v for segment in record.trajectory.segments for v in segment.versions}
            assert all(0 <= step - 1 - version <= max(bound, 1) for version in versions)
    for row in read_metrics(folder.metrics):
        ended = [row.metrics[f"ledger/{name}"] for name in ("trained", "masked", "dropped", "failed")]
        assert row.metrics["ledger/started"] == sum(ended)
    assert all_gone(found["engine"] | found["worker"])


@pytest.mark.parametrize("way", [{}, {"engine__broadcast_host": "127.0.0.1"}], ids=["folder", "line"])
def test_rolling_weight_updates_continue_when_an_engine_dies(tmp_path, way):
    stays = {
        "training__mode": "async",
        "staleness__in_flight_weight_updates": "false",
        "staleness__max_concurrent_rollouts": "6",
    }
    kills = InterveningReporter(9, sends(signal.SIGKILL, "engine"))
    folder = run(tmp_path / "run", kills, **stays, **way, training__steps="6", evaluation__every="3")
    found = started(folder)
    assert len(found["engine"]) == 3
    trained = keys(folder, 6)
    assert len(set(trained)) == len(trained) == 24
    for step in range(1, 7):
        for record in read_rollouts(rollouts_path(folder.path, step)):
            (version,) = {v for s in record.trajectory.segments for v in s.versions}
            assert 0 <= step - 1 - version <= 2
    rows = [row.metrics for row in read_metrics(folder.metrics)]
    assert sum(m.get("sync/engines", 0) for m in rows) >= 3
    assert all_gone(found["engine"] | found["worker"])


def test_engines_and_workers_join_and_leave_during_a_run(alone, tmp_path):
    sizes = []

    def grows(cluster):
        cluster.scale(engines=3, workers=1)
        sizes.append((len(pids(cluster, "engine")), len(pids(cluster, "worker"))))
        cluster.scale(engines=1)
        sizes.append((len(pids(cluster, "engine")), len(pids(cluster, "worker"))))

    folder = run(tmp_path / "run", InterveningReporter(3, grows))
    assert sizes == [(3, 1), (1, 1)]
    assert ledger_adds_up(folder, 2) == {}
    assert lasting_files(folder.path) == alone
    assert all_gone(set().union(*started(folder).values()))


def test_cluster_run_with_lora_matches_a_single_process_run(tmp_path):
    lora = {"model__lora__rank": "4", "model__lora__alpha": "8"}
    one = run(tmp_path / "one", cluster__kind="none", **lora)
    two = run(tmp_path / "two", **lora)
    assert lasting_files(two.path) == lasting_files(one.path)


def test_killed_run_leaves_no_engine_or_worker_processes(tmp_path):
    for kind in ("local", "ray"):
        folder = tmp_path / kind
        settings = SMALLEST | CLUSTER | {"cluster__kind": kind, "training__steps": "50"}
        command = [sys.executable, "-m", "ludus", "train", "search", *small_runs.words(folder, **settings)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 300
        while not (folder / "checkpoints" / "step-000001").exists():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.1)
        found = started(RunFolder(folder))
        process.kill()
        process.wait()
        assert len(found["engine"]) == len(found["worker"]) == 2
        assert all_gone(found["engine"] | found["worker"], 60)


def test_worker_error_is_raised_in_the_learner_with_its_message(tmp_path):
    world = tmp_path / "broken.py"
    here = str(Path(__file__).parents[1])
    world.write_text(
        "import sys\n"
        f"sys.path.insert(0, {here!r})\n"
        "from tiny_world import make_world as plain\n"
        "def make_world(settings, limits):\n"
        "    if any('run_worker' in word for word in sys.orig_argv):\n"
        "        raise RuntimeError('the index of this machine is gone')\n"
        "    return plain(settings, limits)\n"
    )
    with pytest.raises(LudusError, match="the index of this machine is gone"):
        run(tmp_path / "run", env__name=str(world), model__path=str(COLD_START))


class Unreadable:
    """Pickles, and cannot be read."""

    def __reduce__(self):
        return int, ("no number",)


def test_unreadable_request_to_a_ray_actor_raises_without_worker_died():
    ray = pytest.importorskip("ray")
    from ludus.cluster.ray_launcher import RayWorkerHandle

    class Echo:
        async def call(self, number, message):
            return WorkerResponse(number)

        async def cancel(self, number):
            pass

    async def calls():
        remote = RayWorkerHandle("worker 1", ray.remote(Echo).options(num_cpus=0).remote(), ResourceRequest())
        first = await remote.call(WorkerCommand.PING, 60)
        with pytest.raises(LudusError, match="cannot be unpickled by the receiving process: invalid literal") as met:
            await remote.call(Unreadable(), 60)
        assert not isinstance(met.value, WorkerDied)
        return first, await remote.call(WorkerCommand.PING, 60)

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        assert asyncio.run(calls()) == (1, 3)
    finally:
        ray.shutdown()
