"""Tests run in a sandbox: what became of each, and whether that can be believed.

Test functions are named without parameters, `tests/test_a.py::TestB::test_c`: one passes if each of its cases
passes, in each phase.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files as package_files
from pathlib import PurePosixPath
from typing import Final

from ludus.errors import WorldError
from ludus.sandbox.base import MIB, Limits, Sandbox
from ludus.worlds.swe.grader.bundle import ARCHIVE, pytest_archive
from ludus.worlds.swe.grader.guest_runner import READY, Run, RunEnded
from ludus.worlds.swe.grader.layout import RepositoryLayout, is_test
from ludus.worlds.swe.grader.leak_tests import CANARIES, CONTROL, fixed_names

SECONDS: Final = 30.0
"""For the tests of one trial."""
_GRACE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class TestTrial:
    """Tests to run on a tree: the `tests` named, of these test `files`. No `tests`: all in the files.

    `texts` asks for the words of failures, `trace` for the functions that each test calls. `probe` is what
    masked tests call. At a reach (`ludus.worlds.swe.grader.guest_runner`) that is not `allowed` the run ends;
    None: at none.
    """

    tree: Mapping[str, bytes]
    layout: RepositoryLayout
    files: tuple[str, ...]
    tests: tuple[str, ...] = ()
    texts: bool = False
    trace: bool = False
    probe: str = ""
    allowed: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class RunnerReport:
    """How a test failed: its statement, and the error."""

    statement: str
    error: str


@dataclass(frozen=True, slots=True)
class TestRun:
    """What became of a trial. `doubt` says why it cannot be believed; empty where it can.

    `cases` counts the passed cases of each test function that passed; `failed` are those with another
    outcome, of which `broken` failed (the others were skipped or expected to fail). `calls` has the functions
    that a test called, each by file and first line. `nodes` are
    the single cases that passed, with their parameters. `seconds` are those of each test function. `values`
    has digests of what masked tests computed, by test and probe, in their order; `reaches` what the code did
    that tests do not need.
    """

    cases: Mapping[str, int]
    failed: frozenset[str]
    broken: frozenset[str]
    doubt: str = ""
    said: Mapping[str, RunnerReport] = field(default_factory=dict)
    calls: Mapping[str, frozenset[tuple[str, int]]] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    nodes: frozenset[str] = frozenset()
    values: Mapping[str, Mapping[int, tuple[str, ...]]] = field(default_factory=dict)
    reaches: frozenset[str] = frozenset()


async def run_trials(sandbox: Sandbox, trials: Sequence[TestTrial], seconds: float = SECONDS) -> tuple[TestRun, ...]:
    """Run trials in one sandbox, one after the other in their order, each in a process and folder of its own.

    Raises WorldError where the sandbox broke, not for anything that the tree does.
    """
    names = [secrets.token_hex(6) for _ in trials]
    canaries = [f"test_{secrets.token_hex(6)}.py" for _ in trials]
    runs = [_order(*given, seconds) for given in zip(trials, names, canaries, strict=True)]
    order = {"archive": f"/box/{ARCHIVE}", "runs": runs}
    held: dict[str, bytes] = {ARCHIVE: pytest_archive(), "pytest.ini": b"[pytest]\n"}
    for trial, name, canary in zip(trials, names, canaries, strict=True):
        held |= {f"{name}/{path}": content for path, content in trial.tree.items()}
        held[f"{name}/{canary}"] = CANARIES.encode()
    held["order.json"] = json.dumps(order).encode()
    nonce = secrets.token_hex(16)
    outcome = await sandbox.run(
        program(), files=held, stdin=f"{nonce}\n".encode(), limits=_limits(held, seconds * len(trials))
    )
    told = _told(outcome.text, nonce)
    if not outcome.text.startswith(READY):
        raise WorldError(f"The tests could not be run: {outcome.error_text.strip()[-300:]}")
    if told is None or len(told) != len(runs):
        return tuple(_nothing("the run of the tests was ended") for _ in trials)
    given = zip(runs, canaries, told, strict=True)
    return tuple(_read(run, canary, done) for run, canary, done in given)


@cache
def program() -> str:
    """The text of the program that runs the tests."""
    return (package_files("ludus.worlds.swe.grader") / "guest_runner.py").read_text("utf-8")


def _order(trial: TestTrial, name: str, canary: str, seconds: float) -> Run:
    folder = f"/box/{name}"
    own = [f"{canary}::{one}" for one in (CONTROL, *fixed_names())]
    return Run(
        key=secrets.token_hex(16),
        folder=folder,
        paths=[f"{folder}/{root}".rstrip("/") for root in trial.layout.roots],
        ini="/box/pytest.ini",
        files=[*trial.files, canary],
        tests=[*trial.tests, *own] if trial.tests else [],
        frozen=[*(path for path in trial.tree if is_test(path)), canary],
        seconds=seconds,
        texts=trial.texts,
        trace=trial.trace,
        probe=trial.probe,
        allowed=None if trial.allowed is None else sorted(trial.allowed),
    )


def _limits(held: Mapping[str, bytes], seconds: float) -> Limits:
    folders = {str(folder) for path in held for folder in PurePosixPath(path).parents}
    return Limits(
        wall_s=seconds + _GRACE_S,
        cpu_s=seconds + _GRACE_S,
        memory_bytes=1024 * MIB,
        processes=64,
        disk_bytes=32 * MIB + 2 * sum(map(len, held.values())),
        disk_files=1024 + 4 * (len(held) + len(folders)),
        output_bytes=32 * MIB,
        files_out=0,
    )


def _told(text: str, nonce: str) -> list[RunEnded] | None:
    """What the parent says, by the nonce at its head; None where it does not come to its end."""
    if not text.startswith(READY + nonce):
        return None
    try:
        told: list[RunEnded] = json.loads(text.removeprefix(READY + nonce))
    except ValueError:  # cut: lines of a child without end
        return None
    return told


def _nothing(doubt: str) -> TestRun:
    return TestRun({}, frozenset(), frozenset(), doubt)


@dataclass
class _Tally:
    """The lines of one run, by test."""

    key: str
    phases: Counter[tuple[str, str]] = field(default_factory=Counter)
    cases: Counter[str] = field(default_factory=Counter)
    bad: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    said: dict[str, RunnerReport] = field(default_factory=dict)
    calls: dict[str, frozenset[tuple[str, int]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    spoiled: set[str] = field(default_factory=set)
    values: dict[str, dict[int, tuple[str, ...]]] = field(default_factory=dict)
    reaches: set[str] = field(default_factory=set)
    ended: bool = False

    def take(self, line: str) -> None:
        """One line; those without the key, or that cannot be read, do not count."""
        with suppress(ValueError, TypeError, RecursionError, OverflowError):
            key, what, *words = json.loads(line)
            if key == self.key:
                self._said(what, words)

    def _said(self, what: object, words: list[object]) -> None:
        """The words of a line. Raises for those that are not as the recorder writes them."""
        match what, words:
            case "phase", [str(node), str(when), str(outcome), int() | float() as seconds, said]:
                self._phase(node, when, outcome, said)
                test = node.split("[")[0]
                self.seconds[test] = self.seconds.get(test, 0.0) + seconds
            case "calls", [str(name), list(calls)]:
                self.calls[name] = frozenset((str(path), int(line)) for path, line in calls)
            case "value", [str(test), int(number), str(digest)]:
                found = self.values.setdefault(test, {})
                found[number] = (*found.get(number, ()), digest)
            case "reach", [str(reach)]:
                self.reaches.add(reach)
            case "end", []:
                self.ended = True

    def _phase(self, node: str, when: str, outcome: str, said: object) -> None:
        test = node.split("[")[0]
        self.phases[node, when] += 1
        if outcome != "passed" or self.phases[node, when] > 1:
            self.bad.add(test)
            self.spoiled.add(node)
            if outcome == "failed":
                self.broken.add(test)
            if isinstance(said, dict) and said and test not in self.said:
                self.said[test] = RunnerReport(str(said.get("statement", "")), str(said.get("error", "")))
        elif when == "call":
            self.cases[test] += 1


def _read(run: Run, canary: str, done: RunEnded) -> TestRun:
    tally = _Tally(run["key"])
    for line in done["lines"].split("\n"):
        tally.take(line)
    own = {f"{canary}::{name}" for name in fixed_names()}
    doubt = ""
    if done["changed"]:
        doubt = f"tests were changed while they ran: {', '.join(done['changed'])}"
    elif tally.reaches and run["allowed"] is not None:
        doubt = f"the code reached for what tests have no need of: {min(tally.reaches)}"
    elif not tally.ended:
        doubt = "the tests did not run to their end"
    elif not own <= tally.broken or tally.cases[f"{canary}::{CONTROL}"] != 1:
        doubt = "tests that must fail passed, or did not run"
    foreign = {test for test in {*tally.cases, *tally.bad} if not test.startswith(f"{canary}::")}
    return TestRun(
        cases={test: tally.cases[test] for test in sorted(foreign) if test not in tally.bad},
        failed=frozenset(foreign & tally.bad),
        broken=frozenset(foreign & tally.broken),
        doubt=doubt,
        said=tally.said,
        calls={test: calls for test, calls in tally.calls.items() if test in foreign},
        seconds={test: seconds for test, seconds in tally.seconds.items() if test in foreign},
        nodes=frozenset(node for node, when in tally.phases if when == "call" and node not in tally.spoiled),
        values=tally.values,
        reaches=frozenset(tally.reaches),
    )
