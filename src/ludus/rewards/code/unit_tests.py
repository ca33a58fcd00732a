"""Score code by its tests, from a report of the environment that ran them.

A report is JSON: `{"test": true, ...}`, or `{"passed": {"test": true, ...}, "seconds": 1.5, "memory_bytes":
1000}`. A test passed only if its value is true; a missing test failed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ludus.rewards.base import RewardFunction, truth_of
from ludus.rewards.extract import Evidence, NotJson, read_json
from ludus.rewards.json_match import is_number
from ludus.types import JSON, Task, Trajectory

Which = Literal["fail_to_pass", "pass_to_pass", "visible", "hidden", "all"]


@dataclass(frozen=True, slots=True)
class Suite:
    """Truth of a programming task.

    `fail_to_pass` fail before the change and must pass after it; `pass_to_pass` must pass before and after.
    `hidden` names those that the model cannot run. Tests without an entry in `weights` have weight 1. `seconds`
    and `memory_bytes` are the limits used by `thrift`.
    """

    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...] = ()
    hidden: frozenset[str] = field(default_factory=frozenset)
    weights: Mapping[str, float] = field(default_factory=dict)
    seconds: float | None = None
    memory_bytes: float | None = None

    def tests(self, which: Which) -> tuple[str, ...]:
        """Return the tests of one kind."""
        both = (*self.fail_to_pass, *self.pass_to_pass)
        if which in ("visible", "hidden"):
            return tuple(test for test in both if (test in self.hidden) == (which == "hidden"))
        return {"fail_to_pass": self.fail_to_pass, "pass_to_pass": self.pass_to_pass}.get(which, both)


@dataclass(frozen=True, slots=True)
class Report:
    """Result of a run of the tests."""

    passed: frozenset[str] = frozenset()
    seconds: float = math.inf
    memory_bytes: float = math.inf


def read_report(text: str) -> Report:
    """Parse a test report; an invalid text is an empty report, in which no test passed."""
    try:
        value = read_json(text)
    except NotJson:
        return Report()
    if not isinstance(value, dict):
        return Report()
    tests = value.get("passed")
    if not isinstance(tests, dict):
        return Report(_passed(value))
    return Report(_passed(tests), _measure(value.get("seconds")), _measure(value.get("memory_bytes")))


def _passed(tests: Mapping[str, JSON]) -> frozenset[str]:
    return frozenset(test for test, verdict in tests.items() if verdict is True)


def _measure(value: JSON) -> float:
    """Return a measured quantity; infinity if the report does not contain it or it overflows a float."""
    if not isinstance(value, int | float) or not is_number(value) or value < 0:
        return math.inf
    try:
        return float(value)
    except OverflowError:
        return math.inf


def all_passed(suite: Suite, passed: Collection[str]) -> bool:
    """Return whether every test passed. Raises ValueError for a suite without tests."""
    tests = suite.tests("all")
    if not tests:
        raise ValueError("the suite has no tests")
    return all(test in passed for test in tests)


def suite_passes(read: Evidence) -> RewardFunction:
    """Create a verifier: 1 if all tests passed in the report of `read`, else 0 (SWE-bench, arXiv:2310.06770)."""

    def resolved(task: Task, trajectory: Trajectory) -> float:
        return float(all_passed(truth_of(task, Suite), read_report(read(trajectory)).passed))

    return resolved


def share_passed(read: Evidence, which: Which = "all") -> RewardFunction:
    """Create a reward, usually for shaping: the share, by weight, of the tests of one kind that passed; 1 if none."""

    def tests_share(task: Task, trajectory: Trajectory) -> float:
        suite, passed = truth_of(task, Suite), read_report(read(trajectory)).passed
        tests = suite.tests(which)
        total = math.fsum(suite.weights.get(test, 1.0) for test in tests)
        right = math.fsum(suite.weights.get(test, 1.0) for test in tests if test in passed)
        return right / total if total else 1.0

    return tests_share


def thrift(read: Evidence) -> RewardFunction:
    """Create a tie-breaker in [0, 1]: the unused share of the time and memory of a solution that passes all tests.

    The mean of `1 - used / limit` over the limits of the suite; 0 if a test fails or nothing was measured.
    """

    def unused_share(task: Task, trajectory: Trajectory) -> float:
        suite, report = truth_of(task, Suite), read_report(read(trajectory))
        used = ((suite.seconds, report.seconds), (suite.memory_bytes, report.memory_bytes))
        shares = [max(0.0, 1 - amount / limit) for limit, amount in used if limit]
        return sum(shares) / len(shares) if shares and all_passed(suite, report.passed) else 0.0

    return unused_share
