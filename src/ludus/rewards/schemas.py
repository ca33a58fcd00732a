"""JSON schemas (draft 2020-12), with the arithmetic and regular expressions of the standard.

`jsonschema` differs from the standard in both. Multiples are exact in the written numerals (0.3 is a
multiple of 0.1, which fails in floats), for numbers of any size. Patterns follow ECMA-262: `$` is the end of
the text, not the position before a final line break, and digits are ASCII. References must stay in the
schema. As in the draft, `format` is an annotation and rejects nothing.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction

from ludus.types import JSON

_PIECE = re.compile(r"\\.|\[(?:\\.|[^\]])*\]|\$", re.S)
"""Of a pattern: an escaped character, a class of characters, or the sign that is replaced."""


class OddSchema(ValueError):
    """The schema is invalid, references something outside itself, or is infinitely recursive."""


def check_schema(schema: Mapping[str, JSON]) -> None:
    """Raise OddSchema for a schema by which no value can be judged. Needs jsonschema, as `fits` does."""
    import jsonschema
    import referencing
    from referencing.jsonschema import DRAFT202012

    try:
        jsonschema.Draft202012Validator.check_schema(schema)
        root = DRAFT202012.create_resource(schema)
        found = [(root, referencing.Registry().resolver_with_root(root))]
        for resource, resolver in found:
            if isinstance(resource.contents, dict) and "$ref" in resource.contents:
                resolver.lookup(resource.contents["$ref"])
            found += [(inner, resolver.in_subresource(inner)) for inner in resource.subresources()]
        fits(None, schema)
    except jsonschema.SchemaError as error:
        raise OddSchema(f"it is not a JSON schema: {error.message}") from error
    except referencing.exceptions.Unresolvable as error:
        raise OddSchema(f"it refers to {error.ref}, which is not in it") from error
    except RecursionError as error:
        raise OddSchema("it refers to itself without end, or is nested too deep") from error


def fits(value: JSON, schema: Mapping[str, JSON]) -> bool:
    """Return whether a value conforms to a schema that `check_schema` accepts."""
    import referencing
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend

    judge = extend(Draft202012Validator, {"multipleOf": _multiple_of})
    return bool(judge(_with_patterns(schema), registry=referencing.Registry()).is_valid(value))


def _multiple_of(judge: object, step: float, value: JSON, schema: object) -> Iterator[Exception]:
    """Validate the keyword `multipleOf`, with jsonschema's signature."""
    from jsonschema import ValidationError

    del judge, schema
    if isinstance(value, int | float) and not isinstance(value, bool):
        share = Fraction(str(value)) / Fraction(str(step))
        if share.denominator != 1:
            yield ValidationError(f"it is no multiple of {step}")


def _with_patterns(schema: Mapping[str, JSON]) -> Mapping[str, JSON]:
    """Return the schema with its patterns converted to Python's syntax."""
    from referencing.jsonschema import DRAFT202012

    own = copy.deepcopy(dict(schema))
    found = [DRAFT202012.create_resource(own)]
    for resource in found:
        inner = resource.contents
        if isinstance(inner, dict) and isinstance(inner.get("pattern"), str):
            inner["pattern"] = _pattern(inner["pattern"])
        if isinstance(inner, dict) and isinstance(inner.get("patternProperties"), dict):
            inner["patternProperties"] = {_pattern(key): one for key, one in inner["patternProperties"].items()}
        found += resource.subresources()
    return own


def _pattern(pattern: str) -> str:
    plain = _PIECE.sub(lambda piece: r"\Z" if piece[0] == "$" else piece[0], pattern)
    return f"(?a:{plain})"
