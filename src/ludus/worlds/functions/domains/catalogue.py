"""Functions as the catalogue describes them, and the catalogue."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from ludus.types import JSON
from ludus.worlds.functions.domains.kinds import KINDS, ValueKind
from ludus.worlds.functions.domains.state import Row


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter. `piece` says it in a request; one with a default may be left out."""

    name: str
    kind: str
    piece: str = "{}"
    default: JSON = None

    @property
    def of(self) -> ValueKind:
        """Its kind."""
        return KINDS[self.kind]

    @property
    def is_required(self) -> bool:
        """Whether a call must give it."""
        return self.default is None


@dataclass(frozen=True, slots=True)
class Gift:
    """A field of a result that another function may take."""

    name: str
    kind: str


@dataclass(frozen=True, slots=True)
class Function:
    """A function: a request for it is a verb and the pieces of its parameters, in their order.

    `run` takes the state and the arguments by name. Its docstring is the description; what it raises is an
    error that the model sees.
    """

    name: str
    domain: str
    verbs: tuple[str, ...]
    params: tuple[Param, ...]
    run: Callable[..., Row]
    gives: tuple[Gift, ...] = ()

    @property
    def description(self) -> str:
        """What the model is told of it."""
        return inspect.getdoc(self.run) or ""

    @property
    def required(self) -> tuple[Param, ...]:
        """The parameters without a default."""
        return tuple(param for param in self.params if param.is_required)


@cache
def catalogue() -> Mapping[str, Function]:
    """All functions by name."""
    from ludus.worlds.functions.domains import calendar, files, finance, home, media, messaging, travel, weather

    modules = (calendar, messaging, files, travel, weather, finance, home, media)
    return {function.name: function for module in modules for function in module.FUNCTIONS}
