"""Mine tasks: put bugs into packages and keep those that break some tests and leave the others unchanged."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Final

from generators.swe.mutations import edits, is_sound

from ludus.sandbox import open_sandbox
from ludus.sandbox.base import Sandbox
from ludus.worlds.swe.grader import TestRun, TestTrial, run_trial
from ludus.worlds.swe.repository import RepositoryLayout, is_test, layout_of, names_of, package_text
from ludus.worlds.swe.tasks import Edit, read_archive

SLOWEST_TEST_S: Final = 0.5
SUITE_S: Final = 4.0
"""Time limit of the test files of a task."""
BASELINE_S: Final = 100.0
TRIAL_S: Final = 30.0
BATCH: Final = 6
"""Bugs that are tried before the numbers of a plan are compared."""
MOST_BROKEN: Final = 0.3
"""A bug that breaks a greater share of the tests (and more than five) is dropped."""
FEWEST_WHOLE: Final = 5
"""Minimum number of test cases that still pass."""
PER_SYMBOL: Final = 2
_TRACING: Final = """
class Tracing(Recorder):
    trace = {trace}

    def pytest_runtest_logstart(self, nodeid):
        super().pytest_runtest_logstart(nodeid)
        self.calls = set()
        if self.trace:
            sys.setprofile(self.note)

    def pytest_runtest_logfinish(self, nodeid):
        if self.trace:
            sys.setprofile(None)
            self.tell("calls", self.test, sorted(self.calls))

    def pytest_exception_interact(self, node, call, report):
        statement = ""
        for entry in call.excinfo.traceback:
            if str(entry.path) == str(node.path):
                statement = " ".join(str(entry.statement).split())
        error = f"{{call.excinfo.typename}}: {{call.excinfo.value}}"
        self.tell("failure", node.nodeid.split("[")[0], statement[:400], error[:1200])

    def note(self, frame, event, given):
        code, root = frame.f_code, os.getcwd() + "/"
        if event == "call" and code.co_filename.startswith(root):
            self.calls.add((code.co_filename[len(root):], code.co_firstlineno))

Recorder = Tracing


if __name__ == "__main__":
"""
"""Code that makes the guest runner also report failures, and, if `trace`, the functions that each test calls."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How many bugs of a package are wanted, and how many are tried at most."""

    wanted: int = 20
    tries: int = 60
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Baseline:
    """Tests of a package without a bug. `callers` are the tests that call a function (file and first line)."""

    tests: Mapping[str, int]
    seconds: Mapping[str, float]
    callers: Mapping[tuple[str, int], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class MinedBug:
    """A bug that is a task: the tests that it breaks, their files, and how the shortest failing statement fails."""

    path: str
    edit: Edit
    broken: tuple[str, ...]
    files: tuple[str, ...]
    test: str
    failure: tuple[str, str]


def test_files(tree: Mapping[str, bytes]) -> tuple[str, ...]:
    """Return the files in which pytest collects tests."""
    names = ((path, PurePosixPath(path).name) for path in sorted(tree) if is_test(path))
    return tuple(
        path
        for path, name in names
        if name.endswith(".py") and (name.startswith("test") or name.endswith(("_test.py", "_tests.py")))
    )


def tracing_runner(trace: bool = False) -> str:
    """Return the guest runner with the code that miners need."""
    return package_text("guest_runner.py").replace('if __name__ == "__main__":\n', _TRACING.format(trace=trace))


async def measure(sandbox: Sandbox, tree: Mapping[str, bytes], layout: RepositoryLayout) -> Baseline:
    """Run all tests twice, once with a trace."""
    files = test_files(tree)
    plain = await _whole(sandbox, TestTrial(tree, layout, files), tracing_runner())
    traced = await _whole(sandbox, TestTrial(tree, layout, files), tracing_runner(trace=True))
    again = {test: cases for run in traced for test, cases in run.cases.items()}
    seconds = seconds_of(plain)
    tests = {
        test: cases
        for run in plain
        for test, cases in run.cases.items()
        if again.get(test) == cases and seconds.get(test, 0) <= SLOWEST_TEST_S
    }
    callers: dict[tuple[str, int], list[str]] = {}
    for run in traced:
        for record in run.records:
            match record:
                case ["calls", str(test), list(places)] if test in tests:
                    for path, line in places:
                        callers.setdefault((path, line), []).append(test)
    return Baseline(tests, seconds, {place: tuple(sorted(set(who))) for place, who in callers.items()})


def seconds_of(runs: Iterable[TestRun]) -> dict[str, float]:
    """Return the duration of each test function."""
    found: dict[str, float] = defaultdict(float)
    for record in (record for run in runs for record in run.records):
        match record:
            case ["phase", str(node), _, _, int() | float() as seconds, _]:
                found[node.split("[")[0]] += seconds
    return dict(found)


def failures_of(run: TestRun) -> dict[str, tuple[str, str]]:
    """Return the statement and the error of the first failure of each test function."""
    found: dict[str, tuple[str, str]] = {}
    for record in run.records:
        match record:
            case ["failure", str(test), str(statement), str(error)]:
                found.setdefault(test, (statement, error))
    return found


async def _whole(sandbox: Sandbox, trial: TestTrial, source: str) -> list[TestRun]:
    """Return a trial as one run; if it has a doubt, one run per file without those that have one."""
    run = await run_trial(sandbox, trial, BASELINE_S, source)
    if not run.doubt:
        return [run]
    found = []
    for file in trial.files:
        tests = tuple(test for test in trial.tests if test.startswith(f"{file}::"))
        run = await run_trial(sandbox, replace(trial, files=(file,), tests=tests), BASELINE_S / 4, source)
        if not run.doubt:
            found.append(run)
    return found


def candidates(
    tree: Mapping[str, bytes], layout: RepositoryLayout, baseline: Baseline, seed: int
) -> Iterator[tuple[str, Edit]]:
    """Yield sound bugs in functions that tests call, kinds in turn, at most two per function."""
    rng = random.Random(f"swe:{seed}")
    queues: dict[str, list[tuple[str, Edit]]] = {kind: [] for kind in names_of("kinds")}
    texts: dict[str, str] = {}
    for path in sorted(path for path in tree if path.endswith(".py") and layout.is_code(path)):
        try:
            texts[path] = tree[path].decode("utf-8")
            found = list(edits(texts[path]))
        except (UnicodeDecodeError, SyntaxError):
            continue
        for edit in found:
            if (path, edit.line) in baseline.callers and "\r" not in edit.old:
                queues[edit.kind].append((path, edit))
    for queue in queues.values():
        rng.shuffle(queue)
    used: Counter[tuple[str, str]] = Counter()
    while any(queues.values()):
        for kind in names_of("kinds"):
            while queues[kind]:
                path, edit = queues[kind].pop()
                if used[path, edit.symbol] < PER_SYMBOL and is_sound(edit, texts[path]):
                    used[path, edit.symbol] += 1
                    yield path, edit
                    break


def suite_of(place: tuple[str, int], baseline: Baseline) -> tuple[str, ...]:
    """Return the test files of a bug: those with most callers first, up to a time limit."""
    callers = Counter(test.partition("::")[0] for test in baseline.callers[place])
    spent: dict[str, float] = defaultdict(float)
    for test in baseline.tests:
        spent[test.partition("::")[0]] += baseline.seconds.get(test, 0.0)
    chosen: list[str] = []
    for file, _ in callers.most_common():
        if not chosen or sum(spent[one] for one in chosen) + spent[file] <= SUITE_S:
            chosen.append(file)
    return tuple(sorted(chosen))


def judge(path: str, edit: Edit, files: tuple[str, ...], run: TestRun, baseline: Baseline) -> MinedBug | None:
    """Return the task of a bug; None if it breaks nothing or too much, or no failing statement is known."""
    wanted = {test: cases for test, cases in baseline.tests.items() if test.partition("::")[0] in files}
    broken = tuple(sorted(test for test, cases in wanted.items() if run.cases.get(test) != cases))
    whole = sum(cases for test, cases in wanted.items() if test not in broken)
    if run.doubt or not broken or whole < FEWEST_WHOLE or not set(broken) <= run.broken:
        return None
    if len(broken) > max(5, MOST_BROKEN * len(wanted)):
        return None
    failures = {test: failure for test, failure in failures_of(run).items() if test in broken and failure[0]}
    if not failures:
        return None
    test = min(failures, key=lambda name: (len(failures[name][0]), name))
    return MinedBug(path, edit, broken, files, test, failures[test])


async def try_bugs(
    sandbox: Sandbox,
    tree: Mapping[str, bytes],
    layout: RepositoryLayout,
    bugs: Sequence[tuple[str, Edit]],
    baseline: Baseline,
) -> list[MinedBug]:
    """Return the tasks among a few bugs: each breaks the same tests in two runs."""
    suites = [suite_of((path, edit.line), baseline) for path, edit in bugs]

    async def run(chosen: Sequence[int]) -> dict[int, MinedBug]:
        trials = [_trial(tree, layout, *bugs[i], suites[i], baseline) for i in chosen]
        runs = [await run_trial(sandbox, trial, TRIAL_S, tracing_runner()) for trial in trials]
        judged = {i: judge(*bugs[i], suites[i], one, baseline) for i, one in zip(chosen, runs, strict=True)}
        return {i: one for i, one in judged.items() if one is not None}

    first = await run(range(len(bugs)))
    second = await run(list(first)) if first else {}
    return [one for i, one in first.items() if i in second and second[i].broken == one.broken]


def _trial(
    tree: Mapping[str, bytes],
    layout: RepositoryLayout,
    path: str,
    edit: Edit,
    files: tuple[str, ...],
    baseline: Baseline,
) -> TestTrial:
    text = edit.apply(tree[path].decode("utf-8"))
    tests = tuple(test for test in baseline.tests if test.partition("::")[0] in files)
    return TestTrial({**tree, path: text.encode()}, layout, files, tests)


async def mine(archive: Path, plan: Plan, tell: Callable[[str], None]) -> tuple[Baseline, list[MinedBug]]:
    """Return the tests and the tasks of a package."""
    tree, sandbox = read_archive(archive), open_sandbox()
    layout = layout_of(tree)
    try:
        baseline = await measure(sandbox, tree, layout)
        tell(f"{archive.name}: {len(baseline.tests)} tests")
        found: list[MinedBug] = []
        waiting: list[tuple[str, Edit]] = []
        tried = 0
        for bug in candidates(tree, layout, baseline, plan.seed):
            waiting.append(bug)
            if len(waiting) < BATCH:
                continue
            tried += len(waiting)
            found += await try_bugs(sandbox, tree, layout, waiting, baseline)
            waiting.clear()
            if len(found) >= plan.wanted or tried >= plan.tries:
                break
        if waiting:
            found += await try_bugs(sandbox, tree, layout, waiting, baseline)
        tell(f"{archive.name}: {len(found)} tasks of {tried} bugs")
    finally:
        await sandbox.close()
    return baseline, found[: plan.wanted]


def save_found(path: Path, archive: Path, baseline: Baseline, found: Sequence[MinedBug]) -> None:
    """Write the tests and the tasks of a package."""
    head = {
        "archive": archive.name,
        "sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
        "tests": dict(baseline.tests),
    }
    lines = [json.dumps(row) for row in (head, *(asdict(one) for one in found))]
    path.write_text("\n".join(lines) + "\n", "utf-8")
