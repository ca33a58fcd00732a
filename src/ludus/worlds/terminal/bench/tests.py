"""Run pytest over the final files of an episode, in a fresh sandbox.

The policy's session is closed; its files are copied, and the tests placed next to them in a folder with a random name.
A driver runs pytest from an archive, without any configuration, plugin or conftest but those of the tests, and sends
the reports over a pipe that programs run by the tests do not hold, after a nonce that it received on stdin. One test
must fail. The names of the tests are read from their files on the host. Remaining risk: a test that imports the
policy's code lets it into the reporting process.
"""

from __future__ import annotations

import importlib.util
import io
import json
import re
import secrets
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final

from ludus.errors import UserError
from ludus.rewards.extract import NotJson, read_json
from ludus.sandbox.base import MIB, Limits, Sandbox, Snapshot

LIMITS: Final = Limits(wall_s=120.0, cpu_s=100.0, disk_bytes=128 * MIB, disk_files=16384, processes=64, files_out=0)
"""More files than a session may create, so that its files always fit."""
_PACKAGES: Final = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py")
_LEXERS: Final = ("__init__.py", "_mapping.py", "python.py", "special.py", "diff.py")
_CANARY: Final = "def test_must_fail():\n    assert False\n"

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
        self.seen = []
    def pytest_runtest_logreport(self, report):
        self.seen.append([report.nodeid, report.when, report.outcome])

found = Report()
words = ["-q", "-c", place + "/pytest.ini", "--rootdir", place + "/tests", "--confcutdir", place + "/tests"]
pytest.main([*words, "-p", "no:cacheprovider", place + "/tests"], plugins=[found])
sys.stdout.flush()
os.write(line, ("\\n" + order["word"] + json.dumps(found.seen) + "\\n").encode())
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


def _scripted(script: str, state: Snapshot) -> str:
    """Return a program that executes the script, unaffected by modules and settings in the folder.

    Only programs that the script runs can influence its exit code.
    """
    return _SCRIPTED.format(executable=sorted(state.executable), script=script)


_REWARDED: Final = """
exec 3>&1 1>&2
mkdir -p {place}/logs/verifier
bash {place}/tests/test.sh 3>&-
cat {place}/logs/verifier/reward.txt >&3 || cat {place}/logs/verifier/reward.json >&3
"""
"""Only the reward file is written to stdout; without one, the run fails."""


def is_full(reward: str) -> bool:
    """Return whether a reward file holds the full reward: the number 1, or an object with it as `reward`."""
    try:
        value = read_json(reward.strip())
    except NotJson:
        return False
    if isinstance(value, dict):
        value = value.get("reward", next(iter(value.values())) if len(value) == 1 else None)
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 1


def with_folder(data: bytes, old: str, new: str) -> bytes:
    """Return a text with an absolute folder replaced by another; other data is unchanged."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return data
    return re.sub(rf"(?<![\w./-]){re.escape(old)}(?![\w-])(?!\.\w)", lambda _: new, text).encode()


async def grade_tests(
    names: Sequence[str], tests: Mapping[str, bytes], script: str, state: Snapshot, sandbox: Sandbox, timeout_s: float
) -> dict[str, bool]:
    """Return which of the tests pass over these files; a script decides for all tests.

    Raises WorldError if the sandbox fails, UserError if pytest is not installed.
    """
    limits = replace(LIMITS, wall_s=timeout_s, cpu_s=timeout_s)
    place, word, canary = f".{secrets.token_hex(8)}", secrets.token_hex(16), secrets.token_hex(8)
    placed = {
        f"{place}/tests/{path}": with_folder(
            with_folder(data, "/tests", f"/box/{place}/tests"), "/logs/verifier", f"/box/{place}/logs/verifier"
        )
        for path, data in tests.items()
    }
    if script == "tests/test.sh":
        program = _scripted(_REWARDED.format(place=f"/box/{place}"), state)
        outcome = await sandbox.run(program, files={**state.files, **placed}, limits=limits)
        return dict.fromkeys(names, outcome.ok and is_full(outcome.text))
    if script:
        program = _scripted(tests[script].decode(), state)
        outcome = await sandbox.run(program, files=state.files, limits=limits)
        return dict.fromkeys(names, outcome.ok)
    files = {
        **state.files,
        f"{place}/pytest.zip": pytest_archive(),
        f"{place}/pytest.ini": b"[pytest]\n",
        f"{place}/tests/test_{canary}.py": _CANARY.encode(),
        **placed,
    }
    order = {"place": place, "word": word, "executable": sorted(state.executable)}
    outcome = await sandbox.run(_DRIVER, files=files, stdin=json.dumps(order).encode() + b"\n", limits=limits)
    seen = _reports(outcome.text, word)
    passed = _passed(seen)
    if passed.get(f"test_{canary}.py::test_must_fail", True):
        return dict.fromkeys(names, False)
    return {name: passed.get(name, False) for name in names}


def _reports(text: str, word: str) -> list[list[str]]:
    """Return the driver's reports after its nonce: node, phase and outcome."""
    sent = [line.removeprefix(word) for line in text.split("\n") if line.startswith(word)]
    try:
        value = read_json(sent[0]) if len(sent) == 1 else None
    except NotJson:
        return []
    rows = value if isinstance(value, list) else []
    return [[str(cell) for cell in row] for row in rows if isinstance(row, list) and len(row) == 3]


def _passed(reports: Sequence[Sequence[str]]) -> dict[str, bool]:
    """Return whether each test passed with all its parameters and phases, by its name without parameters."""
    called: dict[str, bool] = {}
    for node, when, outcome in reports:
        name = node.partition("[")[0]
        good = outcome == "passed"
        if when == "call" or not good:
            called[name] = called.get(name, True) and good
    return called


@cache
def pytest_archive() -> bytes:
    """Return the installed pytest and its dependencies as an importable archive. Raises UserError if not installed."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in _PACKAGES:
            spec = importlib.util.find_spec(name)
            if spec is None or spec.origin is None:
                raise UserError(
                    f"Tests of Terminal-Bench need pytest, and {name} is not installed.", "pip install pytest"
                )
            if not spec.submodule_search_locations:
                archive.write(spec.origin, f"{name}.py")
                continue
            root = Path(spec.origin).parent
            for path in sorted(root.rglob("*.py")):
                if path.parent.name != "lexers" or path.name in _LEXERS:
                    archive.write(path, f"{name}/{path.relative_to(root).as_posix()}")
    return buffer.getvalue()
