"""A task: initial files and services, instruction, solution, and the checks of the final state.

The supervisor of the sandbox reads the processes from the kernel, so that programs of the session cannot falsify them.
A process is identified by its id and start time, since ids are reused; its state is read from its title, which no other
process can set.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Literal

from ludus.errors import WorldError
from ludus.rewards.code.unit_tests import Suite
from ludus.sandbox.base import Limits, Process, Sandbox, SandboxSession, Snapshot
from ludus.tools.workspace import Workspace
from ludus.untrusted.worker import LimitExceeded, call_bounded
from ludus.worlds.terminal.checks import (
    BOX,
    Check,
    ProcessId,
    SessionState,
    files_unchanged,
    has_text,
    matches,
    service_ended,
    service_lives,
)

RUN_LIMITS = Limits(wall_s=15.0, cpu_s=10.0, files_out=200)
_POLLS, _POLL_S = 100, 0.02
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
        if self.first_signal == "KILL":
            return service_ended(self.name)
        return service_lives(self.name, suspended=self.first_signal == "STOP")


def initial_state(files: Snapshot, services: Sequence[TerminalService]) -> SessionState:
    """Return the state to expect once all services are ready and have received their signals."""
    started, processes = dict[str, ProcessId](), list[Process]()
    for number, service in enumerate(services):
        started[service.name] = number, number
        argv, state = ("python3", *service.words), "T" if service.first_signal == "STOP" else "S"
        if service.first_signal != "KILL":
            values = service.title, "/usr/bin/python3", BOX, argv, service.environment
            processes.append(Process(number, 1, number, state, *values))
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
    for service in (one for one in services if not one.parent):
        values = " ".join(f"{name}={shlex.quote(value)}" for name, value in service.environment.items())
        log = shlex.quote(service.log)
        command = f"{values} setsid python3 {shlex.join(service.words)}"
        lines += [f"{command} < /dev/null >> {log} 2>&1 &", f"echo {service.name} $!", f"up {log}"]
    return "\n".join(("(", *lines, ")"))


@dataclass(frozen=True, slots=True)
class CommandCheck:
    """Check of a command's result, in a fresh sandbox with only the final files that match `takes`.

    `files` are added or replace them: hidden inputs, and programs in their original state. `stdout` and `exit`
    are the expected output and exit code, if set; `leaves` are checks of the files afterwards.
    """

    name: str
    command: str
    takes: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    stdout: str | None = None
    exit: int | None = None
    leaves: tuple[Check, ...] = ()

    async def holds(self, state: SessionState, sandbox: Sandbox) -> bool:
        """Return whether the result is as expected. Raises WorldError if the sandbox fails."""
        taken = {path: data for path, data in state.files.items() if matches(path, self.takes)}
        given = {**taken, **{path: text.encode() for path, text in self.files.items()}}
        outcome = await sandbox.run(["bash", "-c", self.command], files=given, limits=RUN_LIMITS)
        if outcome.timed_out or outcome.memory_exceeded or self.exit not in (None, outcome.exit):
            return False
        printed = SessionState({"stdout": outcome.stdout})
        if self.stdout is not None and not has_text("stdout", self.stdout).holds(printed):
            return False
        return all((await check_bounded(self.leaves, SessionState({**given, **outcome.files}))).values())


@dataclass(frozen=True)
class TerminalTask:
    """A terminal task.

    `steps` are the commands that solve it; they print nothing. `changes` are patterns of the files that may
    change or disappear; all others must stay. `preview` are files whose first lines a demonstration reads. `services`
    run from the start, the commands `after_start` run once they are ready, and `process_checks` are checks of
    processes. `parts` are the names of its kind, or of the two kinds of a pair. The task file has no `parts`,
    `topic`, `level` and `number`.
    """

    text: str
    files: Mapping[str, str | bytes]
    steps: tuple[str, ...]
    file_checks: tuple[Check, ...] = ()
    command_checks: tuple[CommandCheck, ...] = ()
    changes: tuple[str, ...] = ()
    executable: frozenset[str] = frozenset()
    preview: tuple[str, ...] = ()
    services: tuple[TerminalService, ...] = ()
    after_start: str = ""
    process_checks: tuple[Check, ...] = ()
    parts: tuple[str, ...] = ()
    topic: str = ""
    level: int = 0
    number: int = 0

    @property
    def id(self) -> str:
        return f"{'+'.join(self.parts)}:{self.number}"

    @cached_property
    def start(self) -> Snapshot:
        files = {path: data.encode() if isinstance(data, str) else data for path, data in self.files.items()}
        return Snapshot(files, self.executable)

    @cached_property
    def checks(self) -> tuple[Check, ...]:
        """All checks that run no program."""
        unchanged = files_unchanged(self.start.files, self.changes, self.executable)
        return (*self.file_checks, unchanged, *self.process_checks)

    @cached_property
    def suite(self) -> Suite:
        """The names of all checks; those that hold at the start must also hold at the end."""
        found = check_state(self.checks, initial_state(self.start, self.services))
        due = [name for name, holds in found.items() if not holds] + [one.name for one in self.command_checks]
        return Suite(tuple(due), tuple(name for name, holds in found.items() if holds))

    async def grade(self, state: SessionState, sandbox: Sandbox) -> Mapping[str, bool]:
        """Evaluate all checks on the final state, by name; programs run only if all other checks hold.

        Raises WorldError if the sandbox fails.
        """
        found = await check_bounded(self.checks, state)
        for one in self.command_checks:
            found[one.name] = all(found.values()) and await one.holds(state, sandbox)
        return found


def check_state(checks: Sequence[Check], state: SessionState) -> dict[str, bool]:
    """Evaluate the checks and return the results by name."""
    return {check.name: check.holds(state) for check in checks}


async def check_bounded(checks: Sequence[Check], state: SessionState) -> dict[str, bool]:
    """Return the result of `check_state` in a process with limits, because hostile archives and repositories take
    long to read; beyond the limits no check holds."""
    try:
        return await call_bounded(check_state, checks, state) if checks else {}
    except LimitExceeded:
        return {check.name: False for check in checks}


def pair(first: TerminalTask, second: TerminalTask, number: int) -> TerminalTask:
    """Combine two tasks in one folder. Raises ValueError if they share files."""
    if _overlaps(first, second) or _overlaps(second, first):
        raise ValueError(f"{first.id} and {second.id} share files")
    joined = ("steps", "file_checks", "command_checks", "changes", "preview", "services", "after_start")
    one, two = vars(first), vars(second)
    return replace(
        first,
        **{name: one[name] + two[name] for name in (*joined, "process_checks", "parts")},
        text=f"Do two things.\n1. {first.text}\n2. {second.text}",
        files={**first.files, **second.files},
        executable=first.executable | second.executable,
        topic="pairs",
        level=min(4, max(first.level, second.level) + 1),
        number=number,
    )


def _overlaps(first: TerminalTask, second: TerminalTask) -> bool:
    """Return whether the first task may change files of the second, or expects other contents of them."""
    patterns = tuple(str(check.arguments["pattern"]) for check in first.checks if "pattern" in check.arguments)
    shared = [path for path in first.start.files if second.start.files.get(path, b"") != b""]
    same_names = {check.name for check in first.file_checks} & {check.name for check in second.file_checks}
    differ = any(first.start.files[path] != second.start.files[path] for path in shared)
    return differ or bool(same_names) or any(matches(path, first.changes + patterns) for path in second.start.files)
