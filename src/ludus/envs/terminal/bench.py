"""Tasks in the layout of Terminal-Bench: a folder for each, read from a folder of the user's.

    NAME/task.yaml       `instruction` (or `descriptions`), `difficulty`, `category`
    NAME/tests/*.py      tests for pytest, run over the final files (`ludus.envs.terminal.bench_tests`)
    NAME/run-tests.sh    where there are no such tests, and the settings trust scripts: its exit code decides
    NAME/solution.sh     the oracle, if there is one
    NAME/Dockerfile      FROM, WORKDIR and COPY are understood; no image is built

The folder that the tasks speak of becomes /box, in their texts, scripts, tests and files. Source of the
layout: the repository laude-institute/terminal-bench.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Final, Literal

from ludus.envs.terminal.bench_tests import judge_tests
from ludus.envs.terminal.services import NOTHING_RUNS, Running, Service
from ludus.errors import ConfigError
from ludus.rewards.suites import Suite
from ludus.sandbox.base import Sandbox, Snapshot
from ludus.types import FunctionCall, Message, MessageToolCall

Dockerfiles = Literal["refuse", "skip", "ignore"]
Scripts = Literal["refuse", "trust"]
SCRIPT: Final = "run-tests.sh"
_LEVELS: Final = {"easy": 1, "medium": 2, "hard": 4}
_HARMLESS: Final = ("from", "workdir", "copy", "cmd", "entrypoint", "label", "expose", "maintainer", "user")
_MOST_BYTES: Final = 16 * 2**20


@dataclass(frozen=True)
class BenchTask:
    """A task of such a folder. `tests` are the files of its tests; where it has none, `script` is run."""

    name: str
    text: str
    topic: str
    level: int
    start: Snapshot = field(repr=False)
    tests: Mapping[str, bytes] = field(repr=False)
    script: str = field(default="", repr=False)
    solution: str = field(default="", repr=False)

    @property
    def id(self) -> str:
        """Unique among the tasks."""
        return f"bench:{self.name}"

    @property
    def parts(self) -> tuple[str, ...]:
        """Its name."""
        return (self.name,)

    @cached_property
    def suite(self) -> Suite:
        """The tests that have to pass: those that the files define, whatever a run of them says."""
        found = tuple(name for path, data in sorted(self.tests.items()) for name in named_tests(path, data))
        return Suite(found or (SCRIPT,))

    @property
    def services(self) -> tuple[Service, ...]:
        """None run from the beginning."""
        return ()

    @property
    def afterwards(self) -> str:
        """Nothing."""
        return ""

    async def judge(
        self, state: Snapshot, sandbox: Sandbox, running: Running = NOTHING_RUNS
    ) -> Mapping[str, bool]:
        """Which tests pass over the final files, in a fresh run. Raises UserError and WorldError."""
        return await judge_tests(self.suite.fail_to_pass, self.tests, self.script, state, sandbox)

    def solve(self) -> list[Message]:
        """Its solution in one call, whose output is not known here; none where it brings none."""
        if not self.solution:
            return []
        function = FunctionCall(name="shell", arguments=json.dumps({"command": f"(\n{self.solution}\n)"}))
        call = MessageToolCall(id="call_0_0", type="function", function=function)
        return [
            Message(role="assistant", content="", tool_calls=[call]),
            Message(role="tool", content="[no output]", tool_call_id=call["id"], name="shell"),
            Message(role="assistant", content=f"Done with {self.name}."),
        ]


def load_bench(
    folder: Path, workdir: str, dockerfiles: Dockerfiles, scripts: Scripts = "refuse"
) -> tuple[BenchTask, ...]:
    """The tasks of a folder, in the order of their names.

    Raises ConfigError for a folder without any, for a broken task, for one that a script judges, unless
    scripts are trusted, and for a Dockerfile that does more than copy files, unless such tasks are to be
    skipped or that is to be ignored.
    """
    places = sorted(path.parent for path in folder.glob("*/task.yaml"))
    if not places:
        raise ConfigError(
            f"There is no task in {folder}.",
            "env.settings.bench takes a folder whose folders have a task.yaml.",
        )
    found, refused = [], []
    for place in places:
        odd = _odd_lines(place)
        if odd and dockerfiles != "ignore":
            refused.append(f"{place.name}/Dockerfile, line {odd[0][0]}: {odd[0][1]}")
            if dockerfiles == "skip":
                continue
        task = _load(place, workdir)
        if task.script and scripts == "refuse":
            raise ConfigError(
                f"{place.name} is judged by the exit code of {SCRIPT}, in the folder that the policy made.",
                "Programs of the policy that the script runs may choose that code: give the task tests/*.py, "
                "or set env.settings.bench_scripts = 'trust'.",
            )
        found.append(task)
    if refused and (dockerfiles == "refuse" or not found):
        raise ConfigError(
            f"{len(refused)} of {len(places)} tasks need an image that is built, and none is. "
            f"The first: {refused[0]}",
            "env.settings.bench_dockerfile = 'skip' leaves such tasks out, 'ignore' plays them without it.",
        )
    return tuple(found)


def named_tests(path: str, data: bytes) -> Iterator[str]:
    """The names of the tests in a file of pytest: `FILE::test` and `FILE::Class::test`."""
    name = PurePosixPath(path).name
    if not (name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py"))):
        return
    for node in ast.parse(data).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            yield f"{path}::{node.name}"
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and inner.name.startswith(
                    "test"
                ):
                    yield f"{path}::{node.name}::{inner.name}"


def _load(place: Path, workdir: str) -> BenchTask:
    said = _read_yaml(place / "task.yaml")
    text = said.get("instruction") or _described(said.get("descriptions"))
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{place / 'task.yaml'} has no instruction.", "Give it one.")
    tests = {
        path.relative_to(place / "tests").as_posix(): _moved(path.read_bytes(), workdir)
        for path in sorted((place / "tests").rglob("*"))
        if path.is_file() and path.suffix != ".pyc"
    }
    script = "" if any(path.endswith(".py") for path in tests) else _text(place / SCRIPT, workdir)
    if not script and not any(name for path, data in tests.items() for name in named_tests(path, data)):
        raise ConfigError(f"{place} has no tests.", f"Give it tests/test_*.py, or {SCRIPT}.")
    return BenchTask(
        place.name,
        _moved(text.strip().encode(), workdir).decode(),
        str(said.get("category") or "bench"),
        _LEVELS.get(str(said.get("difficulty")), 3),
        Snapshot(dict(_copied(place, workdir)), frozenset(_executable(place, workdir))),
        tests,
        script,
        _text(place / "solution.sh", workdir),
    )


def _read_yaml(path: Path) -> Mapping[str, object]:
    yaml = importlib.import_module("yaml")
    try:
        said = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.", "Mend the file.") from error
    if not isinstance(said, dict):
        raise ConfigError(f"{path} is no mapping.", "Mend the file.")
    return said


def _described(said: object) -> object:
    """The description with the key `base`, or the first one."""
    if not isinstance(said, list):
        return None
    found = {str(one.get("key")): one.get("description") for one in said if isinstance(one, dict)}
    return found.get("base") or next(iter(found.values()), None)


def _text(path: Path, workdir: str) -> str:
    if not path.is_file():
        return ""
    return _moved(path.read_bytes(), workdir).decode("utf-8", "replace")


def _moved(data: bytes, workdir: str) -> bytes:
    """The data with /box in the place of the folder that the task speaks of; what is no text stays."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return data
    pattern = rf"(?<![\w./-]){re.escape(workdir.rstrip('/'))}(?![\w-])(?!\.\w)"
    return re.sub(pattern, "/box", text).encode()


def _lines(place: Path) -> Iterator[tuple[int, str]]:
    """The instructions of a Dockerfile with their line numbers, continued ones joined."""
    path = place / "Dockerfile"
    lines = path.read_text("utf-8", "replace").split("\n") if path.is_file() else []
    begin, held = 0, ""
    for number, line in enumerate(lines, 1):
        if line.strip().startswith("#") or (not held and not line.strip()):
            continue
        begin = begin or number
        held += line.rstrip().removesuffix("\\") + " "
        if not line.rstrip().endswith("\\"):
            yield begin, " ".join(held.split())
            begin, held = 0, ""


def _odd_lines(place: Path) -> list[tuple[int, str]]:
    """What a Dockerfile does besides copying files of the task into the folder it works in."""
    return [
        (number, line)
        for number, line in _lines(place)
        if line.partition(" ")[0].lower() not in _HARMLESS or "--from" in line
    ]


def _copies(place: Path, workdir: str) -> Iterator[tuple[Path, str]]:
    """The files that a Dockerfile copies, and where they lie in /box. Raises ConfigError for other places."""
    folder = PurePosixPath(workdir)
    for number, line in _lines(place):
        words = [word for word in shlex.split(line) if not word.startswith("--")]
        if words[0].lower() == "workdir":
            folder = folder / words[1]
        if words[0].lower() != "copy" or "--from" in line:
            continue
        target = folder / words[-1]
        if not target.is_relative_to(workdir):
            raise ConfigError(
                f"{place.name}/Dockerfile, line {number} copies to {target}, outside of {workdir}.",
                "Name that folder by env.settings.bench_workdir, or leave the task out.",
            )
        inside = target.relative_to(workdir)
        is_folder = words[-1].endswith(("/", ".")) or len(words) > 3
        yield from _sources(place, words[1:-1], inside, is_folder)


def _sources(
    place: Path, names: list[str], inside: PurePosixPath, is_folder: bool
) -> Iterator[tuple[Path, str]]:
    for name in names:
        found = sorted(place.glob(name.removeprefix("./"))) if name not in (".", "./") else [place]
        for source in found:
            if source.is_dir():
                for path in sorted(source.rglob("*")):
                    if path.is_file():
                        yield path, (inside / path.relative_to(source).as_posix()).as_posix()
            elif source.is_file():
                yield source, (inside / source.name if is_folder else inside).as_posix()


def _copied(place: Path, workdir: str) -> Iterator[tuple[str, bytes]]:
    """Files of the beginning. Tests and solution never are among them."""
    total = 0
    for source, path in _copies(place, workdir):
        own = source.relative_to(place)
        if own.parts[0] in ("tests", "solution.sh", "solution.yaml", SCRIPT, "task.yaml", "Dockerfile"):
            continue
        data = _moved(source.read_bytes(), workdir)
        total += len(data)
        if total > _MOST_BYTES:
            raise ConfigError(f"{place} has more than {_MOST_BYTES} bytes of files.", "Leave the task out.")
        yield path, data


def _executable(place: Path, workdir: str) -> Iterator[str]:
    return (path for source, path in _copies(place, workdir) if source.stat().st_mode & 0o100)
