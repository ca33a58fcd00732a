"""The verdict on a policy's tree: hidden tests on a fresh copy of the repository, whole and masked.

Of the policy's tree only code is taken (`ludus.worlds.swe.grader.layout`); tests, `conftest.py` and settings
are those of the repository. The broken tests run masked in one sandbox: they hold no expected value, and the
values that they compute come back as digests, which are compared here with those of the repaired repository.
These come from sandboxes that never see code of the policy (`reference`). Then all tests run as they are in
another sandbox. If a test passes and its masked values are others, the result is forged and nothing has
passed; the same holds if a test that must fail passes, tests change, code reaches for what tests have no need
of, or a run breaks off.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from ludus.rewards.code.unit_tests import Suite
from ludus.sandbox.base import Sandbox
from ludus.types import ToolOutcome, ToolStatus
from ludus.worlds.swe.grader.guest_runner import digest_of
from ludus.worlds.swe.grader.layout import RepositoryLayout, merged, same_code
from ludus.worlds.swe.grader.masking import Masked, masked
from ludus.worlds.swe.grader.test_runner import SECONDS, TestRun, TestTrial, run_trials

REPORT: Final = "report"
"""The name under which the verdict stands in the outcomes of an episode."""
_CONTRARY: Final = {digest_of(True): digest_of(False), digest_of(False): digest_of(True)}
Values = Mapping[str, Mapping[int, tuple[str, ...]]]
"""Digests of what masked tests computed, by test and probe."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What the repaired repository does. `values` are those that are the same in each run.

    `closed` are the probes, by test file, whose expected values are nowhere in a masked run. `reaches` are
    those of the repository's own code.
    """

    values: Values
    closed: Mapping[str, frozenset[int]]
    reaches: frozenset[str]


@dataclass(frozen=True, slots=True)
class Exam:
    """How a task is graded. `pristine` is the repository with its bug and all of its tests.

    `cases` counts the cases of each test function of the suite; one that is not in it needs one case. A test
    of the suite that has parameters in its name is one case. `mended` are the files that a fix changes, after
    it. `known` holds the reference once it was made.
    """

    pristine: Mapping[str, bytes]
    layout: RepositoryLayout
    suite: Suite
    files: tuple[str, ...]
    mended: Mapping[str, bytes]
    cases: Mapping[str, int] = field(default_factory=dict)
    seconds: float = SECONDS
    known: list[Reference] = field(default_factory=list, compare=False)

    @property
    def broken(self) -> tuple[str, ...]:
        """The functions of the broken tests."""
        return _functions(self.suite.fail_to_pass)


@dataclass(frozen=True, slots=True)
class Grade:
    """Which tests of the suite passed. `doubt` says why none has; empty where the runs can be believed."""

    passed: Mapping[str, bool]
    doubt: str = ""

    def outcome(self) -> ToolOutcome:
        """The grade as rewards read it, and the model does not."""
        text = json.dumps({"passed": dict(self.passed), "doubt": self.doubt})
        return ToolOutcome("", REPORT, ToolStatus.OK, text)


async def grade(sandbox: Sandbox, exam: Exam, theirs: Mapping[str, bytes]) -> Grade:
    """Grade a tree. Raises WorldError where the sandbox broke.

    A tree whose code is as it was is not run: what it passes is known.
    """
    tests = exam.suite.tests("all")
    if same_code(exam.pristine, theirs, exam.layout):
        broken = frozenset(exam.suite.fail_to_pass)
        return Grade({test: test not in broken for test in tests}, "the code is as it was")
    tree = merged(exam.pristine, theirs, exam.layout)
    known = await reference(sandbox, exam)
    runs: list[TestRun] = []
    found: Values = {}
    if known.values:
        exercise = masked_exam(exam, tree, known.reaches)
        runs += await run_trials(sandbox, [exercise.trial], exam.seconds)
        found = exercise.values(runs[0])
    runs += await run_trials(sandbox, [_whole(exam, tree, known.reaches)], exam.seconds)
    doubt = next((run.doubt for run in runs if run.doubt), "")
    passed = {test: not doubt and _passed(test, runs[-1], exam) for test in tests}
    claimed = {test.partition("[")[0] for test in exam.suite.fail_to_pass if passed[test]}
    forged = sorted(claimed & other_values(known.values, found))
    if forged:
        passed = dict.fromkeys(tests, False)
        doubt = f"tests passed whose values are not those of the repaired code: {forged[0]}"
    return Grade(passed, doubt)


async def reference(sandbox: Sandbox, exam: Exam) -> Reference:
    """What the repaired repository does, run once for an exam. Raises WorldError where the sandbox broke."""
    if not exam.known:
        tree = {**exam.pristine, **exam.mended}
        one, two = masked_exam(exam, tree, None), masked_exam(exam, tree, None)
        (first,), (again, whole) = await asyncio.gather(
            run_trials(sandbox, [one.trial], exam.seconds),
            run_trials(sandbox, [two.trial, _whole(exam, tree, None)], exam.seconds),
        )
        values = {} if first.doubt or again.doubt else _agreed(one.values(first), two.values(again))
        exam.known[:] = [Reference(values, one.closed, first.reaches | again.reaches | whole.reaches)]
    return exam.known[0]


async def tells_forgery(sandbox: Sandbox, exam: Exam) -> bool:
    """Whether a masked value is another with the bug, so that a forged result is told from a repair."""
    known = await reference(sandbox, exam)
    exercise = masked_exam(exam, exam.pristine, None)
    (run,) = await run_trials(sandbox, [exercise.trial], exam.seconds)
    return bool(other_values(known.values, exercise.values(run)))


@dataclass(frozen=True, slots=True)
class MaskedExam:
    """The masked broken tests on a tree. `closed` and `negated` are probes, by test file."""

    trial: TestTrial
    closed: Mapping[str, frozenset[int]]
    negated: Mapping[str, frozenset[int]]

    def values(self, run: TestRun) -> Values:
        """What the tests computed, with truths as they are."""
        return {
            test: {
                number: tuple(_CONTRARY.get(one, one) for one in many)
                if number in self.negated.get(test.partition("::")[0], ())
                else many
                for number, many in probes.items()
            }
            for test, probes in run.values.items()
        }


def masked_exam(exam: Exam, tree: Mapping[str, bytes], allowed: frozenset[str] | None) -> MaskedExam:
    """Mask the broken tests for one run on a tree."""
    probe = f"_{secrets.token_hex(6)}"
    modules: dict[str, Masked] = {}
    for file in exam.files:
        names = [test.partition("::")[2] for test in exam.broken if test.startswith(f"{file}::")]
        if names and file in tree:
            with suppress(SyntaxError, ValueError):  # a module that cannot be read has no values to compare
                modules[file] = masked(tree[file].decode("utf-8"), names, probe)
    texts = {file: module.text.encode() for file, module in modules.items()}
    others = {file: b"" for file in exam.files if file not in modules}
    return MaskedExam(
        TestTrial({**tree, **texts, **others}, exam.layout, tuple(modules), exam.broken, probe=probe, allowed=allowed),
        {file: module.closed for file, module in modules.items()},
        {file: module.negated for file, module in modules.items()},
    )


def other_values(expected: Values, found: Values) -> frozenset[str]:
    """The tests with a probe whose values are not those that are expected."""
    return frozenset(
        test
        for test, probes in expected.items()
        if any(found.get(test, {}).get(number) != values for number, values in probes.items())
    )


def _agreed(first: Values, again: Values) -> Values:
    """The values that are plain and the same in two runs."""
    same = {
        test: {number: many for number, many in probes.items() if all(many) and again.get(test, {}).get(number) == many}
        for test, probes in first.items()
    }
    return {test: probes for test, probes in same.items() if probes}


def _whole(exam: Exam, tree: Mapping[str, bytes], allowed: frozenset[str] | None) -> TestTrial:
    """All tests of the suite, as they are."""
    return TestTrial(tree, exam.layout, exam.files, _functions(exam.suite.tests("all")), allowed=allowed)


def _functions(tests: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(test.partition("[")[0] for test in tests))


def _passed(test: str, run: TestRun, exam: Exam) -> bool:
    if "[" in test:
        return test in run.nodes
    num = run.cases.get(test, 0)
    return num == exam.cases.get(test, num) and num > 0
