"""The API classes of BFCL's tasks of several turns: from the package bfcl-eval, run in the sandbox.

The package pins versions of many others and none of them is needed: `pip install --no-deps bfcl-eval`. Its
modules are read as files and imported in the sandbox only. Nothing is kept there between calls: each call is
answered by a fresh run that repeats the calls before it, as the classes draw from seeds in their
configuration.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import io
import json
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

from ludus.errors import UserError, WorldError
from ludus.rewards.code.unit_tests import Suite
from ludus.rewards.extract import NotJson, last_output, read_json
from ludus.rewards.paper_rewards import ExpectedCall
from ludus.sandbox.base import MIB, Limits, Sandbox
from ludus.tools.base import ToolSchema
from ludus.types import JSON, Message
from ludus.worlds.functions.api import guest_runner
from ludus.worlds.functions.api.schemas import Fault, read_schemas

VERDICT: Final = "verdict"
"""The tool's name in the outcome that says which turns agree with the gold calls."""
read_verdict = last_output(VERDICT)
LIMITS: Final = Limits(wall_s=20.0, cpu_s=15.0, output_bytes=8 * MIB, files_out=0)
_PACKAGE: Final = "bfcl_eval"
_SOURCES: Final = "eval_checker/multi_turn_eval/func_source_code"
_DESCRIPTIONS: Final = "data/multi_turn_func_doc"
_CARRIED: Final = ("mpmath",)
"""Packages beyond the standard library that go into the sandbox with the classes."""


@dataclass(frozen=True, slots=True)
class ApiTruth(Suite):
    """The truth of a task of several turns: a test `turn N` for each turn with gold calls.

    `modules` are those of the involved classes by name. `schemas` are offered from the start, `added` from
    the turn that is their key on. `turns` are the messages of the user, those of the first turn included.
    """

    modules: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, JSON] = field(default_factory=dict)
    extended: bool = False
    turns: tuple[tuple[Message, ...], ...] = ()
    gold: tuple[tuple[ExpectedCall, ...], ...] = ()
    schemas: tuple[ToolSchema, ...] = ()
    added: Mapping[int, tuple[ToolSchema, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Response:
    """The text that a call returned, and whether the call raised an exception."""

    text: str
    raised: bool


def package_folder() -> Path:
    """Return the folder of the installed package. Raises UserError if it is not installed."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "BFCL's tasks of several turns run on its API classes, and bfcl-eval is not installed.",
            "pip install --no-deps bfcl-eval",
        )
    return Path(spec.submodule_search_locations[0])


@cache
def _classes(folder: Path) -> Mapping[str, str]:
    """Return the modules, below the folder of sources, that define each class."""
    found: dict[str, str] = {}
    for path in sorted((folder / _SOURCES).glob("*.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found[node.name] = path.stem
    return found


def modules_of(classes: Sequence[str]) -> dict[str, str]:
    """Return the modules of classes by name.

    Raises Fault for a class that is not in the package, has no descriptions, or needs a package that is not
    in the sandbox; UserError if the package is not installed.
    """
    folder = package_folder()
    known = _classes(folder)
    found: dict[str, str] = {}
    for name in classes:
        if name not in known or not (folder / _DESCRIPTIONS / f"{known[name]}.json").is_file():
            raise Fault(f"its class {name!r} is not one of the installed bfcl-eval")
        _, lacking = _imports(folder, known[name])
        if lacking:
            raise Fault(f"its class {name!r} needs the package {lacking[0]!r}, which is not in the sandbox")
        found[name] = f"{_PACKAGE}.{_SOURCES.replace('/', '.')}.{known[name]}"
    return found


def described_functions(classes: Sequence[str]) -> dict[str, ToolSchema]:
    """Return the descriptions of the functions of classes by name. Raises Fault if they cannot be read."""
    folder = package_folder()
    told: list[JSON] = []
    for name in classes:
        path = folder / _DESCRIPTIONS / f"{_classes(folder)[name]}.json"
        try:
            told += [read_json(line) for line in path.read_text("utf-8").split("\n") if line.strip()]
        except (OSError, UnicodeDecodeError, NotJson) as error:
            raise Fault(f"{path} cannot be read ({error})") from None
    return read_schemas(told)


@cache
def _imports(folder: Path, stem: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the modules of the folder that a module needs, itself first, and the packages it lacks."""
    own, lacking, waiting = list[str](), list[str](), [stem]
    while waiting:
        stem = waiting.pop()
        if stem in own:
            continue
        own.append(stem)
        for name in _imported(folder / _SOURCES / f"{stem}.py"):
            top, last = name.partition(".")[0], name.rpartition(".")[2]
            if top == _PACKAGE and (folder / _SOURCES / f"{last}.py").is_file():
                waiting.append(last)
            elif top not in sys.stdlib_module_names and top not in _CARRIED:
                lacking.append(name)
    return tuple(own), tuple(lacking)


def _imported(path: Path) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return names


@cache
def archive(folder: Path, stems: tuple[str, ...]) -> bytes:
    """Return the modules with all that they import, as an archive that can be imported from.

    Raises UserError if a package that goes with them is not installed.
    """
    needed = {own for stem in stems for own in _imports(folder, stem)[0]}
    paths = [folder / _SOURCES / f"{one}.py" for one in sorted(needed)]
    imported = {name.partition(".")[0] for path in paths for name in _imported(path)}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed:
        place = _PACKAGE
        for part in ("", *_SOURCES.split("/")):
            place = f"{place}/{part}" if part else place
            packed.writestr(f"{place}/__init__.py", "")
        for path in paths:
            packed.write(path, f"{place}/{path.name}")
        for name in sorted(imported & {*_CARRIED}):
            spec = importlib.util.find_spec(name)
            if spec is None or not spec.submodule_search_locations:
                raise UserError(f"A class of bfcl-eval needs {name}, which is not installed.", f"pip install {name}")
            root = Path(spec.submodule_search_locations[0])
            for path in sorted(root.rglob("*.py")):
                if "tests" not in path.parts:
                    packed.write(path, f"{name}/{path.relative_to(root).as_posix()}")
    return buffer.getvalue()


async def run_calls(
    truth: ApiTruth, made: Sequence[Sequence[ExpectedCall]], sandbox: Sandbox
) -> tuple[Response, ...] | None:
    """Return the responses to the calls of the last turn; None if the run exceeds its limits.

    Raises WorldError if the sandbox broke.
    """
    reply = await _run(truth, made, None, sandbox)
    said, raised = reply.get("said"), reply.get("raised")
    if not isinstance(said, list) or not isinstance(raised, list):
        return None
    return tuple(Response(str(text), flag is True) for text, flag in zip(said, raised, strict=True))


async def compare(truth: ApiTruth, made: Sequence[Sequence[ExpectedCall]], sandbox: Sandbox) -> dict[str, bool]:
    """Return which turns agree with the gold calls, by the names of their tests; no turn if the run fails.

    Raises WorldError if the sandbox broke.
    """
    agrees = (await _run(truth, made, truth.gold, sandbox)).get("agrees")
    flags = agrees if isinstance(agrees, list) and len(agrees) == len(truth.gold) else []
    verdict = {f"turn {number}": flag is True for number, flag in enumerate(flags, 1)}
    return {test: verdict.get(test, False) for test in truth.fail_to_pass}


async def _run(
    truth: ApiTruth,
    made: Sequence[Sequence[ExpectedCall]],
    gold: Sequence[Sequence[ExpectedCall]] | None,
    sandbox: Sandbox,
) -> Mapping[str, JSON]:
    stems = tuple(sorted(module.rpartition(".")[2] for module in truth.modules.values()))
    order = {
        "classes": dict(truth.modules),
        "config": dict(truth.config),
        "extended": truth.extended,
        "made": _as_json(made),
        "gold": None if gold is None else _as_json(gold),
    }
    outcome = await sandbox.run(
        f"{inspect.getsource(guest_runner)}\nmain()\n",
        files={"apis.zip": archive(package_folder(), stems)},
        stdin=json.dumps(order).encode(),
        limits=LIMITS,
    )
    try:
        reply = read_json(outcome.text) if outcome.ok else {}
    except NotJson:
        return {}
    if not isinstance(reply, dict):
        return {}
    if "fault" in reply:
        raise WorldError(f"The objects of the task cannot be made: {reply['fault']}.")
    return reply


def _as_json(turns: Sequence[Sequence[ExpectedCall]]) -> list[list[list[JSON]]]:
    return [[[call.name, dict(call.arguments)] for call in calls] for calls in turns]
