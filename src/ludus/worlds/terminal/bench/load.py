"""Tasks in the layout of Terminal-Bench: a folder for each, read from a folder of the user's.

    its text and settings   `ludus.worlds.terminal.bench.layouts` reads both layouts
    tests/*.py              tests for pytest, run over the final files (`ludus.worlds.terminal.bench.tests`)
    its script              judges if there are no such tests, and the settings trust scripts
    its solution            the oracle, if there is one
    its Dockerfile          FROM, WORKDIR and COPY are understood; no image is built

The folder that the tasks speak of becomes /box, in their texts, scripts, tests and files. Sources of the
layouts: the repository laude-institute/terminal-bench, and the documentation of Harbor.
"""

from __future__ import annotations

import ast
import logging
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Final, Literal

from ludus.envs.messages import assistant, tool_turn
from ludus.errors import ConfigError
from ludus.rewards.code.unit_tests import Suite
from ludus.sandbox.base import Sandbox, Snapshot
from ludus.types import Message
from ludus.worlds.terminal.bench.layouts import BenchLayout, read_layout
from ludus.worlds.terminal.bench.tests import grade_tests, moved
from ludus.worlds.terminal.checks import NOTHING_RUNS, Running
from ludus.worlds.terminal.services import TerminalService

Dockerfiles = Literal["refuse", "skip", "ignore"]
Scripts = Literal["refuse", "trust"]
_LOG: Final = logging.getLogger(__name__)
_MOST_NAMED: Final = 20
_LEVELS: Final = {"easy": 1, "medium": 2, "hard": 4}
_HARMLESS: Final = ("from", "workdir", "copy", "cmd", "entrypoint", "label", "expose", "maintainer", "user")
_MOST_BYTES: Final = 16 * 2**20


@dataclass(frozen=True)
class BenchTask:
    """A task of such a folder. `tests` are the files of its tests; if `script` is set, it is run instead.

    A script at `tests/test.sh` writes a reward file, any other one judges by its exit code.
    """

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
        return Suite((self.script,) if self.script else found)

    @property
    def services(self) -> tuple[TerminalService, ...]:
        """None run from the beginning."""
        return ()

    @property
    def afterwards(self) -> str:
        """Nothing."""
        return ""

    async def grade(self, state: Snapshot, sandbox: Sandbox, running: Running = NOTHING_RUNS) -> Mapping[str, bool]:
        """Which tests pass over the final files, in a fresh run. Raises UserError and WorldError."""
        return await grade_tests(self.suite.fail_to_pass, self.tests, self.script, state, sandbox, self.timeout_s)

    def solve(self) -> list[Message]:
        """Its solution in one call, whose output is not known here; none where it brings none."""
        if not self.solution:
            return []
        solved = tool_turn(0, "shell", {"command": f"(\n{self.solution}\n)"}, "[no output]")
        return [*solved, assistant(f"Done with {self.name}.")]


def load_bench(
    folder: Path, workdir: str, dockerfiles: Dockerfiles, scripts: Scripts = "refuse"
) -> tuple[BenchTask, ...]:
    """The tasks of a folder, in the order of their names.

    Raises ConfigError for a folder without any, for a broken task, for one that a script judges, unless
    scripts are trusted, and, with the reason for each, for tasks that cannot run without a container. If
    `dockerfiles` is `skip`, these are logged and left out; if it is `ignore`, they are played as they are.
    """
    places = sorted({path.parent for name in ("task.yaml", "task.toml") for path in folder.glob(f"*/{name}")})
    if not places:
        raise ConfigError(
            f"There is no task in {folder}.",
            "env.settings.bench takes a folder whose folders have a task.yaml or a task.toml.",
        )
    found, refused = [], []
    for place in places:
        layout = read_layout(place)
        reasons = [f": {need}" for need in layout.needs]
        if reasons := [*reasons, *(f"/{line}" for line in _image(place, layout, workdir))]:
            refused.append(f"{place.name}{reasons[0]}")
            if dockerfiles != "ignore":
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
        more = f"; and {len(refused) - _MOST_NAMED} more" if len(refused) > _MOST_NAMED else ""
        raise ConfigError(
            f"{len(refused)} of {len(places)} tasks need an image that is built, and none is: "
            f"{'; '.join(refused[:_MOST_NAMED])}{more}.",
            "env.settings.bench_dockerfile = 'skip' leaves such tasks out, 'ignore' plays them without it.",
        )
    for reason in refused if dockerfiles == "skip" else ():
        _LOG.warning("The task %s is left out: it needs a container.", reason)
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
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and inner.name.startswith("test"):
                    yield f"{path}::{node.name}::{inner.name}"


def _load(place: Path, layout: BenchLayout, workdir: str) -> BenchTask:
    if not layout.text.strip():
        raise ConfigError(f"{place} has no instruction.", "Add instruction.md, or `instruction` in task.yaml.")
    tests = {
        path.relative_to(place / "tests").as_posix(): _boxed(path.read_bytes(), workdir)
        for path in sorted((place / "tests").rglob("*"))
        if path.is_file() and path.suffix != ".pyc"
    }
    told = _text(layout.script, workdir)
    named = any(name for path, data in tests.items() for name in named_tests(path, data))
    script = ""
    if not named or (layout.rewards and "pytest" not in told):
        if not told or (not layout.rewards and any(path.endswith(".py") for path in tests)):
            raise ConfigError(f"{place} has no tests.", f"Give it tests/test_*.py, or {layout.script.name}.")
        script = layout.script.relative_to(place).as_posix()
        tests |= {} if layout.rewards else {layout.script.name: told.encode()}
    solution = _text(layout.solution, workdir)
    return BenchTask(
        place.name,
        _boxed(layout.text.strip().encode(), workdir).decode(),
        layout.category,
        _LEVELS.get(layout.difficulty, 3),
        Snapshot(dict(_copied(layout, workdir)), frozenset(_executable(layout, workdir))),
        tests,
        script,
        "" if "/solution/" in solution else solution,
        layout.timeout_s,
    )


def _text(path: Path, workdir: str) -> str:
    if not path.is_file():
        return ""
    return _boxed(path.read_bytes(), workdir).decode("utf-8", "replace")


def _boxed(data: bytes, workdir: str) -> bytes:
    """The data with /box in the place of the folder that the task speaks of."""
    return moved(data, workdir.rstrip("/"), "/box")


def _image(place: Path, layout: BenchLayout, workdir: str) -> Iterator[str]:
    """What a Dockerfile does besides copying files of the task into the folder it works in."""
    name = (layout.context / "Dockerfile").relative_to(place).as_posix()
    for number, line in _lines(layout.context):
        if line.partition(" ")[0].lower() not in _HARMLESS or "--from" in line:
            yield f"{name}, line {number}: {line}"
    for number, _, target in _targets(layout.context, workdir):
        if not target.is_relative_to(workdir):
            yield f"{name}, line {number} copies to {target}, outside of {workdir}"


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


def _targets(context: Path, workdir: str) -> Iterator[tuple[int, list[str], PurePosixPath]]:
    """The COPY lines of a Dockerfile: number, words, and the place that is copied to."""
    folder = PurePosixPath(workdir)
    for number, line in _lines(context):
        kind = line.partition(" ")[0].lower()
        if kind not in ("workdir", "copy"):
            continue
        words = [word for word in shlex.split(line) if not word.startswith("--")]
        if kind == "workdir":
            folder = folder / words[-1]
        elif "--from" not in line:
            yield number, words, folder / words[-1]


def _copies(context: Path, workdir: str) -> Iterator[tuple[Path, str]]:
    """The files that a Dockerfile copies, and where they lie in /box; those for other places are left out."""
    for _, words, target in _targets(context, workdir):
        if target.is_relative_to(workdir):
            is_folder = words[-1].endswith(("/", ".")) or len(words) > 3
            yield from _sources(context, words[1:-1], target.relative_to(workdir), is_folder)


def _sources(place: Path, names: list[str], inside: PurePosixPath, is_folder: bool) -> Iterator[tuple[Path, str]]:
    for name in names:
        found = sorted(place.glob(name.removeprefix("./"))) if name not in (".", "./") else [place]
        for source in found:
            if source.is_dir():
                for path in sorted(source.rglob("*")):
                    if path.is_file():
                        yield path, (inside / path.relative_to(source).as_posix()).as_posix()
            elif source.is_file():
                yield source, (inside / source.name if is_folder else inside).as_posix()


def _copied(layout: BenchLayout, workdir: str) -> Iterator[tuple[str, bytes]]:
    """Files of the beginning. Tests and solution never are among them."""
    total = 0
    for source, path in _copies(layout.context, workdir):
        if source.relative_to(layout.context).parts[0] in layout.apart:
            continue
        data = _boxed(source.read_bytes(), workdir)
        total += len(data)
        if total > _MOST_BYTES:
            raise ConfigError(f"{layout.context} has more than {_MOST_BYTES} bytes of files.", "Leave the task out.")
        yield path, data


def _executable(layout: BenchLayout, workdir: str) -> Iterator[str]:
    return (path for source, path in _copies(layout.context, workdir) if source.stat().st_mode & 0o100)
