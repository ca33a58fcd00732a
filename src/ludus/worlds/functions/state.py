"""Kinds of values, and the state of an episode on which the functions of the catalogue run.

Generated values (identifiers, prices, dates) are hashes of the seed and the arguments, independent of the
order of calls: the same call returns the same values in every episode of a task.
"""

from __future__ import annotations

import hashlib
import operator
import random
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final, TypeVar

from pydantic import TypeAdapter

from ludus.rewards.exact_match import normalise
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
    literal: str = "{}"
    reference: str = ""
    asks: Sequence[str] = ()
    letter: str = ""
    tail: str = ""
    checked: bool = True

    def identifier(self, number: int) -> str:
        """Return an identifier of the kind."""
        return f"{self.letter}{number}{self.tail}"

    def draw(self, rng: random.Random, split: str) -> JSON:
        """Return a value of the split. No text of one split occurs in another; numbers are shared."""
        if self.letter:
            return self.identifier(rng.randrange(1000, 10_000))
        places = {"train": range(6), "validation": range(6, 7)}.get(split, range(7, 10))
        if self.type == "array":
            people: Sequence[JSON] = vocabulary().kinds["person"].pool
            return rng.sample([name for i, name in enumerate(people) if i % 10 in places], 2)
        is_shared = len(self.pool) < 10 or self.type != "string"
        while True:
            place = rng.randrange(len(self.pool))
            if is_shared or place % 10 in places:
                return self.pool[place]

    def in_words(self, value: JSON) -> str:
        """Return the words for a value in a request."""
        return self.literal.format(" and ".join(map(str, value)) if isinstance(value, list) else str(value))


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
    """Return the parts, with the items of lists instead of the lists."""
    return [one for part in parts for one in (part if isinstance(part, list) else [part])]


def _canonical(part: JSON) -> str:
    """Return the text of a part, the same for values that count as equal."""
    if isinstance(part, float) and part.is_integer():
        return str(int(part))
    return normalise(str(part)) or str(part)
