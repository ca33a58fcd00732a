"""Run the programs of `battery/` on a sandbox backend and list the violations.

As a script, for any user, it prints each violation on a line, and `contained N` at the end:

    python tests/battery_run.py                                                 # the default backend, all programs
    python tests/battery_run.py --backend podman --image IMAGE fork_bomb daemon
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from ludus.errors import WorldError
from ludus.sandbox import Limits, SandboxSettings, open_sandbox
from ludus.sandbox.base import Outcome

HERE = Path(__file__).parent
PROGRAMS = sorted((HERE / "battery").glob("*.py"))
CONCURRENCY = 6
LIMITS = Limits(
    wall_s=12.0,
    cpu_s=6.0,
    memory_bytes=192 * 2**20,
    processes=16,
    disk_bytes=16 * 2**20,
    disk_files=500,
    output_bytes=16 * 1024,
    files_out_bytes=2**20,
)

ENDLESS = replace(LIMITS, wall_s=1.5, cpu_s=1.0)
"""Limits of programs that only a time limit ends; the other limits suffice on a busy machine."""


@dataclass
class Host:
    """Resources of the host that programs must not read, reach or change; each contains `token`."""

    folder: Path
    token: str
    listener: socket.socket
    named: socket.socket
    abstract: socket.socket
    signals: list[int] = field(default_factory=list)

    @property
    def target(self) -> bytes:
        """The locations of the resources as JSON for the programs, without the token."""
        told = {
            "truth": str(self.folder / "truth" / "answers.json"),
            "canary": str(self.folder / "canary"),
            "port": self.listener.getsockname()[1],
            "socket": str(self.folder / "socket"),
            "abstract": self.abstract.getsockname()[1:].decode(),
            "pid": os.getpid(),
        }
        return json.dumps(told).encode()

    def state(self) -> str:
        """Return a digest of everything on the host that a program could have changed."""
        parts = [(p.as_posix(), oct(p.lstat().st_mode)) for p in sorted(self.folder.rglob("*"))]
        parts += [(p.as_posix(), p.read_text()) for p in sorted(self.folder.rglob("*")) if p.is_file()]
        hellos = [p for p in ("/", "/usr", "/usr/local/bin", "/etc", "/tmp") if Path(p, "hello-from-inside").exists()]
        mounts = Path("/proc/self/mounts").read_text()
        return hashlib.sha256(repr((parts, hellos, mounts, os.stat("/usr").st_mode)).encode()).hexdigest()

    def visits(self) -> int:
        """Return the number of accepted connections."""
        count = 0
        for sock in (self.listener, self.named, self.abstract):
            try:
                sock.accept()[0].close()
                count += 1
            except BlockingIOError:
                pass
        return count


@contextmanager
def a_folder() -> Iterator[Path]:
    """Yield a temporary folder that every user may read."""
    with tempfile.TemporaryDirectory(prefix="battery-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@contextmanager
def a_host() -> Iterator[Host]:
    """Yield a host with files, sockets, an environment variable and a signal handler."""
    token = secrets.token_hex(16)
    with a_folder() as folder:
        for path in ("truth/answers.json", "canary/file"):
            (folder / path).parent.mkdir()
            (folder / path).write_text(f"the answer is {token}")
        (folder / "canary").chmod(0o777)
        listener, named, abstract = (socket.socket(f) for f in (socket.AF_INET, socket.AF_UNIX, socket.AF_UNIX))
        listener.bind(("127.0.0.1", 0))
        named.bind(str(folder / "socket"))
        (folder / "socket").chmod(0o777)
        abstract.bind(f"\0battery-{secrets.token_hex(4)}")
        for sock in (listener, named, abstract):
            sock.listen()
            sock.setblocking(False)
        host = Host(folder, token, listener, named, abstract)
        before = signal.signal(signal.SIGUSR1, lambda number, _: host.signals.append(number))
        os.environ["BATTERY_SECRET"] = token
        try:
            yield host
        finally:
            del os.environ["BATTERY_SECRET"]
            signal.signal(signal.SIGUSR1, before)
            for sock in (listener, named, abstract):
                sock.close()


def descendants() -> set[int]:
    """Return all descendants of this process, including zombies."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, pending = set(), [os.getpid()]
    while pending:
        pending += (new := children.get(pending.pop(), []))
        found |= set(new)
    return found


def expectation(program: Path) -> str:
    """Return how the program must end, according to its first line."""
    return program.read_text().splitlines()[0].removeprefix("# expect: ")


def judge(expected: str, outcome: Outcome, token: str) -> list[str]:
    """Return the violations of an outcome."""
    said = outcome.stdout + outcome.stderr + b"".join(outcome.files.values())
    found = [line.decode("utf-8", "replace") for line in said.splitlines() if b"ESCAPED" in line]
    met = {
        "tried": outcome.exit == 0 and b"TRIED" in outcome.stdout and not outcome.timed_out,
        "ended": outcome.exit == 0 and not outcome.timed_out,
        "failed": not outcome.ok,
        "timed_out": outcome.timed_out,
        "memory_exceeded": outcome.memory_exceeded,
        "truncated": outcome.truncated,
    }
    if not met[expected]:
        found.append(f"not {expected}: {outcome!r:.600}")
    if token.encode() in said:
        found.append("the program read the token of the host")
    if len(outcome.stdout) > LIMITS.output_bytes or len(outcome.stderr) > LIMITS.output_bytes:
        found.append("more output than the limit")
    links = ("truth.txt", "passwd.txt", "environ.txt", "linked.txt", "inner/up.txt", "one.txt", "two.txt")
    found += [f"{name} came out" for name in outcome.files if name in links or "\n" in name]
    return found


async def run_battery(programs: list[Path], host: Host, backend: str = "namespaces", image: str = "") -> list[str]:
    """Run the programs concurrently; return all violations, each with the name of the program."""
    before, state = descendants(), host.state()
    sandbox = open_sandbox(SandboxSettings(backend, concurrency=CONCURRENCY, image=image or SandboxSettings().image))
    slots = asyncio.Semaphore(CONCURRENCY)  # container backends start every run at once
    shared = {"trying.py": (HERE / "battery_trying.py").read_bytes(), "target.json": host.target}

    async def one(program: Path) -> list[str]:
        expected = expectation(program)
        limits = ENDLESS if expected == "timed_out" else LIMITS
        try:
            async with slots:
                outcome = await sandbox.run(program.read_text(), files=shared, limits=limits)
        except WorldError as error:
            return [f"{program.stem}: reported as a failure of the sandbox: {error.message}"]
        return [f"{program.stem}: {finding}" for finding in judge(expected, outcome, host.token)]

    try:
        found = [line for lines in await asyncio.gather(*map(one, programs)) for line in lines]
        after = await sandbox.run("print('still here')", limits=LIMITS)
        found += [] if after.stdout == b"still here\n" else [f"afterwards: {after}"]
    finally:
        await sandbox.close()
    found += [f"process {pid} is left" for pid in descendants() - before]
    found += ["the host changed"] if host.state() != state else []
    found += [f"{visits} connections reached the host"] if (visits := host.visits()) else []
    return found + (["a signal reached the host"] if host.signals else [])


def main() -> int:
    """Run the named programs, or all of them; return 1 if there is a violation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--backend", default="namespaces", choices=("namespaces", "docker", "podman"))
    parser.add_argument("--image", default="", help="docker and podman: the image")
    args = parser.parse_args()
    programs = [program for program in PROGRAMS if not args.names or program.stem in args.names]
    with a_host() as host:
        found = asyncio.run(run_battery(programs, host, args.backend, args.image))
    print("\n".join([*found, f"contained {len(programs)}"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
