"""Start the background services of a task.

The supervisor of the sandbox reads the processes from the kernel, so that programs of the session cannot falsify them.
A process is identified by its id and start time, since ids are reused; its state is read from its title, which no other
process can set.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from ludus.errors import WorldError
from ludus.sandbox.base import Process, SandboxSession, Snapshot
from ludus.tools.workspace import Workspace
from ludus.worlds.terminal.checks import BOX, Check, ProcessId, SessionState, service_ended, service_lives

_POLLS, _POLL_S = 100, 0.02
_PYTHON: Final = "/usr/bin/python3"
_WAIT: Final = 'up() { for i in $(seq 400); do [ -s "$1" ] && return; sleep 0.02; done; }'


@dataclass(frozen=True)
class TerminalService:
    """A process `python3 WORDS...` in /box, started with the task; it writes a line to `log` when it is ready.

    A service with a `parent` is started by that service, in the order of declaration. Once all services are
    ready it receives the signal `first_signal`; `title` is its process title at that time.
    """

    name: str
    words: tuple[str, ...]
    log: str
    environment: Mapping[str, str] = field(default_factory=dict)
    parent: str = ""
    title: str = ""
    first_signal: Literal["", "STOP", "KILL"] = ""

    @property
    def signal_handled(self) -> Check:
        """Check that the first signal has taken effect."""
        if self.first_signal == "KILL":
            return service_ended(self.name)
        return service_lives(self.name, suspended=self.first_signal == "STOP")


def initial_state(files: Snapshot, services: Sequence[TerminalService]) -> SessionState:
    """Return the state to expect once all services are ready and have received their signals."""
    started = {service.name: (number, number) for number, service in enumerate(services)}
    processes: list[Process] = []
    for number, service in enumerate(services):
        argv, state = ("python3", *service.words), "T" if service.first_signal == "STOP" else "S"
        process = Process(number, 1, number, state, service.title, _PYTHON, BOX, argv, service.environment)
        processes += [process] if service.first_signal != "KILL" else []
    return SessionState(files.files, files.executable, started, tuple(processes))


async def start_services(
    shell: Workspace | SandboxSession, services: Sequence[TerminalService], after_start: str
) -> Mapping[str, ProcessId]:
    """Start the services, run the commands `after_start` once all are ready, and return their processes.

    In `after_start` a service's name in braces is replaced by its process id. Raises WorldError if a service does not
    start.
    """
    outcome = await shell.run(_start_script(services))
    pids = dict(line.split() for line in outcome.text.splitlines())
    processes = await shell.processes()
    started: dict[str, ProcessId] = {}
    for service in services:
        if service.parent:
            parent = started.get(service.parent, (0, 0))[0]
            candidates = [(one.pid, one.started) for one in processes if one.parent == parent]
        else:
            candidates = [(one.pid, one.started) for one in processes if str(one.pid) == pids.get(service.name)]
        unclaimed = [process for process in candidates if process not in started.values()]
        if not unclaimed:
            raise WorldError(f"The task's service {service.words[0]} did not start.")
        started[service.name] = unclaimed[0]
    signals = (f"kill -{one.first_signal} {{{one.name}}}\n" for one in services if one.first_signal)
    commands = "".join(signals) + after_start
    for name, (pid, _) in started.items():
        commands = commands.replace(f"{{{name}}}", str(pid))
    if commands:
        await shell.run(f"(\n{commands}\n)")
    for _ in range(_POLLS):
        state = SessionState({}, started=started, processes=await shell.processes())
        if all(service.signal_handled.holds(state) for service in services):
            return started
        await asyncio.sleep(_POLL_S)
    raise WorldError("A service of the task did not stop or exit after its signal.")


def _start_script(services: Sequence[TerminalService]) -> str:
    """Return commands that start the services in order, and print a line `NAME PID` for each."""
    lines = [_WAIT]
    for service in services:
        if not service.parent:
            values = " ".join(f"{name}={shlex.quote(value)}" for name, value in service.environment.items())
            log = shlex.quote(service.log)
            command = f"{values} setsid python3 {shlex.join(service.words)}"
            lines += [f"{command} < /dev/null >> {log} 2>&1 &", f"echo {service.name} $!", f"up {log}"]
    return "\n".join(("(", *lines, ")"))
