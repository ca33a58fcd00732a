"""Programs that run when a task begins, and what has to hold of what runs at its end.

What runs is told by the kernel through the guard of the sandbox, and never by a program of the session. A
process is known by its number and its start, so that none can stand in for another one; what it is doing is
read from its title, which no other process can set.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Final, Literal, Protocol

from ludus.errors import WorldError
from ludus.sandbox.base import Outcome, Process, Snapshot

BOX: Final = "/box"
_ENDED: Final = ("Z", "X")
_LOOKS, _LOOK_S = 100, 0.02
Identity = tuple[int, int]


@dataclass(frozen=True)
class TerminalService:
    """`python3 WORDS...` in /box, from the beginning on, which prints a line to `log` once it is up.

    A service with a `parent` is started by that one, children in the order in which they are declared. `fate`
    is the signal that it gets once all are up, `title` what it calls itself then.
    """

    name: str
    words: tuple[str, ...]
    log: str
    environment: Mapping[str, str] = field(default_factory=dict)
    parent: str = ""
    title: str = ""
    fate: Literal["", "STOP", "KILL"] = ""


@dataclass(frozen=True)
class Running:
    """What runs (`now`), and which processes the services began as."""

    began: Mapping[str, Identity] = field(default_factory=dict)
    now: tuple[Process, ...] = ()

    def process(self, name: str) -> Process | None:
        """The process that a service began as; None where it has ended."""
        own = self.began.get(name)
        found = [one for one in self.now if (one.pid, one.started) == own and one.state not in _ENDED]
        return found[0] if found else None

    def like(self, words: tuple[str, ...]) -> list[Process]:
        """The processes that run a script of Python, the host's own, with its arguments, in /box."""
        return [one for one in self.now if one.state not in _ENDED and _words_of(one) == words]


NOTHING_RUNS: Final = Running()


def _words_of(process: Process) -> tuple[str, ...] | None:
    """The script and the arguments of a Python process, the script's path from /box on."""
    program = PurePosixPath(process.program)
    if not program.is_relative_to("/usr") or not program.name.startswith("python3"):
        return None
    words = process.argv[1:]
    if process.folder != BOX or not words or words[0].startswith("-"):
        return None
    script = words[0].removeprefix(f"{BOX}/").removeprefix("./")
    return (script, *words[1:])


class WatchedService(Protocol):
    """One thing that has to hold of what runs."""

    @property
    def name(self) -> str:
        """What it is called in a report."""
        ...

    def holds(self, state: Snapshot, running: Running) -> bool:
        """Whether it holds of these files and processes."""
        ...


@dataclass(frozen=True, slots=True)
class Lives:
    """The process that a service began as lives, suspended or not, with this title where one is given."""

    service: str
    title: str = ""
    suspended: bool = False

    @property
    def name(self) -> str:
        """By its service."""
        return f"{self.service} lives"

    def holds(self, state: Snapshot, running: Running) -> bool:
        """Whether it does."""
        process = running.process(self.service)
        if process is None or (self.title and process.title != self.title):
            return False
        return (process.state in ("T", "t")) == self.suspended


@dataclass(frozen=True, slots=True)
class ServiceEnded:
    """The process that a service began as has ended."""

    service: str

    @property
    def name(self) -> str:
        """By its service."""
        return f"{self.service} has ended"

    def holds(self, state: Snapshot, running: Running) -> bool:
        """Whether it has. Where no service ever began, nothing ended."""
        return self.service in running.began and running.process(self.service) is None


@dataclass(frozen=True)
class Runs:
    """So many processes run a script, none suspended, with these variables; `pid_file` names the only one."""

    words: tuple[str, ...]
    num: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    pid_file: str = ""

    @property
    def name(self) -> str:
        """By its words."""
        return f"{self.num} of {' '.join(self.words)}"

    def holds(self, state: Snapshot, running: Running) -> bool:
        """Whether they do."""
        found = running.like(self.words)
        fit = all(self.environment.items() <= one.environment.items() for one in found)
        told = state.files.get(self.pid_file, b"").split()
        named = not self.pid_file or told == [str(one.pid).encode() for one in found]
        return len(found) == self.num and fit and named and all(one.state != "T" for one in found)


def at_first(services: Sequence[TerminalService]) -> Running:
    """What runs once all services are up and each has met its fate."""
    processes = [
        Process(
            pid=100 + number,
            parent=1,
            started=number,
            state="T" if service.fate == "STOP" else "S",
            title=service.title,
            program="/usr/bin/python3",
            folder=BOX,
            argv=("python3", *service.words),
            environment=service.environment,
        )
        for number, service in enumerate(services)
    ]
    pairs = list(zip(services, processes, strict=True))
    began = {service.name: (one.pid, one.started) for service, one in pairs}
    return Running(began, tuple(one for service, one in pairs if service.fate != "KILL"))


class Converses(Protocol):
    """What services are started in: a session with a shell."""

    async def run(self, code: str) -> Outcome:
        """Run commands."""
        ...

    async def processes(self) -> tuple[Process, ...]:
        """What runs in it."""
        ...


async def start_services(
    shell: Converses, services: Sequence[TerminalService], afterwards: str
) -> Mapping[str, Identity]:
    """Start the services, and run `afterwards` once all are up; gives the processes that they are.

    A service's name in braces stands for its number in `afterwards`. Raises WorldError where one does not
    come up.
    """
    outcome = await shell.run(_launch(services))
    numbers = dict(line.split() for line in outcome.text.splitlines())
    found = {str(one.pid): one for one in await shell.processes()}
    began: dict[str, Identity] = {}
    for service in services:
        if service.parent:
            parent, known = began.get(service.parent, (0, 0))[0], set(began.values())
            own = [o for o in found.values() if o.parent == parent and (o.pid, o.started) not in known]
        else:
            own = [found[number] for number in [numbers.get(service.name, "")] if number in found]
        if not own:
            raise WorldError(f"{service.words[0]}, which belongs to the task, did not start.")
        began[service.name] = (own[0].pid, own[0].started)
    fates = "".join(f"kill -{one.fate} {{{one.name}}}\n" for one in services if one.fate)
    last = fates + afterwards
    for name, (pid, _) in began.items():
        last = last.replace(f"{{{name}}}", str(pid))
    if last:
        await shell.run(f"(\n{last}\n)")
    for _ in range(_LOOKS):
        now = Running(began, await shell.processes())
        if all(_has_met_fate(service, now.process(service.name)) for service in services):
            return began
        await asyncio.sleep(_LOOK_S)
    raise WorldError("A program that belongs to the task did not end or stop as it should.")


def _has_met_fate(service: TerminalService, process: Process | None) -> bool:
    """Whether a service has ended, stopped or gone on, as its fate says."""
    if service.fate == "KILL":
        return process is None
    return process is not None and (process.state == "T") == (service.fate == "STOP")


def _launch(services: Sequence[TerminalService]) -> str:
    """The commands that start services one after the other, and print a line `NAME PID` for each."""
    lines = ['up() { for i in $(seq 400); do [ -s "$1" ] && return; sleep 0.02; done; }']
    for service in services:
        if not service.parent:
            values = " ".join(f"{name}={shlex.quote(value)}" for name, value in service.environment.items())
            log = shlex.quote(service.log)
            command = f"{values} setsid python3 {shlex.join(service.words)}"
            lines += [f"{command} < /dev/null >> {log} 2>&1 &", f"echo {service.name} $!", f"up {log}"]
    return "\n".join(("(", *lines, ")"))
