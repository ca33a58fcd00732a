"""Functions as a task offers them: with the catalogue's signature, or with one that was changed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ludus.tools.base import ArgumentError, DescribedTool, FunctionSchema, ToolSchema, described_tool
from ludus.types import JSON
from ludus.worlds.functions.domains.catalogue import Function, Param
from ludus.worlds.functions.domains.names import ALIASES
from ludus.worlds.functions.domains.state import DomainState, KnownValues

Form = Literal["plain", "text", "list"]
"""How a value is passed: as it is, a number as its text, a text as a list of one."""
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
    """A parameter as it is offered: the catalogue's, the name here, and the form of its value."""

    param: Param
    name: str
    form: Form = "plain"

    @property
    def type(self) -> str:
        """The type of JSON schema."""
        return _TYPES.get(self.form, self.param.of.type)

    def encode(self, value: JSON) -> JSON:
        """A value as a call passes it here."""
        if self.form == "list":
            return [value]
        return f"{value:g}" if self.form == "text" and isinstance(value, int | float) else value

    def decode(self, given: JSON) -> JSON:
        """The value that a call passed. Raises ArgumentError where the form does not hold one."""
        if self.form == "list" and isinstance(given, list):
            if len(given) != 1 or not isinstance(given[0], str):
                raise ArgumentError(f"the argument {self.name!r} is wrong: it takes a list of one text")
            return given[0]
        if self.form == "text" and isinstance(given, str):
            try:
                return float(given) if self.param.of.type == "number" else int(given)
            except ValueError:
                raise ArgumentError(f"the argument {self.name!r} is wrong: {given!r} is no number") from None
        return given


@dataclass(frozen=True, slots=True)
class Offer:
    """A function as a task offers it, its parameters in this order."""

    function: Function
    params: tuple[OfferedParam, ...]

    @property
    def is_changed(self) -> bool:
        """Whether the signature is not the catalogue's."""
        return self != plain_offer(self.function)

    def encode(self, arguments: Mapping[str, JSON]) -> dict[str, JSON]:
        """Arguments by the catalogue's names as a call passes them here."""
        return {one.name: one.encode(arguments[one.param.name]) for one in self.params if one.param.name in arguments}

    @property
    def schema(self) -> ToolSchema:
        """The description that the model sees."""
        properties = {one.name: _property(one) for one in self.params}
        required = [one.name for one in self.params if one.param.is_required]
        parameters = {"type": "object", "properties": properties, "required": required}
        function = FunctionSchema(name=self.function.name, description=self.function.description, parameters=parameters)
        return ToolSchema(type="function", function=function)

    def run(self, state: DomainState, given: Mapping[str, JSON]) -> str:
        """What the function says to arguments that fit the schema. Raises whatever the function raises."""
        values = {one.param.name: one.param.default for one in self.params}
        values |= {one.param.name: one.decode(given[one.name]) for one in self.params if one.name in given}
        return json.dumps(self.function.run(state, **values), ensure_ascii=False)

    def tool(self, state: DomainState) -> SchemaTool:
        """The tool, on the state of an episode."""
        return schema_tool(self.schema, lambda given: self.run(state, given))


@dataclass(frozen=True)
class CheckedTool(DescribedTool):
    """A tool whose arguments are checked against a given JSON schema, and which runs."""

    def check(self, arguments: Mapping[str, JSON]) -> dict[str, JSON]:
        """The arguments as they are. Raises `ArgumentError` for missing, unknown and ill-typed ones."""
        parameters = self.schema["function"]["parameters"]
        properties: Mapping[str, Mapping[str, JSON]] = parameters.get("properties", {})
        faults = [
            f"the argument {name!r} is missing" for name in parameters.get("required", []) if name not in arguments
        ]
        for name, value in arguments.items():
            if name not in properties:
                faults.append(f"there is no argument {name!r}")
            elif not fits(value, properties[name]):
                faults.append(f"the argument {name!r} is wrong: it takes {_what(properties[name])}")
        if faults:
            raise ArgumentError("; ".join(faults))
        return dict(arguments)


@dataclass(frozen=True)
class SchemaTool(CheckedTool):
    """A tool whose `answer` takes checked arguments.

    Calls of one turn run in their order, as none ever waits.
    """

    answer: Callable[[Mapping[str, JSON]], str] = field(kw_only=True)


def schema_tool(schema: ToolSchema, answer: Callable[[Mapping[str, JSON]], str]) -> SchemaTool:
    """A tool of a description and of what it says to arguments that fit."""

    async def call(**given: JSON) -> str:
        return answer(given)

    told = described_tool(schema)
    return SchemaTool(told.name, told.description, call, told.arguments, given=schema, answer=answer)


def plain_offer(function: Function) -> Offer:
    """The function with the catalogue's signature."""
    return Offer(function, tuple(OfferedParam(param, param.name) for param in function.params))


def changed_offer(function: Function, rng: random.Random, split: str) -> Offer:
    """The function with parameters renamed, passed in another form and in another order.

    At least one is renamed. The last alias of each name is kept for the split `composition`.
    """
    used = {param.name for param in function.params}
    params: list[OfferedParam] = []
    must = rng.randrange(len(function.params))
    for place, param in enumerate(function.params):
        known = ALIASES[param.name]
        aliases = known[-1:] if split == "composition" else known[:-1]
        free = [alias for alias in aliases if alias not in used]
        renamed = free and (place == must or rng.random() < 0.6)
        name = rng.choice(free) if renamed else param.name
        used.add(name)
        params.append(OfferedParam(param, name, _form(param, rng)))
    rng.shuffle(params)
    return Offer(function, tuple(params))


@dataclass(frozen=True, slots=True)
class Scene:
    """What an episode is made of: what the functions make up follows from `seed`."""

    seed: int
    known: tuple[KnownValues, ...]
    offers: tuple[Offer, ...]

    def state(self) -> DomainState:
        """The state that an episode begins with."""
        return DomainState(self.seed, self.known)

    def tools(self) -> tuple[SchemaTool, ...]:
        """The tools of a fresh episode, all on one state."""
        state = self.state()
        return tuple(offer.tool(state) for offer in self.offers)

    def offer(self, name: str) -> Offer:
        """The offer of a function by name."""
        return next(offer for offer in self.offers if offer.function.name == name)


@dataclass(frozen=True, slots=True)
class ListedTool:
    """Functions of which only descriptions are known: whatever fits them is answered with `ok`."""

    schemas: tuple[ToolSchema, ...]

    def tools(self) -> tuple[SchemaTool, ...]:
        """The tools."""
        return tuple(schema_tool(schema, lambda given: "ok") for schema in self.schemas)


def _form(param: Param, rng: random.Random) -> Form:
    if rng.random() < 0.65:
        return "plain"
    return _FORMS.get(param.of.type, "plain")


def _property(one: OfferedParam) -> dict[str, JSON]:
    found: dict[str, JSON] = {"type": one.type}
    if one.type == "array":
        found["items"] = {"type": "string"}
    if not one.param.is_required:
        found["default"] = one.encode(one.param.default)
    return found


def fits(value: JSON, schema: Mapping[str, JSON]) -> bool:
    """Whether an argument is of the type that its description asks for."""
    wanted = _CHECKS.get(str(schema.get("type")))
    if wanted is None:
        return True
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        return False
    choices = schema.get("enum")
    if isinstance(choices, list) and value not in choices:
        return False
    items = schema.get("items")
    return not isinstance(value, list) or not isinstance(items, dict) or all(fits(v, items) for v in value)


def _what(schema: Mapping[str, JSON]) -> str:
    choices = schema.get("enum")
    if isinstance(choices, list):
        return "one of " + ", ".join(map(str, choices))
    return f"the type {schema.get('type')}"
