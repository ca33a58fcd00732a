"""BFCL tasks of several turns: their API classes, which run in the sandbox, and their episodes.

The classes come from the package bfcl-eval (`pip install --no-deps bfcl-eval`; none of its pinned
dependencies is needed). Its modules are read as files and imported only in the sandbox. The sandbox keeps no
state: each call runs after a repetition of the calls before it, which is exact because the classes draw
from seeds in their configuration.
"""

from __future__ import annotations

import ast
import asyncio
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

from ludus.envs.base import Environment
from ludus.envs.messages import assistant, tool_call
from ludus.envs.tool_env import ToolEnv, ToolLimits
from ludus.errors import UserError, WorldError
from ludus.rewards.base import Reward
from ludus.rewards.code.unit_tests import Suite
from ludus.rewards.extract import NotJson, read_json
from ludus.rewards.paper_rewards import ExpectedCall
from ludus.sandbox.base import MIB, Limits, Sandbox
from ludus.tools.base import FunctionSchema, ToolError, ToolSchema
from ludus.types import JSON, Action, Message, StepResult, Task, ToolOutcome, ToolStatus
from ludus.worlds.functions import guest_runner
from ludus.worlds.functions.gold_calls import VERDICT
from ludus.worlds.functions.tools import CheckedTool

LIMITS: Final = Limits(wall_s=20.0, cpu_s=15.0, output_bytes=8 * MIB, files_out=0)
_PACKAGE: Final = "bfcl_eval"
_SOURCES: Final = "eval_checker/multi_turn_eval/func_source_code"
_DESCRIPTIONS: Final = "data/multi_turn_func_doc"
_VENDORED: Final = ("mpmath",)
"""Packages beyond the standard library that are sent to the sandbox with the classes."""
_TYPES: Final = {"dict": "object", "float": "number", "double": "number", "long": "integer", "tuple": "array"}
_KNOWN_TYPES: Final = frozenset({"object", "number", "integer", "string", "boolean", "array"})


class Fault(Exception):
    """An error in a record."""


@dataclass(frozen=True, slots=True)
class ApiTruth(Suite):
    """The truth of a task of several turns: a test `turn N` for each turn with gold calls.

    `modules` maps the involved classes to their modules. `schemas` are offered from the start, `added` from
    the turn that is the key. `turns` are the messages of the user.
    """

    modules: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, JSON] = field(default_factory=dict)
    extended: bool = False
    turns: tuple[tuple[Message, ...], ...] = ()
    gold: tuple[tuple[ExpectedCall, ...], ...] = ()
    schemas: tuple[ToolSchema, ...] = ()
    added: Mapping[int, tuple[ToolSchema, ...]] = field(default_factory=dict)


def read_schemas(functions: JSON) -> dict[str, ToolSchema]:
    """Return the descriptions of functions by name. Raises Fault."""
    found: dict[str, ToolSchema] = {}
    for function in functions if isinstance(functions, list) else [functions]:
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            raise Fault('"function" is not a list of descriptions with names')
        if name in found:
            raise Fault(f"two functions are called {name!r}")
        parameters = _schema(function.get("parameters", {}))
        if not isinstance(parameters, dict) or not isinstance(parameters.get("properties", {}), dict):
            raise Fault(f'"parameters" of {name!r} is not a JSON schema')
        parameters = {"type": "object", "properties": {}, "required": [], **parameters}
        text = str(function.get("description", ""))
        described = FunctionSchema(name=name, description=text, parameters=parameters)
        found[name] = ToolSchema(type="function", function=described)
    return found


def _schema(given: JSON) -> JSON:
    """Return the schema with the type names of JSON schema; unknown types are removed and not checked."""
    if not isinstance(given, dict):
        return given
    schema = {key: value for key, value in given.items() if key != "type"}
    type_ = _TYPES.get(str(given.get("type")), str(given.get("type")))
    if type_ in _KNOWN_TYPES:
        schema["type"] = type_
    properties = schema.get("properties")
    if isinstance(properties, dict):
        schema["properties"] = {name: _schema(one) for name, one in properties.items()}
    return schema | ({"items": _schema(schema["items"])} if "items" in schema else {})


def _installed(package: str, reason: str, command: str) -> Path:
    """Return the folder of a package. Raises UserError if it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(reason, command)
    return Path(spec.submodule_search_locations[0])


def package_folder() -> Path:
    """Return the folder of bfcl-eval. Raises UserError if it is not installed."""
    reason = "BFCL's tasks of several turns run on its API classes, and bfcl-eval is not installed."
    return _installed(_PACKAGE, reason, "pip install --no-deps bfcl-eval")


@cache
def _classes(folder: Path) -> Mapping[str, str]:
    """Return the module, below the folder of sources, that defines each class."""
    return {
        node.name: path.stem
        for path in sorted((folder / _SOURCES).glob("*.py"))
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef)
    }


def modules_of(classes: Sequence[str]) -> dict[str, str]:
    """Return the modules of classes by name.

    Raises Fault for a class that is not in the package, has no descriptions, or needs a package that the
    sandbox lacks; UserError if bfcl-eval is not installed.
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
    described: list[JSON] = []
    for name in classes:
        path = folder / _DESCRIPTIONS / f"{_classes(folder)[name]}.json"
        try:
            described += [read_json(line) for line in path.read_text("utf-8").split("\n") if line.strip()]
        except (OSError, UnicodeDecodeError, NotJson) as error:
            raise Fault(f"{path} cannot be read ({error})") from None
    return read_schemas(described)


@cache
def _imports(folder: Path, stem: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the modules of the folder that a module needs, itself first, and the packages that are missing."""
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
            elif top not in sys.stdlib_module_names and top not in _VENDORED:
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
    """Return the modules and everything that they import as an importable archive.

    Raises UserError if a package that they need is not installed.
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
        for name in sorted(imported & {*_VENDORED}):
            reason = f"A class of bfcl-eval needs {name}, which is not installed."
            root = _installed(name, reason, f"pip install {name}")
            for path in sorted(root.rglob("*.py")):
                if "tests" not in path.parts:
                    packed.write(path, f"{name}/{path.relative_to(root).as_posix()}")
    return buffer.getvalue()


class ApiEnv(Environment):
    """One episode of several turns: an answer without a call is followed by the user's next turn.

    After the last turn, all calls are compared with the gold calls, and the verdict becomes an outcome that
    the model does not see. `offers_tools` is false for a baseline without tools.
    """

    def __init__(
        self,
        truth: ApiTruth,
        rewards: Sequence[Reward],
        limits: ToolLimits,
        sandbox: Sandbox,
        offers_tools: bool = True,
    ) -> None:
        self.rewards = rewards
        self._truth, self._limits, self._sandbox = truth, limits, sandbox
        self._made: list[list[ExpectedCall]] = [[]]
        self._lock = asyncio.Lock()
        self.tools: tuple[CheckedTool, ...] = tuple(map(self._tool, truth.schemas)) if offers_tools else ()
        self._inner = ToolEnv(self.tools, rewards, limits)

    async def start(self, task: Task) -> list[Message]:
        """Return the messages of the task."""
        return await self._inner.start(task)

    async def step(self, action: Action) -> StepResult:
        """Run the calls; without any, continue with the user's next turn, or compare and end."""
        result = await self._inner.step(action)
        if not result.done:
            return result
        place = len(self._made)
        if place == len(self._truth.turns):
            return StepResult(done=True, outcomes=(await self._verdict(),))
        self._made.append([])
        added = self._truth.added.get(place, ()) if self.tools else ()
        self._inner = ToolEnv((*self._inner.tools, *map(self._tool, added)), self.rewards, self._limits)
        return StepResult(messages=turn_messages(self._truth.turns[place], added))

    async def grade_again(self) -> ToolOutcome | None:
        """Return the verdict of another comparison of the same calls; None before the last turn."""
        return await self._verdict() if len(self._made) == len(self._truth.turns) else None

    async def close(self) -> None:
        """Close the tools."""
        await self._inner.close()

    async def _verdict(self) -> ToolOutcome:
        """Return which turns agree with the gold calls, by the names of their tests; no turn if the run fails."""
        gold = self._truth.gold
        agrees = (await self._run(self._made, gold)).get("agrees")
        flags = agrees if isinstance(agrees, list) and len(agrees) == len(gold) else []
        agreeing = {f"turn {number}" for number, flag in enumerate(flags, 1) if flag is True}
        verdict = {test: test in agreeing for test in self._truth.fail_to_pass}
        return ToolOutcome("", VERDICT, ToolStatus.OK, json.dumps(verdict))

    async def _call(self, call: ExpectedCall) -> str:
        """Record a call and return its response. Raises ToolError if the call raised an exception."""
        async with self._lock:
            made = [*self._made[-1], call]
            reply = await self._run([*self._made[:-1], made], None)
            texts, raised = reply.get("said"), reply.get("raised")
            if not isinstance(texts, list) or not isinstance(raised, list):
                raise ToolError("the call takes too much time or memory and was not made")
            self._made[-1] = made
        if raised[-1] is True:
            raise ToolError(str(texts[-1]))
        return str(texts[-1])

    async def _run(
        self, made: Sequence[Sequence[ExpectedCall]], gold: Sequence[Sequence[ExpectedCall]] | None
    ) -> Mapping[str, JSON]:
        """Return the reply of the sandbox, empty if the run exceeds its limits. Raises WorldError if it fails."""
        truth = self._truth
        stems = tuple(sorted(module.rpartition(".")[2] for module in truth.modules.values()))
        order = {
            "classes": dict(truth.modules),
            "config": dict(truth.config),
            "extended": truth.extended,
            "made": _as_json(made),
            "gold": None if gold is None else _as_json(gold),
        }
        outcome = await self._sandbox.run(
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

    def _tool(self, schema: ToolSchema) -> CheckedTool:
        described = schema["function"]

        async def call(**given: JSON) -> str:
            return await self._call(ExpectedCall(described["name"], given))

        return CheckedTool(described["name"], described["description"], call, given=schema)


def _as_json(turns: Sequence[Sequence[ExpectedCall]]) -> list[list[list[JSON]]]:
    return [[[call.name, dict(call.arguments)] for call in calls] for calls in turns]


def turn_messages(turn: Sequence[Message], added: Sequence[ToolSchema]) -> tuple[Message, ...]:
    """Return the messages of a turn; descriptions of functions that it adds are part of one of them."""
    if not added:
        return tuple(turn)
    described = "\n".join(json.dumps(schema["function"], ensure_ascii=False) for schema in added)
    request = "\n".join(message["content"] for message in turn) or "Can you do it now?"
    content = f"From now on there are more tools:\n{described}\n\n{request}"
    return (Message(role="user", content=content),)


def gold_messages(truth: ApiTruth) -> list[Message]:
    """Return the gold calls of several turns as an episode, without the responses, which are unknown here."""
    messages: list[Message] = []
    for place, calls in enumerate(truth.gold):
        if place:
            messages += turn_messages(truth.turns[place], truth.added.get(place, ()))
        for number, call in enumerate(calls):
            made = tool_call(f"call_{place}_{number}", call.name, call.arguments)
            messages.append(Message(role="assistant", content="", tool_calls=[made]))
            messages.append(Message(role="tool", content="[no output]", tool_call_id=made["id"], name=call.name))
        messages.append(assistant("Done."))
    return messages
