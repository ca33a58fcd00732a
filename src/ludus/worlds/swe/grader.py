"""Grading of a policy's tree by hidden tests, unmasked and masked, on a fresh copy of the repository.

Only code is taken from the policy's tree (`ludus.worlds.swe.repository.merged`). The broken tests run masked in one
sandbox, and the values that they compute are compared here, as digests, with those of the repaired repository, which
are computed in sandboxes that never have code of the policy. Then all tests run unmasked in another sandbox. No test
counts as passed if one passes and its masked values differ, a leak test passes, test files change, an audit hook
detects an access that tests do not need, or a run does not finish.

Test functions are named without parameters, `tests/test_a.py::TestB::test_c`: one passes if all of its cases pass.
"""

from __future__ import annotations

import ast
import asyncio
import json
import secrets
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import PurePosixPath
from typing import Final

from ludus.errors import WorldError
from ludus.rewards.code.pytest_archive import pytest_archive
from ludus.rewards.code.unit_tests import Suite
from ludus.sandbox.base import MIB, Limits, Sandbox
from ludus.types import ToolOutcome, ToolStatus
from ludus.worlds.swe.guest_runner import ARCHIVE, READY, TOP, TrialRequest, digest_of
from ludus.worlds.swe.masking import functions_of, masked
from ludus.worlds.swe.repository import RepositoryLayout, is_test, merged, package_text

REPORT: Final = "report"
"""Tool name of the outcome with the grade."""
SECONDS: Final = 30.0
"""Time limit of one trial."""
CONTROL: Final = "test_control"
"""The only leak test that must pass."""
_GRACE_S: Final = 10.0
_CONTRARY: Final = {digest_of(True): digest_of(False), digest_of(False): digest_of(True)}
Values = Mapping[tuple[str, int], tuple[str, ...]]
"""Digests of the values that masked tests computed, by test and probe."""


@dataclass(frozen=True, slots=True)
class TestTrial:
    """Tests to run on a tree: `tests` in these test `files`; an empty `tests` selects all.

    `probe` is the name that masked tests call. A reach (`ludus.worlds.swe.guest_runner`) that is not in `allowed` ends
    the run; None allows all.
    """

    tree: Mapping[str, bytes]
    layout: RepositoryLayout
    files: tuple[str, ...]
    tests: tuple[str, ...] = ()
    probe: str = ""
    allowed: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class TestRun:
    """Result of a trial. `doubt` is the reason why it is invalid, empty if it is valid.

    `cases` counts the passed cases of each test function that passed; functions in `broken` failed, others were skipped
    or expected to fail. `nodes` are the passed cases with their parameters. `values` are digests of the values that
    masked tests computed. `records` are all lines with the key of the run.
    """

    doubt: str = ""
    cases: Mapping[str, int] = field(default_factory=dict)
    broken: frozenset[str] = frozenset()
    nodes: frozenset[str] = frozenset()
    values: Values = field(default_factory=dict)
    reaches: frozenset[str] = frozenset()
    records: Sequence[Sequence[object]] = ()


@dataclass(frozen=True, slots=True)
class SweProblem:
    """A repository to repair, as file contents by path: `shown` to the model, and `pristine` with the hidden tests.

    `fixed` holds the files that the reference fix changes, after the fix. `files` are the paths of the suite's test
    files. `cases` is the number of cases of a test function: 1 if it has no entry, or if its name has parameters.
    `seconds` limits a test run. `known` caches the run of the fixed repository.
    """

    shown: Mapping[str, bytes]
    pristine: Mapping[str, bytes]
    layout: RepositoryLayout
    suite: Suite
    files: tuple[str, ...]
    fixed: Mapping[str, bytes]
    cases: Mapping[str, int] = field(default_factory=dict)
    seconds: float = SECONDS
    known: list[TestRun] = field(default_factory=list, compare=False)

    @property
    def broken(self) -> tuple[str, ...]:
        """Functions of the tests that the bug breaks."""
        return _functions(self.suite.fail_to_pass)

    def text(self, path: str) -> str:
        """Return a file as the model finds it; empty for a new file."""
        return self.shown.get(path, b"").decode("utf-8")


@dataclass(frozen=True, slots=True)
class Grade:
    """Which tests of the suite passed. `doubt` is the reason why none counts as passed, empty if the runs are valid."""

    passed: Mapping[str, bool]
    doubt: str = ""

    def outcome(self) -> ToolOutcome:
        """Return the grade for rewards; the model does not see it."""
        text = json.dumps({"passed": dict(self.passed), "doubt": self.doubt})
        return ToolOutcome("", REPORT, ToolStatus.OK, text)


async def grade(sandbox: Sandbox, problem: SweProblem, theirs: Mapping[str, bytes]) -> Grade:
    """Grade a tree; if its code is unchanged, no test runs. Raises WorldError if the sandbox failed."""
    tests, broken = problem.suite.tests("all"), problem.suite.fail_to_pass
    tree = merged(problem.pristine, theirs, problem.layout)
    if tree == problem.pristine:
        return Grade({test: test not in broken for test in tests}, "the code is unchanged")
    known = await reference(sandbox, problem)
    masked_run = await run_masked(sandbox, problem, tree, known.reaches) if known.values else TestRun()
    run = await _run_all(sandbox, problem, tree, known.reaches)
    doubt = masked_run.doubt or run.doubt
    passed = {test: not doubt and _passed(test, run, problem) for test in tests}
    others = other_values(known.values, masked_run.values)
    if forged := sorted({test.partition("[")[0] for test in broken if passed[test]} & others):
        doubt = f"tests passed whose values are not those of the repaired code: {forged[0]}"
        return Grade(dict.fromkeys(tests, False), doubt)
    return Grade(passed, doubt)


def _passed(test: str, run: TestRun, problem: SweProblem) -> bool:
    num = run.cases.get(test, 0)
    return test in run.nodes if "[" in test else 0 < num == problem.cases.get(test, num)


def _functions(tests: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(test.partition("[")[0] for test in tests))


async def _run_all(
    sandbox: Sandbox, problem: SweProblem, tree: Mapping[str, bytes], allowed: frozenset[str] | None
) -> TestRun:
    tests = _functions(problem.suite.tests("all"))
    trial = TestTrial(tree, problem.layout, problem.files, tests, allowed=allowed)
    return await run_trial(sandbox, trial, problem.seconds)


async def reference(sandbox: Sandbox, problem: SweProblem) -> TestRun:
    """Return the reproducible masked values of the repaired repository, and the reaches of its code.

    Both are computed once per problem. Raises WorldError.
    """
    if not problem.known:
        tree = {**problem.pristine, **problem.fixed}
        masked_runs = (run_masked(sandbox, problem, tree, None) for _ in range(2))
        runs = await asyncio.gather(*masked_runs, _run_all(sandbox, problem, tree, None))
        first, second = ({} if runs[0].doubt or runs[1].doubt else run.values for run in runs[:2])
        values = {  # values of built-in types that are equal in two runs
            probe: digests for probe, digests in first.items() if all(digests) and second.get(probe) == digests
        }
        reaches = frozenset[str]().union(*(run.reaches for run in runs))
        problem.known[:] = [TestRun(values=values, reaches=reaches)]
    return problem.known[0]


async def run_masked(
    sandbox: Sandbox, problem: SweProblem, tree: Mapping[str, bytes], allowed: frozenset[str] | None
) -> TestRun:
    """Run the masked broken tests on a tree; the negation of truth values is undone. Raises WorldError."""
    name = f"_{secrets.token_hex(6)}"
    texts = dict.fromkeys(problem.files, b"")
    negated: dict[str, frozenset[int]] = {}
    for file in problem.files:
        names = [test.partition("::")[2] for test in problem.broken if test.startswith(f"{file}::")]
        if names and file in tree:
            with suppress(SyntaxError, ValueError):  # an unreadable module has no values to compare
                text, negated[file] = masked(tree[file].decode("utf-8"), names, name)
                texts[file] = text.encode()
    trial = TestTrial({**tree, **texts}, problem.layout, tuple(negated), problem.broken, name, allowed)
    run = await run_trial(sandbox, trial, problem.seconds)
    values = {
        (test, probe): tuple(_CONTRARY.get(digest, digest) for digest in digests)
        if probe in negated.get(test.partition("::")[0], ())
        else digests
        for (test, probe), digests in run.values.items()
    }
    return replace(run, values=values)


def other_values(expected: Values, found: Values) -> frozenset[str]:
    """Return the tests that have a probe with unexpected values."""
    return frozenset(test for (test, probe), digests in expected.items() if found.get((test, probe)) != digests)


@cache
def leak_tests() -> tuple[str, ...]:
    """Return the names of the tests that must fail, in each way of pytest and unittest."""
    names = [name for name, _, _ in functions_of(ast.parse(package_text("data/leak_tests.txt"))) if "test_" in name]
    return tuple(name for name in names if name != CONTROL)


async def run_trial(sandbox: Sandbox, trial: TestTrial, seconds: float = SECONDS, source: str = "") -> TestRun:
    """Run a trial. `source` replaces the program that runs the tests.

    Raises WorldError if the sandbox failed, never because of the contents of the tree.
    """
    name, canary, nonce = secrets.token_hex(6), f"test_{secrets.token_hex(6)}.py", secrets.token_hex(16)
    own = [f"{canary}::{test}" for test in (CONTROL, *leak_tests())]
    run = TrialRequest(
        key=secrets.token_hex(16),
        folder=f"{TOP}/{name}",
        paths=[f"{TOP}/{name}/{root}".rstrip("/") for root in trial.layout.roots],
        files=[*trial.files, canary],
        tests=[*trial.tests, *own] if trial.tests else [],
        frozen=[*(path for path in trial.tree if is_test(path)), canary],
        seconds=seconds,
        probe=trial.probe,
        watched=tomllib.loads(package_text("data/watched.toml")),
        allowed=None if trial.allowed is None else sorted(trial.allowed),
    )
    held = {f"{name}/{path}": content for path, content in trial.tree.items()}
    held |= {f"{name}/{canary}": package_text("data/leak_tests.txt").encode(), ARCHIVE: pytest_archive()}
    held |= {"pytest.ini": b"[pytest]\n", "order.json": json.dumps(run).encode()}
    folders = {folder for path in held for folder in PurePosixPath(path).parents}
    limits = Limits(
        wall_s=seconds + _GRACE_S,
        cpu_s=seconds + _GRACE_S,
        memory_bytes=1024 * MIB,
        processes=64,
        disk_bytes=32 * MIB + 2 * sum(map(len, held.values())),
        disk_files=1024 + 4 * (len(held) + len(folders)),
        output_bytes=32 * MIB,
        files_out=0,
    )
    program = source or package_text("guest_runner.py")
    outcome = await sandbox.run(program, files=held, stdin=f"{nonce}\n".encode(), limits=limits)
    if not outcome.text.startswith(READY):
        raise WorldError(f"The tests could not be run: {outcome.error_text.strip()[-300:]}")
    try:  # without the nonce, the text begins with READY, which is not JSON
        lines, changed = json.loads(outcome.text.removeprefix(READY + nonce))
    except ValueError:  # the parent did not finish, or the child wrote too much
        return TestRun("the run of the tests was ended")
    return _result(run, lines, changed)


def _result(run: TrialRequest, lines: str, changed: list[str]) -> TestRun:
    records: list[list[object]] = []
    for line in lines.split("\n"):
        with suppress(ValueError, RecursionError):  # skip malformed lines
            record = json.loads(line)
            records += [record[1:]] if isinstance(record, list) and record[:1] == [run["key"]] else []
    outcomes = defaultdict[str, list[tuple[str, str]]](list)
    values: dict[tuple[str, int], tuple[str, ...]] = {}
    reaches = set[str]()
    for record in records:
        match record:
            case ["phase", str(node), str(when), str(outcome), int() | float(), _]:
                outcomes[node].append((when, outcome))
            case ["value", str(test), int(number), str(digest)]:
                values[test, number] = (*values.get((test, number), ()), digest)
            case ["reach", str(reach)]:
                reaches.add(reach)
    nodes = {node for node, phases in outcomes.items() if phases == [("call", "passed")]}
    bad = _functions(outcomes.keys() - nodes)
    cases = Counter(test for test in (node.partition("[")[0] for node in nodes) if test not in bad)
    failed = (node for node, phases in outcomes.items() if any(outcome == "failed" for _, outcome in phases))
    broken = frozenset(_functions(failed))
    control, *leaks = (f"{run['files'][-1]}::{name}" for name in (CONTROL, *leak_tests()))
    caught = broken.issuperset(leaks) and cases.pop(control, 0) == 1
    doubts = {
        f"tests were changed while they ran: {', '.join(changed)}": bool(changed),
        f"the code did what tests do not need: {min(reaches, default='')}": reaches and run["allowed"] is not None,
        "the tests did not run to their end": ["end"] not in records,
        "tests that must fail passed, or did not run": not caught,
    }
    doubt = next((doubt for doubt, holds in doubts.items() if holds), "")
    return TestRun(doubt, cases, broken, frozenset(nodes), values, frozenset(reaches), records)
