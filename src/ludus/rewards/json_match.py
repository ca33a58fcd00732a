"""JSON verifiers: an answer against a schema or a value, and the final state against the expected one.

1 and true are different values, as are 0, "" and null; 1 and 1.0 are the same number.

Schemas are of draft 2020-12, with the arithmetic and regular expressions of the standard; `jsonschema` differs
from it in both. Multiples are exact in the written numerals (0.3 is a multiple of 0.1, which fails in floats),
for numbers of any size. Patterns follow ECMA-262: `$` is the end of the text, not the position before a final
line break, and digits are ASCII. References must stay in the schema. As in the draft, `format` is an annotation
and rejects nothing.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial

from ludus.errors import ConfigError, UserError
from ludus.rewards.base import RewardFunction, truth_of
from ludus.rewards.extract import Evidence, NotJson, fenced_block, final_answer, read_json
from ludus.types import JSON, Task, Trajectory

MAX_CHARACTERS = 20_000
"""Maximum characters of a text to validate: `uniqueItems` takes quadratic time for objects."""
_PIECE = re.compile(r"\\.|\[(?:\\.|[^\]])*\]|\$", re.S)
"""Part of a pattern: an escaped character, a character class, or the `$` to replace."""


@dataclass(frozen=True, slots=True)
class Schema:
    """Truth of a task whose answer is JSON that conforms to a schema (draft 2020-12)."""

    schema: Mapping[str, JSON]


@dataclass(frozen=True, slots=True)
class Value:
    """Truth of a task whose answer is a JSON value. Numbers may differ by `tolerance`."""

    value: JSON
    tolerance: float = 0.0


@dataclass(frozen=True, slots=True)
class MatchState:
    """The expected final state. Keys named in `ignored` do not count, at any depth."""

    value: JSON
    ignored: frozenset[str] = field(default_factory=frozenset)
    tolerance: float = 0.0


def same_json(one: JSON, other: JSON, tolerance: float = 0.0, ignored: frozenset[str] = frozenset()) -> bool:
    """Return whether two values are equal: objects in any order of keys, lists in the same order, numbers by value."""
    same = partial(same_json, tolerance=tolerance, ignored=ignored)
    if isinstance(one, dict) and isinstance(other, dict):
        keys = one.keys() - ignored
        return keys == other.keys() - ignored and all(same(one[key], other[key]) for key in keys)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if is_number(one) and is_number(other):
        return same_number(one, other, tolerance)
    return type(one) is type(other) and one == other


def is_number(value: object) -> bool:
    """Return whether a value is a number, and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def same_number(one: object, other: object, tolerance: float) -> bool:
    """Return whether two numbers are equal, or differ by at most `tolerance` (absolute, or relative if above 1)."""
    assert isinstance(one, int | float)
    assert isinstance(other, int | float)
    if one == other or not tolerance:
        return one == other
    try:
        return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:
        return False


def require_schema(schema: Mapping[str, JSON]) -> None:
    """Raise UserError without jsonschema, and ValueError for a schema that cannot be used."""
    if importlib.util.find_spec("jsonschema") is None:
        raise UserError("JSON schemas need jsonschema.", "Install it: pip install 'ludus[schema]'.")
    check_schema(schema)


def fits_schema(text: str, truth: Schema) -> bool:
    """Return whether the text, or its only fenced block, is one JSON value that fits the schema.

    Raises UserError without jsonschema, ConfigError for a schema that cannot be used.
    """
    try:
        require_schema(truth.schema)
    except InvalidSchema as error:
        raise ConfigError(f"A task's schema cannot be used: {error}.", "Fix the task.") from error
    if len(text) > MAX_CHARACTERS:
        return False
    try:
        return fits(read_json(fenced_block(text)), truth.schema)
    except (NotJson, RecursionError):
        return False


def json_schema(task: Task, trajectory: Trajectory) -> float:
    """Return 1 if the final answer is JSON that conforms to the schema of the truth, else 0."""
    return float(fits_schema(trajectory.answer, truth_of(task, Schema)))


def is_value(text: str, truth: Value) -> bool:
    """Return whether the text, or its only fenced block, is the JSON value."""
    return is_state(fenced_block(text), MatchState(truth.value, tolerance=truth.tolerance))


def json_value(task: Task, trajectory: Trajectory) -> float:
    """Return 1 if the final answer is the JSON value of the truth, else 0."""
    return float(is_value(trajectory.answer, truth_of(task, Value)))


def is_state(text: str, truth: MatchState) -> bool:
    """Return whether the text is the JSON of the expected state."""
    try:
        return same_json(read_json(text), truth.value, truth.tolerance, truth.ignored)
    except NotJson:
        return False


def same_state(read: Evidence = final_answer) -> RewardFunction:
    """Create a verifier: 1 if `read` returns the JSON of the expected state, else 0.

    As in tau-bench (arXiv:2406.12045, section 3): only the state counts, not how it was reached.
    """

    def state_equality(task: Task, trajectory: Trajectory) -> float:
        return float(is_state(read(trajectory), truth_of(task, MatchState)))

    return state_equality


class InvalidSchema(ValueError):
    """The schema is invalid, references something outside itself, or is infinitely recursive."""


def check_schema(schema: Mapping[str, JSON]) -> None:
    """Raise InvalidSchema for a schema that cannot be used for validation. Needs jsonschema, as `fits` does."""
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
        raise InvalidSchema(f"it is not a JSON schema: {error.message}") from error
    except referencing.exceptions.Unresolvable as error:
        raise InvalidSchema(f"it references {error.ref}, which it does not contain") from error
    except RecursionError as error:
        raise InvalidSchema("it is infinitely recursive, or nested too deep") from error


def fits(value: JSON, schema: Mapping[str, JSON]) -> bool:
    """Return whether a value conforms to a schema that `check_schema` accepts."""
    import referencing
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend
    from referencing.jsonschema import DRAFT202012

    converted = copy.deepcopy(dict(schema))
    found = [DRAFT202012.create_resource(converted)]
    for resource in found:
        inner = resource.contents
        if isinstance(inner, dict) and isinstance(inner.get("pattern"), str):
            inner["pattern"] = _pattern(inner["pattern"])
        if isinstance(inner, dict) and isinstance(inner.get("patternProperties"), dict):
            inner["patternProperties"] = {_pattern(key): one for key, one in inner["patternProperties"].items()}
        found += resource.subresources()
    validator = extend(Draft202012Validator, {"multipleOf": _multiple_of})
    return bool(validator(converted, registry=referencing.Registry()).is_valid(value))


def _multiple_of(validator: object, step: float, value: JSON, schema: object) -> Iterator[Exception]:
    """Validate the keyword `multipleOf`, with jsonschema's signature."""
    from jsonschema import ValidationError

    if is_number(value) and Fraction(str(value)) % Fraction(str(step)) != 0:
        yield ValidationError(f"it is not a multiple of {step}")


def _pattern(pattern: str) -> str:
    plain = _PIECE.sub(lambda piece: r"\Z" if piece[0] == "$" else piece[0], pattern)
    return f"(?a:{plain})"
