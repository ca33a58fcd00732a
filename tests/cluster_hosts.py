"""Hosts of a Ray cluster in network namespaces of one machine, connected only by a bridge.

Each has its own address, loopback device and Ray node.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

RAY = [sys.executable, "-m", "ray.scripts.scripts"]
NETWORK = "10.211.7"
PORT = 6399
ENVIRONMENT = ("RAY_worker_niceness=0", "RAY_AUTH_MODE=disabled")
"""By default Ray lowers the priority of its processes, and nodes need the token of the head."""


def why_not() -> str:
    """Return why this machine cannot have such hosts; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "`ip` (iproute2) is missing"
    name = f"ludus-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return "" if made.returncode == 0 else f"`ip netns add` failed: {made.stderr.strip()}"


@dataclass
class Host:
    """A network namespace. `resources` are those of its Ray node."""

    number: int
    resources: dict[str, float]
    node: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        return f"ludus-host-{self.number}"

    @property
    def address(self) -> str:
        return f"{NETWORK}.{self.number + 1}"

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, "env", *ENVIRONMENT, *words]


@dataclass
class NamespaceHosts:
    """The hosts; the learner runs on the first one, the head."""

    hosts: list[Host]
    folder: Path
    said: list[Path] = field(default_factory=list)

    @property
    def head(self) -> Host:
        return self.hosts[0]

    def lay(self) -> None:
        """Create the bridge, and a veth pair to each namespace."""
        _ip("link", "add", "ludus-bridge", "type", "bridge")
        _ip("link", "set", "ludus-bridge", "up")
        for host in self.hosts:
            outer, inner = f"ludus-o{host.number}", f"ludus-i{host.number}"
            _ip("netns", "add", host.name)
            _ip("link", "add", outer, "type", "veth", "peer", "name", inner)
            _ip("link", "set", inner, "netns", host.name)
            _ip("link", "set", outer, "master", "ludus-bridge", "up")
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", inner)
            _ip("-n", host.name, "link", "set", inner, "up")
            _ip("-n", host.name, "link", "set", "lo", "up")

    def start(self) -> None:
        """Start a Ray node on each host, one after the other: a node must start within 30 s."""
        for host in self.hosts:
            where = ["--address", f"{self.head.address}:{PORT}"]
            if host is self.head:
                where = ["--head", "--port", str(PORT), "--include-dashboard=false"]
                where += ["--temp-dir", str(self.folder)]
            command = [*RAY, "start", *where, "--node-ip-address", host.address, "--num-cpus", "4", "--block"]
            command += ["--object-store-memory", str(100 << 20), "--disable-usage-stats"]
            command += ["--resources", json.dumps(host.resources)]
            said = self.folder.with_name(f"{self.folder.name}-{host.name}.txt")
            self.said.append(said)
            tries = 3
            while not self._started(host, command, said):
                tries -= 1
                assert tries, said.read_text("utf-8", "replace")

    def _started(self, host: Host, command: list[str], said: Path, seconds: float = 120.0) -> bool:
        """Start a node; return whether it runs, or False if it has exited."""
        with said.open("wb") as words:
            host.node = subprocess.Popen(host.command(*command), stdout=words, stderr=words)
        deadline = time.monotonic() + seconds
        while "Ray runtime started" not in (text := said.read_text("utf-8", "replace")):
            assert time.monotonic() < deadline, text
            if host.node.poll() is not None:
                for pid in self.processes(host):
                    subprocess.run(["kill", "-9", str(pid)], capture_output=True)
                return False
            time.sleep(0.1)
        return True

    def processes(self, host: Host) -> list[int]:
        """Return the processes on a host."""
        found = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]

    def end(self) -> None:
        """Kill the processes on the hosts and delete the namespaces."""
        for host in reversed(self.hosts):
            for pid in self.processes(host):
                subprocess.run(["kill", "-9", str(pid)], capture_output=True)
            if host.node is not None:
                host.node.wait(30)
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)
        subprocess.run(["ip", "link", "del", "ludus-bridge"], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        for said in self.said:
            said.unlink(missing_ok=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def ray_hosts(*resources: dict[str, float]):
    """Yield one host per element of `resources`. The folder is in /tmp, because socket paths must be short."""
    hosts = NamespaceHosts([Host(i, one) for i, one in enumerate(resources)], Path(f"/tmp/ludus-ray-{os.getpid()}"))
    try:
        hosts.lay()
        hosts.start()
        yield hosts
    finally:
        hosts.end()
