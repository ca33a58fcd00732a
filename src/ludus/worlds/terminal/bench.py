"""Tasks in the layouts of Terminal-Bench and Harbor, which the README of the recipe `terminal` describes.

pytest or a script grades the final files of an episode in a fresh sandbox, next to the tests in a folder with a random
name. A driver (`data/bench_driver.txt`) runs pytest from an archive, without any configuration, plugin or conftest but
those of the tests, and sends the results, after a nonce received on stdin, over a pipe that programs run by the tests
do not inherit. A canary test must fail. Remaining risk: a test that imports the policy's code runs it in the reporting
process.
"""

from __future__ import annotations

import ast
import importlib
import json
import logging
import re
import secrets
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import ClassVar, Final, Literal, TypeGuard

from ludus.envs.tool_world import assistant, tool_turn
from ludus.errors import ConfigError
from ludus.rewards.code.pytest_archive import pytest_archive
from ludus.rewards.code.unit_tests import Suite
from ludus.rewards.extract import NotJson, read_json
from ludus.sandbox.base import MIB, Limits, Sandbox, Snapshot
from ludus.types import JSON, Message
from ludus.worlds.terminal.checks import SessionState
from ludus.worlds.terminal.task import TerminalService

LIMITS: Final = Limits(wall_s=120.0, cpu_s=100.0, disk_bytes=128 * MIB, disk_files=16384, processes=64, files_out=0)
"""Limits of the grading sandbox, with more files than a session may create, so that its files fit."""
REWARD_SCRIPT: Final = "tests/test.sh"
"""Path of a script that writes a reward file; any other script grades by its exit code."""
_CANARY: Final = b"def test_must_fail():\n    assert False\n"


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
        return f"bench:{self.name}"

    @property
    def parts(self) -> tuple[str, ...]:
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
            rewarded, reward = self.script == REWARD_SCRIPT, _program("bench_reward.sh").format(place=f"/box/{place}")
            script = reward if rewarded else self.tests[self.script].decode()
            program = _program("bench_script.txt").format(executable=executable, script=script)
            outcome = await sandbox.run(program, files=files, limits=limits)
            return dict.fromkeys(names, outcome.ok and (not rewarded or is_full(outcome.text)))
        files[f"{place}/pytest.zip"] = pytest_archive()
        files[f"{place}/pytest.ini"] = b"[pytest]\n"
        files[f"{place}/tests/{canary}"] = _CANARY
        order = json.dumps({"place": place, "nonce": nonce, "executable": executable})
        driver = _program("bench_driver.txt")
        outcome = await sandbox.run(driver, files=files, stdin=f"{order}\n".encode(), limits=limits)
        sent = [line.removeprefix(nonce) for line in outcome.text.split("\n") if line.startswith(nonce)]
        passed: JSON = None
        with suppress(NotJson):
            passed = read_json(sent[0]) if len(sent) == 1 else None
        if not isinstance(passed, dict):
            return dict.fromkeys(names, False)
        failed = passed.get(f"{canary}::test_must_fail") is False
        return {name: failed and passed.get(name) is True for name in names}


@cache
def _program(name: str) -> str:
    """Return a program of the grading sandbox.

    `bench_script.txt` executes a script, unaffected by modules and settings in the folder; only programs that it runs
    can influence it. `bench_reward.sh` writes only the reward file to stdout; without one, it fails.
    """
    return (resources.files("ludus.worlds.terminal") / "data" / name).read_text("utf-8")


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
    return with_folder(with_folder(data, "/tests", f"{place}/tests"), "/logs/verifier", f"{place}/logs/verifier")


log = logging.getLogger(__name__)
_MAX_NAMED: Final = 20
_LEVELS: Final = {"easy": 1, "medium": 2, "hard": 4}
_IGNORED: Final = ("from", "workdir", "copy", "cmd", "entrypoint", "label", "expose", "maintainer", "user")
"""Instructions of a Dockerfile that need no container."""
_MAX_BYTES: Final = 16 * 2**20
_TIMEOUT_S: Final = 120.0
_HARBOR_TIMEOUT_S: Final = 600.0
"""Default and maximum time of Harbor's verifier."""


@dataclass(frozen=True, slots=True)
class BenchLayout:
    """Paths in a task's folder; names in `excluded` are never copied from `context` to the initial files."""

    settings: str
    context: str
    script: str
    solution: str
    excluded: tuple[str, ...]


TERMINAL_BENCH: Final = BenchLayout(
    *("task.yaml", "", "run-tests.sh", "solution.sh"),
    ("tests", "solution.sh", "solution.yaml", "run-tests.sh", "task.yaml", "Dockerfile"),
)
HARBOR: Final = BenchLayout("task.toml", "environment", "tests/test.sh", "solution/solve.sh", ("Dockerfile",))


def load_bench(
    folder: Path,
    workdir: str,
    dockerfiles: Literal["refuse", "skip", "ignore"],
    scripts: Literal["refuse", "trust"] = "refuse",
) -> tuple[BenchTask, ...]:
    """Return the tasks of a folder, sorted by name.

    Raises ConfigError for a folder without tasks, for a broken task, for a task graded by a script unless scripts
    are trusted, and for tasks that need a container, each with its reason. With `skip` the latter are logged and
    omitted; with `ignore` they run without a container.
    """
    places = sorted({path.parent for name in ("task.yaml", "task.toml") for path in folder.glob(f"*/{name}")})
    if not places:
        raise ConfigError(
            f"{folder} does not contain a task.",
            "env.settings.bench is a folder of folders with a task.yaml or task.toml.",
        )
    found: list[BenchTask] = []
    refused: list[str] = []
    for place in places:
        source = read_folder(place, workdir)
        if dockerfiles != "ignore" and (reasons := source.needs):
            refused.append(reasons[0])
            continue
        task = source.task()
        if task.script and scripts == "refuse":
            raise ConfigError(
                f"{place.name} is graded by {task.script}, which runs in the folder that the policy wrote.",
                "Programs of the policy that the script runs can forge its verdict: give the task tests/*.py, "
                "or set env.settings.bench_scripts = 'trust'.",
            )
        found.append(task)
    if refused and (dockerfiles == "refuse" or not found):
        more = f"; and {len(refused) - _MAX_NAMED} more" if len(refused) > _MAX_NAMED else ""
        raise ConfigError(
            f"{len(refused)} of {len(places)} tasks need an image, but images are not built: "
            f"{'; '.join(refused[:_MAX_NAMED])}{more}.",
            "env.settings.bench_dockerfile = 'skip' omits such tasks, 'ignore' runs them without it.",
        )
    for reason in refused:
        log.warning("Skipped a task that needs a container: %s.", reason)
    return tuple(found)


@dataclass(frozen=True)
class TaskFolder:
    """The folder of a task. `settings` are its file's, with the instruction; `timeout_s` bounds the grader."""

    place: Path
    workdir: str
    layout: BenchLayout
    settings: Mapping[str, object]
    timeout_s: float

    @property
    def context(self) -> Path:
        return self.place / self.layout.context

    @property
    def needs(self) -> list[str]:
        """The requirements that only a container can meet."""
        name = (self.context / "Dockerfile").relative_to(self.place).as_posix()
        found = [f"{self.place.name}: {need}" for need in self._harbor_needs] if self.layout is HARBOR else []
        return [*found, *(f"{self.place.name}/{name}, {need}" for need in self._dockerfile[1])]

    @property
    def _harbor_needs(self) -> Iterator[str]:
        environment = _table(self.settings, "environment")
        image = environment.get("docker_image")
        if self.settings.get("steps"):
            yield "it has several steps"
        for name in ("docker-compose.yaml", "docker-compose.yml"):
            if (self.context / name).is_file():
                yield f"environment/{name}: services in other containers"
        if image and not (self.context / "Dockerfile").is_file():
            yield f"environment.docker_image: the image {image}"
        for key, need in (("gpus", "a GPU"), ("mcp_servers", "MCP servers")):
            if environment.get(key):
                yield f"environment.{key}: {need}"

    def task(self) -> BenchTask:
        """Return the task. Raises ConfigError if it has no instruction or no tests."""
        text = self._instruction()
        metadata = _table(self.settings, "metadata") if self.layout is HARBOR else self.settings
        if not text.strip():
            raise ConfigError(f"{self.place} has no instruction.", "Add instruction.md, or `instruction` in task.yaml.")
        tests = {
            path.relative_to(self.place / "tests").as_posix(): self._move_to_box(path.read_bytes())
            for path in sorted((self.place / "tests").rglob("*"))
            if path.is_file() and path.suffix != ".pyc"
        }
        script, solution = self._script(tests), self._text(self.layout.solution)
        return BenchTask(
            self.place.name,
            self._move_to_box(text.strip().encode()).decode(),
            str(metadata.get("category") or "bench"),
            _LEVELS.get(str(metadata.get("difficulty")), 3),
            self._start(),
            tests if not script or self.layout is HARBOR else {**tests, script: self._text(script).encode()},
            script,
            "" if "/solution/" in solution else solution,
            self.timeout_s,
        )

    def _instruction(self) -> str:
        text, descriptions = self.settings.get("instruction"), self.settings.get("descriptions")
        if not text and isinstance(descriptions, list) and self.layout is TERMINAL_BENCH:
            found = {str(one.get("key")): one.get("description") for one in descriptions if isinstance(one, dict)}
            text = found.get("base") or next(iter(found.values()), None)
        return text if isinstance(text, str) else ""

    def _script(self, tests: Mapping[str, bytes]) -> str:
        """Return the path of the script that grades; empty if pytest does. Raises ConfigError if there is neither."""
        code, harbor = self._text(self.layout.script), self.layout is HARBOR
        named = any(name for path, data in tests.items() for name in named_tests(path, data))
        if named and ("pytest" in code or not harbor):
            return ""
        if not code or (not harbor and any(path.endswith(".py") for path in tests)):
            name = PurePosixPath(self.layout.script).name
            raise ConfigError(f"{self.place} has no tests.", f"Give it tests/test_*.py, or {name}.")
        return self.layout.script

    def _text(self, name: str) -> str:
        path = self.place / name
        return self._move_to_box(path.read_bytes()).decode("utf-8", "replace") if path.is_file() else ""

    def _move_to_box(self, data: bytes) -> bytes:
        """Return the data with the task's working directory replaced by /box."""
        return with_folder(data, self.workdir.rstrip("/"), "/box")

    @cached_property
    def _dockerfile(self) -> tuple[list[tuple[list[str], PurePosixPath, bool]], list[str]]:
        """The COPY instructions into the working directory, and all other instructions, by line.

        A copy is a tuple: sources, target in the working directory, whether the target is a folder.
        """
        folder, copies, needs, outside = PurePosixPath(self.workdir), [], [], []
        for number, line in _instructions(self.context / "Dockerfile"):
            kind = line.partition(" ")[0].lower()
            if kind not in _IGNORED or "--from" in line:
                needs.append(f"line {number}: {line}")
            elif kind in ("workdir", "copy"):
                words = [word for word in shlex.split(line) if not word.startswith("--")]
                target = folder / words[-1]
                if kind == "workdir":
                    folder = target
                elif not target.is_relative_to(self.workdir):
                    outside.append(f"line {number} copies to {target}, outside of {self.workdir}")
                else:
                    is_folder = words[-1].endswith(("/", ".")) or len(words) > 3
                    copies.append((words[1:-1], target.relative_to(self.workdir), is_folder))
        return copies, needs + outside

    def _start(self) -> Snapshot:
        """Return the files that the Dockerfile copies into the working directory, without tests and solution."""
        files, executable, total = dict[str, bytes](), set[str](), 0
        for source, path in self._copied_files():
            files[path] = self._move_to_box(source.read_bytes())
            total += len(files[path])
            executable |= {path} if source.stat().st_mode & 0o100 else set()
            if total > _MAX_BYTES:
                raise ConfigError(f"{self.context} has more than {_MAX_BYTES} bytes of files.", "Remove the task.")
        return Snapshot(files, frozenset(executable))

    def _copied_files(self) -> Iterator[tuple[Path, str]]:
        """Yield the files that the Dockerfile copies, and their paths in /box."""
        for names, target, is_folder in self._dockerfile[0]:
            for name in names:
                is_all = name in (".", "./")
                for source in [self.context] if is_all else sorted(self.context.glob(name.removeprefix("./"))):
                    paths = sorted(source.rglob("*")) if source.is_dir() else [source]
                    into = source.parent if is_folder and not source.is_dir() else source
                    for path in paths:
                        if path.is_file() and path.relative_to(self.context).parts[0] not in self.layout.excluded:
                            yield path, (target / path.relative_to(into).as_posix()).as_posix()


def read_folder(place: Path, workdir: str) -> TaskFolder:
    """Return the folder of a task in either layout. Raises ConfigError if its settings cannot be read."""
    harbor = (place / HARBOR.settings).is_file()
    path, yaml = place / (HARBOR if harbor else TERMINAL_BENCH).settings, importlib.import_module("yaml")
    try:
        text = path.read_text("utf-8")
        data = tomllib.loads(text) if harbor else yaml.safe_load(text)
        if harbor:
            instruction = place / "instruction.md"
            data["instruction"] = instruction.read_text("utf-8") if instruction.is_file() else ""
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.", "Fix the file.") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is not a mapping.", "Fix the file.")
    if not harbor:
        return TaskFolder(place, workdir, TERMINAL_BENCH, data, _TIMEOUT_S)
    seconds = _table(data, "verifier").get("timeout_sec", _HARBOR_TIMEOUT_S)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise ConfigError(f"{path}: verifier.timeout_sec is {seconds!r}.", "Fix the file.")
    return TaskFolder(place, workdir, HARBOR, data, min(float(seconds), _HARBOR_TIMEOUT_S))


def _table(settings: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = settings.get(key)
    return value if isinstance(value, dict) else {}


def _instructions(dockerfile: Path) -> Iterator[tuple[int, str]]:
    """Yield the instructions of a Dockerfile with their line numbers, continuation lines joined."""
    lines = dockerfile.read_text("utf-8", "replace").split("\n") if dockerfile.is_file() else []
    begin, held = 0, ""
    for number, line in enumerate(lines, 1):
        if line.strip().startswith("#") or (not held and not line.strip()):
            continue
        begin = begin or number
        held += line.rstrip().removesuffix("\\") + " "
        if not line.rstrip().endswith("\\"):
            yield begin, " ".join(held.split())
            begin, held = 0, ""
