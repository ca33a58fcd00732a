"""Tasks of several turns, as the files `multi_turn_*` of BFCL hold them.

question          a list of turns, each a list of messages; an empty turn where functions are added
involved_classes  the API classes whose functions are offered
initial_config    what an object of each class begins with
missed_function   names of functions by the turn from which on they are offered; else from the start
ground_truth      for each turn a list of calls as text, `mv(source='a', destination='b')`
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Final

from ludus.rewards.paper_rewards import ExpectedCall
from ludus.tools.base import ToolSchema
from ludus.types import JSON, Message
from ludus.worlds.functions.api.apis import ApiTruth, described_functions, modules_of
from ludus.worlds.functions.api.schemas import Fault, read_messages
from ludus.worlds.functions.tool_distractors import fits

_OPERATORS: Final[Mapping[type[ast.operator], Callable[[float, float], float]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def read_turns(id_: str, record: Mapping[str, JSON], answer: JSON) -> ApiTruth:
    """Return the truth of a record with several turns.

    Raises Fault for a record that has none, and UserError if bfcl-eval is not installed.
    """
    classes, config = _names(record.get("involved_classes")), record.get("initial_config", {})
    if not isinstance(config, dict):
        raise Fault('"initial_config" is not an object')
    modules = modules_of(classes)
    functions = described_functions(classes)
    added = _added(record.get("missed_function", {}), functions)
    question = record.get("question")
    if not isinstance(question, list) or not question:
        raise Fault('"question" is not a list of turns')
    turns = tuple(_turn(turn, place in added) for place, turn in enumerate(question))
    gold = _gold(answer, functions, len(turns))
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


def read_call(text: JSON, functions: Mapping[str, ToolSchema]) -> ExpectedCall:
    """Return the call that a text is: `name(argument=value)`, with literals and sums of them as values.

    Values without a name are those of the parameters in the order of the description. Raises Fault.
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
        arguments[argument] = _value(value)
        if not fits(arguments[argument], known[argument]):
            raise Fault(f"no call of {name!r} is right: {argument!r} has another type in its description")
    if lacking := [argument for argument in parameters["required"] if argument not in arguments]:
        raise Fault(f"{name!r} requires {lacking[0]!r}, which has no value")
    return ExpectedCall(name, arguments)


def _names(given: JSON) -> list[str]:
    if not isinstance(given, list) or not given or not all(isinstance(name, str) for name in given):
        raise Fault('"involved_classes" is not a list of names')
    return [str(name) for name in given]


def _added(given: JSON, functions: Mapping[str, ToolSchema]) -> dict[int, tuple[ToolSchema, ...]]:
    """The functions that are offered later, by the place of their turn."""
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


def _turn(given: JSON, is_added: bool) -> tuple[Message, ...]:
    return () if given == [] and is_added else read_messages(given)


def _gold(answer: JSON, functions: Mapping[str, ToolSchema], length: int) -> tuple[tuple[ExpectedCall, ...], ...]:
    if not isinstance(answer, list) or not all(isinstance(calls, list) for calls in answer):
        raise Fault('"ground_truth" is not a list of calls for each turn')
    if len(answer) != length:
        raise Fault(f'"ground_truth" has {len(answer)} turns, "question" {length}')
    turns = [calls if isinstance(calls, list) else [] for calls in answer]
    if not any(turns):
        raise Fault('"ground_truth" has no call')
    return tuple(tuple(read_call(text, functions) for text in calls) for calls in turns)


def _value(node: ast.expr) -> JSON:
    """The value of a literal, or of a sum, product or quotient of numbers."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(left, int | float) and isinstance(right, int | float):
            try:
                return _OPERATORS[type(node.op)](left, right)
            except (ZeroDivisionError, OverflowError):
                pass
    try:
        value: JSON = _plain(ast.literal_eval(node))
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise Fault(f'{ast.unparse(node)[:80]!r} of "ground_truth" is not a literal') from None
    return value


def _plain(value: object) -> JSON:
    """A literal as JSON: tuples become lists. Raises ValueError for others, such as sets."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {str(key): _plain(one) for key, one in value.items()}
    raise ValueError("not JSON")
