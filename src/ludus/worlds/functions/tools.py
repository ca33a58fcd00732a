"""Tools that validate arguments against a JSON schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from ludus.tools.base import ArgumentError, DescribedTool, ToolSchema
from ludus.types import JSON

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
