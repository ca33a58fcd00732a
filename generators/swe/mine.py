"""Mine tasks: put bugs into packages and keep those that break some tests and leave the others as they were.

    python -m generators.swe.mine fetch FOLDER NAME[==VERSION] ...
    python -m generators.swe.mine bugs FOLDER ARCHIVE ... [--wanted 20] [--tries 60] [--seed 0]
    python -m generators.swe.mine assemble FOLDER CATALOGUE --validation NAME ... --test NAME ...

FOLDER holds source distributions and what is found in each, one file of JSON lines a package; `assemble`
writes the catalogue of them all. A package whose file is there already is not mined again.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Final

from ludus.sandbox import open_sandbox
from ludus.sandbox.base import Sandbox
from ludus.worlds.swe.grader.layout import RepositoryLayout, is_test, layout_of
from ludus.worlds.swe.grader.test_runner import RunnerReport, TestRun, TestTrial, run_trials
from ludus.worlds.swe.mutations import KINDS, Edit, edits, is_sound
from ludus.worlds.swe.sources import download, read_archive

SLOWEST_TEST_S: Final = 0.5
SUITE_S: Final = 4.0
"""Test files beyond so many seconds are left out of a task."""
BASELINE_S: Final = 100.0
TRIAL_S: Final = 30.0
BATCH: Final = 6
"""Bugs that are tried in one run of the sandbox."""
MOST_BROKEN: Final = 0.3
"""A bug that breaks a greater share of the tests (and more than five) is no task."""
FEWEST_WHOLE: Final = 5
"""Cases of tests that have to go on passing."""
PER_SYMBOL: Final = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """How many bugs are wanted of a package, and how many are tried at most."""

    wanted: int = 20
    tries: int = 60
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Baseline:
    """What holds of a package without a bug. `callers` are the tests of a function (file and first line)."""

    tests: Mapping[str, int]
    seconds: Mapping[str, float]
    callers: Mapping[tuple[str, int], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Found:
    """A bug that is a task: what it breaks, in which test files, and how its first test fails."""

    path: str
    edit: Edit
    broken: tuple[str, ...]
    files: tuple[str, ...]
    test: str
    said: RunnerReport


def test_files(tree: Mapping[str, bytes]) -> tuple[str, ...]:
    """The files in which pytest looks for tests."""
    names = ((path, PurePosixPath(path).name) for path in sorted(tree) if is_test(path))
    return tuple(
        path
        for path, name in names
        if name.endswith(".py") and (name.startswith("test") or name.endswith(("_test.py", "_tests.py")))
    )


async def measure(sandbox: Sandbox, tree: Mapping[str, bytes], layout: RepositoryLayout) -> Baseline:
    """Run all tests twice, once with a trace."""
    files = test_files(tree)
    plain = await _whole(sandbox, TestTrial(tree, layout, files))
    traced = await _whole(sandbox, TestTrial(tree, layout, files, trace=True))
    again = {test: cases for run in traced for test, cases in run.cases.items()}
    seconds = {test: spent for run in plain for test, spent in run.seconds.items()}
    tests = {
        test: cases
        for run in plain
        for test, cases in run.cases.items()
        if again.get(test) == cases and seconds.get(test, 0) <= SLOWEST_TEST_S
    }
    callers: dict[tuple[str, int], list[str]] = {}
    for run in traced:
        for test in run.calls.keys() & tests.keys():
            for place in run.calls[test]:
                callers.setdefault(place, []).append(test)
    return Baseline(tests, seconds, {place: tuple(sorted(who)) for place, who in callers.items()})


async def _whole(sandbox: Sandbox, trial: TestTrial) -> list[TestRun]:
    """A trial as one run; where that cannot be believed, one run for each file, and those that can be."""
    (run,) = await run_trials(sandbox, [trial], BASELINE_S)
    if not run.doubt:
        return [run]
    found = []
    for file in trial.files:
        tests = tuple(test for test in trial.tests if test.startswith(f"{file}::"))
        (run,) = await run_trials(sandbox, [replace(trial, files=(file,), tests=tests)], BASELINE_S / 4)
        if not run.doubt:
            found.append(run)
    return found


def candidates(
    tree: Mapping[str, bytes], layout: RepositoryLayout, baseline: Baseline, seed: int
) -> Iterator[tuple[str, Edit]]:
    """Sound bugs in functions that tests call, kinds in turn, at most two in a function."""
    rng = random.Random(f"swe:{seed}")
    queues: dict[str, list[tuple[str, Edit]]] = {kind: [] for kind in KINDS}
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
        for kind in KINDS:
            while queues[kind]:
                path, edit = queues[kind].pop()
                if used[path, edit.symbol] < PER_SYMBOL and is_sound(edit, texts[path]):
                    used[path, edit.symbol] += 1
                    yield path, edit
                    break


def suite_of(place: tuple[str, int], baseline: Baseline) -> tuple[str, ...]:
    """The test files to run for a bug: those with most callers first, up to a number of seconds."""
    callers = Counter(test.partition("::")[0] for test in baseline.callers[place])
    spent: dict[str, float] = defaultdict(float)
    for test in baseline.tests:
        spent[test.partition("::")[0]] += baseline.seconds.get(test, 0.0)
    chosen: list[str] = []
    for file, _ in callers.most_common():
        if not chosen or sum(spent[one] for one in chosen) + spent[file] <= SUITE_S:
            chosen.append(file)
    return tuple(sorted(chosen))


def judge(path: str, edit: Edit, files: tuple[str, ...], run: TestRun, baseline: Baseline) -> Found | None:
    """The task that a bug is; None where it breaks nothing, too much, or in a way that says nothing."""
    wanted = {test: cases for test, cases in baseline.tests.items() if test.partition("::")[0] in files}
    broken = tuple(sorted(test for test, cases in wanted.items() if run.cases.get(test) != cases))
    whole = sum(cases for test, cases in wanted.items() if test not in broken)
    if run.doubt or not broken or whole < FEWEST_WHOLE or not set(broken) <= run.broken:
        return None
    if len(broken) > max(5, MOST_BROKEN * len(wanted)):
        return None
    shown = [test for test in broken if test in run.said and run.said[test].statement]
    said = [(len(run.said[test].statement), test) for test in shown]
    if not said:
        return None
    test = min(said)[1]
    return Found(path, edit, broken, files, test, run.said[test])


async def try_bugs(
    sandbox: Sandbox,
    tree: Mapping[str, bytes],
    layout: RepositoryLayout,
    bugs: Sequence[tuple[str, Edit]],
    baseline: Baseline,
) -> list[Found]:
    """Those of a few bugs that are tasks: each breaks the same tests in two runs."""
    suites = [suite_of((path, edit.line), baseline) for path, edit in bugs]

    async def run(chosen: Sequence[int]) -> dict[int, Found]:
        trials = [_trial(tree, layout, *bugs[i], suites[i], baseline) for i in chosen]
        runs = await run_trials(sandbox, trials, TRIAL_S)
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
    return TestTrial({**tree, path: text.encode()}, layout, files, tests, texts=True)


async def mine(archive: Path, plan: Plan, tell: Callable[[str], None]) -> tuple[Baseline, list[Found]]:
    """The tasks of a package."""
    tree, sandbox = read_archive(archive), open_sandbox()
    layout = layout_of(tree)
    try:
        baseline = await measure(sandbox, tree, layout)
        tell(f"{archive.name}: {len(baseline.tests)} tests")
        found: list[Found] = []
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


def save_found(path: Path, archive: Path, baseline: Baseline, found: Sequence[Found]) -> None:
    """Write what was found in a package."""
    head = {
        "archive": archive.name,
        "sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
        "tests": dict(baseline.tests),
    }
    lines = [json.dumps(row) for row in (head, *(asdict(one) for one in found))]
    path.write_text("\n".join(lines) + "\n", "utf-8")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="act", required=True)
    fetching = commands.add_parser("fetch")
    fetching.add_argument("folder", type=Path)
    fetching.add_argument("packages", nargs="+")
    mining = commands.add_parser("bugs")
    mining.add_argument("folder", type=Path)
    mining.add_argument("archives", nargs="+", type=Path)
    for name, value in (("wanted", 20), ("tries", 60), ("seed", 0)):
        mining.add_argument(f"--{name}", type=int, default=value)
    assembling = commands.add_parser("assemble")
    assembling.add_argument("folder", type=Path)
    assembling.add_argument("catalogue", type=Path)
    assembling.add_argument("--validation", nargs="*", default=[])
    assembling.add_argument("--test", nargs="*", default=[])
    given = parser.parse_args()
    if given.act == "fetch":
        for requirement in given.packages:
            print(download(requirement, given.folder))
    elif given.act == "bugs":
        mine_all(given.folder, given.archives, Plan(given.wanted, given.tries, given.seed))
    else:
        from generators.swe.assemble import assemble

        print(assemble(given.folder, given.catalogue, {"validation": given.validation, "test": given.test}))


def mine_all(folder: Path, archives: Sequence[Path], plan: Plan) -> None:
    """Mine packages one after the other; those that have been are left out."""
    for archive in archives:
        target = folder / f"{archive.name.removesuffix('.tar.gz')}.jsonl"
        if not target.exists():
            save_found(target, archive, *asyncio.run(mine(archive, plan, lambda said: print(said, flush=True))))


if __name__ == "__main__":
    main()
