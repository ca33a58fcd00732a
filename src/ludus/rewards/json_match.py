"""JSON verifiers: an answer against a schema or a value, and the final state against the expected one.

1 and true are different values, as are 0, "" and null; 1 and 1.0 are the same number.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ludus.errors import ConfigError, UserError
from ludus.rewards.base import RewardFunction, truth_of
from ludus.rewards.extract import Evidence, NotJson, fenced, final_answer, read_json
from ludus.rewards.schemas import OddSchema, check_schema, fits
from ludus.types import JSON, Task, Trajectory

MAX_CHARACTERS = 20_000
"""A longer text fits no schema: to find out whether many objects differ takes time with their square."""


@dataclass(frozen=True, slots=True)
class Schema:
    """Truth of a task that asks for JSON of a certain form: a JSON schema (draft 2020-12)."""

    schema: Mapping[str, JSON]


@dataclass(frozen=True, slots=True)
class Value:
    """Truth of a task that asks for a certain JSON value. Numbers may differ by `tolerance`."""

    value: JSON
    tolerance: float = 0.0


@dataclass(frozen=True, slots=True)
class MatchState:
    """The expected final state. Keys named in `ignored` do not count, at any depth."""

    value: JSON
    ignored: frozenset[str] = field(default_factory=frozenset)
    tolerance: float = 0.0


def same_json(one: JSON, other: JSON, tolerance: float = 0.0, ignored: frozenset[str] = frozenset()) -> bool:
    """Whether two values are equal: objects in any order of keys, lists in theirs, numbers by value."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = one.keys() - ignored
        return keys == other.keys() - ignored and all(
            same_json(one[key], other[key], tolerance, ignored) for key in keys
        )
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(
            same_json(a, b, tolerance, ignored) for a, b in zip(one, other, strict=True)
        )
    if is_number(one) and is_number(other):
        return same_number(one, other, tolerance)
    return type(one) is type(other) and one == other


def is_number(value: object) -> bool:
    """Whether a value is a number and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def same_number(one: object, other: object, tolerance: float) -> bool:
    """Whether two numbers are equal, or differ by at most `tolerance` (absolute, or relative if above 1)."""
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
        raise UserError("JSON schemas need jsonschema.", "Install it with: pip install 'ludus[schema]'")
    check_schema(schema)


def fits_schema(text: str, truth: Schema) -> bool:
    """Whether the text, or its only fenced block, is one JSON value that fits the schema.

    Raises UserError without jsonschema, ConfigError for a schema that cannot be used.
    """
    try:
        require_schema(truth.schema)
    except OddSchema as error:
        raise ConfigError(f"A task's schema cannot be used: {error}.", "Mend the task.") from error
    if len(text) > MAX_CHARACTERS:
        return False
    try:
        return fits(read_json(fenced(text)), truth.schema)
    except (NotJson, RecursionError):
        return False


def json_schema(task: Task, trajectory: Trajectory) -> float:
    """Return 1 if the final answer is JSON that conforms to the schema of the truth, else 0."""
    return float(fits_schema(trajectory.answer, truth_of(task, Schema)))


def is_value(text: str, truth: Value) -> bool:
    """Whether the text, or its only fenced block, is the JSON value."""
    return _reads(fenced(text), truth.value, truth.tolerance, frozenset())


def json_value(task: Task, trajectory: Trajectory) -> float:
    """Return 1 if the final answer is the JSON value of the truth, else 0."""
    return float(is_value(trajectory.answer, truth_of(task, Value)))


def is_state(text: str, truth: MatchState) -> bool:
    """Whether the text is the JSON of the state that is due."""
    return _reads(text, truth.value, truth.tolerance, truth.ignored)


def same_state(read: Evidence = final_answer) -> RewardFunction:
    """Create a verifier: 1 if `read` returns the JSON of the expected state, else 0.

    As in tau-bench (arXiv:2406.12045, section 3): only the state counts, not how it was reached.
    """

    def state_equality(task: Task, trajectory: Trajectory) -> float:
        return float(is_state(read(trajectory), truth_of(task, MatchState)))

    return state_equality


def _reads(text: str, value: JSON, tolerance: float, ignored: frozenset[str]) -> bool:
    try:
        return same_json(read_json(text), value, tolerance, ignored)
    except NotJson:
        return False
