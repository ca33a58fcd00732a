"""Kinds of values, and the state of an episode on which the functions of the catalogue run.

Generated values (identifiers, prices, dates) are hashes of the seed and the arguments, independent of the
order of calls: the same call returns the same values in every episode of a task.
"""

from __future__ import annotations

import hashlib
import operator
import random
import tomllib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Final

from ludus.rewards.exact_match import normalise
from ludus.types import JSON

Row = dict[str, JSON]


def data_text(name: str) -> str:
    """Return the text of a data file of the world."""
    return (files("ludus.worlds.functions") / "data" / name).read_text("utf-8")


@dataclass(frozen=True, slots=True)
class ValueKind:
    """A kind of value; `data/values.toml` describes the fields."""

    name: str
    type: str = "string"
    pool: Sequence[JSON] = ()
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
            people = vocabulary().kinds["person"].pool
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
    tables = tomllib.loads(data_text("values.toml"))
    tables["kinds"] = {name: ValueKind(name, **row) for name, row in tables["kinds"].items()}
    return Vocabulary(**tables)


@dataclass
class DomainState:
    """The state of one episode: rows by kind and identifier. `known` are kinds and identifiers that exist initially."""

    seed: int
    known: tuple[tuple[str, str], ...] = ()
    _rows: dict[str, dict[str, Row]] = field(init=False, default_factory=lambda: defaultdict(dict))

    def __post_init__(self) -> None:
        for kind, key in self.known:
            self._rows[kind][key] = {}

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
        self._rows[kind].setdefault(made, {})
        return made

    def row(self, kind: str, key: str) -> Row:
        """Return the row of a key, such as a room. Raises LookupError for an unknown identifier."""
        if not vocabulary().kinds[kind].letter:
            return self._rows[kind].setdefault(normalise(key) or key, {})
        if key not in self._rows[kind]:
            raise LookupError(f"there is no {kind} {key!r}")
        return self._rows[kind][key]

    def drop(self, kind: str, key: str) -> str:
        """Delete the row of a known identifier, and return the identifier."""
        del self._rows[kind][key]
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
    if name in _STATE_OPERATIONS:
        return _STATE_OPERATIONS[str(name)](state, *operands)
    return _OPERATIONS[str(name)](*operands)


def _withdraw(balance: float, amount: float, account: str) -> float:
    left = balance - amount
    if left < 0:
        raise ValueError(f"{account} holds less than {amount:g}")
    return left


_STATE_OPERATIONS: Final[Mapping[str, Callable[..., JSON]]] = {
    "number": DomainState.number,
    "pick": DomainState.pick,
    "issue": DomainState.issue,
    "drop": DomainState.drop,
}
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
