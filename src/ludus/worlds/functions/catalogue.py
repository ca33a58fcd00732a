"""The functions, their signatures in a task (from the catalogue or changed), and the tools of an episode."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Final, Literal

from ludus.tools.base import ArgumentError, DescribedTool, FunctionSchema, ToolSchema
from ludus.types import JSON
from ludus.worlds.functions.state import DomainState, Row, ValueKind, read_data, run_steps, vocabulary

Form = Literal["plain", "text", "list"]
"""Format of an argument: unchanged, a number as text, or a text as a list of one."""
_FORMS: Final[Mapping[str, Form]] = {"integer": "text", "number": "text", "string": "list"}
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
        """The kind of its values."""
        return vocabulary().kinds[self.kind]

    @property
    def offered(self) -> str:
        """Its name in the task."""
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
        """The parameters without a default."""
        return tuple(param for param in self.params if param.default is None)

    @property
    def schema(self) -> ToolSchema:
        """The description that the model sees."""
        properties = {param.offered: param.schema for param in self.params}
        required = [param.offered for param in self.required]
        parameters = {"type": "object", "properties": properties, "required": required}
        described = FunctionSchema(name=self.name, description=self.description, parameters=parameters)
        return ToolSchema(type="function", function=described)

    def run(self, state: DomainState, **arguments: JSON) -> Row:
        """Return the result of a call. Raises LookupError or ValueError, which the model sees."""
        for param in catalogue()[self.name].params:
            if param.of.letter and param.of.checked:
                state.row(param.kind, str(arguments[param.name]))
        return run_steps(self.steps, state, arguments)

    def encode(self, arguments: Mapping[str, JSON]) -> dict[str, JSON]:
        """Convert arguments from the names of the catalogue to the signature of the task."""
        return {one.offered: one.encode(arguments[one.name]) for one in self.params if one.name in arguments}

    def drawn(self, rng: random.Random) -> dict[str, JSON]:
        """Return random arguments for the required parameters, in the signature of the task."""
        return self.encode({param.name: param.of.draw(rng, "train") for param in catalogue()[self.name].required})

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


def change_signature(function: Function, rng: random.Random, split: str) -> Function:
    """Rename and reorder the parameters, and change the format of values.

    At least one is renamed. The last alias of each name is reserved for the split `composition`.
    """
    used = {param.name for param in function.params}
    params: list[Param] = []
    must = rng.randrange(len(function.params))
    for place, param in enumerate(function.params):
        aliases = vocabulary().aliases[param.name]
        free = [one for one in (aliases[-1:] if split == "composition" else aliases[:-1]) if one not in used]
        alias = rng.choice(free) if free and (place == must or rng.random() < 0.6) else ""
        used.add(alias)
        form: Form = "plain" if rng.random() < 0.65 else _FORMS.get(param.of.type, "plain")
        params.append(replace(param, alias=alias, form=form))
    rng.shuffle(params)
    return replace(function, params=tuple(params))


Links = Mapping[str, tuple[int, str]]
"""Parameters that take earlier results: index of the step, and field of its result."""


@dataclass(frozen=True)
class PlanStep:
    """A call with the values that the request states and links to earlier results."""

    function: Function
    values: Mapping[str, JSON]
    links: Links = field(default_factory=dict)

    def request(self, verb: str) -> str:
        """Return the request for this step."""
        pieces = [verb]
        for param in self.function.params:
            if param.name in self.links:
                pieces.append(param.piece.format(param.of.reference))
            elif param.name in self.values:
                pieces.append(param.piece.format(param.of.in_words(self.values[param.name])))
        return " ".join(pieces)


Plan = tuple[PlanStep, ...]


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
