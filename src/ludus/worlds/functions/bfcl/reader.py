"""Tasks from files in the format of BFCL: JSON lines with `id`, `question`, `function` and `ground_truth`.

`question` is a list of messages, a list with one such list, or a text. `function` has descriptions, with a JSON
schema or BFCL's type names. `ground_truth` lists calls in any order, `{name: {argument: [right values]}}`, with ""
among the values of an optional argument, or as text, `name(argument=value)`; if it is empty, no call is right. The
categories without answers are recognised by their ids: in `irrelevance` (`live_irrelevance_0-0-0`) no call is right,
in `relevance` any call that fits its description. No function is executed: each such call is answered with `ok`.

Calls of records of several turns (`multi_turn_*`) are executed. `involved_classes` are the API classes whose functions
are offered, `initial_config` is the initial state of an object of each class. `question` has a list of messages for
each turn, empty if the turn adds functions; `missed_function` has the names of these by turn, all others are
offered from the start. `ground_truth` has a list of calls as text for each turn.

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
import itertools
import json
import logging
import math
import operator
import re
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Final, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, JsonValue, NonNegativeInt, ValidationError

from ludus.envs.task_files import Record, RecordError, parse_record, read_lines, text_field
from ludus.envs.tool_env import ToolEnv, ToolLimits
from ludus.envs.tool_world import assistant, tool_call
from ludus.errors import UserError, WorldError
from ludus.rewards.base import Reward
from ludus.rewards.code.unit_tests import Suite
from ludus.rewards.paper_rewards import ExpectedCall
from ludus.sandbox.base import MIB, Limits, Sandbox
from ludus.tools.base import FunctionSchema, ToolError, ToolSchema
from ludus.types import JSON, Action, Message, StepResult, Task, ToolOutcome, ToolStatus
from ludus.worlds.functions.bfcl import guest_runner
from ludus.worlds.functions.catalogue import CheckedTool, Scene, fits
from ludus.worlds.functions.grader import VERDICT, GoldCall, Right, Truth
from ludus.worlds.functions.tasks import SYSTEM

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


# Records

BadLines = Literal["refuse", "skip"]
T = TypeVar("T")

log = logging.getLogger(__name__)
MAX_NAMED: Final = 20
"""Maximum number of faults in an error message."""
MAX_CHOICES: Final = 1000
"""Maximum number of combinations of the values of one argument."""
_OPERATORS: Final = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def _as_turns(question: object) -> object:
    if isinstance(question, str):
        return [[{"role": "user", "content": question}]]
    is_one = isinstance(question, list) and bool(question) and isinstance(question[0], dict)
    return [question] if is_one else question


class _BfclMessage(BaseModel):
    role: Literal["system", "user", "assistant"]
    content: str


class _BfclRecord(BaseModel):
    """Fields of a line, described in the module docstring. `ground_truth` may be in another file."""

    id: str = Field(min_length=1)
    question: Annotated[list[list[_BfclMessage]], BeforeValidator(_as_turns), Field(min_length=1)]
    function: Annotated[list[Description], BeforeValidator(lambda f: [f] if isinstance(f, dict) else f)] | None = None
    ground_truth: list[JsonValue] | None = None
    involved_classes: list[str] | None = Field(None, min_length=1)
    initial_config: dict[str, JsonValue] = {}
    missed_function: dict[NonNegativeInt, list[str]] = {}


def load_tasks(path: Path, answers: Path | None, split: str, bad_lines: BadLines = "refuse") -> tuple[Task, ...]:
    """Return the tasks of a file. `answers` is an optional separate file with `{"id", "ground_truth"}`.

    Raises UserError, with the lines, for invalid records, repeated ids and missing answers, or logs and skips them.
    """
    faults: list[tuple[str, RecordError]] = []
    right: dict[str, JSON] = {}
    tasks: dict[str, Task] = {}
    for file, is_answers in ((answers, True), (path, False)):
        for line, text in read_lines(file) if file is not None else ():
            try:
                record = parse_record(text)
                if is_answers:
                    right[text_field(record, "id")] = record.get("ground_truth")
                    continue
                if answers is not None:
                    record["ground_truth"] = right.get(text_field(record, "id"))
                task = _task(record, split)
                if task.id in tasks:
                    raise RecordError(f"duplicate id {task.id!r}")
                tasks[task.id] = task
            except RecordError as error:
                faults.append((f"{file}, line {line}", error))
    _report(faults, bad_lines)
    if not tasks:
        raise UserError(f"{path} contains no tasks.", "Write one JSON object per line.")
    return tuple(tasks.values())


def _report(faults: Sequence[tuple[str, RecordError]], bad_lines: BadLines) -> None:
    if faults and bad_lines == "refuse":
        named = [f"{place}, is not a task: {reason}" for place, reason in faults[:MAX_NAMED]]
        more = f" And {len(faults) - MAX_NAMED} more lines." if len(faults) > MAX_NAMED else ""
        raise UserError(
            f"{'. '.join(named)}.{more}",
            'A line is {"id", "question", "function", "ground_truth"} as in BFCL; '
            "env.settings.data_bad_lines = 'skip' skips invalid lines.",
        )
    for place, reason in faults:
        log.warning("%s, is skipped: %s.", place, reason)


def _task(line: Record, split: str) -> Task:
    try:
        record = _BfclRecord.model_validate(line)
    except ValidationError as error:
        first = error.errors()[0]
        raise RecordError(f'"{".".join(map(str, first["loc"]))}": {first["msg"]}') from None
    found = re.search(r"(?:^|_)(ir)?relevance(?:_|$)", record.id)
    if record.ground_truth is None and not found:
        raise RecordError(f'there is no "ground_truth" for {record.id!r}')
    right: Right = "call" if record.ground_truth else "any_call" if found and not found[1] else "decline"
    messages = _messages(record.question[0])
    if record.involved_classes:
        truth: Truth | ApiTruth = _several_turns(record, record.involved_classes)
    elif len(record.question) > 1:
        raise RecordError('"question" has several turns, but no "involved_classes"')
    elif record.function is None:
        raise RecordError('it has no "function"')
    else:
        schemas = read_schemas(record.function)
        gold = tuple(read_gold(one, schemas) for one in record.ground_truth or ())
        truth = Truth(tuple(call.expected for call in gold), right, gold, Scene(described=tuple(schemas.values())))
    if messages[0]["role"] != "system":
        messages = (Message(role="system", content=SYSTEM), *messages)
    is_null = not record.involved_classes and right == "decline"
    tags = {"split": split, "family": record.id.rpartition("_")[0] or split, "null": str(is_null).lower()}
    return Task(record.id, messages, truth, tags)


def _messages(turn: Sequence[_BfclMessage]) -> tuple[Message, ...]:
    if not turn or turn[-1].role != "user":
        raise RecordError('a turn of "question" does not end with a message of the user')
    return tuple(Message(role=message.role, content=message.content) for message in turn)


def _several_turns(record: _BfclRecord, classes: Sequence[str]) -> ApiTruth:
    """Return the truth of a record of several turns. Raises UserError if bfcl-eval is not installed."""
    modules, functions = find_classes(classes)
    late = [name for names in record.missed_function.values() for name in names]
    if unknown := [name for name in late if name not in functions]:
        raise RecordError(f'"missed_function" names {unknown[0]!r}, which is not a function of the task')
    added = {place: tuple(functions[name] for name in names) for place, names in record.missed_function.items()}
    answer, num = record.ground_truth or [], len(record.question)
    if len(answer) != num:
        raise RecordError(f'"ground_truth" has {len(answer)} turns, "question" {num}')
    turns = [calls for calls in answer if isinstance(calls, list)]
    if len(turns) < num:
        raise RecordError('"ground_truth" is not a list of calls for each turn')
    gold = tuple(tuple(read_gold(call, functions).expected for call in calls) for calls in turns)
    if not any(gold):
        raise RecordError('"ground_truth" has no call')
    return ApiTruth(
        fail_to_pass=tuple(f"turn {number}" for number, calls in enumerate(gold, 1) if calls),
        modules=modules,
        config=record.initial_config,
        extended="long_context" in record.id or "composite" in record.id,
        turns=tuple(() if not t and i in added else _messages(t) for i, t in enumerate(record.question)),
        gold=gold,
        schemas=tuple(schema for name, schema in functions.items() if name not in late),
        added=added,
    )


def read_gold(given: JSON, functions: Mapping[str, ToolSchema]) -> GoldCall:
    """Return a gold call, given as in a record. Raises RecordError, also if no such call fits its description.

    Text is `name(argument=value)`, with literals and arithmetic; values without a name follow the description's order.
    """
    if isinstance(given, str):
        node = _parse(given)
        name = ast.unparse(node.func)
    elif isinstance(given, dict) and len(given) == 1:
        ((name, arguments),) = given.items()
    else:
        raise RecordError('a call of "ground_truth" is not {name: {argument: [values]}}')
    if name not in functions:
        raise RecordError(f'"ground_truth" calls {name!r}, which is not a function of the task')
    parameters = functions[name]["function"]["parameters"]
    known: Mapping[str, Mapping[str, JSON]] = parameters["properties"]
    optional = frozenset[str]()
    if isinstance(given, str):
        accepted = _literals(node, [*known])
    elif isinstance(arguments, dict):
        accepted = {argument: _accepted(argument, values) for argument, values in arguments.items()}
        optional = frozenset(name for name, values in arguments.items() if isinstance(values, list) and "" in values)
    else:
        raise RecordError(f"the arguments of {name!r} are not an object")
    for argument, values in accepted.items():
        if argument not in known:
            raise RecordError(f"{name!r} has no argument {argument!r}")
        if argument not in optional and not any(fits(one, known[argument]) for one in values):
            raise RecordError(f"no value of {argument!r} is of its type, so that no call of {name!r} is right")
    if lacking := [argument for argument in parameters["required"] if argument not in accepted]:
        raise RecordError(f"{name!r} requires {lacking[0]!r}, which has no value")
    return GoldCall(name, accepted, optional)


def _accepted(argument: str, values: JSON) -> tuple[JSON, ...]:
    if not isinstance(values, list) or not values:
        raise RecordError(f"the values of {argument!r} are not a list")
    return tuple(choice for value in values if value != "" or len(values) == 1 for choice in _choices(value))


def _choices(value: JSON) -> list[JSON]:
    """Return all combinations of a value: each field of an object has a list of values, "" for none."""
    if isinstance(value, list):
        return [list(one) for one in _product([_choices(part) for part in value])]
    if not isinstance(value, dict):
        return [value]
    fields: list[list[dict[str, JSON]]] = []
    for name, options in value.items():
        given = options if isinstance(options, list) else [options]
        fields.append([{name: one} for part in given if part != "" for one in _choices(part)])
        fields[-1] += [{}] if "" in given else []
    return [{name: one for field in chosen for name, one in field.items()} for chosen in _product(fields)]


def _product(options: Sequence[Sequence[T]]) -> list[tuple[T, ...]]:
    if math.prod(map(len, options)) > MAX_CHOICES:
        raise RecordError(f"an argument may have more than {MAX_CHOICES} different values")
    return list(itertools.product(*options))


def _parse(text: str) -> ast.Call:
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        if isinstance(node := ast.parse(text, mode="eval").body, ast.Call):
            return node
    raise RecordError(f'{text[:80]!r} of "ground_truth" is not a call')


def _literals(call: ast.Call, names: Sequence[str]) -> dict[str, tuple[JSON, ...]]:
    """Return the arguments of a call; those without a name are those of the parameters `names`."""
    if len(call.args) > len(names):
        raise RecordError(f'{ast.unparse(call)[:80]!r} of "ground_truth" has more values than parameters')
    given = [*zip(names, call.args, strict=False), *((one.arg or "**", one.value) for one in call.keywords)]
    if len({name for name, _ in given}) < len(given):
        raise RecordError(f'{ast.unparse(call)[:80]!r} of "ground_truth" has an argument twice')
    return {name: (_literal(value),) for name, value in given}


def _literal(node: ast.expr) -> JSON:
    try:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            left, right = _literal(node.left), _literal(node.right)
            if isinstance(left, int | float) and isinstance(right, int | float):
                node = ast.Constant(_OPERATORS[type(node.op)](left, right))
        value: JSON = json.loads(json.dumps(ast.literal_eval(node)))
    except (ArithmeticError, ValueError, TypeError, RecursionError, MemoryError):
        raise RecordError(f'{ast.unparse(node)[:80]!r} of "ground_truth" is not a literal') from None
    return value
