"""A task: initial files and services, instruction, solution, and the checks of the final state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ludus.rewards.code.unit_tests import Suite
from ludus.sandbox.base import Limits, Sandbox, Snapshot
from ludus.untrusted.worker import LimitExceeded, call_bounded
from ludus.worlds.terminal.checks import NOTHING_RUNS, Check, Executable, FilesUnchanged, Only, Running, Text, matches
from ludus.worlds.terminal.services import TerminalService, initial_processes

RUN_LIMITS = Limits(wall_s=15.0, cpu_s=10.0, files_out=200)


@dataclass(frozen=True, slots=True)
class Ran:
    """A command's result, in a fresh sandbox with only those of the final files that match `takes`.

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

    async def holds(self, state: Snapshot, sandbox: Sandbox) -> bool:
        """Return whether the result is as expected. Raises WorldError if the sandbox fails."""
        taken = {path: data for path, data in state.files.items() if matches(path, self.takes)}
        given = {**taken, **{path: text.encode() for path, text in self.files.items()}}
        outcome = await sandbox.run(["bash", "-c", self.command], files=given, limits=RUN_LIMITS)
        if outcome.timed_out or outcome.memory_exceeded or self.exit not in (None, outcome.exit):
            return False
        printed = Snapshot({"stdout": outcome.stdout})
        fits = self.stdout is None or Text("stdout", self.stdout).holds(printed)
        return fits and all((await grade_state(Snapshot({**given, **outcome.files}), self.leaves)).values())


@dataclass(frozen=True)
class JobDraft:
    """A task as stored in the task file.

    `steps` are the commands that solve it; they print nothing. `changes` are patterns of the files that may
    change or disappear; all others must stay. `looks` are files whose first lines are worth reading. `services`
    run from the start, the commands `afterwards` run once they are ready, and `watched` are checks of processes.
    """

    text: str
    files: Mapping[str, str | bytes]
    steps: tuple[str, ...]
    checks: tuple[Check, ...] = ()
    runs: tuple[Ran, ...] = ()
    changes: tuple[str, ...] = ()
    executable: frozenset[str] = frozenset()
    looks: tuple[str, ...] = ()
    services: tuple[TerminalService, ...] = ()
    afterwards: str = ""
    watched: tuple[Check, ...] = ()


@dataclass(frozen=True)
class TerminalJob:
    """A task. `parts` are the names of its kind, or of the two kinds of a pair."""

    parts: tuple[str, ...]
    topic: str
    level: int
    number: int
    draft: JobDraft

    @property
    def id(self) -> str:
        """A unique id."""
        return f"{'+'.join(self.parts)}:{self.number}"

    @property
    def text(self) -> str:
        """The instruction."""
        return self.draft.text

    @property
    def services(self) -> tuple[TerminalService, ...]:
        """Programs that run from the start."""
        return self.draft.services

    @property
    def afterwards(self) -> str:
        """Commands to run once all services are ready."""
        return self.draft.afterwards

    @cached_property
    def start(self) -> Snapshot:
        """The initial files."""
        files = {path: data.encode() if isinstance(data, str) else data for path, data in self.draft.files.items()}
        return Snapshot(files, self.draft.executable)

    @cached_property
    def checks(self) -> tuple[Check, ...]:
        """All checks that run no program."""
        kept = FilesUnchanged(self.start.files, self.draft.changes, self.draft.executable)
        return (*self.draft.checks, kept, *self.draft.watched)

    @cached_property
    def suite(self) -> Suite:
        """The names of all checks; those that hold at the start must still hold at the end."""
        found = check_state(self.checks, self.start, initial_processes(self.services))
        due = [name for name, holds in found.items() if not holds] + [run.name for run in self.draft.runs]
        return Suite(tuple(due), tuple(name for name, holds in found.items() if holds))

    async def grade(self, state: Snapshot, sandbox: Sandbox, running: Running = NOTHING_RUNS) -> Mapping[str, bool]:
        """Return which checks hold of the final state, by name; programs run only if all other checks hold.

        Raises WorldError if the sandbox fails.
        """
        found = await grade_state(state, self.checks, running)
        for run in self.draft.runs:
            found[run.name] = all(found.values()) and await run.holds(state, sandbox)
        return found


def check_state(checks: Sequence[Check], state: Snapshot, running: Running) -> dict[str, bool]:
    """Return which checks hold, by name."""
    return {check.name: check.holds(state, running) for check in checks}


async def grade_state(state: Snapshot, checks: Sequence[Check], running: Running = NOTHING_RUNS) -> dict[str, bool]:
    """Return the result of `check_state` in a process with limits, because hostile archives and repositories take
    long to read; beyond the limits no check holds."""
    try:
        return await call_bounded(check_state, checks, state, running) if checks else {}
    except LimitExceeded:
        return {check.name: False for check in checks}


def pair(first: TerminalJob, second: TerminalJob, number: int) -> TerminalJob:
    """Return both tasks in one folder. Raises ValueError if they share files."""
    one, two = first.draft, second.draft
    if _overlaps(first, second) or _overlaps(second, first):
        raise ValueError(f"{first.id} and {second.id} are about the same files")
    draft = JobDraft(
        f"Do two things.\n1. {one.text}\n2. {two.text}",
        {**one.files, **two.files},
        (*one.steps, *two.steps),
        (*one.checks, *two.checks),
        (*one.runs, *two.runs),
        (*one.changes, *two.changes),
        one.executable | two.executable,
        (*one.looks, *two.looks),
        (*one.services, *two.services),
        one.afterwards + two.afterwards,
        (*one.watched, *two.watched),
    )
    level = min(4, max(first.level, second.level) + 1)
    return TerminalJob((*first.parts, *second.parts), "pairs", level, number, draft)


def _overlaps(first: TerminalJob, second: TerminalJob) -> bool:
    """Return whether the first task may touch, or disagrees about, files of the second."""
    patterns = [*first.draft.changes, *(c.pattern for c in first.checks if isinstance(c, Only | Executable))]
    shared = [path for path in first.start.files if second.start.files.get(path, b"") != b""]
    same_names = {check.name for check in first.draft.checks} & {check.name for check in second.draft.checks}
    differ = any(first.start.files[path] != second.start.files[path] for path in shared)
    return differ or bool(same_names) or any(matches(path, tuple(patterns)) for path in second.start.files)
