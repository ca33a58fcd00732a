"""Tasks from files in the manner of BFCL: a question, functions, and calls with the values they may have.

One JSON object a line, `{"id", "question", "function", "ground_truth"}`:

    question      a list of messages, a list with one such list in it, or a text
    function      descriptions: name, description, parameters (a JSON schema; BFCL's own type names are read)
    ground_truth  calls in any order, `{name: {argument: [values that are right]}}`; "" among the values says
                  that the argument may be left out; an empty list: no call is right

The categories of BFCL without answers are known by their ids: in `irrelevance` (`live_irrelevance_0-0-0`) no
call is right, in `relevance` at least one that fits its description must be made. Any other record needs its
answer.

Nothing is executed: every call that fits its description is answered with `ok`. The gold calls of BFCL's
executed categories are texts, `name(argument=value)`; they are compared by their arguments, whatever their
`execution_result_type`.

A record with `involved_classes` has several turns (`ludus.worlds.functions.turns`), and its calls do run.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, TypeVar

from ludus.errors import UserError
from ludus.rewards.extract import NotJson, read_json
from ludus.tools.base import ToolSchema
from ludus.tools.fetch import json_lines
from ludus.types import JSON, Message, Task
from ludus.worlds.functions.api.schemas import Fault, read_messages, read_schemas
from ludus.worlds.functions.generate import SYSTEM
from ludus.worlds.functions.gold_calls import GoldCall, Right, Truth
from ludus.worlds.functions.tool_distractors import ListedTool, fits
from ludus.worlds.functions.turns import read_call, read_turns

BadLines = Literal["refuse", "skip"]
T = TypeVar("T")

_LOG: Final = logging.getLogger(__name__)
_MOST_NAMED: Final = 20

MOST_CHOICES = 1000
"""Combinations of the values that one argument may have, at most."""


def load_tasks(path: Path, answers: Path | None, split: str, bad_lines: BadLines = "refuse") -> tuple[Task, ...]:
    """The tasks of a file. `answers` is a file with `{"id", "ground_truth"}` where they are kept apart.

    Raises UserError, with the lines, for records that are none, ids given twice, or ids without answer; if
    `bad_lines` is `skip`, these are logged and left out.
    """
    faults: list[tuple[Path, int, Fault]] = []
    given = None if answers is None else dict(_answers(answers, faults))
    tasks: dict[str, Task] = {}
    for line, record in _records(path):
        try:
            task = _task(_read(record), given, split)
            if task.id in tasks:
                raise Fault(f"the id {task.id!r} was there before")
        except Fault as fault:
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


def _answers(path: Path, faults: list[tuple[Path, int, Fault]]) -> Iterator[tuple[str, JSON]]:
    for line, text in _records(path):
        try:
            record = _read(text)
            if not isinstance(record.get("id"), str) or "ground_truth" not in record:
                raise Fault('it needs "id" and "ground_truth"')
        except Fault as fault:
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
        raise Fault(f"it is no JSON ({error})") from None
    if not isinstance(record, dict):
        raise Fault("it is no JSON object")
    return record


def _error(faults: Sequence[tuple[Path, int, Fault]]) -> UserError:
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
        raise Fault('"id" is not a text')
    category = _category(id_)
    if answers is None and "ground_truth" in record:
        truth = record["ground_truth"]
    elif answers is not None and id_ in answers:
        truth = answers[id_]
    elif category:
        truth = []
    elif answers is None:
        raise Fault('it has no "ground_truth"')
    else:
        raise Fault(f"the file of answers has none for {id_!r}")
    if "involved_classes" in record:
        turns = read_turns(id_, record, truth)
        return Task(id_, _opened(turns.turns[0]), turns, _tags(id_, split, null=False))
    schemas = read_schemas(record.get("function"))
    gold = _gold(truth, schemas)
    kind: Right = "call" if gold else "any_call" if category == "relevance" else "decline"
    messages = _opened(read_messages(record.get("question")))
    right = Truth(
        calls=tuple(call.expected for call in gold),
        right=kind,
        gold=gold,
        scene=ListedTool(tuple(schemas.values())),
        shape="; ".join(sorted(call.name for call in gold)),
        form=messages[-1]["content"],
    )
    return Task(id_, messages, right, _tags(id_, split, null=kind == "decline"))


def _opened(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The messages, after the world's system message unless they have one."""
    if messages[0]["role"] == "system":
        return messages
    return (Message(role="system", content=SYSTEM), *messages)


def _tags(id_: str, split: str, null: bool) -> dict[str, str]:
    return {"split": split, "family": id_.rpartition("_")[0] or split, "null": str(null).lower()}


def _category(id_: str) -> str:
    """The category of BFCL that an id names, where it is one without answers; else empty."""
    found = re.search(r"(?:^|_)(ir)?relevance(?:_|$)", id_)
    return "" if found is None else "irrelevance" if found[1] else "relevance"


def _gold(truth: JSON, schemas: Mapping[str, ToolSchema]) -> tuple[GoldCall, ...]:
    if not isinstance(truth, list):
        raise Fault('"ground_truth" is not a list')
    return tuple(_call(one, schemas) for one in truth)


def _call(given: JSON, schemas: Mapping[str, ToolSchema]) -> GoldCall:
    if isinstance(given, str):
        call = read_call(given, schemas)
        return GoldCall(call.name, {name: (value,) for name, value in call.arguments.items()})
    if not isinstance(given, dict) or len(given) != 1:
        raise Fault('a call of "ground_truth" is not {name: {argument: [values]}}')
    ((name, arguments),) = given.items()
    if name not in schemas:
        raise Fault(f'"ground_truth" calls {name!r}, which is no function of the task')
    parameters = schemas[name]["function"]["parameters"]
    known = parameters["properties"]
    if not isinstance(arguments, dict):
        raise Fault(f"the arguments of {name!r} are no object")
    accepted: dict[str, tuple[JSON, ...]] = {}
    optional: set[str] = set()
    for argument, values in arguments.items():
        if argument not in known:
            raise Fault(f"{name!r} has no argument {argument!r}")
        if not isinstance(values, list) or not values:
            raise Fault(f"the values of {argument!r} are not a list")
        if "" in values:
            optional.add(argument)
        found = [choice for value in values if value != "" or len(values) == 1 for choice in _choices(value)]
        accepted[argument] = tuple(found)
        if argument not in optional and not any(fits(one, known[argument]) for one in found):
            raise Fault(f"no value of {argument!r} is of its type, so that no call of {name!r} is right")
    if lacking := [argument for argument in parameters["required"] if argument not in accepted]:
        raise Fault(f"{name!r} requires {lacking[0]!r}, which has no value")
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
        {name: one for name, (there, one) in zip(value, chosen, strict=True) if there} for chosen in _product(fields)
    ]


def _product(options: Sequence[Sequence[T]]) -> list[tuple[T, ...]]:
    if math.prod(map(len, options)) > MOST_CHOICES:
        raise Fault(f"an argument may have more than {MOST_CHOICES} different values")
    return list(itertools.product(*options))
