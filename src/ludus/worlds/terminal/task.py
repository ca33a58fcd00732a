"""A task: initial files and services, instruction, solution, and the checks of the final state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ludus.rewards.code.unit_tests import Suite
from ludus.sandbox.base import Limits, Sandbox, Snapshot
from ludus.untrusted.worker import LimitExceeded, call_bounded
from ludus.worlds.terminal.checks import Check, SessionState, files_unchanged, has_text, matches
from ludus.worlds.terminal.services import TerminalService, initial_state

RUN_LIMITS = Limits(wall_s=15.0, cpu_s=10.0, files_out=200)


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
        if self.stdout is not None and not has_text("stdout", self.stdout).holds(
            SessionState({"stdout": outcome.stdout})
        ):
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
        """A unique id."""
        return f"{'+'.join(self.parts)}:{self.number}"

    @cached_property
    def start(self) -> Snapshot:
        """The initial files."""
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
    return replace(
        first,
        text=f"Do two things.\n1. {first.text}\n2. {second.text}",
        files={**first.files, **second.files},
        steps=first.steps + second.steps,
        file_checks=first.file_checks + second.file_checks,
        command_checks=first.command_checks + second.command_checks,
        changes=first.changes + second.changes,
        executable=first.executable | second.executable,
        preview=first.preview + second.preview,
        services=first.services + second.services,
        after_start=first.after_start + second.after_start,
        process_checks=first.process_checks + second.process_checks,
        parts=first.parts + second.parts,
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
