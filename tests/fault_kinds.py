"""Kinds of faults: each has requirements, is injected into a run, and may be repaired afterwards."""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fault_runs import Process, alive, fork, named, records
from ludus.diagnostics.trackers import read_metrics
from ludus.rollouts.rollout_files import read_rollouts
from ludus.types import StopReason
from tiny_world import PRICES
from waiting import free_port

TOKEN = "a-token-of-the-tests"
WORLDS = str(Path(__file__).with_name("fault_worlds.py"))
_PLACE = re.compile(r"(engine|worker) (\d+) runs at \S+ \((\d+)\)")


class Fault:
    """One kind of fault. Trials alternate between `ways`; `codes` are the allowed exit codes of the run."""

    name = ""
    modes: tuple[str, ...] = ("sync", "async")
    ways: tuple[str, ...] = ("SIGKILL",)
    codes: tuple[int, ...] = (0,)

    def __init__(self, work: Path) -> None:
        self.work = work

    def why_not(self) -> str:
        """Return why this machine cannot inject the fault; empty if it can."""
        return ""

    def settings(self) -> dict[str, str]:
        """Return the settings of the runs."""
        return {}

    def folder(self) -> Path:
        """Return the parent folder of the runs."""
        return self.work / "runs"

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Start what the runs need, and stop it at the end of the block."""
        yield

    def inject(self, run: Process, folder: Path, way: str, rng: random.Random) -> str:
        """Inject the fault; return what was done, or an empty text if the run has no target."""
        raise NotImplementedError

    def mend(self) -> None:
        """Repair the fault, so that the run can be resumed."""

    def untold(self, folder: Path) -> list[str]:
        """Return what the files of the finished run should tell of the fault, but do not."""
        return []


class Learner(Fault):
    """Kill the process of the command, every other time while it writes a checkpoint."""

    name = "learner"
    ways = ("killed", "killed while it writes a checkpoint")
    codes = (-signal.SIGKILL,)

    def inject(self, run, folder, way, rng):
        deadline = time.monotonic() + 20
        while way != "killed" and not any(folder.glob("checkpoints/.step-*.tmp")):
            if run.code is not None or time.monotonic() > deadline:
                return ""
        os.kill(run.pid, signal.SIGKILL)
        return way


class Role(Fault):
    """Kill or suspend a process of the cluster."""

    ways = ("killed", "hangs")
    engines, workers = "1", "1"

    def settings(self):
        given = {"cluster.kind": "local", "cluster.heartbeat_timeout_s": "15", "engine.connect_timeout_s": "10"}
        return given | {"cluster.engines": self.engines, "cluster.workers": self.workers}

    def inject(self, run, folder, way, rng):
        log = folder / "log.txt"
        places = _PLACE.findall(log.read_text()) if log.exists() else []
        own = [int(pid) for kind, _, pid in places if kind == self.name]
        if not own or run.code is not None:
            return ""
        with suppress(ProcessLookupError):
            os.kill(rng.choice(own), signal.SIGKILL if way == "killed" else signal.SIGSTOP)
            return way
        return ""


class Worker(Role):
    name = "worker"
    workers = "2"


class Engine(Role):
    name = "engine"
    engines = "2"


class Rank(Fault):
    """Kill one of two processes of the learner."""

    name = "rank"
    ways = ("follower killed", "leader killed")
    codes = (5, -signal.SIGKILL)

    def settings(self):
        return {"training.learner.ranks": "2", "training.learner.shard": "true"}

    def inject(self, run, folder, way, rng):
        followers = named(run.pid, "ludus.training.rl.rank_worker")
        if run.code is not None or not followers:
            return ""
        os.kill(run.pid if way == "leader killed" else followers[0], signal.SIGKILL)
        return way


class Pool(Fault):
    """Kill the sandbox server of the environments' tools; restart it, or not."""

    name = "environment pool"
    ways = ("killed, back after a while", "killed for good")
    codes = (0, 4)
    server: Process | None = None
    port = 0

    def settings(self):
        return {
            "env.name": WORLDS,
            "env.settings": '{behind = "pool"}',
            "sandbox.backend": "remote",
            "sandbox.url": f"http://127.0.0.1:{self.port}",
            "sandbox.token_file": str(self.work / "token"),
        }

    @contextmanager
    def ready(self):
        (self.work / "token").write_text(TOKEN)
        self.port = free_port()
        self.mend()
        try:
            yield
        finally:
            self.server.kill()

    def inject(self, run, folder, way, rng):
        self.server.kill()
        if way != "killed for good":
            time.sleep(rng.uniform(0, 0.5))
            self.mend()
        return way

    def mend(self):
        if self.server is not None and self.server.code is None:
            return
        words = ["sandbox", "serve", "--backend", "process", "--unsafe", "--port", str(self.port)]
        self.server = fork([*words, "--token-file", str(self.work / "token")], self.work / "pool.txt")
        until_heard("127.0.0.1", self.port)


class Tool(Fault):
    """Suspend the server behind the tool, temporarily or permanently."""

    name = "tool server"
    ways = ("hangs for a while", "hangs for good")
    codes = (0, 4)

    def settings(self):
        behind = {"env.name": WORLDS, "env.settings": '{behind = "mcp"}'}
        return behind | {"rollout.tool_timeout_s": "0.5"}

    def inject(self, run, folder, way, rng):
        servers = named(run.pid, "price_server.py")
        if run.code is not None or not servers:
            return ""
        with suppress(ProcessLookupError):
            for pid in servers:
                os.kill(pid, signal.SIGSTOP)
            if way == "hangs for a while":
                time.sleep(rng.uniform(0.1, 2))
                for pid in servers:
                    os.kill(pid, signal.SIGCONT)
        return way


class Disk(Fault):
    """Fill the disk of the run folder, completely, or to at most 1 MB of free space."""

    name = "full disk"
    ways = ("full", "room for a little")
    codes = (2, 0)

    def why_not(self):
        return "" if os.geteuid() == 0 else "mounting a small disk needs root"

    def folder(self):
        return self.work / "disk"

    @contextmanager
    def ready(self):
        self.folder().mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", self.folder()], check=True)
        try:
            yield
        finally:
            subprocess.run(["umount", "-l", self.folder()], check=True)

    def inject(self, run, folder, way, rng):
        room = 0 if way == "full" else rng.choice([4096, 65_536, 262_144, 1_048_576])
        with (self.folder() / "filler").open("wb", buffering=0) as filler:
            with suppress(OSError):
                while filler.write(bytes(65_536)) == 65_536:
                    pass
            with suppress(OSError):
                while filler.write(bytes(4096)) == 4096:
                    pass
            filler.truncate(max(0, filler.tell() - room))
        return way

    def mend(self):
        (self.folder() / "filler").unlink(missing_ok=True)


class Link(Fault):
    """Slow down or cut the network link to the engine's server, which is in another network namespace."""

    name = "network link"
    ways = ("slow for a while", "slower than the deadline", "cut for a while", "cut for good")
    codes = (0, 3, 6)
    here, there = "10.212.9.1", "10.212.9.2"
    server: Process | None = None
    port = 8200

    def why_not(self):
        if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
            return "network namespaces need root and iproute2"
        with suppress(subprocess.CalledProcessError), self._laid():
            return ""
        return "network namespaces or the token bucket filter are unavailable"

    def settings(self):
        return {
            "engine.url": f"http://{self.there}:{self.port}",
            "engine.token_file": str(self.work / "token"),
            "engine.broadcast_host": self.here,
            "engine.timeout_s": "6",
            "engine.connect_timeout_s": "6",
        }

    @contextmanager
    def ready(self):
        (self.work / "token").write_text(TOKEN)
        with self._laid():
            self._serve()
            try:
                yield
            finally:
                self.server.kill()

    def inject(self, run, folder, way, rng):
        speed = rng.choice(["100kbit", "400kbit"]) if "deadline" not in way else "4kbit"
        self._cut() if "cut" in way else self._slow(speed)
        if "while" in way:
            time.sleep(rng.uniform(0.5, 5))
            self._restore()
        return way

    def mend(self):
        self._restore()

    def _serve(self):
        words = ["serve", str(self.work / "cold"), "--control", "--name", "policy", "--host", self.there]
        words += ["--token-file", str(self.work / "token")]
        with in_network(self.network):
            self.server = fork([*words, "--port", str(self.port), "--context-tokens", "512"], self.work / "serve.txt")
        until_heard(self.there, self.port)

    @property
    def network(self):
        return f"ludus-link-{os.getpid()}"

    @property
    def ends(self):
        return f"ll{os.getpid()}"[:13], f"lr{os.getpid()}"[:13]

    @contextmanager
    def _laid(self):
        ours, theirs = self.ends
        run_words(f"ip netns add {self.network}")
        try:
            run_words(f"ip link add {ours} type veth peer name {theirs}")
            run_words(f"ip link set {theirs} netns {self.network}")
            run_words(f"ip addr add {self.here}/24 dev {ours}")
            run_words(f"ip link set {ours} up")
            run_words(f"ip -n {self.network} addr add {self.there}/24 dev {theirs}")
            run_words(f"ip -n {self.network} link set {theirs} up")
            run_words(f"ip -n {self.network} link set lo up")
            self._slow("1gbit")
            self._restore()
            yield
        finally:
            subprocess.run(["ip", "link", "del", ours], capture_output=True)
            subprocess.run(["ip", "netns", "del", self.network], capture_output=True)

    def _slow(self, speed):
        ours, theirs = self.ends
        bucket = f"root tbf rate {speed} burst 16kb limit 1mb"
        run_words(f"tc qdisc replace dev {ours} {bucket}")
        run_words(f"tc -n {self.network} qdisc replace dev {theirs} {bucket}")

    def _cut(self):
        run_words(f"ip -n {self.network} link set {self.ends[1]} down")  # the route at our end stays

    def _restore(self):
        ours, theirs = self.ends
        run_words(f"ip -n {self.network} link set {theirs} up")
        subprocess.run(["tc", "qdisc", "del", "dev", ours, "root"], capture_output=True)
        subprocess.run(["tc", "-n", self.network, "qdisc", "del", "dev", theirs, "root"], capture_output=True)


class AgentProgram(Fault):
    """Kill or suspend the program of a rollout, which fails (`agent_failed`) or, before a reply, is repeated."""

    name = "agent program"
    ways = ("killed", "hangs")

    def settings(self):
        command = [sys.executable, "-S", str(Path(__file__).with_name("price_agent.py")), json.dumps(PRICES)]
        return {"rollout.agent.command": json.dumps(command), "rollout.agent.timeout_s": "10"}

    def inject(self, run, folder, way, rng):
        while not (programs := named(run.pid, "price_agent.py")):
            if run.wait(0.01) is not None:
                return ""
        time.sleep(rng.uniform(0, 0.2))
        pid = rng.choice(programs)
        if run.code is not None or not alive(pid):
            return ""
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if way == "killed" else signal.SIGSTOP)
            return way
        return ""

    def untold(self, folder):
        played = [record for _, record in records(folder)]
        played += [one for path in folder.glob("evaluations/*.jsonl.gz") for one in read_rollouts(path)]
        ends = {StopReason.AGENT_FAILED, StopReason.TIMEOUT}
        failed = sum(row.metrics["ledger/failed"] for row in read_metrics(folder / "metrics.jsonl"))
        told = failed or any(one.attempt or one.trajectory.stop_reason in ends for one in played)
        return [] if told else ["no rollout tells of the failed agent"]


class AgentFunction(AgentProgram):
    """Let an agent function raise or hang; one that hangs ends at the time limit of its episode."""

    name = "agent function"
    ways = ("raises", "hangs")

    def settings(self):
        order = json.dumps(str(self.order))
        world = {"env.name": WORLDS, "env.settings": f'{{behind = "agent", order = {order}}}'}
        return world | {"rollout.episode_timeout_s": "10"}

    @property
    def order(self):
        return self.work / "order"

    def inject(self, run, folder, way, rng):
        self.order.write_text(way)
        while self.order.exists():
            if run.wait(0.02) is not None:
                self.order.unlink(missing_ok=True)
                return ""
        return way


class AgentLearner(Learner):
    """Kill the process of the command during rollouts of programs."""

    name = "learner of agents"

    def settings(self):
        return AgentProgram(self.work).settings()


AGENTS = (AgentProgram, AgentFunction, AgentLearner)
KINDS = {kind.name: kind for kind in (Learner, Worker, Engine, Rank, Pool, Tool, Disk, Link, *AGENTS)}


def run_words(words: str) -> None:
    """Run a system command; raise if it fails."""
    subprocess.run(words.split(), check=True, capture_output=True)


def until_heard(host: str, port: int, seconds: float = 120.0) -> None:
    """Wait until the port accepts connections."""
    deadline = time.monotonic() + seconds
    while True:
        with suppress(OSError):
            socket.create_connection((host, port), 1.0).close()
            return
        assert time.monotonic() < deadline, f"nothing listens at {host}:{port}"
        time.sleep(0.05)


@contextmanager
def in_network(name: str) -> Iterator[None]:
    """Move this thread and its forks into a network namespace for the time of a block."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as own, open(f"/run/netns/{name}") as other:
        assert libc.setns(other.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
        try:
            yield
        finally:
            assert libc.setns(own.fileno(), 0) == 0
