"""The functions, their signatures in a task (from the catalogue or changed), and the tools and state of an episode.

Generated values (identifiers, prices, dates) are hashes of the seed and the arguments, independent of the
order of calls: the same call returns the same values in every episode of a task.
"""

from __future__ import annotations

import hashlib
import json
import operator
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Final, Literal, TypeVar

from pydantic import TypeAdapter

from ludus.rewards.exact_match import normalise
from ludus.tools.base import ArgumentError, DescribedTool, FunctionSchema, ToolSchema
from ludus.types import JSON

T = TypeVar("T")
Row = dict[str, JSON]


def read_data(name: str, kind: type[T]) -> T:
    """Return a TOML file of the folder `data`, converted to a type, such as a dataclass with a field per table."""
    text = (files("ludus.worlds.functions") / "data" / name).read_text("utf-8")
    return TypeAdapter(kind).validate_python(tomllib.loads(text))


@dataclass(frozen=True, slots=True)
class ValueKind:
    """A kind of value; `data/values.toml` describes the fields."""

    type: str = "string"
    pool: Sequence[bool | int | float | str] = ()
    asks: Sequence[str] = ()
    letter: str = ""
    tail: str = ""
    checked: bool = True

    def identifier(self, number: int) -> str:
        return f"{self.letter}{number}{self.tail}"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tables of `data/values.toml`."""

    kinds: Mapping[str, ValueKind]
    choices: Mapping[str, Sequence[str]]
    aliases: Mapping[str, Sequence[str]]
    asks: Mapping[str, Sequence[str]]


@cache
def vocabulary() -> Vocabulary:
    """Return the kinds of values and the words for them."""
    return read_data("values.toml", Vocabulary)


@dataclass
class DomainState:
    """The state of one episode: rows by kind and identifier. `known` are kinds and identifiers that exist initially."""

    seed: int
    known: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        self._rows: dict[tuple[str, str], Row] = {one: {} for one in self.known}
        self.operations: dict[str, Callable[..., JSON]] = {"number": self.number, "pick": self.pick}
        self.operations |= {"issue": self.issue, "drop": self.drop, **_OPERATIONS}

    def number(self, low: int, high: int, *parts: JSON) -> int:
        """Return a number from `low` to `high`, the same for equal parts."""
        text = "\n".join([str(self.seed), *map(_canonical, parts)])
        drawn = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
        return low + drawn % (high - low + 1)

    def pick(self, name: str, *parts: JSON) -> JSON:
        """Return a value of a kind, or of other choices by name, the same for equal parts."""
        words = vocabulary()
        choices: Sequence[JSON] = words.kinds[name].pool if name in words.kinds else words.choices[name]
        return choices[self.number(0, len(choices) - 1, *parts)]

    def issue(self, kind: str, *parts: JSON) -> str:
        """Return the identifier for these parts and add it to `known`."""
        made = vocabulary().kinds[kind].identifier(self.number(1000, 9999, kind, *_flatten(parts)))
        self._rows.setdefault((kind, made), {})
        return made

    def row(self, kind: str, key: str) -> Row:
        """Return the row of a key, such as a room. Raises LookupError for an unknown identifier."""
        if not vocabulary().kinds[kind].letter:
            return self._rows.setdefault((kind, normalise(key) or key), {})
        if (kind, key) not in self._rows:
            raise LookupError(f"there is no {kind} {key!r}")
        return self._rows[kind, key]

    def drop(self, kind: str, key: str) -> str:
        """Delete the row of a known identifier, and return the identifier."""
        del self._rows[kind, key]
        return key


def run_steps(steps: Mapping[str, JSON], state: DomainState, arguments: Mapping[str, JSON]) -> Row:
    """Return the result of the steps of a function; `data/functions.toml` describes their form."""
    scope: Row = {**arguments}
    for key, expression in steps.items():
        value = _evaluate(expression, scope, state)
        kind, *place = key.split(".")
        if not place:
            scope[key] = value
        else:
            changed = value if place[1] == "*" and isinstance(value, dict) else {place[1]: value}
            state.row(kind, str(scope[place[0]])).update(changed)
    return {key: scope[key] for key in steps if "." not in key and key[0] != "_"}


def _evaluate(expression: JSON, scope: Row, state: DomainState) -> JSON:
    if isinstance(expression, str):
        return scope[expression[1:]] if expression.startswith("$") else expression
    if not isinstance(expression, list):
        return expression
    name, *operands = (_evaluate(part, scope, state) for part in expression)
    if name in ("get", "row"):
        kind, argument, *place = str(operands[0]).split(".")
        row = state.row(kind, str(scope[argument]))
        return row.get(place[0], *operands[1:]) if place else row
    return state.operations[str(name)](*operands)


def _withdraw(balance: float, amount: float, account: str) -> float:
    left = balance - amount
    if left < 0:
        raise ValueError(f"{account} holds less than {amount:g}")
    return left


_OPERATIONS: Final[Mapping[str, Callable[..., JSON]]] = {
    "+": operator.add,
    "*": operator.mul,
    "/": operator.truediv,
    "min": min,
    "round": round,
    "if": lambda test, then, other: then if test else other,
    "join": lambda separator, *parts: separator.join(_flatten(parts)),
    "strip": str.strip,
    "count": lambda text: len(str(text).split()),
    "translate": lambda text, language: " ".join([language.lower()[:2], *(word[::-1] for word in text.split())]),
    "degrees": lambda celsius, unit: celsius * 9 / 5 + 32 if unit.lower() == "fahrenheit" else celsius,
    "withdraw": _withdraw,
}


def _flatten(parts: Sequence[JSON]) -> list[JSON]:
    return [one for part in parts for one in (part if isinstance(part, list) else [part])]


def _canonical(part: JSON) -> str:
    """Return the text of a part, the same for values that count as equal."""
    if isinstance(part, float) and part.is_integer():
        return str(int(part))
    return normalise(str(part)) or str(part)


Form = Literal["plain", "text", "list"]
"""Format of an argument: unchanged, a number as text, or a text as a list of one."""
_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


@dataclass(frozen=True)
class CheckedTool(DescribedTool):
    """Executable tool that validates arguments against its schema."""

    def check(self, arguments: Mapping[str, JSON]) -> dict[str, JSON]:
        """Return the arguments. Raises ArgumentError for missing, unknown and ill-typed ones."""
        parameters = self.schema["function"]["parameters"]
        properties: Mapping[str, Mapping[str, JSON]] = parameters.get("properties", {})
        missing = [name for name in parameters.get("required", []) if name not in arguments]
        faults = [f"the argument {name!r} is missing" for name in missing]
        for name, value in arguments.items():
            if name not in properties:
                faults.append(f"there is no argument {name!r}")
            elif not fits(value, properties[name]):
                choices = properties[name].get("enum")
                one_of = f"one of {', '.join(map(str, choices))}" if isinstance(choices, list) else ""
                expected = one_of or f"the type {properties[name].get('type')}"
                faults.append(f"the argument {name!r} is wrong: it takes {expected}")
        if faults:
            raise ArgumentError("; ".join(faults))
        return dict(arguments)


@dataclass(frozen=True)
class SchemaTool(CheckedTool):
    """A tool with a synchronous `answer` to checked arguments, so calls of one turn run in their order."""

    answer: Callable[[Mapping[str, JSON]], str] = field(kw_only=True)


def schema_tool(schema: ToolSchema, answer: Callable[[Mapping[str, JSON]], str]) -> SchemaTool:
    """Return the tool with this description and these answers."""

    async def call(**given: JSON) -> str:
        return answer(given)

    described = schema["function"]
    return SchemaTool(described["name"], described["description"], call, given=schema, answer=answer)


def fits(value: JSON, schema: Mapping[str, JSON]) -> bool:
    """Return whether a value and its items have the types of the schema."""
    wanted = _TYPES.get(str(schema.get("type")))
    if wanted is None:
        return True
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        return False
    choices, items = schema.get("enum"), schema.get("items")
    if isinstance(choices, list) and value not in choices:
        return False
    return not isinstance(value, list) or not isinstance(items, dict) or all(fits(v, items) for v in value)


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter. `piece` is its part of a request; one with a default is optional.

    A task may offer it by the name `alias`, and take its value in another form.
    """

    name: str
    kind: str
    piece: str = "{}"
    default: JSON = None
    alias: str = ""
    form: Form = "plain"

    @property
    def of(self) -> ValueKind:
        return vocabulary().kinds[self.kind]

    @property
    def offered(self) -> str:
        return self.alias or self.name

    @property
    def schema(self) -> dict[str, JSON]:
        """The JSON schema of its value in the task."""
        found: dict[str, JSON] = {"type": {"text": "string", "list": "array"}.get(self.form, self.of.type)}
        if found["type"] == "array":
            found["items"] = {"type": "string"}
        if self.default is not None:
            found["default"] = self.encode(self.default)
        return found

    def encode(self, value: JSON) -> JSON:
        """Convert a value to the format of the task."""
        if self.form == "list":
            return [value]
        return f"{value:g}" if self.form == "text" and isinstance(value, int | float) else value

    def decode(self, given: JSON) -> JSON:
        """Convert an argument to its value. Raises ArgumentError if its format is wrong."""
        if self.form == "list" and isinstance(given, list):
            if len(given) != 1 or not isinstance(given[0], str):
                raise ArgumentError(f"the argument {self.offered!r} is wrong: it takes a list of one text")
            return given[0]
        if self.form == "text" and isinstance(given, str):
            try:
                return float(given) if self.of.type == "number" else int(given)
            except ValueError:
                raise ArgumentError(f"the argument {self.offered!r} is wrong: {given!r} is not a number") from None
        return given


@dataclass(frozen=True, slots=True)
class Function:
    """A function; `data/functions.toml` describes the fields."""

    name: str
    domain: str
    description: str
    verbs: Sequence[str]
    params: tuple[Param, ...]
    steps: Mapping[str, JSON] = field(compare=False)
    returns: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def required(self) -> tuple[Param, ...]:
        return tuple(param for param in self.params if param.default is None)

    @property
    def schema(self) -> ToolSchema:
        """The description that the model sees."""
        properties = {param.offered: param.schema for param in self.params}
        required = [param.offered for param in self.required]
        parameters = {"type": "object", "properties": properties, "required": required}
        described = FunctionSchema(name=self.name, description=self.description, parameters=parameters)
        return ToolSchema(type="function", function=described)

    def param(self, name: str) -> Param:
        """Return a parameter by its name in the catalogue."""
        return next(param for param in self.params if param.name == name)

    def run(self, state: DomainState, **arguments: JSON) -> Row:
        """Return the result of a call. Raises LookupError or ValueError, which the model sees."""
        for param in catalogue()[self.name].params:
            if param.of.letter and param.of.checked:
                state.row(param.kind, str(arguments[param.name]))
        return run_steps(self.steps, state, arguments)

    def encode(self, arguments: Mapping[str, JSON]) -> dict[str, JSON]:
        """Convert arguments from the names of the catalogue to the signature of the task."""
        return {one.offered: one.encode(arguments[one.name]) for one in self.params if one.name in arguments}

    def tool(self, state: DomainState) -> SchemaTool:
        """Return the tool on the state of an episode."""

        def answer(given: Mapping[str, JSON]) -> str:
            values = {one.name: one.default for one in self.params}
            values |= {one.name: one.decode(given[one.offered]) for one in self.params if one.offered in given}
            return json.dumps(self.run(state, **values), ensure_ascii=False)

        return schema_tool(self.schema, answer)


@cache
def catalogue() -> Mapping[str, Function]:
    """Return all functions by name."""
    rows = read_data("functions.toml", dict)
    for row in rows.values():
        row["params"] = tuple(Param(*param) for param in row["params"])
    return {name: Function(name, **row) for name, row in rows.items()}


@dataclass(frozen=True, slots=True)
class Scene:
    """The functions of an episode and its initial state; generated values follow from `seed`.

    `known` are the kinds and identifiers that the request names. A function known only by its description, in
    `described`, answers each call that fits with `ok`.
    """

    seed: int = 0
    known: tuple[tuple[str, str], ...] = ()
    functions: tuple[Function, ...] = ()
    described: tuple[ToolSchema, ...] = ()

    def tools(self) -> tuple[SchemaTool, ...]:
        """Return the tools of a new episode, which share one state."""
        state = DomainState(self.seed, self.known)
        generated = (function.tool(state) for function in self.functions)
        return (*generated, *(schema_tool(schema, lambda given: "ok") for schema in self.described))

    def function(self, name: str) -> Function:
        """Return an offered function by name."""
        return next(function for function in self.functions if function.name == name)
