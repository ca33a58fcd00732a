"""The functions, the other names of their parameters, and the words by which a question asks for one."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Final

from ludus.types import JSON
from ludus.worlds.functions.state import DomainState, Row, ValueKind, data_text, run_steps, vocabulary


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter. `piece` is its part of a request; one with a default is optional."""

    name: str
    kind: str
    piece: str = "{}"
    default: JSON = None

    @property
    def of(self) -> ValueKind:
        """The kind of its values."""
        return vocabulary().kinds[self.kind]

    @property
    def is_required(self) -> bool:
        """Whether a call must pass it."""
        return self.default is None


@dataclass(frozen=True, slots=True)
class Function:
    """A function; `data/functions.toml` describes the fields."""

    name: str
    domain: str
    description: str
    verbs: tuple[str, ...]
    params: tuple[Param, ...]
    gives: Mapping[str, str] = field(compare=False)
    steps: Mapping[str, JSON] = field(compare=False)

    @property
    def required(self) -> tuple[Param, ...]:
        """The parameters without a default."""
        return tuple(param for param in self.params if param.is_required)

    def run(self, state: DomainState, **arguments: JSON) -> Row:
        """Return the result of a call. Raises LookupError or ValueError, which the model sees."""
        for param in self.params:
            if param.of.letter and param.of.checked:
                state.row(param.kind, str(arguments[param.name]))
        return run_steps(self.steps, state, arguments)


@cache
def catalogue() -> Mapping[str, Function]:
    """Return all functions by name."""
    rows = tomllib.loads(data_text("functions.toml"))
    return {
        name: Function(
            name,
            row["domain"],
            row["description"],
            tuple(row["verbs"]),
            tuple(Param(*param) for param in row["params"]),
            row.get("gives", {}),
            row["run"],
        )
        for name, row in rows.items()
    }


def words_of(text: str) -> frozenset[str]:
    """Return the words of a text in lower case."""
    return frozenset(re.findall(r"[\w']+", text.casefold()))


FILLERS: Final = words_of("how what which for of to in at on by the a an is it one")
"""Words of any question, which alone ask for nothing."""
_EMPTY: Final = words_of("of in at on by num id is a the to into what which one most send add")
_ASKING: Final = words_of("who whom where when name called")
"""Interrogatives and nouns of no particular topic."""


def ask_phrases(param: Param, offered: str) -> frozenset[frozenset[str]]:
    """Return phrases, as words, one of which a question for the parameter contains.

    They are the phrases of its kind, its names and `offered`, its name in the task.
    """
    said = map(words_of, vocabulary().asks.get(param.name, param.of.asks))
    names = (frozenset(name.split("_")) - _EMPTY for name in (param.name, offered, *vocabulary().aliases[param.name]))
    return frozenset(phrase for phrase in (*said, *names) if phrase - FILLERS or len(phrase) > 1)


def other_words(function: Function, missing: Param) -> dict[str, frozenset[str]]:
    """Return words that ask for each other required parameter, without those for the missing one.

    Identifiers are left out, since a question may name its topic; persons have interrogatives only.
    """
    taken = frozenset({"from"}).union(*ask_phrases(missing, missing.name))
    return {
        param.name: _words_for(param) - taken - _EMPTY
        for param in function.required
        if param != missing and not param.of.letter
    }


def _words_for(param: Param) -> frozenset[str]:
    asking = frozenset(param.of.asks) & _ASKING
    if param.kind in ("person", "people"):
        return asking - {"name"}
    return asking | {*param.name.split("_"), *vocabulary().aliases[param.name][0].split("_")}
