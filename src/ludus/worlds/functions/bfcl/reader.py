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
"""

from __future__ import annotations

import ast
import itertools
import json
import logging
import math
import operator
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, JsonValue, NonNegativeInt, ValidationError

from ludus.envs.task_files import Record, RecordError, parse_record, read_lines, text_field
from ludus.errors import UserError
from ludus.tools.base import ToolSchema
from ludus.types import JSON, Message, Task
from ludus.worlds.functions.bfcl.api_env import ApiTruth, Description, find_classes, read_schemas
from ludus.worlds.functions.catalogue import Scene, fits
from ludus.worlds.functions.generate import SYSTEM
from ludus.worlds.functions.grader import GoldCall, Right, Truth

BadLines = Literal["refuse", "skip"]
T = TypeVar("T")

_LOG: Final = logging.getLogger(__name__)
MAX_NAMED: Final = 20
"""Maximum number of faults in an error message."""
MAX_CHOICES: Final = 1000
"""Maximum number of combinations of the values of one argument."""
_OPERATORS: Final = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def _as_turns(question: object) -> object:
    """Return the question as a list of turns."""
    if isinstance(question, str):
        return [[{"role": "user", "content": question}]]
    is_one = isinstance(question, list) and bool(question) and isinstance(question[0], dict)
    return [question] if is_one else question


def _as_list(functions: object) -> object:
    return [functions] if isinstance(functions, dict) else functions


class _BfclMessage(BaseModel):
    role: Literal["system", "user", "assistant"]
    content: str


class _BfclRecord(BaseModel):
    """Fields of a line, described in the module docstring. `ground_truth` may be in another file."""

    id: str = Field(min_length=1)
    question: Annotated[list[list[_BfclMessage]], BeforeValidator(_as_turns), Field(min_length=1)]
    function: Annotated[list[Description], BeforeValidator(_as_list)] | None = None
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
    """Raise UserError with the invalid lines, or log them."""
    if faults and bad_lines == "refuse":
        named = [f"{place}, is not a task: {reason}" for place, reason in faults[:MAX_NAMED]]
        more = f" And {len(faults) - MAX_NAMED} more lines." if len(faults) > MAX_NAMED else ""
        raise UserError(
            f"{'. '.join(named)}.{more}",
            'A line is {"id", "question", "function", "ground_truth"} as in BFCL; '
            "env.settings.data_bad_lines = 'skip' skips invalid lines.",
        )
    for place, reason in faults:
        _LOG.warning("%s, is skipped: %s.", place, reason)


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
    if odd := [name for name in late if name not in functions]:
        raise RecordError(f'"missed_function" names {odd[0]!r}, which is not a function of the task')
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
    """Return the right values of an argument, with all combinations of their parts."""
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
