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
from ludus.sandbox.base import Process, SandboxSession
from ludus.tools.workspace import Workspace
from ludus.worlds.terminal.checks import BOX, Identity, Running

_POLLS, _POLL_S = 100, 0.02
_SCRIPT: Final = 'up() { for i in $(seq 400); do [ -s "$1" ] && return; sleep 0.02; done; }'


@dataclass(frozen=True)
class TerminalService:
    """`python3 WORDS...` in /box, running from the start; it prints a line to `log` when it is ready.

    A service with a `parent` is started by that service, in the order of declaration. Once all services are
    ready it receives the signal `fate`; `title` is its process title then.
    """

    name: str
    words: tuple[str, ...]
    log: str
    environment: Mapping[str, str] = field(default_factory=dict)
    parent: str = ""
    title: str = ""
    fate: Literal["", "STOP", "KILL"] = ""


def initial_processes(services: Sequence[TerminalService]) -> Running:
    """Return the processes to expect once all services are ready and have received their signals."""
    began: dict[str, Identity] = {}
    now: list[Process] = []
    for number, service in enumerate(services):
        began[service.name] = (100 + number, number)
        if service.fate != "KILL":
            process = Process(
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
            now.append(process)
    return Running(began, tuple(now))


async def start_services(
    shell: Workspace | SandboxSession, services: Sequence[TerminalService], afterwards: str
) -> Mapping[str, Identity]:
    """Start the services, run the commands `afterwards` once all are ready, and return their processes.

    In `afterwards` a service's name in braces stands for its process id. Raises WorldError if a service does not
    start.
    """
    outcome = await shell.run(_start_script(services))
    pids = dict(line.split() for line in outcome.text.splitlines())
    found = {str(one.pid): one for one in await shell.processes()}
    began: dict[str, Identity] = {}
    for service in services:
        if service.parent:
            parent, known = began.get(service.parent, (0, 0))[0], set(began.values())
            own = [o for o in found.values() if o.parent == parent and (o.pid, o.started) not in known]
        else:
            own = [found[pid] for pid in [pids.get(service.name, "")] if pid in found]
        if not own:
            raise WorldError(f"{service.words[0]}, which belongs to the task, did not start.")
        began[service.name] = (own[0].pid, own[0].started)
    last = "".join(f"kill -{one.fate} {{{one.name}}}\n" for one in services if one.fate) + afterwards
    for name, (pid, _) in began.items():
        last = last.replace(f"{{{name}}}", str(pid))
    if last:
        await shell.run(f"(\n{last}\n)")
    for _ in range(_POLLS):
        now = Running(began, await shell.processes())
        if all(_met_fate(service, now.process(service.name)) for service in services):
            return began
        await asyncio.sleep(_POLL_S)
    raise WorldError("A program that belongs to the task did not end or stop as it should.")


def _met_fate(service: TerminalService, process: Process | None) -> bool:
    if service.fate == "KILL":
        return process is None
    return process is not None and (process.state == "T") == (service.fate == "STOP")


def _start_script(services: Sequence[TerminalService]) -> str:
    """Return commands that start the services in order, and print a line `NAME PID` for each."""
    lines = [_SCRIPT]
    for service in services:
        if not service.parent:
            values = " ".join(f"{name}={shlex.quote(value)}" for name, value in service.environment.items())
            log = shlex.quote(service.log)
            command = f"{values} setsid python3 {shlex.join(service.words)}"
            lines += [f"{command} < /dev/null >> {log} 2>&1 &", f"echo {service.name} $!", f"up {log}"]
    return "\n".join(("(", *lines, ")"))
