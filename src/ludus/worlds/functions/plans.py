"""Plans: the calls of a request, with arguments from the request or from the results of earlier calls."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

from ludus.types import JSON
from ludus.worlds.functions.catalogue import Function, catalogue
from ludus.worlds.functions.state import data_text

Links = Mapping[str, tuple[int, str]]
"""Parameters that take earlier results: index of the step, and field of its result."""


@dataclass(frozen=True, slots=True)
class LevelSpec:
    """The tasks of a level; `data/requests.toml` describes the fields."""

    calls: int
    tools: int
    changed: float
    families: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RequestSpecs:
    """The tables of `data/requests.toml`."""

    held_out_domain: str
    held_out_links: Sequence[Sequence[str]]
    styles: Sequence[str]
    joints: Mapping[str, Sequence[Sequence[str]]]
    lookalikes: Sequence[Sequence[str]]
    questions: Sequence[Sequence[str]]
    levels: Mapping[str, LevelSpec]


@cache
def request_specs() -> RequestSpecs:
    """Return the tables of `data/requests.toml`."""
    tables = tomllib.loads(data_text("requests.toml"))
    tables["levels"] = {level: LevelSpec(**row) for level, row in tables["levels"].items()}
    return RequestSpecs(**tables)


@dataclass(frozen=True)
class PlanStep:
    """A call with the values that the request states and links to earlier results."""

    function: Function
    values: Mapping[str, JSON]
    links: Links = field(default_factory=dict)

    def request(self, verb: str) -> str:
        """Return the request for this step."""
        pieces = [verb]
        for param in self.function.params:
            if param.name in self.links:
                pieces.append(param.piece.format(param.of.reference))
            elif param.name in self.values:
                pieces.append(param.piece.format(param.of.in_words(self.values[param.name])))
        return " ".join(pieces)


Plan = tuple[PlanStep, ...]


@cache
def targets_for(split: str) -> tuple[Function, ...]:
    """Return the functions of single calls: the held-out domain for `composition`, else the other domains."""
    held_out = request_specs().held_out_domain
    return tuple(one for one in catalogue().values() if (one.domain == held_out) == (split == "composition"))


def functions_for(split: str) -> Sequence[Function]:
    """Return the functions that tasks of a split may offer: for `composition` all, else without the held-out domain."""
    return tuple(catalogue().values()) if split == "composition" else targets_for(split)


@cache
def _pairs() -> tuple[tuple[Function, Function], ...]:
    """Return all pairs of functions of which the second takes a result of the first."""
    every = catalogue().values()
    return tuple((a, b) for a in every for b in every if a != b and _links(a, b, 0))


@cache
def pairs_for(split: str) -> tuple[tuple[Function, Function], ...]:
    """Return the held-out pairs for `composition`, all others for every other split."""
    return tuple(pair for pair in _pairs() if _is_held_out(*pair) == (split == "composition"))


@cache
def fans_for(split: str) -> tuple[tuple[Function, Function, Function], ...]:
    """Return the triples of which the third takes a result of the first and another kind of the second.

    For `composition` one of these two pairs is held out, for other splits neither.
    """
    ordered = sorted(_pairs(), key=lambda pair: (pair[0].name, pair[1].name))
    return tuple(
        (first, second, last)
        for first, last in ordered
        for second, other in ordered
        if other == last and second.domain != first.domain and _fan_links(first, second, last)
        if (_is_held_out(first, last) or _is_held_out(second, last)) == (split == "composition")
    )


@dataclass(frozen=True, slots=True)
class PlanSampler:
    """Draws the plans of a split."""

    rng: random.Random
    split: str

    def plan(self, family: str, num: int) -> Plan:
        """Return a plan of a family; `num` counts the calls of `several`, `parallel` and `chain`."""
        rng, split = self.rng, self.split
        match family:
            case "several":
                return tuple(self._step(function) for function in rng.sample(targets_for(split), num))
            case "parallel":
                return self._parallel(num)
            case "chain":
                return self._chain(num)
            case "fan":
                first, second, last = rng.choice(fans_for(split))
                return self._step(first), self._step(second), self._step(last, _fan_links(first, second, last))
            case "mixed":  # a chain of two, and an unrelated call of another domain
                linked = self._chain(2)
                domains = {step.function.domain for step in linked}
                others = [function for function in functions_for(split) if function.domain not in domains]
                return (*linked, self._step(rng.choice(others)))
        return (self._step(rng.choice(targets_for(split))),)

    def _parallel(self, num: int) -> Plan:
        """Return calls of one function with different values."""
        function, steps = self.rng.choice(targets_for(self.split)), list[PlanStep]()
        for _ in range(20 * num):
            step = self._step(function)
            if len(steps) < num and all(step.values != other.values for other in steps):
                steps.append(step)
        return tuple(steps)

    def _chain(self, num: int) -> Plan:
        """Return calls that each take results of the one before. `composition` has a held-out link."""
        rng, pairs, usual = self.rng, pairs_for(self.split), pairs_for("train")
        functions = list(rng.choice(pairs))
        while len(functions) < num:
            after = [b for a, b in usual if a == functions[-1] and b not in functions]
            before = [a for a, b in usual if b == functions[0] and a not in functions]
            if after and (not before or rng.random() < 0.7):
                functions.append(rng.choice(after))
            elif before:
                functions.insert(0, rng.choice(before))
            else:
                functions = list(rng.choice(pairs))
        links = [_links(first, second, place) for place, (first, second) in enumerate(pairwise(functions))]
        return self._step(functions[0]), *map(self._step, functions[1:], links)

    def _step(self, function: Function, links: Links | None = None) -> PlanStep:
        """Return the function with values of the split, all different, none the default of its parameter.

        A parameter with a default has a value with probability 0.4.
        """
        values: dict[str, JSON] = {}
        for param in function.params:
            if param.name not in (links or {}) and (param.is_required or self.rng.random() < 0.4):
                value = param.of.draw(self.rng, self.split)
                while value in values.values() or value == param.default:
                    value = param.of.draw(self.rng, self.split)
                values[param.name] = value
        return PlanStep(function, values, links or {})


def _links(first: Function, second: Function, place: int) -> Links:
    """Return links for the required parameters of `second` from the result of `first`, which has index `place`."""
    found: dict[str, tuple[int, str]] = {}
    left = dict(first.returns)
    for param in second.required:
        name = next((name for name, kind in left.items() if kind == param.kind), None)
        if name is not None:
            found[param.name] = (place, name)
            del left[name]
    return found


def _fan_links(first: Function, second: Function, last: Function) -> Links:
    """Return one link to each of two first steps, of kinds that only one of them returns."""
    one, other = _links(first, last, 0), _links(second, last, 1)
    return {**one, **other} if len(one) == len(other) == 1 and not set(one) & set(other) else {}


def _is_held_out(first: Function, second: Function) -> bool:
    domains, specs = [first.domain, second.domain], request_specs()
    return domains in specs.held_out_links or specs.held_out_domain in domains
