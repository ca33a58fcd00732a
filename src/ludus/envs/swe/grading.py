"""The verdict on a policy's tree: hidden tests on a fresh copy of the repository, and on a twisted one.

Of the policy's tree only code is taken (`ludus.envs.swe.layout`); tests, `conftest.py` and settings are those
of the repository. Tests run twice, in an order that chance decides: as they are, and with other expectations
(`ludus.envs.swe.canaries`). Folders and canaries have random names. Where a test that must fail passes, tests
change, or a run breaks off, nothing has passed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ludus.envs.swe.layout import Layout, merged, same_code
from ludus.envs.swe.trials import SECONDS, TestRun, Trial, run_trials
from ludus.rewards.suites import Suite
from ludus.sandbox.base import Sandbox
from ludus.types import ToolOutcome, ToolStatus

REPORT: Final = "report"
"""The name under which the verdict stands in the outcomes of an episode."""


@dataclass(frozen=True, slots=True)
class Exam:
    """How a task is graded. `pristine` is the repository with its bug and all of its tests.

    `cases` counts the cases of each test function of the suite; one that is not in it needs one case. A test
    of the suite that has parameters in its name is one case. `twins` are test files that expect something
    else, of which `twisted` are the tests that must fail.
    """

    pristine: Mapping[str, bytes]
    layout: Layout
    suite: Suite
    files: tuple[str, ...]
    cases: Mapping[str, int] = field(default_factory=dict)
    twins: Mapping[str, bytes] = field(default_factory=dict)
    twisted: tuple[str, ...] = ()
    seconds: float = SECONDS


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
    functions = tuple(dict.fromkeys(test.partition("[")[0] for test in tests))
    plain = Trial(tree, exam.layout, exam.files, functions)
    trials = [plain]
    if exam.twisted:
        trials.append(Trial({**tree, **exam.twins}, exam.layout, tuple(exam.twins), exam.twisted))
    random.SystemRandom().shuffle(trials)
    runs = await run_trials(sandbox, trials, exam.seconds)
    doubt = next((run.doubt for run in runs if run.doubt), "")
    first = trials.index(plain)
    twisted = [run for i, run in enumerate(runs) if i != first]
    if not doubt and any(test in run.cases for run in twisted for test in exam.twisted):
        doubt = "tests that expect something else passed as well"
    return Grade({test: not doubt and _passed(test, runs[first], exam) for test in tests}, doubt)


def _passed(test: str, run: TestRun, exam: Exam) -> bool:
    if "[" in test:
        return test in run.nodes
    num = run.cases.get(test, 0)
    return num == exam.cases.get(test, num) and num > 0
