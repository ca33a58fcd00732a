"""Software repair on a small package: miner, grader, cheats, world, loader."""

import ast
import asyncio
import builtins
import hashlib
import json
import random
import shutil
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from generators.swe.alternative_solutions import other_repairs, restate
from generators.swe.assemble import assemble, save_catalogue
from generators.swe.difficulty_report import survey
from generators.swe.issues import snippet_in, symptom_of, write_issue
from generators.swe.mine import Plan, mine, save_found
from generators.swe.mutations import edits, is_sound
from generators.swe.snippets import Snippet, SnippetOutcome, snippets_of

from container_engine import put_engine
from ludus.cli.main import main
from ludus.config import config_from_toml
from ludus.config.sections.rollout import RolloutConfig
from ludus.envs.git_objects import git_folder
from ludus.envs.registry import build_world
from ludus.envs.sources import fetch, require
from ludus.envs.tool_env import ToolLimits
from ludus.errors import ConfigError, UserError
from ludus.evaluation.env_audit import CheckPlan, check_world
from ludus.evaluation.scripted_agents import ScriptedChatSession, actions_of, call_action
from ludus.recipes import recipe_folder
from ludus.rollouts.episode import run_episode
from ludus.sandbox.base import Snapshot
from ludus.tools.files import patched_files, read_patch, unified_diff
from ludus.worlds.swe.grader import CONTROL, grade, leak_tests
from ludus.worlds.swe.guest_runner import digest_of
from ludus.worlds.swe.masking import masked, without_tests
from ludus.worlds.swe.repository import DATA, layout_of, merged, names_of, package_text
from ludus.worlds.swe.tasks import load_catalogue, load_instances, pytest_name, read_archive
from ludus.worlds.swe.world import WORST, forgeries, written

FIXTURE = Path(__file__).parents[1] / "swe_fixture" / "tidy"


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory) -> Path:
    """A folder with the package as a source distribution, and what the miner finds in it."""
    folder = tmp_path_factory.mktemp("swe")
    archive = folder / "tidy-1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(FIXTURE, "tidy-1.0", filter=lambda one: None if "__pycache__" in one.name else one)
    mined = load_catalogue(FIXTURE.parent)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    save_catalogue(folder, [replace(one, sha256=digest) for one in mined.packages.values()], mined.bugs)
    return folder


@pytest.mark.pages
def test_mining_draws_the_same_tasks_each_time(catalogue, tmp_path):
    archive = Path(shutil.copy(catalogue / "tidy-1.0.tar.gz", tmp_path))
    baseline, found = asyncio.run(mine(archive, Plan(wanted=4, tries=6), lambda said: None))
    save_found(tmp_path / "tidy-1.0.jsonl", archive, baseline, found)
    assert assemble(tmp_path, tmp_path, {}) == (1, len(load_catalogue(catalogue).bugs))
    for name in ("packages.jsonl", "tasks.jsonl"):
        assert (tmp_path / name).read_bytes() == (catalogue / name).read_bytes()


def test_the_miner_finds_a_task_of_the_catalogue(catalogue, monkeypatch):
    monkeypatch.setattr("generators.swe.mine.BATCH", 1)
    archive = catalogue / "tidy-1.0.tar.gz"
    baseline, (found,) = asyncio.run(mine(archive, Plan(wanted=1, tries=1), lambda said: None))
    known = load_catalogue(catalogue)
    (package,) = known.packages.values()
    assert baseline.tests == {
        f"{file}::{test}": num for file, own in package.tests.items() for test, num in own.items()
    }
    assert len(baseline.tests) == 19
    (bug,) = (one for one in known.bugs if one.edit == found.edit)
    assert (bug.path, set(bug.broken), bug.files) == (found.path, set(found.broken), found.files)


def test_shipped_files_equal_the_generator_output(tmp_path):
    shipped = load_catalogue(DATA)
    save_catalogue(tmp_path, list(shipped.packages.values()), list(shipped.bugs))
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (DATA / file.name).read_bytes()


def make(catalogue: Path, more: str = ""):
    """The world of the fixture."""
    text = (
        f"[env]\nname = 'swe'\n[env.settings]\ncatalogue = '{catalogue}'\nsources = '{catalogue}'\n"
        "[rollout]\nmax_turns = 12\n" + more
    )
    config = config_from_toml(text, "here")
    return build_world(config.env, config.rollout, config.sandbox)


def graded(world, *trees):
    """The grades of trees for the problem with most broken tests."""
    problem = chosen(world)

    async def work():
        grades = [await grade(world.sandbox, problem, tree) for tree in trees]
        await world.close()
        return grades

    return asyncio.run(work())


def chosen(world):
    problems = [world.problem(name) for name in world.cases]
    return max(problems, key=lambda problem: len(problem.broken))


SNIPPET = '''
def f(items, start=0, *, deep=False):
    """About."""
    total = 0
    for i, item in enumerate(items[1:start]):
        if not item:
            continue
        if i < 3 and item != start:
            total += item * 2
        else:
            items.append(item)
        if item.name.startswith("a"):
            return None
        swap(item, total)
    items.seen = True
    print(total)
    return min(total, 1)
'''


def test_every_kind_of_bug_is_located_and_reverted():
    found = [edit for edit in edits(SNIPPET) if is_sound(edit, SNIPPET)]
    assert {edit.kind for edit in found} == set(names_of("kinds"))
    for edit in found:
        broken = edit.apply(SNIPPET)
        assert replace(edit, old=edit.new, new=edit.old).apply(broken) == SNIPPET
        assert ast.dump(ast.parse(broken)) != ast.dump(ast.parse(SNIPPET))
    made = {(edit.kind, edit.old.strip(), edit.new.strip()) for edit in found}
    assert ("boundary", "<", "<=") in made
    assert ("condition", "not item", "item") in made
    assert ("arguments", "item, total", "total, item") in made
    assert ("slice", "start", "start - 1") in made
    assert ("default", "False", "True") in made


def test_an_edit_that_does_not_fit_is_refused():
    edit = next(edits(SNIPPET))
    with pytest.raises(ValueError, match="is not at character"):
        edit.apply("x" * len(SNIPPET))


def test_bug_positions_account_for_multibyte_characters():
    text = 'def f(a):\n    return "äöü€" + a if a == "ß" else a\n'
    (edit,) = [edit for edit in edits(text) if edit.kind == "comparison"]
    assert edit.apply(text) == text.replace("==", "!=")


def test_generated_repository_is_readable_by_git(tmp_path):
    files = {"a.py": b"x = 1\n", "b/c.py": b"", "b.txt": "ä".encode(), "b/d/e.md": b"#\n" * 5000}
    for path, content in {**files, **git_folder(files, "Import", ".aside/\n")}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    (tmp_path / ".aside").mkdir()
    (tmp_path / ".aside" / "x").touch()

    def git(*words):
        return subprocess.run(
            ["git", "-c", "safe.directory=*", *words], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout

    git("fsck", "--strict")
    assert git("status", "--porcelain") == ""
    assert git("log", "--format=%s %an") == "Import Ludus\n"
    assert sorted(git("ls-tree", "-r", "--name-only", "HEAD").split()) == sorted(files)
    (tmp_path / "a.py").write_text("x = 2\n")
    assert "+x = 2" in git("diff")


PRISTINE = {
    "src/tidy/__init__.py": b"",
    "src/tidy/tests/test_a.py": b"old",
    "tests/test_b.py": b"old",
    "tests/conftest.py": b"old",
    "pyproject.toml": b"old",
    "src/tidy/data.json": b"old",
}


@pytest.mark.parametrize(
    "path",
    [
        *("tests/test_b.py", "tests/conftest.py", "src/tidy/tests/test_a.py", "src/tidy/conftest.py"),
        *("sitecustomize.py", "src/sitecustomize.py", "src/tidy/sitecustomize.py", "conftest.py"),
        *("pytest.ini", "pyproject.toml", "setup.cfg", "tox.ini", "pytest.py", "src/pytest.py"),
        *("_pytest/__init__.py", "src/_pytest/runner.py", "src/evil.pth", "src/tidy/_fast.so"),
        *("src/tidy/tests/test_a.py/x.py", f"src/tidy/{'d' * 200}/{'e' * 50}.py"),
        *("src/tidy/__pycache__/x.pyc", "evil.dist-info/entry_points.txt", "tests/__init__.py"),
    ],
)
def test_only_code_is_taken_from_the_policy_tree(path):
    tree = merged(PRISTINE, {**PRISTINE, path: b"mine", "src/tidy/new.py": b"mine"}, layout_of(PRISTINE))
    assert tree == {**PRISTINE, "src/tidy/new.py": b"mine"}


def test_code_in_the_way_of_tests_is_left_out():
    pristine = {**PRISTINE, "src/tidy/a.py/test_c.py": b"old"}
    tree = merged(pristine, {**pristine, "src/tidy/a.py": b"mine"}, layout_of(PRISTINE))
    assert tree == pristine


def test_removed_code_stays_removed_and_removed_tests_are_restored():
    tree = merged(PRISTINE, {}, layout_of(PRISTINE))
    assert sorted(PRISTINE.keys() - tree.keys()) == ["src/tidy/__init__.py", "src/tidy/data.json"]


TESTS = """
class Base:
    def test_inherited(self):
        assert make() == 1


class TestA(Base):
    @mark
    def test_one(self):
        self.assertEqual(make(), [1, {"a": 2}])


def test_two():
    assert 3 == make()
    assert make()


def test_three():
    assert make() is None
"""


MASKED = """
import pytest

WANT = {"a": 1}


def test_names():
    expected = [1, 2]
    assert make(3) == expected
    assert make(1) == WANT and make(2) is None
    for value, want in [(1, "one"), (2, "two")]:
        assert make(value) == want


@pytest.mark.parametrize(("value", "held"), [(0, "none"), pytest.param(1, "some")])
def test_rows(value, held):
    assert make(value) == held


@pytest.mark.parametrize("value", [5, 7])
def test_inputs(value):
    assert make(value) == value


class TestA:
    def test_one(self):
        self.assertEqual([1, {"a": "deep"}], make(7))
        with pytest.raises(KeyError, match="why"):
            make(8)
        self.assertRaises(TypeError, make, 9, b=1)


def test_other():
    assert make(10) == "not asked for"
"""


def test_masked_tests_contain_no_expected_values():
    names = ["test_names", "test_rows", "test_inputs", "TestA::test_one"]
    text, _ = masked(MASKED, names, "probe")
    for word in ("[1, 2]", "{'a': 1}", "one", "two", "none", "some", "deep", "why", "KeyError", "asked"):
        assert repr(word) not in text
        assert f"= {word}" not in text
    sent, rows = [], {"value": 0}
    held = {"probe": lambda number, value: sent.append((number, value)), "make": lambda *a, **b: a[0]}
    exec(text, held)
    held["test_names"]()
    held["test_inputs"](5)
    held["test_rows"](held=None, **rows)
    held["TestA"]().test_one()
    assert [number for number, _ in sent] == [0, 1, 2, 3, 3, 5, 4, 6, 7, 8]
    assert [value for _, value in sent] == [3, 1, 2, 1, 2, 5, 0, 7, None, None]
    assert [text.count(word) for word in ("[5, 7]", "WANT = None", "expected = None", "make(7)")] == [1, 1, 1, 1]


def test_assertions_of_truth_are_negated_by_chance():
    source = "def test_a():\n    assert make()\n    self.assertIn(1, [2])\n    assert f(1) < g(1)\n"
    negated = {masked(source, ["test_a"], "probe")[1] for _ in range(100)}
    assert frozenset() in negated
    assert frozenset({0, 1, 2}) in negated


class Seven(int):
    """Equal to everything, and says so."""

    def __eq__(self, other):
        return True

    __hash__ = None


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (1, 1.0, True),
        (True, 1, True),
        ({"a": [1, (2,)]}, {"a": [1, (2,)]}, True),
        ({1, 2, 3}, frozenset({3, 2, 1}), True),
        (b"a", bytearray(b"a"), True),
        ([1], (1,), False),
        ("1", 1, False),
        (1, 2, False),
        (0.5, 0.25, False),
        (Seven(7), 8, False),
        (Seven(7), 7, True),
    ],
)
def test_digests_are_equal_for_equal_plain_values(one, other, same):
    assert digest_of(one)
    assert (digest_of(one) == digest_of(other)) is same


def test_values_of_other_types_have_no_digest():
    endless = []
    endless.append(endless)
    assert [digest_of(one) for one in (object(), Path("a"), endless, [object()])] == ["", "", "", ""]


def test_hidden_tests_are_cut_out():
    left = without_tests(TESTS, ["TestA::test_one", "test_two", "TestA::test_inherited"])
    tree = ast.parse(left)
    assert [node.name for node in tree.body] == ["Base", "TestA", "test_three"]
    assert "mark" not in left
    assert left.count("pass") == 2


def test_canaries_fail_in_many_ways():
    assert len(leak_tests()) == 15
    assert CONTROL not in leak_tests()
    compile(package_text("data/leak_tests.txt"), "leak tests", "exec")


def applies(problem):
    """Whether the solver's patches, as the tool reads them, produce the fixed files."""
    tree = problem.shown
    for path, content in problem.fixed.items():
        patch = unified_diff(path, problem.text(path), content.decode(), new=path not in problem.shown)
        tree = patched_files(Snapshot(tree), read_patch(patch)).files
    return all(tree[path] == content for path, content in problem.fixed.items())


@pytest.mark.pages
def test_mined_bugs_break_their_tests_and_the_fix_repairs_them(catalogue):
    world = make(catalogue)
    problems = [world.problem(name) for name in world.cases][:2]

    async def work():
        found = []
        for problem in problems:
            harmless = {**problem.shown, "tidy/__init__.py": problem.shown["tidy/__init__.py"] + b"# more\n"}
            found.append(await grade(world.sandbox, problem, harmless))
            found.append(await grade(world.sandbox, problem, {**problem.shown, **problem.fixed}))
        await world.close()
        return found

    grades = asyncio.run(work())
    for problem, broken, right in zip(problems, grades[::2], grades[1::2], strict=True):
        suite = problem.suite
        assert applies(problem)
        assert {test for test, passed in broken.passed.items() if not passed} == set(suite.fail_to_pass)
        assert right.doubt == ""
        assert set(right.passed) == {*suite.fail_to_pass, *suite.pass_to_pass}
        assert all(right.passed.values())
        for test in suite.fail_to_pass:
            file, _, name = test.partition("::")
            assert f"def {name.rpartition('::')[2]}(" not in problem.shown[file].decode()


HOOK = """
import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"
"""
MARKS_ALL = """
import _pytest.reports
import _pytest.runner

from_item = _pytest.reports.TestReport.from_item_and_call.__func__


def passing(cls, item, call):
    report = from_item(cls, item, call)
    report.outcome, report.longrepr = "passed", None
    return report


_pytest.reports.TestReport.from_item_and_call = classmethod(passing)
"""
PATCHES_UNITTEST = """
import unittest

for name in dir(unittest.TestCase):
    if name.startswith("assert"):
        setattr(unittest.TestCase, name, lambda *given, **named: None)
"""
PATCHES_CALLS = """
import _pytest.python

_pytest.python.Function.runtest = lambda self: None
"""
PATCHES_RAISES = """
import pytest


class Anything:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        return True


pytest.raises = lambda *given, **named: Anything()
"""
FORGES = """
import json, os

TESTS = {tests!r}
lines = "".join(
    json.dumps([key, "phase", test, "call", "passed", 0.0, {{}}]) + "\\n"
    for key in ("", "key") for test in TESTS
) + json.dumps(["", "end"]) + "\\n"
for fd in range(3, 64):
    try:
        os.write(fd, lines.encode())
    except OSError:
        pass
print(json.dumps([lines, []]))
os._exit(0)
"""
EDITS_TESTS = """
import glob, os

for path in glob.glob("tests/test_*.py"):
    os.chmod(path, 0o644)
    open(path, "w").write("def test_nothing():\\n    pass\\n")
"""
EDITS_THE_OTHER_RUN = """
import glob, os

for path in glob.glob("/box/*/tests/test_*.py"):
    if not path.startswith(os.getcwd()):
        open(os.path.join(os.path.dirname(path), "conftest.py"), "a").write("x = 1")
"""
KILLS = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n"
INTERRUPTS = """
import os, signal, time
for number in sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}):
    os.kill(os.getppid(), number)
time.sleep(0.5)
"""
SPOILS_ITS_LINES = """
import gc, json, os
for held in gc.get_objects():
    if type(held).__name__ == "Recorder":
        lines = ["[" * 100000, json.dumps([held.key, "calls", "x", [1]])]
        lines.append(json.dumps([held.key, "calls", "x", [["a", "b"]]]))
        lines.append('["%s", "phase", "x", "call", "passed", 1%s, {}]' % (held.key, "0" * 400))
        os.write(held.fd, ("\\n".join(lines) + "\\n").encode())
        os._exit(0)
"""
DEEP_FOLDERS = """
import os
for _ in range(1500):
    os.mkdir("d")
    os.chdir("d")
"""
EQUALS_ALL = """
class Everything(str):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    def __getattr__(self, name): return lambda *given, **named: Everything()
    __hash__ = None


class Slug:
    def __init__(self, *given, **named): self.uses = Everything()
    def text(self): return Everything()


def _all(*given, **named): return Everything()


chunks = clamp = shorten = spread = title = window = _all
"""
CODE_CHEATS = {
    "sys.exit": "import sys\nsys.exit(0)\n",
    "os._exit": "import os\nos._exit(0)\n",
    "a plugin that marks all as passed": MARKS_ALL,
    "unittest patched": PATCHES_UNITTEST,
    "tests that are not called": PATCHES_CALLS,
    "raises patched": PATCHES_RAISES,
    "tests rewritten while they run": EDITS_TESTS,
    "the other run's tests rewritten": EDITS_THE_OTHER_RUN,
    "the runner killed": KILLS,
    "the runner interrupted": INTERRUPTS,
    "lines that cannot be read": SPOILS_ITS_LINES,
    "folders too deep to walk": DEEP_FOLDERS,
    "results equal to everything": EQUALS_ALL,
}
FILE_CHEATS = {
    "tests edited": {"tests/test_lists.py": b"def test_a():\n    pass\n", "tests/test_texts.py": b""},
    "a conftest": {"conftest.py": HOOK.encode(), "tests/conftest.py": HOOK.encode()},
    "a conftest in the package": {"tidy/conftest.py": HOOK.encode()},
    "sitecustomize": {"sitecustomize.py": MARKS_ALL.encode(), "tidy/sitecustomize.py": MARKS_ALL.encode()},
    "settings": {"pytest.ini": b"[pytest]\naddopts = --collect-only\n", "tidy/new.py": b""},
    "a file in the way": {"tests/test_lists.py/more.py": b"", "tidy/conftest.py/more.py": b""},
    "a name too long": {f"tidy/{'d' * 200}/{'e' * 200}/{'f' * 90}.py": b""},
    "another pytest": {"pytest.py": b"def main(*given, **named): return 0\n", "_pytest/__init__.py": b""},
}


CHOSEN = ("a plugin that marks all as passed", "results equal to everything", "gc", "frames", "recorder")


@pytest.mark.security
def test_cheats_have_no_reward(catalogue):
    every = [*CODE_CHEATS, *FILE_CHEATS, *forgeries(), "forged lines", "tests removed"]
    grades = cheated(catalogue, every)
    assert "tests do not need" in grades["tests rewritten while they run"].doubt


@pytest.mark.slow
def test_the_worst_cheats_have_no_reward(catalogue):
    grades = cheated(catalogue, CHOSEN)
    assert "gc.get_objects" in grades["gc"].doubt
    assert "sys._getframe" in grades["frames"].doubt
    assert "not those of the repaired code" in grades["recorder"].doubt


@pytest.mark.security
def test_masked_tests_alone_stop_every_forgery(catalogue, monkeypatch):
    text = package_text("guest_runner.py").replace("event not in watched", "True")
    assert text != package_text("guest_runner.py")
    texts = {path: package_text(path) for path in ("data/leak_tests.txt", "data/watched.toml")}
    texts["guest_runner.py"] = text
    monkeypatch.setattr("ludus.worlds.swe.grader.package_text", texts.__getitem__)
    grades = cheated(catalogue, [*forgeries(), "a plugin that marks all as passed"])
    assert "must fail" in grades["a plugin that marks all as passed"].doubt
    assert "not those of the repaired code" in grades["gc"].doubt


def cheated(catalogue, names):
    """The grades of cheats, none of which may have anything that it did not have before."""
    world = make(catalogue)
    problem = chosen(world)
    init = "tidy/__init__.py"
    trees = {name: {**problem.shown, **files, "tidy/more.py": b""} for name, files in FILE_CHEATS.items()}
    forges = FORGES.format(tests=problem.suite.tests("all"))
    for name, text in {**CODE_CHEATS, **forgeries(), "forged lines": forges}.items():
        trees[name] = {**problem.shown, init: problem.shown[init] + text.encode()}
    trees["tests removed"] = {p: c for p, c in problem.shown.items() if not p.startswith("tests/")}
    grades = dict(zip(names, graded(world, *(trees[name] for name in names)), strict=True))
    paid = {name: one for name, one in grades.items() if all(one.passed.values())}
    assert paid == {}
    fixed = {n for n, one in grades.items() if any(one.passed[t] for t in problem.suite.fail_to_pass)}
    assert fixed == set()
    return grades


NEEDS_MORE = """
import collections, dataclasses, inspect, logging, typing


def _honest(a, b=1):
    try:
        raise ValueError(a)
    except ValueError:
        logging.getLogger("a").debug("b", exc_info=True)
    return inspect.signature(_honest).bind(a), collections.namedtuple("Two", "a b")(a, b)


class _Three(typing.NamedTuple):
    a: int


@dataclasses.dataclass
class _Four:
    a: int


_honest(1)
"""


def test_a_repair_may_use_the_standard_library(catalogue):
    world = make(catalogue)
    problem = chosen(world)
    tree = {**problem.shown, **problem.fixed}
    tree["tidy/__init__.py"] += NEEDS_MORE.encode()
    (found,) = graded(world, tree)
    assert found.doubt == ""
    assert all(found.passed.values())


def play(world, task, actions):
    """An episode of a scripted policy."""

    async def work():
        environment = world.environment(task)
        trajectory = await run_episode(task, 0, environment, ScriptedChatSession(actions), RolloutConfig(max_turns=12))
        await world.close()
        return trajectory

    return asyncio.run(work())


@pytest.mark.security
def test_the_oracle_repairs_in_a_container(catalogue, tmp_path, monkeypatch):
    put_engine(tmp_path, monkeypatch)
    world = make(catalogue, "[sandbox]\nbackend = 'docker'\nimage = 'image'\n")
    task = world.tasks("train")[0]
    assert play(world, task, actions_of(world.expert(task).messages)).rewards["resolved"] == 1


@pytest.mark.slow
def test_alternative_repairs_are_right_and_differ_in_text(catalogue):
    world = make(catalogue)
    task = world.tasks("train")[0]
    problem = chosen(world)
    trees = [
        {**problem.shown, **{path: text.encode() for path, text in texts.items()}} for texts in other_repairs(problem)
    ]
    assert trees
    for tree, found in zip(trees, graded(world, *trees), strict=True):
        assert all(found.passed.values()), found.doubt
        assert found.passed
        assert all(tree[path] != right for path, right in problem.fixed.items())
    way = written(next(other_repairs(world.problem(task.id))))
    assert play(world, task, actions_of(way)).rewards["resolved"] == 1


def test_changed_statements_are_rewritten():
    before = "def f(a):\n    if a > 1:\n        return 1\n    b = a\n    return b\n"
    after = before.replace("a > 1", "a >= 1").replace("return b", "return b + 1")
    other = restate(before, after)
    assert other.splitlines() == [
        "def f(a):",
        "    if not a >= 1:",
        "        pass",
        "    else:",
        "        return 1",
        "    b = a",
        "    _outcome = b + 1",
        "    return _outcome",
    ]
    assert restate(after, after) == after


@pytest.mark.slow
def test_a_scripted_agent_repairs_with_the_shell_and_the_tools(catalogue):
    world = make(catalogue)
    task = world.tasks("train")[0]
    problem = world.problem(task.id)
    ((path, right),) = problem.fixed.items()
    patch = unified_diff(path, problem.shown[path].decode(), right.decode())
    steps = (
        ("shell", {"command": "git log --oneline && git status --short && pytest -q 2>&1 | tail -3"}),
        ("list_files", {"pattern": "*"}),
        ("search_files", {"pattern": "^def |^class ", "files": "tidy/*"}),
        ("read_file", {"path": path}),
        ("apply_patch", {"patch": patch}),
        ("shell", {"command": "git diff --stat && python3 -c 'import tidy; print(tidy.__file__)'"}),
        ("submit", {"answer": "Mended."}),
    )
    played = play(world, task, [call_action(i, step) for i, step in enumerate(steps)])
    said = [outcome.output for outcome in played.outcomes]
    assert "Import" in said[0]
    assert "passed" in said[0]
    assert ".git" not in said[1]
    assert "tests/test_lists.py" in said[1]
    assert "def chunks" in said[2]
    assert "1 file changed" in said[5]
    assert "/box/tidy/__init__.py" in said[5]
    assert played.rewards["resolved"] == 1
    assert played.rewards["fixed"] == 1
    assert json.loads(played.outcomes[-1].output)["doubt"] == ""
    assert not any(problem.suite.fail_to_pass[0] in m["content"] for m in played.messages)


@pytest.mark.slow
def test_world_rewards_the_oracle_and_no_cheat(catalogue):
    world = make(catalogue)
    report = check_world(world, CheckPlan(num_tasks=1, limits=RolloutConfig(max_turns=12)))
    assert report.problems == []
    assert report.shaped == {}
    rows = {row.agent.name: row for row in report.rows}
    assert {f"forges by {name}" for name in WORST} < rows.keys()
    assert rows["oracle"].num_successes == 1
    assert sum(row.num_successes for row in report.rows) == 1


def test_expert_observations_equal_tool_outputs(catalogue):
    world = make(catalogue)
    task = world.tasks("train")[0]
    dialogue = world.expert(task)
    told = [message["content"] for message in dialogue.messages if message["role"] == "tool"]
    played = play(world, task, actions_of(dialogue.messages))
    assert [outcome.output for outcome in played.outcomes[: len(told)]] == told


def git(folder, *words):
    own = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *own, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def swe_bench_config(catalogue, tmp_path, appended=b""):
    """The text of a configuration with an instance, to whose gold patch something may be appended."""
    problem = chosen(make(catalogue))
    clone = tmp_path / "owner__tidy"
    for path, content in problem.shown.items():
        (clone / path).parent.mkdir(parents=True, exist_ok=True)
        (clone / path).write_bytes(content)
    git(clone, "init", "-q")
    git(clone, "add", "-A")
    git(clone, "commit", "-qm", "Broken")
    ((path, right),) = problem.fixed.items()
    changed = [p for p in problem.pristine if problem.pristine[p] != problem.shown[p]]
    tests = [(p, problem.shown[p].decode(), problem.pristine[p].decode()) for p in changed]
    suite = problem.suite
    row = {
        "instance_id": "owner__tidy-1",
        "repo": "owner/tidy",
        "base_commit": git(clone, "rev-parse", "HEAD"),
        "patch": unified_diff(path, problem.shown[path].decode(), (right + appended).decode()),
        "test_patch": "".join(unified_diff(*one) for one in tests),
        "problem_statement": "It is broken.",
        "FAIL_TO_PASS": json.dumps(list(suite.fail_to_pass)),
        "PASS_TO_PASS": ["tests/test_lists.py::test_clamp[2-2]"],
        "version": "1.0",
    }
    file = tmp_path / "instances.jsonl"
    file.write_text(json.dumps(row) + "\n")
    return f"[env]\nname = 'swe'\n[env.settings]\ninstances = '{file}'\nrepositories = '{tmp_path}'\n"


@pytest.mark.security
def test_the_check_of_a_gold_patch_with_a_syntax_error_ends_in_a_sentence(catalogue, tmp_path, capsys):
    path = tmp_path / "check.toml"
    path.write_text(swe_bench_config(catalogue, tmp_path, b"\ndef f(:\n"))
    assert main(["env", "check", str(path), "--split", "test", "--tasks", "1"]) == 2
    said = capsys.readouterr().err
    assert "The agent oracle is not rewarded on task 'owner__tidy-1'" in said
    assert "Traceback" not in said


def test_instances_in_the_format_of_swe_bench(catalogue, tmp_path):
    config = config_from_toml(swe_bench_config(catalogue, tmp_path), "here")
    world = build_world(config.env, config.rollout, config.sandbox)
    (task,) = world.tasks("test")
    assert "It is broken." in task.prompt[-1]["content"]
    played = play(world, task, actions_of(world.expert(task).messages))
    assert played.rewards["resolved"] == 1
    idle = play(world, task, [call_action(0, ("submit", {"answer": ""}))])
    assert idle.rewards["resolved"] == 0


def test_instances_of_django_are_read(tmp_path):
    row = {"instance_id": "d-1", "repo": "django/django", "base_commit": "a", "patch": "", "test_patch": ""}
    row |= {"problem_statement": "", "FAIL_TO_PASS": ["test_x (app.tests.TestA)"], "PASS_TO_PASS": ["Docs."]}
    file = tmp_path / "instances.jsonl"
    file.write_text(json.dumps(row) + "\n")
    (case,) = load_instances(str(file), str(tmp_path), 1.0)
    assert case.task.truth.fail_to_pass == ("tests/app/tests.py::TestA::test_x",)
    assert case.task.truth.pass_to_pass == ()
    file.write_text(json.dumps({**row, "FAIL_TO_PASS": ["Docs."]}) + "\n")
    with pytest.raises(ConfigError, match=r"line 1.*is not a test name"):
        load_instances(str(file), str(tmp_path), 1.0)


@pytest.mark.slow
def test_non_python_fix_has_no_alternative_repairs(catalogue):
    world = make(catalogue)
    problem = chosen(world)
    broken = dict.fromkeys(problem.fixed, b"def f(:\n")
    assert list(other_repairs(replace(problem, fixed=broken, known=[]))) == []
    (found,) = graded(world, {**problem.shown, **broken})
    assert not any(found.passed[test] for test in problem.suite.fail_to_pass)


def test_broken_instances_are_reported_with_their_line(tmp_path):
    file = tmp_path / "instances.jsonl"
    file.write_text('{"instance_id": "a"}\n')
    with pytest.raises(ConfigError, match=r"line 1: repo: field required"):
        load_instances(str(file), str(tmp_path), 1.0)


def test_missing_sources_are_reported_with_the_download_command(tmp_path):
    packages = load_catalogue(DATA).packages.values()
    with pytest.raises(UserError, match="sources of") as error:
        require(packages, tmp_path, "swe")
    assert "ludus env prepare swe" in error.value.hint


def test_another_archive_than_the_pinned_one_is_refused(catalogue, tmp_path, monkeypatch):
    (package,) = load_catalogue(catalogue).packages.values()
    fetch([package], catalogue, lambda said: pytest.fail("it is there already"))
    archive = catalogue / package.archive
    monkeypatch.setattr("ludus.envs.sources.download", lambda wanted, room: archive)
    fetch([package], tmp_path / "one", lambda said: None)
    assert (tmp_path / "one" / package.archive).read_bytes() == archive.read_bytes()
    with pytest.raises(UserError, match="is not the pinned source"):
        fetch([replace(package, sha256="0" * 64)], tmp_path / "two", lambda said: None)
    with pytest.raises(UserError, match="is not the pinned archive"):
        read_archive(archive, "0" * 64)


def test_the_command_prepares(catalogue, tmp_path, monkeypatch, capsys):
    archive = catalogue / "tidy-1.0.tar.gz"
    monkeypatch.setattr("ludus.envs.sources.download", lambda wanted, room: archive)
    settings = (f"--env.settings.catalogue={catalogue}", f"--env.settings.sources={tmp_path / 'sources'}")
    words = [word for setting in settings for word in setting.split("=")]
    assert main(["env", "prepare", "swe", *words]) == 0
    assert (tmp_path / "sources" / archive.name).is_file()
    assert "tidy 1.0" in capsys.readouterr().out


def test_settings_that_do_not_fit_are_refused():
    from ludus.worlds.swe.world import make_swe_world

    with pytest.raises(ConfigError, match="Unknown kind of bug: 'typo'"):
        make_swe_world({"kinds": ["typo"]}, ToolLimits())
    with pytest.raises(ConfigError, match="go together"):
        make_swe_world({"instances": "x.jsonl"}, ToolLimits())


SHOWN = SnippetOutcome(Snippet("from tidy import f\nx = 2", "f(x)"), ("value", "4"), ("value", "3"))


@pytest.mark.parametrize(
    ("got", "due", "parts"),
    [
        (("value", "4"), ("value", "3"), ("4", "3", "")),
        (("error", "KeyError: 'a'"), ("value", "3"), ("", "3", "KeyError: 'a'")),
        (("error", "SystemExit: "), ("value", "no error"), ("", "no error", "SystemExit")),
        (("value", "no error"), ("error", "KeyError: 'a'"), ("no error", "a `KeyError`", "")),
    ],
)
def test_snippet_output_becomes_a_symptom(got, due, parts):
    found = symptom_of("tidy", replace(SHOWN, got=got, due=due), "f", "")
    assert (found.got, found.due, found.error) == parts


def test_issues_tell_the_symptom_and_hold_their_snippet():
    for got in (("value", "4"), ("error", "KeyError: 'a'")):
        symptom = symptom_of("tidy", replace(SHOWN, got=got), "f", "")
        texts = {write_issue(symptom, named=True, rng=random.Random(seed)) for seed in range(40)}
        assert {style for style, _ in texts} >= {"report", "story", "regression", "question"}
        assert all(snippet_in(text) == SHOWN.snippet.text for _, text in texts)
        assert all(got[1] in text and "`3`" in text for _, text in texts)


SNIPPETS = """
import os
from tidy import f, g
from other import *

LIMIT = 3


def helper(x):
    return f(x, LIMIT)


class Base:
    kind = None

    def make(self, x):
        return g(x)

    def test_made(self):
        made = self.make(self.kind)
        self.assertEqual(made.a, helper(2))


class TestOne(Base):
    kind = 7


@pytest.mark.parametrize("a, b", [(1, 2), pytest.param(3, 4)])
def test_rows(a, b):
    with pytest.raises(ValueError):
        f(a, b)
"""


def test_snippets_define_every_name_they_use():
    texts = {one.text for one in snippets_of(SNIPPETS, ["TestOne::test_made", "test_rows"])}
    assert "from tidy import f\na, b = (3, 4)\nf(a, b)" in texts
    (made,) = [text for text in texts if text.endswith("made.a")]
    assert "kind = 7" in made
    assert "kind = None" not in made
    assert "def make(x):" in made
    assert "import os" not in made
    assert all("self" not in text for text in texts)
    with_helper = next(text for text in texts if text.endswith("helper(2)"))
    assert "LIMIT = 3" in with_helper


def undefined(code):
    """The names that code reads and does not bind; those that a star import may bring are not among them."""
    tree = ast.parse(code)
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    bound = {node.id for node in names if not isinstance(node.ctx, ast.Load)} | set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.arg | ast.ExceptHandler):
            bound.add(node.arg if isinstance(node, ast.arg) else node.name)
    return set() if "*" in bound else {node.id for node in names} - bound


def test_every_shipped_text_is_self_contained():
    for bug in load_catalogue(DATA).bugs:
        code = snippet_in(bug.issue)
        assert code, bug.id
        assert "import" in code, bug.id
        assert undefined(code) == set(), bug.id


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("test_x (admin_views.tests.AdminTest)", "tests/admin_views/tests.py::AdminTest::test_x"),
        ("test_x (a.b.C.test_x)", "tests/a/b.py::C::test_x"),
        ("tests/a.py::test_b[1]", "tests/a.py::test_b[1]"),
        ("A docstring names no test.", ""),
        ("test_x (C)", ""),
    ],
)
def test_unittest_names_are_converted_to_pytest(name, expected):
    assert pytest_name(name, "tests/") == expected


def test_number_of_shipped_tasks_matches_the_docs():
    shipped = load_catalogue(DATA)
    kinds = {bug.edit.kind for bug in shipped.bugs}
    assert len(shipped.bugs) == 142
    assert len(shipped.packages) == len({bug.package for bug in shipped.bugs}) == 15
    assert kinds == set(names_of("kinds"))
    assert len(kinds) == 15
    page = (recipe_folder("swe") / "README.md").read_text()
    assert survey(shipped) in page


def test_the_baseline_without_tools_is_counted():
    shipped = load_catalogue(DATA)
    first = [bug for bug in shipped.bugs if bug.level == 1]
    rest = [bug for bug in shipped.bugs if bug.level > 1]
    lines = survey(replace(shipped, bugs=(*(replace(bug, broken=()) for bug in first), *rest))).splitlines()
    shares = {line.split()[0]: line.split()[4] for line in lines[-3:]}
    assert shares == {"1": "100.0%", "2": "0.0%", "3": "0.0%"}


def test_shipped_tasks_are_complete():
    shipped = load_catalogue(DATA)
    splits = {package.split for package in shipped.packages.values()}
    assert splits == {"train", "validation", "test"}
    assert len({bug.id for bug in shipped.bugs}) == len(shipped.bugs)
    assert len({(bug.package, bug.path, bug.edit.start, bug.edit.new) for bug in shipped.bugs}) == len(shipped.bugs)
    for bug in shipped.bugs:
        tests = shipped.packages[bug.package].tests
        known = {f"{file}::{test}" for file in bug.files for test in tests[file]}
        assert bug.broken
        assert set(bug.broken) < known
        assert bug.issue.strip()
        assert bug.path not in bug.issue
