"""Tasks of several turns: the API classes of BFCL, and episodes whose calls run on them in the sandbox.

The modules of the package bfcl-eval are read as files and imported only in the sandbox; its pinned dependencies are
not needed. The sandbox keeps no state: each run replays all earlier calls first, which is deterministic because the
classes draw from seeds in their configuration.
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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Final

from pydantic import BaseModel, Field, JsonValue

from ludus.envs.messages import assistant, tool_call
from ludus.envs.task_files import RecordError, parse_record
from ludus.envs.tool_env import ToolEnv, ToolLimits
from ludus.errors import UserError, WorldError
from ludus.rewards.base import Reward
from ludus.rewards.code.unit_tests import Suite
from ludus.rewards.paper_rewards import ExpectedCall
from ludus.sandbox.base import MIB, Limits, Sandbox
from ludus.tools.base import FunctionSchema, ToolError, ToolSchema
from ludus.types import JSON, Action, Message, StepResult, ToolOutcome, ToolStatus
from ludus.worlds.functions.bfcl import guest_runner
from ludus.worlds.functions.catalogue import CheckedTool
from ludus.worlds.functions.grader import VERDICT

LIMITS: Final = Limits(wall_s=20.0, cpu_s=15.0, output_bytes=8 * MIB, files_out=0)
Turns = Sequence[Sequence[ExpectedCall]]
"""The calls of each turn."""
_PACKAGE: Final = "bfcl_eval"
_SOURCES: Final = PurePosixPath("bfcl_eval/eval_checker/multi_turn_eval/func_source_code")
_DESCRIPTIONS: Final = PurePosixPath("bfcl_eval/data/multi_turn_func_doc")
_PACKAGES: Final = {
    _PACKAGE: ("BFCL's tasks of several turns run on its API classes", "Install it: pip install --no-deps bfcl-eval."),
    "mpmath": ("A class of bfcl-eval needs another package", "Install it: pip install mpmath."),
}
"""The packages that are sent to the sandbox, with the reasons, and the commands that install them."""
_TYPES: Final = {
    **{name: name for name in ("object", "number", "integer", "string", "boolean", "array")},
    "dict": "object",
    "float": "number",
    "double": "number",
    "long": "integer",
    "tuple": "array",
}
"""JSON schema types by their names in BFCL; others are not checked."""


class Description(BaseModel):
    """The description of a function."""

    name: str = Field(min_length=1)
    description: str = ""
    parameters: dict[str, JsonValue] = {}


def read_schemas(described: Iterable[Description]) -> dict[str, ToolSchema]:
    """Return the descriptions of functions by name. Raises RecordError."""
    found: dict[str, ToolSchema] = {}
    for one in described:
        if one.name in found:
            raise RecordError(f"duplicate function {one.name!r}")
        schema = _schema(one.parameters)
        if not isinstance(schema, dict) or not isinstance(schema.get("properties", {}), dict):
            raise RecordError(f'"parameters" of {one.name!r} is not a JSON schema')
        parameters = {"type": "object", "properties": {}, "required": [], **schema}
        function = FunctionSchema(name=one.name, description=one.description, parameters=parameters)
        found[one.name] = ToolSchema(type="function", function=function)
    return found


def _schema(given: JSON) -> JSON:
    """Return the schema with the type names of JSON schema, without unknown types."""
    if not isinstance(given, dict):
        return given
    schema = {key: _schema(value) if key == "items" else value for key, value in given.items() if key != "type"}
    if str(given.get("type")) in _TYPES:
        schema["type"] = _TYPES[str(given["type"])]
    if isinstance(properties := schema.get("properties"), dict):
        schema["properties"] = {name: _schema(one) for name, one in properties.items()}
    return schema


def _site_folder(package: str) -> Path:
    """Return the folder in which a package is installed. Raises UserError if it is not."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        reason, command = _PACKAGES[package]
        raise UserError(f"{reason}, and {package.replace('_', '-')} is not installed.", command)
    return Path(spec.submodule_search_locations[0]).parent


def find_classes(names: Iterable[str]) -> tuple[dict[str, str], dict[str, ToolSchema]]:
    """Return the names of the modules that define classes, by class, and the descriptions of their functions.

    Raises RecordError for a class that cannot be used in the sandbox, and UserError if bfcl-eval is not installed.
    """
    site = _site_folder(_PACKAGE)
    modules: dict[str, str] = {}
    described: list[Description] = []
    for name in names:
        stem = _classes(site).get(name)
        path = site / _DESCRIPTIONS / f"{stem}.json"
        if stem is None or not path.is_file():
            raise RecordError(f"its class {name!r} is not in the installed bfcl-eval")
        _, packages = _imports_of(frozenset({site / _SOURCES / f"{stem}.py"}))
        if lacking := [package for package in packages if package not in _PACKAGES]:
            raise RecordError(f"its class {name!r} needs the package {lacking[0]!r}, which is not in the sandbox")
        try:
            lines = path.read_text("utf-8").split("\n")
            described += [Description.model_validate_json(line) for line in lines if line.strip()]
        except (OSError, ValueError) as error:
            raise RecordError(f"{path} cannot be read ({error})") from None
        modules[name] = ".".join((*_SOURCES.parts, stem))
    return modules, read_schemas(described)


@cache
def _classes(site: Path) -> Mapping[str, str]:
    """Return the module, without its folder, that defines each class."""
    return {
        node.name: source.stem
        for source in sorted((site / _SOURCES).glob("*.py"))
        for node in ast.parse(source.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef)
    }


@cache
def _imports_of(modules: frozenset[Path]) -> tuple[list[Path], list[str]]:
    """Return the transitive imports of modules: modules of the package, with themselves, and other packages."""
    found, packages = sorted(modules), set[str]()
    for module in found:
        for node in ast.walk(ast.parse(module.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in [node.module or ""] if isinstance(node, ast.ImportFrom) else names:
                sibling, top = module.with_name(f"{name.rpartition('.')[2]}.py"), name.partition(".")[0]
                if top == _PACKAGE and sibling.is_file():
                    found += [] if sibling in found else [sibling]
                elif top not in sys.stdlib_module_names:
                    packages.add(top)
    return sorted(found), sorted(packages)


@cache
def archive(modules: frozenset[str]) -> bytes:
    """Return the modules and their imports as an importable archive. Raises UserError if a package is missing."""
    folder = _site_folder(_PACKAGE) / _SOURCES
    paths, packages = _imports_of(frozenset(folder / f"{module.rpartition('.')[2]}.py" for module in modules))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed:
        for parent in (_SOURCES, *_SOURCES.parents[:-1]):
            packed.writestr(f"{parent}/__init__.py", "")
        for path in paths:
            packed.write(path, f"{_SOURCES}/{path.name}")
        for name in packages:
            site = _site_folder(name)
            for path in sorted(path for path in (site / name).rglob("*.py") if "tests" not in path.parts):
                packed.write(path, path.relative_to(site).as_posix())
    return buffer.getvalue()


@dataclass(frozen=True, slots=True)
class ApiTruth(Suite):
    """The truth of a task of several turns: a test `turn N` for each turn with gold calls.

    `modules` are those of the involved classes, `turns` the user's messages, `added` the schemas that a turn adds.
    """

    modules: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, JSON] = field(default_factory=dict)
    extended: bool = False
    turns: tuple[tuple[Message, ...], ...] = ()
    gold: Turns = ()
    schemas: tuple[ToolSchema, ...] = ()
    added: Mapping[int, tuple[ToolSchema, ...]] = field(default_factory=dict)

    def messages_of(self, place: int) -> tuple[Message, ...]:
        """Return the messages of a later turn; descriptions of functions that it adds are part of one of them."""
        turn, added = self.turns[place], self.added.get(place)
        if not added:
            return turn
        described = "\n".join(json.dumps(schema["function"], ensure_ascii=False) for schema in added)
        request = "\n".join(message["content"] for message in turn) or "Can you do it now?"
        content = f"From now on there are more tools:\n{described}\n\n{request}"
        return (Message(role="user", content=content),)


class ApiEnv(ToolEnv):
    """One episode of several turns: an answer without a call is followed by the user's next turn.

    After the last turn, all calls are compared with the gold calls; the model does not see the outcome.
    """

    def __init__(
        self, truth: ApiTruth, rewards: Sequence[Reward], limits: ToolLimits, sandbox: Sandbox, offers_tools: bool
    ) -> None:
        super().__init__(tuple(map(self._tool, truth.schemas)) if offers_tools else (), rewards, limits)
        self._truth, self._sandbox = truth, sandbox
        self._made: list[list[ExpectedCall]] = [[]]
        self._lock = asyncio.Lock()

    async def step(self, action: Action) -> StepResult:
        """Run the calls; without any, continue with the user's next turn, or compare and end."""
        result = await super().step(action)
        if not result.done:
            return result
        place = len(self._made)
        if place == len(self._truth.turns):
            return StepResult(done=True, outcomes=(await self._verdict(),))
        self._made.append([])
        if not self.tools:
            return StepResult(messages=self._truth.turns[place])
        added = map(self._tool, self._truth.added.get(place, ()))
        self._executor = replace(self._executor, tools=(*self._executor.tools, *added))
        return StepResult(messages=self._truth.messages_of(place))

    async def grade_again(self) -> ToolOutcome | None:
        """Compare the same calls again and return the verdict; None before the last turn."""
        return await self._verdict() if len(self._made) == len(self._truth.turns) else None

    async def _verdict(self) -> ToolOutcome:
        """Return whether each turn agrees with the gold calls, by test name; all False if the run fails."""
        reply = await self._run(self._made, self._truth.gold)
        verdict = {test: reply.get(test) is True for test in self._truth.fail_to_pass}
        return ToolOutcome("", VERDICT, ToolStatus.OK, json.dumps(verdict))

    async def _run(self, made: Turns, gold: Turns | None) -> Mapping[str, JSON]:
        """Return the reply of the sandbox, empty if the run exceeds its limits. Raises WorldError if it fails."""
        shared = {"classes": self._truth.modules, "config": self._truth.config, "extended": self._truth.extended}
        outcome = await self._sandbox.run(
            f"{inspect.getsource(guest_runner)}\nmain()\n",
            files={"apis.zip": archive(frozenset(self._truth.modules.values()))},
            stdin=json.dumps({**shared, "made": made, "gold": gold}, default=astuple).encode(),
            limits=LIMITS,
        )
        try:
            reply = parse_record(outcome.text if outcome.ok else "{}")
        except RecordError:
            return {}
        if "fault" in reply:
            raise WorldError(f"The objects of the task cannot be created: {reply['fault']}.")
        return reply

    def _tool(self, schema: ToolSchema) -> CheckedTool:
        described = schema["function"]

        async def call(**given: JSON) -> str:
            async with self._lock:
                made = [*self._made[-1], ExpectedCall(described["name"], given)]
                reply = await self._run([*self._made[:-1], made], None)
                response = reply.get("response")
                if not isinstance(response, str):
                    raise ToolError("the call takes too much time or memory and was not made")
                self._made[-1] = made
            if reply.get("raised") is True:
                raise ToolError(response)
            return response

        return CheckedTool(described["name"], described["description"], call, given=schema)


def gold_messages(truth: ApiTruth) -> list[Message]:
    """Return the gold calls of several turns as an episode, without the responses, which are unknown here."""
    messages: list[Message] = []
    for place, calls in enumerate(truth.gold):
        if place:
            messages += truth.messages_of(place)
        for number, call in enumerate(calls):
            made = tool_call(f"call_{place}_{number}", call.name, call.arguments)
            messages.append(Message(role="assistant", content="", tool_calls=[made]))
            messages.append(Message(role="tool", content="[no output]", tool_call_id=made["id"], name=call.name))
        messages.append(assistant("Done."))
    return messages
