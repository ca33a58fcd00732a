"""Hostile programs on the default backend: each one is contained in time and leaves the host unchanged."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import battery_run
import ludus
from battery_run import PROGRAMS, a_folder, a_host, judge, run_battery
from ludus.sandbox import NamespacesSandbox, SandboxSettings
from ludus.sandbox.base import Outcome
from ludus.sandbox.local.namespaces import find_python
from ludus.worlds.code.grader import CodeGrader, CodeTruth, TestCase

SOME = (
    "truth_file",
    "writes_outside",
    "fork_bomb",
    "memory_bomb_many",
    "disk_filler",
    "namespaces",
    "daemon",
    "signal_int_to_supervisor",
    "limits_of_the_supervisor",
)
"""What is tried as an ordinary user in the default suite; `make security` tries all."""
ANSWERS = ("exit_zero", "os_exit_zero", "signal_int_to_supervisor", "limits_of_the_supervisor", "signals_to_all")
"""What is handed in as an answer in the default suite; `make security` hands in all."""
TASK = CodeTruth(("one", "two"), cases=(TestCase("one", (2, 3), 5), TestCase("two", (4, 5), 9)))


def test_every_hostile_program_is_contained():
    assert len(PROGRAMS) >= 50
    with a_host() as host:
        assert asyncio.run(run_battery(PROGRAMS, host)) == []


def as_ordinary_user(folder: Path, names: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """The battery as a script, by nobody where this is root, in a copy that nobody can read."""
    shutil.copytree(Path(ludus.__file__).parent / "sandbox", folder / "ludus" / "sandbox")
    for name in ("__init__.py", "errors.py"):
        shutil.copy(Path(ludus.__file__).parent / name, folder / "ludus" / name)
    here = Path(battery_run.__file__).parent
    shutil.copytree(here / "battery", folder / "battery")
    for name in ("battery_run.py", "battery_trying.py"):
        shutil.copy(here / name, folder / name)
    for path in folder.rglob("*"):
        path.chmod(0o755)
    python = find_python("") if os.geteuid() == 0 else sys.executable
    command = [python, "-s", str(folder / "battery_run.py"), *names]
    if os.geteuid() == 0:
        command = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--", *command]
    environment = {"PYTHONPATH": str(folder), "PATH": "/usr/local/bin:/usr/bin:/bin", "TMPDIR": "/tmp"}
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=120)


def test_selected_hostile_programs_are_contained_for_an_unprivileged_user():
    with a_folder() as folder:
        done = as_ordinary_user(folder, SOME)
    assert (done.stdout, done.stderr) == (f"contained {len(SOME)}\n", "")


@pytest.mark.security
def test_all_hostile_programs_are_contained_for_an_unprivileged_user():
    with a_folder() as folder:
        done = as_ordinary_user(folder, ())
    assert (done.stdout, done.stderr) == (f"contained {len(PROGRAMS)}\n", "")


def verdicts(programs: list[Path]) -> dict[str, tuple[bool, ...]]:
    """What a grader says of each program as the solution of a task. Raises WorldError as the grader does."""
    shared = (battery_run.HERE / "battery_trying.py").read_text()

    async def all_of_them(target: bytes):
        stub = f"open('trying.py', 'w').write({shared!r})\nopen('target.json', 'wb').write({target!r})\n"
        task = replace(TASK, stub=stub)
        sandbox = NamespacesSandbox(SandboxSettings(concurrency=battery_run.CONCURRENCY))
        judge = CodeGrader(sandbox, replace(battery_run.ENDLESS, files_out=0))
        try:
            graded = await asyncio.gather(*(judge.grade(program.read_text(), task, task.cases) for program in programs))
        finally:
            await sandbox.close()
        return {
            program.stem: tuple(one.passed for one in grading.verdicts)
            for program, grading in zip(programs, graded, strict=True)
        }

    with a_host() as host:
        return asyncio.run(all_of_them(host.target))


def test_selected_hostile_answers_are_graded_as_failures():
    chosen = [program for program in PROGRAMS if program.stem in ANSWERS]
    assert verdicts(chosen) == dict.fromkeys(sorted(ANSWERS), (False, False))


@pytest.mark.security
def test_all_hostile_answers_are_graded_as_failures():
    assert set(verdicts(PROGRAMS).values()) == {(False, False)}


def test_self_test_judge_detects_escapes():
    fine = Outcome(stdout=b"refused x\nTRIED\n", exit=0)
    assert judge("tried", fine, "secret") == []
    assert judge("tried", Outcome(stdout=b"ESCAPED x\nTRIED\n", exit=0), "secret") == ["ESCAPED x"]
    assert judge("tried", Outcome(stdout=b"TRIED", exit=0, files={"a": b"a secret"}), "secret") != []
    assert judge("tried", Outcome(stdout=b"TRIED", exit=0, files={"truth.txt": b""}), "secret") != []
    for expected in ("timed_out", "memory_exceeded", "truncated", "failed"):
        assert judge(expected, fine, "secret") != []


def test_battery_detects_effects_of_unsandboxed_programs():
    with a_host() as host:
        state = host.state()
        (host.folder / "canary" / "file").write_text("changed")
        assert host.state() != state
        child = subprocess.Popen(["sleep", "5"])
        assert child.pid in battery_run.descendants()
        child.kill()
        child.wait()
