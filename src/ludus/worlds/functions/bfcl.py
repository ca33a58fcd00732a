"""Tasks from files in the format of BFCL: JSON lines with a question, functions and the right calls.

    id
    question      a list of messages, a list with one such list, or a text
    function      descriptions: name, description, parameters (a JSON schema, also with BFCL's type names)
    ground_truth  calls in any order, `{name: {argument: [right values]}}`, with "" among the values of an
                  optional argument, or as text, `name(argument=value)`; an empty list: no call is right

The categories without answers are recognised by their ids: in `irrelevance` (`live_irrelevance_0-0-0`) no
call is right, in `relevance` any call that fits its description. No function is executed: each call that fits
its description is answered with `ok`.

Records of several turns (`multi_turn_*`) have these fields instead, and their calls are executed:

    question          a list of turns, each a list of messages; an empty turn if it adds functions
    involved_classes  the API classes whose functions are offered
    initial_config    the initial state of an object of each class
    missed_function   names of functions by the turn that adds them; all others are offered from the start
    ground_truth      for each turn a list of calls as text, `mv(source='a', destination='b')`
"""

from __future__ import annotations

import ast
import itertools
import logging
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, TypeVar

from ludus.errors import UserError
from ludus.rewards.extract import NotJson, read_json
from ludus.rewards.paper_rewards import ExpectedCall
from ludus.tools.base import ToolSchema
from ludus.tools.fetch import json_lines
from ludus.types import JSON, Message, Task
from ludus.worlds.functions.bfcl_api import ApiTruth, Fault, described_functions, modules_of, read_schemas
from ludus.worlds.functions.catalogue import Scene
from ludus.worlds.functions.generate import SYSTEM
from ludus.worlds.functions.gold_calls import GoldCall, Right, Truth
from ludus.worlds.functions.tools import fits

BadLines = Literal["refuse", "skip"]
T = TypeVar("T")

_LOG: Final = logging.getLogger(__name__)
MAX_NAMED: Final = 20
"""Maximum number of faults in an error message."""
MAX_CHOICES: Final = 1000
"""Maximum number of combinations of the values of one argument."""
_OPERATORS: Final[Mapping[type[ast.operator], Callable[[float, float], float]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def load_tasks(path: Path, answers: Path | None, split: str, bad_lines: BadLines = "refuse") -> tuple[Task, ...]:
    """Return the tasks of a file. `answers` is an optional separate file with `{"id", "ground_truth"}`.

    Raises UserError, with the lines, for invalid records, repeated ids, and missing answers; if `bad_lines`
    is `skip`, these are logged and skipped.
    """
    faults: list[tuple[Path, int, Fault]] = []
    given = None if answers is None else dict(_answers(answers, faults))
    tasks: dict[str, Task] = {}
    for line, text in _lines(path):
        try:
            task = _task(_record(text), given, split)
            if task.id in tasks:
                raise Fault(f"the id {task.id!r} was there before")
            tasks[task.id] = task
        except Fault as fault:
            faults.append((path, line, fault))
    if faults and bad_lines == "refuse":
        named = [f"{place}, line {line}, is not a task: {reason}" for place, line, reason in faults[:MAX_NAMED]]
        more = f" And {len(faults) - MAX_NAMED} more lines." if len(faults) > MAX_NAMED else ""
        raise UserError(
            f"{'. '.join(named)}.{more}",
            'A line is {"id", "question", "function", "ground_truth"} as in BFCL; '
            "env.settings.data_bad_lines = 'skip' skips invalid lines.",
        )
    for place, line, reason in faults:
        _LOG.warning("%s, line %d, is skipped: %s.", place, line, reason)
    if not tasks:
        raise UserError(f"{path} holds no tasks.", "It needs one JSON object a line.")
    return tuple(tasks.values())


def _answers(path: Path, faults: list[tuple[Path, int, Fault]]) -> Iterator[tuple[str, JSON]]:
    for line, text in _lines(path):
        try:
            record = _record(text)
            if not isinstance(record.get("id"), str) or "ground_truth" not in record:
                raise Fault('it needs "id" and "ground_truth"')
            yield str(record["id"]), record["ground_truth"]
        except Fault as fault:
            faults.append((path, line, fault))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, with their numbers."""
    try:
        lines = json_lines(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}.", "Check env.settings.data.") from error
    yield from ((number, text) for number, text in enumerate(lines, 1) if text.strip())


def _record(text: str) -> dict[str, JSON]:
    try:
        record = read_json(text)
    except NotJson as error:
        raise Fault(f"it is not JSON ({error})") from None
    if not isinstance(record, dict):
        raise Fault("it is not a JSON object")
    return record


def _task(record: Mapping[str, JSON], answers: Mapping[str, JSON] | None, split: str) -> Task:
    id_ = record.get("id")
    if not isinstance(id_, str) or not id_:
        raise Fault('"id" is not a text')
    found = re.search(r"(?:^|_)(ir)?relevance(?:_|$)", id_)
    if answers is None and "ground_truth" in record:
        answer = record["ground_truth"]
    elif answers is not None and id_ in answers:
        answer = answers[id_]
    elif found:
        answer = []
    else:
        raise Fault('it has no "ground_truth"' if answers is None else f"the file of answers has none for {id_!r}")
    truth: Truth | ApiTruth
    if "involved_classes" in record:
        truth = _read_turns(id_, record, answer)
        messages = truth.turns[0]
    else:
        schemas = read_schemas(record.get("function"))
        if not isinstance(answer, list):
            raise Fault('"ground_truth" is not a list')
        gold = tuple(_gold_call(one, schemas) for one in answer)
        right: Right = "call" if gold else "any_call" if found and not found[1] else "decline"
        messages = _messages(record.get("question"))
        truth = Truth(
            calls=tuple(call.expected for call in gold),
            right=right,
            gold=gold,
            scene=Scene(described=tuple(schemas.values())),
            shape="; ".join(sorted(call.name for call in gold)),
            form=messages[-1]["content"],
        )
    if messages[0]["role"] != "system":
        messages = (Message(role="system", content=SYSTEM), *messages)
    is_null = isinstance(truth, Truth) and truth.right == "decline"
    tags = {"split": split, "family": id_.rpartition("_")[0] or split, "null": str(is_null).lower()}
    return Task(id_, messages, truth, tags)


def _messages(question: JSON) -> tuple[Message, ...]:
    """Return the messages of one turn, the last one from the user."""
    if isinstance(question, str):
        return (Message(role="user", content=question),)
    if isinstance(question, list) and question and isinstance(question[0], list):
        if len(question) > 1:
            raise Fault('"question" has several turns, and one is read')
        question = question[0]
    if not isinstance(question, list) or not question:
        raise Fault('"question" is neither a text nor a list of messages')
    messages = tuple(map(_message, question))
    if messages[-1]["role"] != "user":
        raise Fault('the last message of "question" is not from the user')
    return messages


def _message(given: JSON) -> Message:
    role, content = (given.get("role"), given.get("content")) if isinstance(given, dict) else (None, None)
    if not isinstance(content, str):
        raise Fault('a message of "question" has no "content"')
    for known in ("system", "user", "assistant"):
        if role == known:
            return Message(role=known, content=content)
    raise Fault(f'a message of "question" has the role {role!r}')


def _gold_call(given: JSON, schemas: Mapping[str, ToolSchema]) -> GoldCall:
    if isinstance(given, str):
        call = read_call(given, schemas)
        return GoldCall(call.name, {name: (value,) for name, value in call.arguments.items()})
    if not isinstance(given, dict) or len(given) != 1:
        raise Fault('a call of "ground_truth" is not {name: {argument: [values]}}')
    ((name, arguments),) = given.items()
    if name not in schemas:
        raise Fault(f'"ground_truth" calls {name!r}, which is not a function of the task')
    parameters = schemas[name]["function"]["parameters"]
    known = parameters["properties"]
    if not isinstance(arguments, dict):
        raise Fault(f"the arguments of {name!r} are not an object")
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
    """Return all combinations of a value: each field of an object has a list of values, "" for none."""
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
    if math.prod(map(len, options)) > MAX_CHOICES:
        raise Fault(f"an argument may have more than {MAX_CHOICES} different values")
    return list(itertools.product(*options))


def _read_turns(id_: str, record: Mapping[str, JSON], answer: JSON) -> ApiTruth:
    """Return the truth of a record of several turns. Raises UserError if bfcl-eval is not installed."""
    names, config, question = record.get("involved_classes"), record.get("initial_config", {}), record.get("question")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise Fault('"involved_classes" is not a list of names')
    if not isinstance(config, dict):
        raise Fault('"initial_config" is not an object')
    classes = list(map(str, names))
    modules, functions = modules_of(classes), described_functions(classes)
    added = _added(record.get("missed_function", {}), functions)
    if not isinstance(question, list) or not question:
        raise Fault('"question" is not a list of turns')
    turns = tuple(() if turn == [] and place in added else _messages(turn) for place, turn in enumerate(question))
    gold = _gold_turns(answer, functions, len(turns))
    late = {schema["function"]["name"] for schemas in added.values() for schema in schemas}
    return ApiTruth(
        fail_to_pass=tuple(f"turn {number}" for number, calls in enumerate(gold, 1) if calls),
        modules=modules,
        config=config,
        extended="long_context" in id_ or "composite" in id_,
        turns=turns,
        gold=gold,
        schemas=tuple(schema for name, schema in functions.items() if name not in late),
        added=added,
    )


def _added(given: JSON, functions: Mapping[str, ToolSchema]) -> dict[int, tuple[ToolSchema, ...]]:
    """Return the functions that later turns add, by the place of the turn."""
    if not isinstance(given, dict):
        raise Fault('"missed_function" is not an object')
    found: dict[int, tuple[ToolSchema, ...]] = {}
    for place, names in given.items():
        if not place.isdecimal() or not isinstance(names, list):
            raise Fault('"missed_function" is not lists of names by turn')
        if odd := [name for name in names if name not in functions]:
            raise Fault(f'"missed_function" names {odd[0]!r}, which is not a function of the task')
        found[int(place)] = tuple(functions[str(name)] for name in names)
    return found


def _gold_turns(answer: JSON, functions: Mapping[str, ToolSchema], num: int) -> tuple[tuple[ExpectedCall, ...], ...]:
    turns = [calls for calls in answer if isinstance(calls, list)] if isinstance(answer, list) else []
    if not isinstance(answer, list) or len(turns) != len(answer):
        raise Fault('"ground_truth" is not a list of calls for each turn')
    if len(turns) != num:
        raise Fault(f'"ground_truth" has {len(turns)} turns, "question" {num}')
    if not any(turns):
        raise Fault('"ground_truth" has no call')
    return tuple(tuple(read_call(text, functions) for text in calls) for calls in turns)


def read_call(text: JSON, functions: Mapping[str, ToolSchema]) -> ExpectedCall:
    """Return the call that a text is: `name(argument=value)`, with literals and arithmetic as values.

    Values without a name belong to the parameters in the order of the description. Raises Fault.
    """
    try:
        node = ast.parse(text, mode="eval").body if isinstance(text, str) else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        node = None
    if not isinstance(node, ast.Call):
        raise Fault(f'{str(text)[:80]!r} of "ground_truth" is not a call')
    name = ast.unparse(node.func)
    if name not in functions:
        raise Fault(f'"ground_truth" calls {name!r}, which is not a function of the task')
    parameters = functions[name]["function"]["parameters"]
    known: Mapping[str, Mapping[str, JSON]] = parameters["properties"]
    if len(node.args) > len(known):
        raise Fault(f'"ground_truth" calls {name!r} with more values than it has parameters')
    given = [*zip(known, node.args, strict=False), *((one.arg or "**", one.value) for one in node.keywords)]
    arguments: dict[str, JSON] = {}
    for argument, value in given:
        if argument not in known or argument in arguments:
            raise Fault(f'"ground_truth" calls {name!r} with the argument {argument!r}, which does not fit')
        arguments[argument] = _literal(value)
        if not fits(arguments[argument], known[argument]):
            raise Fault(f"no call of {name!r} is right: {argument!r} has another type in its description")
    if lacking := [argument for argument in parameters["required"] if argument not in arguments]:
        raise Fault(f"{name!r} requires {lacking[0]!r}, which has no value")
    return ExpectedCall(name, arguments)


def _literal(node: ast.expr) -> JSON:
    """Return the value of a literal, or of arithmetic on numbers."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _literal(node.left), _literal(node.right)
        if isinstance(left, int | float) and isinstance(right, int | float):
            try:
                return _OPERATORS[type(node.op)](left, right)
            except (ZeroDivisionError, OverflowError):
                pass
    try:
        return _plain(ast.literal_eval(node))
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise Fault(f'{ast.unparse(node)[:80]!r} of "ground_truth" is not a literal') from None


def _plain(value: object) -> JSON:
    """Return a literal as JSON, with tuples as lists. Raises ValueError for others, such as sets."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {str(key): _plain(one) for key, one in value.items()}
    raise ValueError("not JSON")
