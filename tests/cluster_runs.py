"""Runs of the small recipe on a cluster, and faults of its processes."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import small_runs
from ludus.cluster.cluster import Cluster, open_cluster
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path
from ludus.training.rl.build import train
from ludus.training.run.run_dir import RunFolder, lock_run, new_run
from ludus.training.run.session import open_session
from small_runs import SMALLEST, RecordingReporter

CLUSTER = {
    "cluster__kind": "local",
    "cluster__engines": "2",
    "cluster__workers": "2",
    "cluster__episodes_per_worker": "4",
    "cluster__heartbeat_timeout_s": "150",
    "cluster__startup_timeout_s": "500",
    "engine__connect_timeout_s": "20",
}
_PLACE = re.compile(r"(engine|reward worker|worker) (\d+) runs at \S+ \((\d+)\)")


class InterveningReporter(RecordingReporter):
    """A reporter that calls `what(cluster)` after `at` episodes."""

    def __init__(self, at: int, what) -> None:
        super().__init__()
        self.at = at
        self.what = what
        self.cluster: Cluster | None = None

    def episode(self, episode) -> None:
        super().episode(episode)
        if self.episodes == self.at:
            self.what(self.cluster)


def run(folder: Path, reporter: RecordingReporter | None = None, **changes: str) -> RunFolder:
    """Train in `folder`, on a cluster unless `cluster__kind` is none."""
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray lowers the priority of its processes
    reporter = reporter or RecordingReporter()
    session = open_session(small_runs.config(folder, **SMALLEST | CLUSTER | changes))
    made = new_run(session.config, "run", "rl", "search")
    with lock_run(made):
        if session.config.cluster.kind == "none":
            train(session, made, reporter)
            return made
        with open_cluster(session) as cluster:
            if isinstance(reporter, InterveningReporter):
                reporter.cluster = cluster
            train(session, made, reporter, cluster)
    return made


def pids(cluster: Cluster, kind: str) -> list[int]:
    """Return the pids of a kind, the busiest first."""
    pool = next(pool for pool in cluster.group.pools if pool.kind == kind)
    members = sorted(pool.members.values(), key=lambda member: -member.busy - member.heartbeat.in_flight)
    return [member.started.pid for member in members]


def sends(number: signal.Signals, *kinds: str):
    """Return a function that signals the busiest process of each kind and waits for the replacements."""

    def meddle(cluster: Cluster) -> None:
        before = {kind: pids(cluster, kind) for kind in kinds}
        for first, *_ in before.values():
            os.kill(first, number)
        deadline = time.monotonic() + 500
        for kind, (first, *_) in before.items():
            while first in (now := pids(cluster, kind)) or len(now) < len(before[kind]):
                assert time.monotonic() < deadline
                time.sleep(0.05)

    return meddle


def started(folder: RunFolder) -> dict[str, set[int]]:
    """Return the pids in the log of a run, by kind."""
    found: dict[str, set[int]] = {"engine": set(), "worker": set(), "reward worker": set()}
    for kind, _, pid in _PLACE.findall((folder.path / "log.txt").read_text()):
        found[kind].add(int(pid))
    return found


def all_gone(pids: set[int], seconds: float = 30.0) -> bool:
    """Return whether all these processes end within `seconds`; zombies count as ended."""
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if _runs(pid)]:
        if time.monotonic() > deadline:
            print("left:", left)
            return False
        time.sleep(0.05)
    return True


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def keys(folder: RunFolder, steps: int) -> list:
    """Return the keys of the trained rollouts."""
    return [r.key for step in range(1, steps + 1) for r in read_rollouts(rollouts_path(folder.path, step))]


def cluster_threads() -> list[str]:
    """Return the remaining cluster threads of this process."""
    return [thread.name for thread in threading.enumerate() if thread.name == "ludus-cluster"]
