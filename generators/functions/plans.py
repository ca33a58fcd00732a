"""Plans of calls with drawn values, their words in a request, and changed signatures."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Final

from ludus.types import JSON
from ludus.worlds.functions.catalogue import Form, Function, Param, ValueKind, catalogue, read_data, vocabulary

_FORMS: Final[Mapping[str, Form]] = {"integer": "text", "number": "text", "string": "list"}
Links = Mapping[str, tuple[int, str]]
"""Parameters that take earlier results: index of the step, and field of its result."""


@dataclass(frozen=True, slots=True)
class KindWords:
    """The words for values of a kind in a request; `data/values.toml` describes the fields."""

    literal: str = "{}"
    reference: str = ""


@dataclass(frozen=True, slots=True)
class RequestWords:
    """The part of `data/values.toml` that only requests use."""

    kinds: Mapping[str, KindWords]


@cache
def words_of_kinds() -> Mapping[str, KindWords]:
    """Return the words for the values of each kind."""
    return read_data("values.toml", RequestWords).kinds


def in_words(kind: str, value: JSON) -> str:
    """Return the words for a value in a request."""
    text = " and ".join(map(str, value)) if isinstance(value, list) else str(value)
    return words_of_kinds()[kind].literal.format(text)


def draw_value(kind: ValueKind, rng: random.Random, split: str) -> JSON:
    """Return a value of the split. No text of one split occurs in another; numbers are shared."""
    if kind.letter:
        return kind.identifier(rng.randrange(1000, 10_000))
    places = {"train": range(6), "validation": range(6, 7)}.get(split, range(7, 10))
    if kind.type == "array":
        people: Sequence[JSON] = vocabulary().kinds["person"].pool
        return rng.sample([name for i, name in enumerate(people) if i % 10 in places], 2)
    is_shared = len(kind.pool) < 10 or kind.type != "string"
    while True:
        place = rng.randrange(len(kind.pool))
        if is_shared or place % 10 in places:
            return kind.pool[place]


def invent(function: Function, rng: random.Random) -> dict[str, JSON]:
    """Return random arguments for the required parameters, by the names of the catalogue."""
    return {param.name: draw_value(param.of, rng, "train") for param in catalogue()[function.name].required}


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


@dataclass(frozen=True)
class PlanStep:
    """A call with the values that the request states and links to earlier results."""

    function: Function
    values: Mapping[str, JSON]
    links: Links = field(default_factory=dict)

    def request(self, verb: str) -> str:
        pieces = [verb]
        for param in self.function.params:
            if param.name in self.links:
                pieces.append(param.piece.format(words_of_kinds()[param.kind].reference))
            elif param.name in self.values:
                pieces.append(param.piece.format(in_words(param.kind, self.values[param.name])))
        return " ".join(pieces)


Plan = tuple[PlanStep, ...]
