"""Random tool arguments that match a JSON schema."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict, cast

from ludus.tools.base import Tool
from ludus.types import JSON

_Schema = TypedDict(
    "_Schema",
    {
        "$ref": str,
        "$defs": dict[str, "_Schema"],
        "const": JSON,
        "enum": list[JSON],
        "anyOf": list["_Schema"],
        "oneOf": list["_Schema"],
        "allOf": list["_Schema"],
        "type": str | list[str],
        "properties": dict[str, "_Schema"],
        "required": list[str],
        "items": "_Schema",
        "minItems": int,
        "maxItems": int,
        "minLength": int,
        "maxLength": int,
        "minimum": float,
        "maximum": float,
        "exclusiveMinimum": float,
        "exclusiveMaximum": float,
    },
    total=False,
)
"""The supported part of JSON schema."""

MAX_DEPTH = 4
"""Lists and objects nested deeper than this are empty."""


def random_arguments(tool: Tool, rng: random.Random, words: Sequence[str]) -> dict[str, JSON]:
    """Return arguments for a call: all required ones and about half of the others. Strings consist of `words`."""
    parameters = cast(_Schema, tool.schema["function"]["parameters"])
    return _object(parameters, _Draw(rng, words, parameters.get("$defs", {})), 0)


@dataclass(frozen=True)
class _Draw:
    """The state of a draw: random numbers, words for strings, and referenced schemas."""

    rng: random.Random
    words: Sequence[str]
    defs: Mapping[str, _Schema]


def _object(schema: _Schema, draw: _Draw, depth: int) -> dict[str, JSON]:
    required = set(schema.get("required", ()))
    return {
        name: _value(one, draw, depth + 1)
        for name, one in schema.get("properties", {}).items()
        if name in required or (depth < MAX_DEPTH and draw.rng.random() < 0.5)
    }


def _value(schema: _Schema, draw: _Draw, depth: int) -> JSON:
    if "$ref" in schema:
        return _value(draw.defs[schema["$ref"].rpartition("/")[2]], draw, depth)
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return draw.rng.choice(schema["enum"])
    if options := [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())]:
        return _value(draw.rng.choice(options), draw, depth)
    return _typed(schema, draw, depth)


def _typed(schema: _Schema, draw: _Draw, depth: int) -> JSON:
    kind = schema.get("type", "string")
    if isinstance(kind, list):
        kind = draw.rng.choice(kind)
    if kind in ("integer", "number"):
        return _number(schema, draw.rng, whole=kind == "integer")
    if kind == "array":
        most = 0 if depth >= MAX_DEPTH else schema.get("maxItems", 2)
        least = schema.get("minItems", 0)
        size = draw.rng.randint(least, max(least, min(most, least + 2)))
        return [_value(schema.get("items", {}), draw, depth + 1) for _ in range(size)]
    if kind == "object":
        return _object(schema, draw, depth)
    if kind == "boolean":
        return draw.rng.random() < 0.5
    return None if kind == "null" else _text(schema, draw)


def _text(schema: _Schema, draw: _Draw) -> str:
    text = " ".join(draw.rng.choices(draw.words or ("word",), k=draw.rng.randint(1, 3)))
    return text.ljust(schema.get("minLength", 0), "x")[: schema.get("maxLength")]


def _number(schema: _Schema, rng: random.Random, *, whole: bool) -> int | float:
    """Return a number within the bounds of the schema; without one, within 20 of the other bound or of 0."""
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if low is None:
        low = 0 if high is None else high - 20
    if high is None:
        high = low + 20
    low += int(whole and "exclusiveMinimum" in schema)
    high -= int(whole and "exclusiveMaximum" in schema)
    return rng.randint(int(low), max(int(low), int(high))) if whole else rng.uniform(low, high)
