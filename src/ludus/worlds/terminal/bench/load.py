"""Load Terminal-Bench tasks from a folder with one subfolder per task.

    instruction and settings   read by `ludus.worlds.terminal.bench.layouts`, in both layouts
    tests/*.py                 run by pytest over the final files (`ludus.worlds.terminal.bench.tests`)
    script                     grades if there are no such tests, if the settings trust scripts
    solution                   the expert's, if present
    Dockerfile                 FROM, WORKDIR and COPY are interpreted; no image is built

The tasks' working directory becomes /box in their instructions, scripts, tests and files. Sources of the layouts:
the repository laude-institute/terminal-bench, and the documentation of Harbor.
"""

from __future__ import annotations

import ast
import logging
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import ClassVar, Final, Literal, TypeGuard

from ludus.envs.messages import assistant, tool_turn
from ludus.errors import ConfigError
from ludus.rewards.code.unit_tests import Suite
from ludus.sandbox.base import Sandbox, Snapshot
from ludus.types import Message
from ludus.worlds.terminal.bench.layouts import BenchLayout, read_layout
from ludus.worlds.terminal.bench.tests import grade_tests, with_folder
from ludus.worlds.terminal.checks import NOTHING_RUNS, Running
from ludus.worlds.terminal.services import TerminalService

_LOG: Final = logging.getLogger(__name__)
_MAX_NAMED: Final = 20
_LEVELS: Final = {"easy": 1, "medium": 2, "hard": 4}
_IGNORED: Final = ("from", "workdir", "copy", "cmd", "entrypoint", "label", "expose", "maintainer", "user")
"""Instructions of a Dockerfile that need no container."""
_MAX_BYTES: Final = 16 * 2**20


@dataclass(frozen=True)
class BenchTask:
    """A Terminal-Bench task. `tests` are the test files; if `script` is set, it is run instead.

    A script at `tests/test.sh` writes a reward file; any other grades by its exit code.
    """

    services: ClassVar[tuple[TerminalService, ...]] = ()
    afterwards: ClassVar[str] = ""

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
        """The tests that must pass: those that the test files define, whatever a run of them reports."""
        found = tuple(name for path, data in sorted(self.tests.items()) for name in named_tests(path, data))
        return Suite((self.script,) if self.script else found)

    async def grade(self, state: Snapshot, sandbox: Sandbox, running: Running = NOTHING_RUNS) -> Mapping[str, bool]:
        """Return which tests pass over the final files, in a fresh sandbox. Raises UserError and WorldError."""
        return await grade_tests(self.suite.fail_to_pass, self.tests, self.script, state, sandbox, self.timeout_s)

    def solve(self) -> list[Message]:
        """Return the messages of the solution as one call, whose output is unknown; empty if there is none."""
        if not self.solution:
            return []
        solved = tool_turn(0, "shell", {"command": f"(\n{self.solution}\n)"}, "[no output]")
        return [*solved, assistant(f"Done with {self.name}.")]


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
            f"There is no task in {folder}.", "env.settings.bench is a folder of folders with a task.yaml or task.toml."
        )
    found: list[BenchTask] = []
    refused: list[str] = []
    for place in places:
        layout = read_layout(place)
        reasons = [f"{place.name}: {need}" for need in layout.needs]
        reasons += [f"{place.name}/{line}" for line in _image(place, layout, workdir)]
        if reasons and dockerfiles != "ignore":
            refused.append(reasons[0])
            continue
        task = _load(place, layout, workdir)
        if task.script and scripts == "refuse":
            raise ConfigError(
                f"{place.name} is judged by what {task.script} says, in the folder that the policy made.",
                "Programs of the policy that the script runs may choose that: give the task tests/*.py, "
                "or set env.settings.bench_scripts = 'trust'.",
            )
        found.append(task)
    if refused and (dockerfiles == "refuse" or not found):
        more = f"; and {len(refused) - _MAX_NAMED} more" if len(refused) > _MAX_NAMED else ""
        raise ConfigError(
            f"{len(refused)} of {len(places)} tasks need an image that is built, and none is: "
            f"{'; '.join(refused[:_MAX_NAMED])}{more}.",
            "env.settings.bench_dockerfile = 'skip' leaves such tasks out, 'ignore' plays them without it.",
        )
    for reason in refused if dockerfiles == "skip" else ():
        _LOG.warning("The task %s is left out: it needs a container.", reason)
    return tuple(found)


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


def _load(place: Path, layout: BenchLayout, workdir: str) -> BenchTask:
    if not layout.text.strip():
        raise ConfigError(f"{place} has no instruction.", "Add instruction.md, or `instruction` in task.yaml.")
    tests = {
        path.relative_to(place / "tests").as_posix(): _boxed(path.read_bytes(), workdir)
        for path in sorted((place / "tests").rglob("*"))
        if path.is_file() and path.suffix != ".pyc"
    }
    code = _text(layout.script, workdir)
    named = any(name for path, data in tests.items() for name in named_tests(path, data))
    script = ""
    if not named or (layout.rewards and "pytest" not in code):
        if not code or (not layout.rewards and any(path.endswith(".py") for path in tests)):
            raise ConfigError(f"{place} has no tests.", f"Give it tests/test_*.py, or {layout.script.name}.")
        script = layout.script.relative_to(place).as_posix()
        tests |= {} if layout.rewards else {layout.script.name: code.encode()}
    solution = _text(layout.solution, workdir)
    return BenchTask(
        place.name,
        _boxed(layout.text.strip().encode(), workdir).decode(),
        layout.category,
        _LEVELS.get(layout.difficulty, 3),
        _start(layout, workdir),
        tests,
        script,
        "" if "/solution/" in solution else solution,
        layout.timeout_s,
    )


def _text(path: Path, workdir: str) -> str:
    return _boxed(path.read_bytes(), workdir).decode("utf-8", "replace") if path.is_file() else ""


def _boxed(data: bytes, workdir: str) -> bytes:
    """Return the data with the task's working directory replaced by /box."""
    return with_folder(data, workdir.rstrip("/"), "/box")


def _instructions(context: Path) -> Iterator[tuple[int, str]]:
    """Yield the instructions of a Dockerfile with their line numbers, continuation lines joined."""
    path = context / "Dockerfile"
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


def _copies(context: Path, workdir: str) -> Iterator[tuple[int, list[str], PurePosixPath, bool]]:
    """Yield the COPY instructions: line number, sources, target, and whether the target is a folder."""
    folder = PurePosixPath(workdir)
    for number, line in _instructions(context):
        kind = line.partition(" ")[0].lower()
        if kind not in ("workdir", "copy"):
            continue
        words = [word for word in shlex.split(line) if not word.startswith("--")]
        if kind == "workdir":
            folder = folder / words[-1]
        elif "--from" not in line:
            yield number, words[1:-1], folder / words[-1], words[-1].endswith(("/", ".")) or len(words) > 3


def _image(place: Path, layout: BenchLayout, workdir: str) -> Iterator[str]:
    """Yield what a Dockerfile does besides copying files into the working directory."""
    name = (layout.context / "Dockerfile").relative_to(place).as_posix()
    for number, line in _instructions(layout.context):
        if line.partition(" ")[0].lower() not in _IGNORED or "--from" in line:
            yield f"{name}, line {number}: {line}"
    for number, _, target, _ in _copies(layout.context, workdir):
        if not target.is_relative_to(workdir):
            yield f"{name}, line {number} copies to {target}, outside of {workdir}"


def _start(layout: BenchLayout, workdir: str) -> Snapshot:
    """Return the files that the Dockerfile copies into the working directory, without tests and solution."""
    files: dict[str, bytes] = {}
    executable: set[str] = set()
    total = 0
    for _, names, target, is_folder in _copies(layout.context, workdir):
        if not target.is_relative_to(workdir):
            continue
        for source, path in _sources(layout.context, names, target.relative_to(workdir), is_folder):
            if source.relative_to(layout.context).parts[0] in layout.apart:
                continue
            files[path] = _boxed(source.read_bytes(), workdir)
            total += len(files[path])
            if source.stat().st_mode & 0o100:
                executable.add(path)
            if total > _MAX_BYTES:
                raise ConfigError(f"{layout.context} has more than {_MAX_BYTES} bytes of files.", "Leave the task out.")
    return Snapshot(files, frozenset(executable))


def _sources(context: Path, names: list[str], target: PurePosixPath, is_folder: bool) -> Iterator[tuple[Path, str]]:
    """Yield the files that an instruction copies, and their paths in /box."""
    for name in names:
        found = sorted(context.glob(name.removeprefix("./"))) if name not in (".", "./") else [context]
        for source in found:
            if source.is_dir():
                files = (path for path in sorted(source.rglob("*")) if path.is_file())
                yield from ((path, (target / path.relative_to(source).as_posix()).as_posix()) for path in files)
            elif source.is_file():
                yield source, (target / source.name if is_folder else target).as_posix()
