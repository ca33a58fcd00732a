"""Functions as a task offers them: with the signature of the catalogue or a changed one."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ludus.tools.base import ArgumentError, DescribedTool, FunctionSchema, ToolSchema, described_tool
from ludus.types import JSON
from ludus.worlds.functions.catalogue import Function, Param
from ludus.worlds.functions.state import DomainState, KnownValues, vocabulary

Form = Literal["plain", "text", "list"]
"""How a value is passed: unchanged, a number as text, or a text as a list of one."""
_FORMS: Mapping[str, Form] = {"integer": "text", "number": "text", "string": "list"}
_TYPES = {"text": "string", "list": "array"}
_CHECKS: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


@dataclass(frozen=True, slots=True)
class OfferedParam:
    """A parameter of the catalogue with its name and the form of its value in a task."""

    param: Param
    name: str
    form: Form = "plain"

    def encode(self, value: JSON) -> JSON:
        """Return a value in the form of the task."""
        if self.form == "list":
            return [value]
        return f"{value:g}" if self.form == "text" and isinstance(value, int | float) else value

    def decode(self, given: JSON) -> JSON:
        """Return the value of an argument. Raises ArgumentError if its form is wrong."""
        if self.form == "list" and isinstance(given, list):
            if len(given) != 1 or not isinstance(given[0], str):
                raise ArgumentError(f"the argument {self.name!r} is wrong: it takes a list of one text")
            return given[0]
        if self.form == "text" and isinstance(given, str):
            try:
                return float(given) if self.param.of.type == "number" else int(given)
            except ValueError:
                raise ArgumentError(f"the argument {self.name!r} is wrong: {given!r} is not a number") from None
        return given

    @property
    def schema(self) -> dict[str, JSON]:
        """The JSON schema."""
        found: dict[str, JSON] = {"type": _TYPES.get(self.form, self.param.of.type)}
        if found["type"] == "array":
            found["items"] = {"type": "string"}
        if not self.param.is_required:
            found["default"] = self.encode(self.param.default)
        return found


@dataclass(frozen=True, slots=True)
class Offer:
    """A function as a task offers it, with its parameters in this order."""

    function: Function
    params: tuple[OfferedParam, ...]

    @property
    def is_changed(self) -> bool:
        """Whether the signature differs from the catalogue."""
        return self != plain_offer(self.function)

    def encode(self, arguments: Mapping[str, JSON]) -> dict[str, JSON]:
        """Return arguments, given by the names of the catalogue, in the terms of the task."""
        return {one.name: one.encode(arguments[one.param.name]) for one in self.params if one.param.name in arguments}

    @property
    def schema(self) -> ToolSchema:
        """The description that the model sees."""
        properties = {one.name: one.schema for one in self.params}
        required = [one.name for one in self.params if one.param.is_required]
        parameters = {"type": "object", "properties": properties, "required": required}
        function = FunctionSchema(name=self.function.name, description=self.function.description, parameters=parameters)
        return ToolSchema(type="function", function=function)

    def run(self, state: DomainState, given: Mapping[str, JSON]) -> str:
        """Return the response to arguments that fit the schema. Raises the errors of the function."""
        values = {one.param.name: one.param.default for one in self.params}
        values |= {one.param.name: one.decode(given[one.name]) for one in self.params if one.name in given}
        return json.dumps(self.function.run(state, **values), ensure_ascii=False)

    def tool(self, state: DomainState) -> SchemaTool:
        """Return the tool on the state of an episode."""
        return schema_tool(self.schema, lambda given: self.run(state, given))


@dataclass(frozen=True)
class CheckedTool(DescribedTool):
    """An executable tool whose arguments are checked against a given JSON schema."""

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
                faults.append(f"the argument {name!r} is wrong: it takes {_expected(properties[name])}")
        if faults:
            raise ArgumentError("; ".join(faults))
        return dict(arguments)


@dataclass(frozen=True)
class SchemaTool(CheckedTool):
    """A tool with a synchronous `answer` to checked arguments, so calls of one turn run in their order."""

    answer: Callable[[Mapping[str, JSON]], str] = field(kw_only=True)


def schema_tool(schema: ToolSchema, answer: Callable[[Mapping[str, JSON]], str]) -> SchemaTool:
    """Return a tool with this description and these answers."""

    async def call(**given: JSON) -> str:
        return answer(given)

    tool = described_tool(schema)
    return SchemaTool(tool.name, tool.description, call, tool.arguments, given=schema, answer=answer)


def plain_offer(function: Function) -> Offer:
    """Return the function with the signature of the catalogue."""
    return Offer(function, tuple(OfferedParam(param, param.name) for param in function.params))


def changed_offer(function: Function, rng: random.Random, split: str) -> Offer:
    """Return the function with parameters renamed, passed in another form and reordered.

    At least one is renamed. The last alias of each name is reserved for the split `composition`.
    """
    used = {param.name for param in function.params}
    params: list[OfferedParam] = []
    must = rng.randrange(len(function.params))
    for place, param in enumerate(function.params):
        aliases = vocabulary().aliases[param.name]
        free = [one for one in (aliases[-1:] if split == "composition" else aliases[:-1]) if one not in used]
        renamed = free and (place == must or rng.random() < 0.6)
        name = rng.choice(free) if renamed else param.name
        used.add(name)
        params.append(OfferedParam(param, name, "plain" if rng.random() < 0.65 else _FORMS.get(param.of.type, "plain")))
    rng.shuffle(params)
    return Offer(function, tuple(params))


@dataclass(frozen=True, slots=True)
class Scene:
    """The functions of an episode and its initial state; generated values follow from `seed`."""

    seed: int
    known: tuple[KnownValues, ...]
    offers: tuple[Offer, ...]

    def state(self) -> DomainState:
        """Return the initial state of an episode."""
        return DomainState(self.seed, self.known)

    def tools(self) -> tuple[SchemaTool, ...]:
        """Return the tools of a new episode, which share one state."""
        state = self.state()
        return tuple(offer.tool(state) for offer in self.offers)

    def offer(self, name: str) -> Offer:
        """Return the offer of a function by name."""
        return next(offer for offer in self.offers if offer.function.name == name)


@dataclass(frozen=True, slots=True)
class ListedTool:
    """Functions known only by their descriptions: each call that fits is answered with `ok`."""

    schemas: tuple[ToolSchema, ...]

    def tools(self) -> tuple[SchemaTool, ...]:
        """Return the tools."""
        return tuple(schema_tool(schema, lambda given: "ok") for schema in self.schemas)


def fits(value: JSON, schema: Mapping[str, JSON]) -> bool:
    """Return whether an argument has the type of its description."""
    wanted = _CHECKS.get(str(schema.get("type")))
    if wanted is None:
        return True
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        return False
    choices, items = schema.get("enum"), schema.get("items")
    if isinstance(choices, list) and value not in choices:
        return False
    return not isinstance(value, list) or not isinstance(items, dict) or all(fits(v, items) for v in value)


def _expected(schema: Mapping[str, JSON]) -> str:
    choices = schema.get("enum")
    return f"one of {', '.join(map(str, choices))}" if isinstance(choices, list) else f"the type {schema.get('type')}"
