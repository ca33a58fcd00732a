"""Tasks from files in the manner of BFCL: a question, functions, and calls with the values they may have.

One JSON object a line, `{"id", "question", "function", "ground_truth"}`:

    question      a list of messages, a list with one such list in it, or a text
    function      descriptions: name, description, parameters (a JSON schema; BFCL's own type names are read)
    ground_truth  calls in any order, `{name: {argument: [values that are right]}}`; "" among the values says
                  that the argument may be left out; an empty list: no call is right

The categories of BFCL without answers are known by their ids: in `irrelevance` (`live_irrelevance_0-0-0`) no
call is right, in `relevance` at least one that fits its description must be made. Any other record needs its
answer.

Nothing is executed: every call that fits its description is answered with `ok`.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, TypeVar

from ludus.envs.functions.generate import SYSTEM
from ludus.envs.functions.gold import GoldCall, Right, Truth
from ludus.envs.functions.offers import Listed, fits
from ludus.errors import UserError
from ludus.rewards.evidence import NotJson, read_json
from ludus.tools.base import FunctionSchema, ToolSchema
from ludus.tools.lines import json_lines
from ludus.types import JSON, Message, Task

BadLines = Literal["refuse", "skip"]
T = TypeVar("T")

_LOG: Final = logging.getLogger(__name__)
_MOST_NAMED: Final = 20

_TYPES = {"dict": "object", "float": "number", "double": "number", "long": "integer", "tuple": "array"}
_KNOWN = frozenset({"object", "number", "integer", "string", "boolean", "array"})
MOST_CHOICES = 1000
"""Combinations of the values that one argument may have, at most."""


class _Fault(Exception):
    """What is wrong with a record."""


def load_tasks(
    path: Path, answers: Path | None, split: str, bad_lines: BadLines = "refuse"
) -> tuple[Task, ...]:
    """The tasks of a file. `answers` is a file with `{"id", "ground_truth"}` where they are kept apart.

    Raises UserError, with the lines, for records that are none, ids given twice, or ids without answer; if
    `bad_lines` is `skip`, these are logged and left out.
    """
    faults: list[tuple[Path, int, _Fault]] = []
    given = None if answers is None else dict(_answers(answers, faults))
    tasks: dict[str, Task] = {}
    for line, record in _records(path):
        try:
            task = _task(_read(record), given, split)
            if task.id in tasks:
                raise _Fault(f"the id {task.id!r} was there before")
        except _Fault as fault:
            faults.append((path, line, fault))
            continue
        tasks[task.id] = task
    if faults and bad_lines == "refuse":
        raise _error(faults)
    for place, line, reason in faults:
        _LOG.warning("%s, line %d, is left out: %s.", place, line, reason)
    if not tasks:
        raise UserError(f"{path} holds no tasks.", "It needs one JSON object a line.")
    return tuple(tasks.values())


def _answers(path: Path, faults: list[tuple[Path, int, _Fault]]) -> Iterator[tuple[str, JSON]]:
    for line, text in _records(path):
        try:
            record = _read(text)
            if not isinstance(record.get("id"), str) or "ground_truth" not in record:
                raise _Fault('it needs "id" and "ground_truth"')
        except _Fault as fault:
            faults.append((path, line, fault))
            continue
        yield str(record["id"]), record["ground_truth"]


def _records(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers."""
    try:
        lines = json_lines(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}.", "Check env.settings.data.") from error
    yield from ((number, text) for number, text in enumerate(lines, 1) if text.strip())


def _read(text: str) -> dict[str, JSON]:
    try:
        record = read_json(text)
    except NotJson as error:
        raise _Fault(f"it is no JSON ({error})") from None
    if not isinstance(record, dict):
        raise _Fault("it is no JSON object")
    return record


def _error(faults: Sequence[tuple[Path, int, _Fault]]) -> UserError:
    named = [f"{path}, line {line}, is not a task: {fault}" for path, line, fault in faults[:_MOST_NAMED]]
    more = f" And {len(faults) - _MOST_NAMED} more lines." if len(faults) > _MOST_NAMED else ""
    return UserError(
        f"{'. '.join(named)}.{more}",
        'A line is {"id", "question", "function", "ground_truth"} as BFCL has them; '
        "env.settings.data_bad_lines = 'skip' leaves the others out.",
    )


def _task(record: Mapping[str, JSON], answers: Mapping[str, JSON] | None, split: str) -> Task:
    id_ = record.get("id")
    if not isinstance(id_, str) or not id_:
        raise _Fault('"id" is not a text')
    schemas = _schemas(record.get("function"))
    category = _category(id_)
    if answers is None and "ground_truth" in record:
        truth = record["ground_truth"]
    elif answers is not None and id_ in answers:
        truth = answers[id_]
    elif category:
        truth = []
    elif answers is None:
        raise _Fault('it has no "ground_truth"')
    else:
        raise _Fault(f"the file of answers has none for {id_!r}")
    gold = _gold(truth, schemas)
    kind: Right = "call" if gold else "any_call" if category == "relevance" else "decline"
    messages = _messages(record.get("question"))
    if messages[0]["role"] != "system":
        messages = (Message(role="system", content=SYSTEM), *messages)
    right = Truth(
        calls=tuple(call.expected for call in gold),
        right=kind,
        gold=gold,
        scene=Listed(tuple(schemas.values())),
        shape="; ".join(sorted(call.name for call in gold)),
        form=messages[-1]["content"],
    )
    family = id_.rpartition("_")[0] or split
    return Task(
        id_, messages, right, {"split": split, "family": family, "null": str(kind == "decline").lower()}
    )


def _category(id_: str) -> str:
    """The category of BFCL that an id names, where it is one without answers; else empty."""
    found = re.search(r"(?:^|_)(ir)?relevance(?:_|$)", id_)
    return "" if found is None else "irrelevance" if found[1] else "relevance"


def _messages(question: JSON) -> tuple[Message, ...]:
    if isinstance(question, str):
        return (Message(role="user", content=question),)
    if isinstance(question, list) and question and isinstance(question[0], list):
        if len(question) > 1:
            raise _Fault('"question" has several turns, and one is read')
        question = question[0]
    if not isinstance(question, list) or not question:
        raise _Fault('"question" is neither a text nor a list of messages')
    return tuple(map(_message, question))


def _message(given: JSON) -> Message:
    role, content = (given.get("role"), given.get("content")) if isinstance(given, dict) else (None, None)
    if not isinstance(content, str):
        raise _Fault('a message of "question" has no "content"')
    if role == "system":
        return Message(role="system", content=content)
    if role == "user":
        return Message(role="user", content=content)
    raise _Fault(f'a message of "question" has the role {role!r}')


def _schemas(functions: JSON) -> dict[str, ToolSchema]:
    found: dict[str, ToolSchema] = {}
    for function in functions if isinstance(functions, list) else [functions]:
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            raise _Fault('"function" is not a list of descriptions with names')
        if name in found:
            raise _Fault(f"two functions are called {name!r}")
        parameters = _schema(function.get("parameters", {}))
        if not isinstance(parameters, dict) or not isinstance(parameters.get("properties", {}), dict):
            raise _Fault(f'"parameters" of {name!r} is not a JSON schema')
        parameters = {"type": "object", "properties": {}, "required": [], **parameters}
        text = str(function.get("description", ""))
        described = FunctionSchema(name=name, description=text, parameters=parameters)
        found[name] = ToolSchema(type="function", function=described)
    return found


def _schema(given: JSON) -> JSON:
    """The schema with the type names of JSON schema; a type that is unknown is left out and not checked."""
    if not isinstance(given, dict):
        return given
    schema = {key: value for key, value in given.items() if key != "type"}
    type_ = _TYPES.get(str(given.get("type")), str(given.get("type")))
    if type_ in _KNOWN:
        schema["type"] = type_
    properties = schema.get("properties")
    if isinstance(properties, dict):
        schema["properties"] = {name: _schema(one) for name, one in properties.items()}
    if "items" in schema:
        schema["items"] = _schema(schema["items"])
    return schema


def _gold(truth: JSON, schemas: Mapping[str, ToolSchema]) -> tuple[GoldCall, ...]:
    if not isinstance(truth, list):
        raise _Fault('"ground_truth" is not a list')
    return tuple(_call(one, schemas) for one in truth)


def _call(given: JSON, schemas: Mapping[str, ToolSchema]) -> GoldCall:
    if not isinstance(given, dict) or len(given) != 1:
        raise _Fault('a call of "ground_truth" is not {name: {argument: [values]}}')
    ((name, arguments),) = given.items()
    if name not in schemas:
        raise _Fault(f'"ground_truth" calls {name!r}, which is no function of the task')
    parameters = schemas[name]["function"]["parameters"]
    known = parameters["properties"]
    if not isinstance(arguments, dict):
        raise _Fault(f"the arguments of {name!r} are no object")
    accepted: dict[str, tuple[JSON, ...]] = {}
    optional: set[str] = set()
    for argument, values in arguments.items():
        if argument not in known:
            raise _Fault(f"{name!r} has no argument {argument!r}")
        if not isinstance(values, list) or not values:
            raise _Fault(f"the values of {argument!r} are not a list")
        if "" in values:
            optional.add(argument)
        found = [choice for value in values if value != "" or len(values) == 1 for choice in _choices(value)]
        accepted[argument] = tuple(found)
        if argument not in optional and not any(fits(one, known[argument]) for one in found):
            raise _Fault(f"no value of {argument!r} is of its type, so that no call of {name!r} is right")
    if lacking := [argument for argument in parameters["required"] if argument not in accepted]:
        raise _Fault(f"{name!r} requires {lacking[0]!r}, which has no value")
    return GoldCall(name, accepted, frozenset(optional))


def _choices(value: JSON) -> list[JSON]:
    """All values that one stands for: inside objects every field has a list of values, "" for none."""
    if isinstance(value, list):
        return [list(one) for one in _product([_choices(part) for part in value])]
    if not isinstance(value, dict):
        return [value]
    fields = []
    for options in value.values():
        given = options if isinstance(options, list) else [options]
        fields.append([(True, one) for part in given if part != "" for one in _choices(part)])
        if "" in given:
            fields[-1].append((False, ""))
    return [
        {name: one for name, (there, one) in zip(value, chosen, strict=True) if there}
        for chosen in _product(fields)
    ]


def _product(options: Sequence[Sequence[T]]) -> list[tuple[T, ...]]:
    if math.prod(map(len, options)) > MOST_CHOICES:
        raise _Fault(f"an argument may have more than {MOST_CHOICES} different values")
    return list(itertools.product(*options))
