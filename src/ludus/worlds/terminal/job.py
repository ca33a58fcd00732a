"""A task of the terminal: what lies there, what is asked, how it is done, and what has to hold at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ludus.rewards.code.unit_tests import Suite
from ludus.sandbox.base import Limits, Sandbox, Snapshot
from ludus.untrusted.worker import LimitExceeded, call_bounded
from ludus.worlds.terminal.checks import Check, Executable, FilesUnchanged, Only, Text, matches
from ludus.worlds.terminal.services import NOTHING_RUNS, Running, TerminalService, WatchedService, at_first

RUN_LIMITS = Limits(wall_s=15.0, cpu_s=10.0, files_out=200)


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command gives, run afresh over some of the final files: those that fit `takes`, and no others.

    `files` are laid beside them (or over them): hidden inputs, and programs as they were at first. `stdout`
    and `exit`, where given, have to be so, and so have the checks `leaves` on the files afterwards.
    """

    name: str
    command: str
    takes: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    stdout: str | None = None
    exit: int | None = None
    leaves: tuple[Check, ...] = ()

    async def holds(self, state: Snapshot, sandbox: Sandbox) -> bool:
        """Whether it does. Raises WorldError where the sandbox breaks."""
        taken = {path: data for path, data in state.files.items() if matches(path, self.takes)}
        given = {**taken, **{path: text.encode() for path, text in self.files.items()}}
        outcome = await sandbox.run(["bash", "-c", self.command], files=given, limits=RUN_LIMITS)
        if outcome.timed_out or outcome.memory_exceeded:
            return False
        if self.exit is not None and outcome.exit != self.exit:
            return False
        after = Snapshot({**given, **outcome.files})
        said = Snapshot({"stdout": outcome.stdout})
        told = self.stdout is None or Text("stdout", self.stdout).holds(said)
        return told and all((await grade_files(after, self.leaves)).values())


@dataclass(frozen=True)
class JobDraft:
    """What a task is, as the file of the tasks has it.

    `steps` are the commands that do it; they print nothing. `changes` are patterns of the files that may
    change or go; all others are to be kept. `looks` are files whose first lines are worth a look.
    `services` run from the beginning, `afterwards` are commands that are run once they are up, and `watched`
    has to hold of what runs at the end.
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
    watched: tuple[WatchedService, ...] = ()


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
        """Unique among the tasks."""
        return f"{'+'.join(self.parts)}:{self.number}"

    @cached_property
    def start(self) -> Snapshot:
        """The files at the beginning."""
        files = {path: data.encode() if isinstance(data, str) else data for path, data in self.draft.files.items()}
        return Snapshot(files, self.draft.executable)

    @cached_property
    def checks(self) -> tuple[Check, ...]:
        """All that is judged without running anything; that the rest is kept comes last."""
        kept = FilesUnchanged(self.start.files, self.draft.changes, self.draft.executable)
        return (*self.draft.checks, kept)

    @property
    def text(self) -> str:
        """What is asked."""
        return self.draft.text

    @cached_property
    def suite(self) -> Suite:
        """The names of all that has to hold; what holds at the beginning has to go on holding."""
        found = self._found(self.start, at_first(self.services))
        held = tuple(name for name, holds in found.items() if holds)
        due = tuple(name for name, holds in found.items() if not holds)
        return Suite((*due, *(run.name for run in self.draft.runs)), held)

    @property
    def services(self) -> tuple[TerminalService, ...]:
        """What runs from the beginning."""
        return self.draft.services

    @property
    def afterwards(self) -> str:
        """The commands that are run once all services are up."""
        return self.draft.afterwards

    async def grade(self, state: Snapshot, sandbox: Sandbox, running: Running = NOTHING_RUNS) -> Mapping[str, bool]:
        """What holds of the final files and processes, by name. Programs run only where all else holds.

        Raises WorldError where the sandbox breaks.
        """
        found = await grade_files(state, self.checks, self.draft.watched, running)
        for run in self.draft.runs:
            found[run.name] = all(found.values()) and await run.holds(state, sandbox)
        return found

    def _found(self, state: Snapshot, running: Running) -> dict[str, bool]:
        """What holds, by name, without running anything."""
        return held(self.checks, self.draft.watched, state, running)


def held(
    checks: Sequence[Check], watched: Sequence[WatchedService], state: Snapshot, running: Running
) -> dict[str, bool]:
    """Which checks hold, by name."""
    files = {check.name: check.holds(state) for check in checks}
    return {**files, **{one.name: one.holds(state, running) for one in watched}}


async def grade_files(
    state: Snapshot, checks: Sequence[Check], watched: Sequence[WatchedService] = (), running: Running = NOTHING_RUNS
) -> dict[str, bool]:
    """As `held`, in a process with limits: reading a policy's archives and repositories may take long.

    None of the checks holds where they take longer.
    """
    if not checks and not watched:
        return {}
    try:
        return await call_bounded(held, checks, watched, state, running)
    except LimitExceeded:
        return dict.fromkeys([*(one.name for one in checks), *(one.name for one in watched)], False)


def pair(first: TerminalJob, second: TerminalJob, number: int) -> TerminalJob:
    """Both tasks in one folder. Raises ValueError where one touches the other's files."""
    one, two = first.draft, second.draft
    if _touches(first, second) or _touches(second, first):
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


def _touches(first: TerminalJob, second: TerminalJob) -> bool:
    """Whether what the first is about has files of the second in it."""
    patterns = [*first.draft.changes, *(c.pattern for c in first.checks if isinstance(c, Only | Executable))]
    shared = [path for path in first.start.files if second.start.files.get(path, b"") != b""]
    same_names = {check.name for check in first.draft.checks} & {check.name for check in second.draft.checks}
    odd = [path for path in shared if first.start.files[path] != second.start.files[path]]
    return bool(odd or same_names) or any(matches(path, tuple(patterns)) for path in second.start.files)
