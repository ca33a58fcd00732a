"""The code world: tasks are sound and varied, the grader reveals nothing, cheats earn nothing."""

import ast
import asyncio
import contextlib
import gzip
import io
import json
import pickle
import zlib
from base64 import b64encode
from dataclasses import dataclass, field, replace
from itertools import islice

import pytest
from generators.code.__main__ import row
from generators.code.difficulty_report import borrowed, constant, rates, unchanged, variety
from generators.code.generate import (
    LEVELS,
    SPLITS,
    CodeQuota,
    by_split,
    catalogue,
    is_held_out,
    make_problems,
    split_of_chain,
)
from generators.code.layouts import LAYOUTS
from generators.code.problems import NUM_SHOWN, TooLarge, _pool, source_of
from generators.code.shapes import shape_of

from ludus.config.load import load_config
from ludus.envs.registry import build_world
from ludus.envs.tool_env import ToolLimits
from ludus.errors import ConfigError, UserError
from ludus.evaluation.env_audit import CheckPlan, check_world
from ludus.evaluation.scripted_agents import actions_of, text_action
from ludus.evaluation.verifier_report import form_of
from ludus.rewards.base import check_rewards, score, success
from ludus.sandbox import open_sandbox
from ludus.types import StopReason, Trajectory
from ludus.worlds.code import guest_runner
from ludus.worlds.code.grader import LIMITS, CodeGrader, CodeTruth, TestCase, read_value, same_output, same_value
from ludus.worlds.code.records import load_code_tasks
from ludus.worlds.code.world import CodeSettings, CodeWorld, _rows, make_code_world, program_of, run_tests_tool
from tables.check_tasks import CHEATS, TASKS

NUM = 320
QUICK = replace(LIMITS, cpu_s=1.0, wall_s=5.0)


@pytest.fixture(scope="module")
def world():
    return CodeWorld(CodeSettings(tasks=NUM))


@pytest.fixture(scope="module")
def drawn():
    """The problems that the data is made of, drawn again."""
    return make_problems(CodeQuota(NUM))


@pytest.fixture(scope="module")
def every(drawn):
    return [one for split in by_split(drawn).values() for one in split]


@pytest.fixture(scope="module")
def sandbox():
    opened = open_sandbox()
    yield opened
    asyncio.run(opened.close())


def grade(sandbox, truth, *programs, limits=QUICK):
    """The gradings of programs, all at once."""

    async def run():
        judge = CodeGrader(sandbox, limits)
        return await asyncio.gather(*(judge.grade(one, truth, truth.cases) for one in programs))

    return asyncio.run(run())


def passed(grading):
    return [one.passed for one in grading.verdicts]


# Steps and problems


def test_every_step_matches_its_description_and_leaves_arguments_unchanged():
    assert len(catalogue()) > 250
    assert len({step.name for step in catalogue()}) == len(catalogue())
    assert len({source_of(step).shape for step in catalogue()}) == len(catalogue())
    for step in catalogue():
        numbers = {name: bounds[0] for name, bounds in step.draws.items()}
        assert step.says.format(**numbers).endswith("."), step.name
        for place in range(0, 60, 4):
            arguments = [_pool(kind, i)[place] for i, kind in enumerate(step.takes)]
            before = repr(arguments)
            value = step.function(*arguments, **numbers)
            assert repr(arguments) == before, step.name
            assert type(value).__name__ == step.gives.annotation.partition("[")[0], step.name
            assert step.gives.layout in LAYOUTS, step.name


@pytest.mark.slow
def test_tasks_are_sufficient_and_distinct(world, every):
    assert len(every) == NUM
    assert len({one.chain.shape for one in every}) == len({one.id for one in every}) == NUM
    assert {level: len([p for p in every if p.level == level]) for level in LEVELS} == dict.fromkeys(LEVELS, 64)
    forms = {form_of(one.text) for one in every}
    assert len(forms) > 0.97 * NUM
    assert 0.2 < sum(one.style == "stdin" for one in every) / NUM < 0.5
    assert all(found.num_shapes == found.num_tasks for found in variety(every).values())
    assert len({one.chain.family for one in every}) == 12


def test_shipped_data_equals_the_generator_output(drawn):
    assert [json.loads(json.dumps(row(one))) for one in drawn] == _rows()[:NUM]


def test_settings_choose_from_the_data():
    few = CodeWorld(CodeSettings(tasks=60, levels=(2,), families=("lists", "folds"), styles=("stdin",), tests=9))
    tasks = [task for split in few.splits for task in few.tasks(split)]
    assert len(tasks) == 60
    assert {task.tags["level"] for task in tasks} == {"2"}
    assert {task.tags["family"] for task in tasks} == {"lists", "folds"}
    assert {len(task.truth.cases) for task in tasks} == {9}
    assert {task.truth.style for task in tasks} == {"stdin"}


def test_splits_share_no_solution_and_composition_has_held_out_pairs(drawn):
    splits = by_split(drawn)
    pairs = {split: set().union(*(p.chain.pairs for p in splits[split])) for split in SPLITS}
    held_out = {pair for p in splits["composition"] for pair in p.chain.pairs}
    assert len(splits["composition"]) > 15
    assert min(len(splits[split]) for split in SPLITS[:3]) > 15
    for split in SPLITS:
        for problem in splits[split]:
            assert split_of_chain(problem.chain) == split
            assert is_held_out(problem.chain) == (split == "composition")
    for problem in splits["composition"]:
        assert problem.chain.pairs - pairs["train"]
    assert held_out


def run_on_host(problem):
    """The solution's text by itself: what it gives for the arguments of each test."""
    given, names = [], {"__name__": "__main__"}
    code = compile(problem.solution, "solution.py", "exec")
    if problem.style == "function":
        exec(code, names)
    for example in problem.examples:
        if problem.style == "function":
            given.append(names["solve"](*example.arguments))
            continue
        stdin, due = problem.as_texts(example)
        lines, printed = iter(stdin.split("\n")), io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names | {"input": lambda lines=lines: next(lines)})
        assert printed.getvalue() == due, (problem.id, stdin)
        given.append(example.value)
    return given


def test_solutions_pass_their_tests_as_text(every):
    for problem in every:
        due = [one.value for one in problem.examples]
        assert run_on_host(problem) == due, problem.id
        assert len(problem.examples) == 15
        assert problem.chain.shape
        assert all(one.says.split("{")[0] in problem.text for one in problem.chain.steps)


def test_little_is_solved_without_skill(drawn):
    splits = by_split(drawn)
    train, test = splits["train"], splits["test"]
    for guess in (constant, unchanged, borrowed(train)):
        solved, share = rates(test, guess)
        assert solved < 0.03
        assert share < 0.35


def test_hidden_tests_are_not_among_the_shown_ones(world):
    for split in SPLITS:
        for task in world.tasks(split):
            shown, hidden = task.truth.cases[:NUM_SHOWN], task.truth.cases[NUM_SHOWN:]
            assert not {repr(one.given) for one in shown} & {repr(one.given) for one in hidden}
            assert {one.name for one in hidden} == task.truth.hidden
            results = [repr(one.due) for one in hidden]
            assert max(map(results.count, results)) <= 0.5 * len(results)


def test_shape_ignores_names_and_numbers():
    assert shape_of("def f(x):\n    'doc'\n    return x + 1") == shape_of("def g(y: int):\n    return y + -23")
    assert shape_of("def f(x):\n    return x + 1") != shape_of("def f(x):\n    return x - 1")
    assert shape_of("def f(x):\n    return len(x)") != shape_of("def f(x):\n    return sum(x)")


# Values


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(10**30),
        1.5,
        float("inf"),
        "a\ud800\n",
        [1, [2, ()]],
        (1, "a"),
        {1: {"a": (2,)}, (1, 2): None},
        {1, 2},
        frozenset({"a"}),
        b"\x00\xff",
        complex(1, -2),
    ],
)
def test_plain_values_come_through_with_their_types(value):
    back = guest_runner.decode(json.loads(json.dumps(guest_runner.encode(value))))
    assert back == value
    assert type(back) is type(value)


def test_other_values_do_not_come_through():
    for value in (object(), lambda: 0, range(3), iter([])):
        with pytest.raises(guest_runner.NotPlain):
            guest_runner.encode(value)
    deep = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(guest_runner.NotPlain, match="deep"):
        guest_runner.encode(deep)
    for text in ('{"set": [[]]}', '{"a": 1, "b": 2}', '{"eval": ["1"]}', '{"dict": [[[], 1]]}', '{"dict": [[1]]}'):
        with pytest.raises(ValueError, match=r"\w"):
            guest_runner.decode(json.loads(text))


@pytest.mark.parametrize(
    ("value", "due", "loose", "right"),
    [
        ((1, [2]), [1, (2,)], False, True),
        (2.0, 2, False, True),
        (0.1 + 0.2, 0.3, False, True),
        (0.3001, 0.3, False, False),
        ("2", 2, False, False),
        ([2], 2, False, False),
        (2, [2], False, False),
        (2, [2], True, True),
        (3, [2], True, False),
        ({"a": (1,)}, {"a": [1]}, False, True),
        ({"a": 1, "b": 2}, {"a": 1}, False, False),
        (10**400, 1.0, False, False),
        (float("nan"), float("nan"), False, False),
        (None, 0, False, False),
        ({1}, [1], False, False),
        ("", [], False, False),
    ],
)
def test_values_are_compared_as_values(value, due, loose, right):
    assert same_value(read_value(guest_runner.encode(value)), due, loose) is right


@pytest.mark.parametrize(
    ("printed", "due", "loose", "right"),
    [
        ("1 2\n", "1 2", False, True),
        ("1 2 \n\n\n", "1 2\n", False, True),
        ("1  2\n", "1 2\n", False, False),
        ("1  2\n", "1 2\n", True, True),
        (" 1\n", "1\n", False, False),
        ("1\n2\n", "2\n1\n", True, False),
        ("0.333333333\n", "0.3333333\n", True, True),
        ("0.34\n", "0.3333333\n", True, False),
        ("3.0\n", "3\n", True, False),
        ("", "1\n", True, False),
        ("1\n1\n", "1\n", True, False),
    ],
)
def test_printed_output_is_compared_line_by_line(printed, due, loose, right):
    assert same_output(printed, due, loose) is right


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("x = 1", "x = 1"),
        ("Well:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```\na\n```\nbetter:\n```py\nb\n```", "b\n"),
        ("```python\nx = 1", "x = 1"),
        ("```json\n{}\n```", ""),
        ("```python\n    return 1\n```", "    return 1\n"),
    ],
)
def test_program_of_an_answer_is_its_last_code_block(answer, program):
    assert program_of(answer) == program


# The grader


def adder(**more):
    cases = [TestCase(f"t{i}", (i, 7), i + 7) for i in range(4)]
    names = tuple(one.name for one in cases)
    return CodeTruth(names, hidden=frozenset(names[1:]), entry="add", cases=tuple(cases), **more)


def printer():
    cases = tuple(TestCase(f"t{i}", f"{i} 7\n", f"{i + 7}\n") for i in range(3))
    return CodeTruth(tuple(c.name for c in cases), style="stdin", entry="", cases=cases)


FLAWED = {
    "half right": ("def add(a, b):\n    return a + b if a < 2 else 0", [True, True, False, False]),
    "a method": ("class Solution:\n    def add(self, a, b):\n        return a + b", [True] * 4),
    "it prints a lot": ("def add(a, b):\n    print('9' * 3_000_000)\n    return a + b", [True] * 4),
    "it ends at the second": (
        "import os\ndef add(a, b):\n    if a == 1: os._exit(0)\n    return a + b",
        [True, False, True, True],
    ),
    "it hangs at the second": ("def add(a, b):\n    while a == 1: pass\n    return a + b", [True, False, True, True]),
    "it raises at the second": ("def add(a, b):\n    return [a + b][a == 1]", [True, False, True, True]),
    "it leaves at the second": (
        "import sys\ndef add(a, b):\n    return sys.exit(0) if a == 1 else a + b",
        [True, False, True, True],
    ),
    "nothing plain": ("def add(a, b):\n    return range(a + b)", [False] * 4),
    "a generator": ("def add(a, b):\n    yield a + b", [False] * 4),
    "no such function": ("def plus(a, b):\n    return a + b", [False] * 4),
    "no syntax": ("def add(a, b:\n    return a + b", [False] * 4),
    "it fails on its way": ("1 / 0\ndef add(a, b):\n    return a + b", [False] * 4),
    "memory": ("def add(a, b):\n    return len(bytearray(10 ** 11))", [False] * 4),
    "records that are none": (
        (
            "import sys, os\n"
            "def add(a, b):\n"
            "    results = sys._getframe(2).f_locals['results']\n"
            "    for said in ([1], {}, None, True, 1e999, 10 ** 400):\n"
            "        results.send({'number': said, 'value': 1})\n"
            "    os._exit(0)"
        ),
        [False] * 4,
    ),
    "a patched sum": ("import builtins\nbuiltins.sum = print\ndef add(a, b):\n    return a + b", [True] * 4),
}


def test_each_test_has_a_verdict_whatever_the_program_does(sandbox):
    gradings = grade(sandbox, adder(), *(program for program, _ in FLAWED.values()))
    found = {name: passed(grading) for name, grading in zip(FLAWED, gradings, strict=True)}
    assert found == {name: due for name, (_, due) in FLAWED.items()}
    broken = {name for name, grading in zip(FLAWED, gradings, strict=True) if grading.broken}
    assert broken == {"no such function", "no syntax", "it fails on its way"}
    said = dict(zip(FLAWED, gradings, strict=True))
    assert "SyntaxError" in said["no syntax"].broken
    assert "line 2" in said["it raises at the second"].verdicts[1].failure
    assert "longer than" in said["it hangs at the second"].verdicts[1].failure
    assert "not a plain value" in said["nothing plain"].verdicts[0].failure


def test_programs_that_read_and_print(sandbox):
    right = "a, b = map(int, input().split())\nprint(a + b)"
    late = "while True: pass"
    programs = [right, "print(7)", "print(", "", late, f"{right}\nimport sys\nsys.exit(1)"]
    gradings = grade(sandbox, printer(), *programs)
    assert [sum(passed(one)) for one in gradings] == [3, 1, 0, 0, 0, 0]
    assert [bool(one.broken) for one in gradings] == [False, False, True, True, False, False]
    assert gradings[4].verdicts[2].failure == "not run: an earlier test took too long"


@dataclass
class RecordingSandbox:
    """A sandbox that keeps whatever went in."""

    inner: object
    name: str = "watched"
    seen: list = field(default_factory=list)

    async def run(self, program, *, files=None, stdin=b"", limits=None):
        self.seen.append((program, dict(files or {}), stdin))
        return await self.inner.run(program, files=files, stdin=stdin, limits=limits)


def test_expected_results_are_not_visible_to_the_program(sandbox):
    truth = CodeTruth(("a",), entry="f", cases=(TestCase("a", (4, "abc"), "the-secret-77"),))
    printing = replace(truth, style="stdin", cases=(TestCase("a", "4 abc\n", "the-secret-77\n"),))
    checks = replace(truth, style="checks", cases=(TestCase("a", "assert candidate(4) == 'the-secret-77'"),))
    program = "def f(*a): return 'nothing-known'"
    for one in (truth, printing, checks):
        watched = RecordingSandbox(sandbox)
        (grading,) = grade(watched, one, program)
        assert not grading.verdicts[0].passed
        with_program = [run for run in watched.seen if program in run[0] or run[1]]
        assert with_program
        assert all("the-secret-77" not in repr(run) for run in with_program)
        assert all(program not in repr(run) for run in watched.seen if "the-secret-77" in repr(run))


def test_cheats_pass_nothing(sandbox, world):
    programs = {name: text.format(entry="add") for name, text in CHEATS.items() if name != "endless"}
    for truth in (adder(), printer()):
        gradings = grade(sandbox, truth, *programs.values())
        assert {name: sum(passed(g)) for name, g in zip(programs, gradings, strict=True)} == dict.fromkeys(programs, 0)


def test_solutions_pass_in_the_sandbox(sandbox, world, every):
    chosen = every[:: NUM // 12]
    for problem in chosen:
        task = next(t for t in world.tasks(split_of_chain(problem.chain)) if t.id == problem.id)
        (grading,) = grade(sandbox, task.truth, problem.solution, limits=LIMITS)
        assert all(passed(grading)), [one.failure for one in grading.verdicts if not one.passed]
        assert grading.seconds > 0


# Asserts of others, and files


def write(path, rows, packed=False):
    text = "\n".join(json.dumps(row) for row in rows)
    if packed:
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.slow
def test_tasks_in_the_manner_of_human_eval(sandbox, tmp_path):
    tasks = load_code_tasks(write(tmp_path / "own.jsonl.gz", TASKS, packed=True), "humaneval", "")["test"]
    assert [task.id for task in tasks] == [row["task_id"] for row in TASKS]

    async def run(program_of_task, limits):
        judge = CodeGrader(sandbox, limits)
        return await asyncio.gather(*(judge.grade(program_of_task(t.truth), t.truth, t.truth.cases) for t in tasks))

    bare = {task.truth.entry: row["canonical_solution"] for task, row in zip(tasks, TASKS, strict=True)}
    for right in (lambda truth: truth.reference, lambda truth: bare[truth.entry]):
        gradings = asyncio.run(run(right, LIMITS))
        assert [passed(one) for one in gradings] == [[True]] * len(TASKS), [g.verdicts[0].failure for g in gradings]
    for name in ("always equal", "os._exit", "prints the protocol", "reads the tests", "empty body"):
        cheat = CHEATS[name]
        gradings = asyncio.run(run(lambda truth, cheat=cheat: cheat.format(entry=truth.entry), QUICK))
        assert [passed(one) for one in gradings] == [[False]] * len(TASKS), name


MBPP = {
    "task_id": 12,
    "text": "Write a function to add one to each number.",
    "code": "import math\ndef helper(x):\n    return x + 1\ndef up(xs):\n    return [helper(x) for x in xs]",
    "test_list": ["assert up([1]) == [2]", "assert up([]) == []", "assert up([3, 4]) == [4, 5]"],
    "test_setup_code": "",
    "challenge_test_list": [],
}
APPS = {
    "problem_id": 3,
    "question": "Add two numbers.",
    "solutions": json.dumps(["print(int(input()) + int(input()))"]),
    "input_output": json.dumps({"inputs": ["1\n2\n", "3\n4\n", ["5", "6"]], "outputs": ["3\n", "7\n", ["11"]]}),
    "difficulty": "interview",
    "split": "train",
}
APPS_CALL = {
    "problem_id": 4,
    "question": "Add.",
    "solutions": json.dumps(["class Solution:\n    def add(self, a, b):\n        return a + b"]),
    "input_output": json.dumps({"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], 7]}),
    "starter_code": "class Solution:\n    def add(self, a, b):",
    "split": "train",
}
PRIVATE = json.dumps([{"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional"}])
BENCH = {
    "question_id": "b1",
    "question_content": "Add n to each.",
    "starter_code": "class Solution:\n    def up(self, xs, n):",
    "metadata": json.dumps({"func_name": "up"}),
    "public_test_cases": json.dumps([{"input": "[0]\n1", "output": "[1]", "testtype": "functional"}]),
    "private_test_cases": b64encode(zlib.compress(pickle.dumps(PRIVATE))).decode(),
    "solution": "class Solution:\n    def up(self, xs, n):\n        return tuple(x + n for x in xs)",
}
KODCODE = {
    "question_id": "Leetcode_1",
    "subset": "Leetcode",
    "question": "Add one to each.",
    "solution": "def up(xs):\n    return [x + 1 for x in xs]",
    "test": "import pytest\nfrom solution import up\n\nLIMIT = 3\n\n"
    "def test_one():\n    assert up([1]) == [2]\n\n"
    "def test_many():\n    assert up([LIMIT]) == [4]\n\n"
    "def test_bad():\n    with pytest.raises(TypeError):\n        up(1)\n",
    "version": "v1.0",
    "style": "instruct",
    "gpt_difficulty": "easy",
    "gpt_pass_percentage": 0.8,
    "test_info": [
        {
            "docstring": "Adds one.",
            "function_declaration": "def up(xs):",
            "function_name": "up",
            "parameter_list": "(xs)",
        }
    ],
    "split": "train",
}
KODCODE_MORE = KODCODE | {
    "question_id": "Leetcode_2",
    "solution": "class Box:\n    x = 1\n\ndef of(box):\n    return box.x\n\ndef unused():\n    pass",
    "test_info": [{"function_name": "of", "function_declaration": "def of(box):"}],
}
OWN = {
    "prompt": "Double it.",
    "entry": "f",
    "tests": [{"args": [2], "result": 4}, {"args": [3], "result": 6}],
    "solution": "def f(x): return 2 * x",
    "split": "train",
}
OWN_STDIN = {
    "prompt": "Echo.",
    "tests": [{"stdin": "a\n", "stdout": "a\n"}],
    "solution": "print(input())",
    "split": "train",
}


@pytest.mark.parametrize(
    ("layout", "rows", "split", "wrong"),
    [
        ("mbpp", [MBPP], "test", "def up(xs):\n    return xs"),
        ("apps", [APPS], "train", "print(input())"),
        ("apps", [APPS_CALL], "train", "def add(a, b):\n    return a"),
        ("livecodebench", [BENCH], "test", "class Solution:\n    def up(self, xs, n):\n        return xs"),
        ("kodcode", [KODCODE], "train", "def up(xs):\n    return xs"),
        ("own", [OWN], "train", "def f(x): return x"),
        ("own", [OWN_STDIN], "train", "print(1)"),
    ],
)
def test_public_layouts_are_read(sandbox, tmp_path, layout, rows, split, wrong):
    world = make_code_world({"data": str(write(tmp_path / "x.jsonl", rows)), "format": layout}, ToolLimits())
    (task,) = world.tasks(split)
    right, other, empty = grade(sandbox, task.truth, task.truth.reference, wrong, "pass")
    assert all(passed(right)), [one.failure for one in right.verdicts]
    assert not all(passed(other))
    assert not any(passed(empty))
    assert task.truth.hidden < set(task.truth.fail_to_pass) or layout == "own"
    assert len(world.expert(task).messages) >= 3


@pytest.mark.parametrize(
    ("layout", "line", "said"),
    [
        ("kodcode", '{"solution": "", "test": "def test_a(): pass", "question": ""}', "does not use"),
        ("kodcode", '{"solution": "", "test": "from solution import f", "question": ""}', "no test function"),
        ("own", "{", "it is not JSON"),
        ("own", "[1]", "not a JSON object"),
        ("own", '{"prompt": "a"}', '"tests" is not a list'),
        ("own", '{"prompt": "a", "tests": [{}]}', '"stdin" is not a text'),
        ("own", '{"prompt": "a", "entry": "f", "tests": [{"args": 1}]}', "a test is"),
        ("own", '{"prompt": "a", "tests": [{"stdin": "", "stdout": ""}], "split": "dev"}', "'dev'"),
        ("own", '{"prompt": "a", "tests": [{"stdin": "", "stdout": "", "weight": 0}]}', '"weight" is not a number'),
        ("own", '{"prompt": "a", "tests": [{"stdin": "", "stdout": "", "weight": NaN}]}', '"weight" is not a number'),
        ("own", '{"prompt": "a", "tests": [{"stdin": "", "stdout": "", "weight": 1e999}]}', '"weight" is not a number'),
        ("own", '{"prompt": "a", "entry": "", "tests": [{"args": [], "result": 1}]}', '"entry" is not the name'),
        ("own", '{"prompt": "a", "entry": 5, "tests": [{"args": [], "result": 1}]}', '"entry" is not the name'),
        ("humaneval", '{"prompt": "def f(:", "entry_point": "f", "test": "", "task_id": "a"}', "is not Python"),
        ("mbpp", '{"task_id": "a"}', "is not a number"),
        ("mbpp", '{"task_id": 1, "text": "", "code": "x = 1", "test_list": ["assert f(1)"]}', "does not call"),
        ("apps", '{"question": "a", "input_output": "{}"}', "no inputs and outputs"),
        ("apps", '{"question": "a", "input_output": {"inputs": ["a"], "outputs": []}}', "1 inputs and 0 outputs"),
        ("livecodebench", '{"question_content": "a"}', "has no test cases"),
        ("livecodebench", json.dumps({"private_test_cases": "!!"}), "cannot be unpacked"),
        (
            "livecodebench",
            json.dumps({"private_test_cases": b64encode(zlib.compress(pickle.dumps(print))).decode()}),
            "references builtins.print",
        ),
    ],
)
def test_broken_line_is_reported(tmp_path, layout, line, said):
    file = tmp_path / "own.jsonl"
    file.write_text("\n" + line)
    with pytest.raises(UserError, match="line 2, is not a task") as error:
        load_code_tasks(file, layout, "")
    assert said in str(error.value)


def test_missing_file_or_duplicate_record_is_reported(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        load_code_tasks(tmp_path / "none.jsonl", "own", "")
    with pytest.raises(UserError, match="is that of line 1"):
        load_code_tasks(write(tmp_path / "two.jsonl", [MBPP, MBPP]), "mbpp", "")
    with pytest.raises(UserError, match="contains no tasks"):
        load_code_tasks(write(tmp_path / "empty.jsonl", []), "own", "")


# Episodes


def small(sandbox, **settings):
    return CodeWorld(CodeSettings(tasks=20, levels=(1,), **settings)).with_sandbox(sandbox)


def played(world, task, *actions):
    async def play():
        environment = world.environment(task)
        messages = await environment.start(task)
        outcomes = []
        for action in actions:
            result = await environment.step(action)
            outcomes += result.outcomes
            messages += [action.message, *result.messages]
        await environment.close()
        stop = StopReason.ANSWERED if result.done else StopReason.MAX_TURNS
        return Trajectory(task.id, 0, (), tuple(messages), stop, tuple(outcomes))

    return score(world.rewards, task, asyncio.run(play()))


def test_oracle_episode_has_full_reward_and_shows_no_hidden_test(sandbox):
    world = small(sandbox)
    task = world.tasks("train")[0]
    shown = world.expert(task).messages
    result = played(world, task, *actions_of(shown))
    assert success(world.rewards, result)
    assert result.reward == pytest.approx(1.35)
    tried, report_ = result.outcomes
    assert tried.output == shown[3]["content"]
    assert (tried.tool, report_.tool, report_.call_id) == ("run_tests", "report", "")
    assert json.loads(report_.output) == {"passed": dict.fromkeys(task.truth.fail_to_pass, True), "loads": True}
    hidden = [
        repr(one.given) for one in task.truth.cases if one.name in task.truth.hidden and len(repr(one.given)) > 12
    ]
    texts = " ".join(str(message) for message in result.messages)
    assert hidden
    assert not [one for one in hidden if one in texts]


def test_program_that_passes_only_shown_tests_has_partial_reward(sandbox):
    world = small(sandbox, styles=("function",))
    task = world.tasks("train")[0]
    program = f"KNOWN = {[(one.given, one.due) for one in task.truth.cases[:NUM_SHOWN]]!r}\n"
    program += "def solve(*args):\n    return next((due for given, due in KNOWN if given == args), None)\n"
    result = played(world, task, text_action(f"```python\n{program}```"))
    assert not success(world.rewards, result)
    assert result.rewards["loads"] == 1
    assert result.rewards["hidden_share"] < 0.2
    share = small(sandbox, styles=("function",), outcome="share")
    assert [part.name for part in share.rewards] == ["tests", "loads", "well_formed"]
    graded = played(share, task, text_action(program))
    assert 0.1 < graded.rewards["tests"] < 0.4
    assert not success(share.rewards, graded)


@pytest.mark.parametrize(("style", "program"), [("stdin", "print('PASS')"), ("function", "x = 1")])
def test_unrelated_program_has_no_format_reward(sandbox, style, program):
    world = small(sandbox, styles=(style,))
    task = world.tasks("train")[0]
    assert played(world, task, text_action(program)).reward == 0
    assert played(world, task, text_action(task.truth.reference)).rewards["well_formed"] == 1


@pytest.mark.parametrize("outcome", ["all", "share"])
def test_empty_output_has_no_reward_even_if_a_test_expects_none(sandbox, outcome):
    settings = CodeSettings(tasks=200, levels=(1, 2), styles=("stdin",), outcome=outcome)
    world = CodeWorld(settings).with_sandbox(sandbox)
    silent = (t for t in world.tasks("train") if any(not str(c.due).strip() for c in t.truth.cases))
    result = played(world, next(silent), text_action("pass"))
    assert '": true' in result.outcomes[-1].output  # a test passed
    assert result.reward == 0


def test_efficiency_is_measured_only_if_configured(sandbox):
    world = small(sandbox, thrift_weight=0.05)
    task = world.tasks("train")[0]
    result = played(world, task, text_action(task.truth.reference))
    assert 0.3 < result.rewards["thrift"] < 1
    assert {"seconds", "memory_bytes"} < set(json.loads(result.outcomes[0].output))
    check_rewards(world.rewards)


def test_output_of_run_tests(sandbox, world):
    task = next(t for t in world.tasks("train") if t.truth.style == "function")
    judge = CodeGrader(sandbox, QUICK)
    tool = run_tests_tool(judge, task.truth)
    said = asyncio.run(tool.function(code="def solve(*args):\n    return 'odd'"))
    assert said.startswith("0 of 3 shown tests pass.\nFAILED: solve(")
    assert "it gave 'odd', expected" in said
    assert asyncio.run(tool.function(code="x = (")).startswith("The program does not run: SyntaxError")
    none = replace(adder(), hidden=frozenset(adder().fail_to_pass))
    assert "shows no tests" in asyncio.run(run_tests_tool(judge, none).function(code=""))


def test_world_rewards_no_cheat(sandbox):
    world = small(sandbox)
    checked = check_world(world, CheckPlan(num_tasks=2))
    assert checked.problems == []
    oracle = next(row for row in checked.rows if row.agent.name == "oracle")
    assert (oracle.num_successes, len(oracle.plays)) == (2, 2)
    assert next(row for row in checked.rows if row.agent.name == "majority answer").plays


def test_alternative_solutions_have_full_reward(sandbox):
    world = small(sandbox)
    task = world.tasks("train")[1]
    for text in world.paraphrases(task):
        assert success(world.rewards, played(world, task, text_action(text)))


def test_demonstrations_forget_steps_and_are_programs(world):
    shown = list(islice(world.demonstrations(2), 60))
    again = [one.messages for one in islice(world.demonstrations(2), 60)]
    assert [one.messages for one in shown] == again
    tried = sum(any(m["role"] == "tool" for m in one.messages) for one in shown)
    assert 15 < tried < 45
    for one in shown:
        ast.parse(program_of(one.messages[-1]["content"]))
    due = {task.prompt[-1]["content"]: task.truth.reference for task in world.tasks("train")}
    right = sum(program_of(one.messages[-1]["content"]) == due[one.messages[1]["content"]] for one in shown)
    assert right == tried
    assert list(islice(world.texts(), 3))


# Settings


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"levels": [6]}, "env.settings.levels"),
        ({"families": ["list"]}, "Unknown family 'list'"),
        ({"format": "apps"}, "without env.settings.data"),
        ({"task": 30}, "the nearest is env.settings.tasks"),
        ({"outcome": "some"}, "env.settings.outcome"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        make_code_world(settings, ToolLimits())


def test_recipe_has_enough_tasks():
    config = load_config("code", [])
    world = build_world(config.env, config.rollout, config.sandbox)
    assert world.implements("with_sandbox")
    assert len(world.tasks("train")) >= config.training.prompts_per_step
    assert len(world.tasks("test")) == 50
    assert len(world.tasks("validation")) >= config.evaluation.tasks_during
    assert {tool.name for tool in world.environment(world.tasks("train")[0]).tools} == {"python", "run_tests", "submit"}


def test_without_tools_there_are_none():
    world = CodeWorld(CodeSettings(tasks=20, levels=(1,), tools=False))
    task = world.tasks("train")[0]
    assert world.environment(task).tools == ()
    assert [m["role"] for m in world.expert(task).messages] == ["system", "user", "assistant"]


def test_a_number_that_is_too_large_is_not_counted_up_to(every):
    step = next(one for one in catalogue() if one.name == "divisors")
    chain = next(one.chain for one in every if one.chain.steps[0] is step or step in one.chain.steps)
    with pytest.raises(TooLarge):
        replace(chain, steps=(step,), numbers=({},)).run([10**9])


@pytest.mark.parametrize("head", ["from solution import *\n", "", "from solution import Box, of\n"])
def test_kodcodes_tests_may_use_several_definitions(tmp_path, head, caplog):
    file = tmp_path / "kodcode.jsonl"
    tests = "def test_x():\n    assert of(Box()) == 1\n\ndef test_tmp(tmp_path):\n    assert of(Box()) == 1\n"
    file.write_text(json.dumps({**KODCODE_MORE, "test": head + tests}))
    (task,) = load_code_tasks(file, "kodcode", "")["train"]
    assert "Define `Box`, `def of(box)`." in task.prompt[-1]["content"]
    assert task.truth.fail_to_pass == ("test_x",)
    assert "KodCode/Leetcode_2: skipped 1 tests" in caplog.text
