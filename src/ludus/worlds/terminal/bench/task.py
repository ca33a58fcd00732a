"""A Terminal-Bench task, graded by pytest or a script over the final files of an episode, in a fresh sandbox.

The policy's session is closed; its files are copied, and the tests placed next to them in a folder with a random name.
A driver runs pytest from an archive, without any configuration, plugin or conftest but those of the tests, and sends
the results, after a nonce received on stdin, over a pipe that programs run by the tests do not inherit. A canary test
must fail. The names of the tests are read from their files on the host. Remaining risk: a test that imports the
policy's code runs it in the reporting process.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import PurePosixPath
from typing import ClassVar, Final, TypeGuard

from ludus.envs.messages import assistant, tool_turn
from ludus.rewards.code.pytest_archive import pytest_archive
from ludus.rewards.code.unit_tests import Suite
from ludus.rewards.extract import NotJson, read_json
from ludus.sandbox.base import MIB, Limits, Sandbox, Snapshot
from ludus.types import Message
from ludus.worlds.terminal.checks import SessionState
from ludus.worlds.terminal.services import TerminalService

LIMITS: Final = Limits(wall_s=120.0, cpu_s=100.0, disk_bytes=128 * MIB, disk_files=16384, processes=64, files_out=0)
"""Limits of the grading sandbox, with more files than a session may create, so that its files fit."""
REWARD_SCRIPT: Final = "tests/test.sh"
"""Path of a script that writes a reward file; any other script grades by its exit code."""
_CANARY: Final = b"def test_must_fail():\n    assert False\n"
_DRIVER: Final = """
import ctypes, json, os, sys
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
order = json.loads(sys.stdin.readline())
for path in order["executable"]:
    os.chmod(path, 0o755)
place = os.path.abspath(order["place"])
sys.path[:] = [place + "/pytest.zip", *(p for p in sys.path if os.path.abspath(p or ".") != os.getcwd())]
sys.dont_write_bytecode = True
os.environ["TEST_DIR"] = place + "/tests"
line = os.dup(1)
import pytest

class Report:
    def __init__(self):
        self.passed = {}
    def pytest_runtest_logreport(self, report):
        name, passed = report.nodeid.partition("[")[0], report.outcome == "passed"
        if report.when == "call" or not passed:
            self.passed[name] = self.passed.get(name, True) and passed

found = Report()
words = ["-q", "-c", place + "/pytest.ini", "--rootdir", place + "/tests", "--confcutdir", place + "/tests"]
pytest.main([*words, "-p", "no:cacheprovider", place + "/tests"], plugins=[found])
sys.stdout.flush()
os.write(line, ("\\n" + order["nonce"] + json.dumps(found.passed) + "\\n").encode())
os._exit(0)
"""
_SCRIPTED: Final = """
import os
for path in {executable!r}:
    os.chmod(path, 0o755)
kept = {{key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ}}
apart = {{"HOME": "/tmp", "PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1"}}
os.execve("/bin/bash", ["bash", "--norc", "--noprofile", "-c", {script!r}], {{**kept, **apart}})
"""
"""Execute a script, unaffected by modules and settings in the folder; only programs that it runs can influence it."""
_REWARDED: Final = """
exec 3>&1 1>&2
mkdir -p {place}/logs/verifier
bash {place}/tests/test.sh 3>&-
cat {place}/logs/verifier/reward.txt >&3 || cat {place}/logs/verifier/reward.json >&3
"""
"""Only the reward file is written to stdout; without one, the run fails."""


@dataclass(frozen=True)
class BenchTask:
    """A Terminal-Bench task. `tests` are the test files; if `script` is set, it is run instead."""

    services: ClassVar[tuple[TerminalService, ...]] = ()
    after_start: ClassVar[str] = ""

    name: str
    text: str
    topic: str
    level: int
    start: Snapshot = field(repr=False)
    tests: Mapping[str, bytes] = field(repr=False)
    script: str = field(default="", repr=False)
    solution: str = field(default="", repr=False)
    timeout_s: float = 120.0

    @property
    def id(self) -> str:
        """A unique id."""
        return f"bench:{self.name}"

    @property
    def parts(self) -> tuple[str, ...]:
        """The name."""
        return (self.name,)

    @cached_property
    def suite(self) -> Suite:
        """Tests that must pass: all tests defined in the test files, independent of the reported ones."""
        found = tuple(name for path, data in sorted(self.tests.items()) for name in named_tests(path, data))
        return Suite((self.script,) if self.script else found)

    def solve(self) -> list[Message]:
        """Return the messages of the solution as one call, whose output is unknown; empty if there is none."""
        if not self.solution:
            return []
        solved = tool_turn(0, "shell", {"command": f"(\n{self.solution}\n)"}, "[no output]")
        return [*solved, assistant(f"Done with {self.name}.")]

    async def grade(self, state: SessionState, sandbox: Sandbox) -> Mapping[str, bool]:
        """Return whether each test passes on these files; a script determines the result of all tests.

        Raises WorldError if the sandbox fails, UserError if pytest is not installed.
        """
        names, limits = self.suite.fail_to_pass, replace(LIMITS, wall_s=self.timeout_s, cpu_s=self.timeout_s)
        place, nonce, canary = f".{secrets.token_hex(8)}", secrets.token_hex(16), f"test_{secrets.token_hex(8)}.py"
        executable, files = sorted(state.executable), {**state.files}
        if not self.script or self.script == REWARD_SCRIPT:
            files |= {f"{place}/tests/{path}": _placed(data, f"/box/{place}") for path, data in self.tests.items()}
        if self.script:
            rewarded = self.script == REWARD_SCRIPT
            script = _REWARDED.format(place=f"/box/{place}") if rewarded else self.tests[self.script].decode()
            program = _SCRIPTED.format(executable=executable, script=script)
            outcome = await sandbox.run(program, files=files, limits=limits)
            return dict.fromkeys(names, outcome.ok and (not rewarded or is_full(outcome.text)))
        files[f"{place}/pytest.zip"] = pytest_archive()
        files[f"{place}/pytest.ini"] = b"[pytest]\n"
        files[f"{place}/tests/{canary}"] = _CANARY
        order = json.dumps({"place": place, "nonce": nonce, "executable": executable})
        outcome = await sandbox.run(_DRIVER, files=files, stdin=f"{order}\n".encode(), limits=limits)
        passed = _report(outcome.text, nonce)
        failed = passed.get(f"{canary}::test_must_fail") is False
        return {name: failed and passed.get(name) is True for name in names}


def named_tests(path: str, data: bytes) -> Iterator[str]:
    """Yield the names of the tests in a pytest file: `FILE::test` and `FILE::Class::test`."""
    name = PurePosixPath(path).name
    if not (name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py"))):
        return
    for node in ast.parse(data).body:
        if _is_test(node):
            yield f"{path}::{node.name}"
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield from (f"{path}::{node.name}::{inner.name}" for inner in node.body if _is_test(inner))


def _is_test(node: ast.stmt) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")


def is_full(reward: str) -> bool:
    """Return whether a reward file contains the full reward: the number 1, or an object with it as `reward`."""
    try:
        value = read_json(reward.strip())
    except NotJson:
        return False
    if isinstance(value, dict):
        value = value.get("reward", next(iter(value.values())) if len(value) == 1 else None)
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 1


def with_folder(data: bytes, old: str, new: str) -> bytes:
    """Return the text with an absolute folder replaced by another; return binary data unchanged."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return data
    return re.sub(rf"(?<![\w./-]){re.escape(old)}(?![\w-])(?!\.\w)", lambda _: new, text).encode()


def _placed(data: bytes, place: str) -> bytes:
    """Return a test file with the folders of tests and logs replaced by those of this run."""
    return with_folder(with_folder(data, "/tests", f"{place}/tests"), "/logs/verifier", f"{place}/logs/verifier")


def _report(text: str, nonce: str) -> Mapping[str, object]:
    """Return whether each test passed with all parameters and phases, from the driver's line prefixed by `nonce`."""
    sent = [line.removeprefix(nonce) for line in text.split("\n") if line.startswith(nonce)]
    try:
        value = read_json(sent[0]) if len(sent) == 1 else None
    except NotJson:
        return {}
    return value if isinstance(value, dict) else {}
