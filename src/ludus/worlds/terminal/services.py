"""Start the programs that run when a task begins.

The kernel reports the processes, through the supervisor of the sandbox, and no program of the session can change the
report. A process is identified by its id and start time, so that no other can stand in for it; its state is read
from its title, which no other process can set.
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
    """`python3 WORDS...` in /box, running from the start; it prints a line to `log` when it is ready.

    A service with a `parent` is started by that service, in the order of declaration. Once all services are
    ready it receives the signal `first_signal`; `title` is its process title then.
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
        """The check that the first signal has had its effect."""
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

    In `after_start` a service's name in braces stands for its process id. Raises WorldError if a service does not
    start.
    """
    outcome = await shell.run(_start_script(services))
    pids = dict(line.split() for line in outcome.text.splitlines())
    processes = await shell.processes()
    started: dict[str, ProcessId] = {}
    for service in services:
        if service.parent:
            parent = started.get(service.parent, (0, 0))[0]
            own = [(one.pid, one.started) for one in processes if one.parent == parent]
        else:
            own = [(one.pid, one.started) for one in processes if str(one.pid) == pids.get(service.name)]
        new = [process for process in own if process not in started.values()]
        if not new:
            raise WorldError(f"The task's service {service.words[0]} did not start.")
        started[service.name] = new[0]
    signals = (f"kill -{one.first_signal} {{{one.name}}}\n" for one in services if one.first_signal)
    last = "".join(signals) + after_start
    for name, (pid, _) in started.items():
        last = last.replace(f"{{{name}}}", str(pid))
    if last:
        await shell.run(f"(\n{last}\n)")
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
