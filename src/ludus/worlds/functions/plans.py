"""Plans: the calls of a request, with arguments from the request or from the results of earlier calls."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

from ludus.types import JSON
from ludus.worlds.functions.catalogue import Function, Param, catalogue
from ludus.worlds.functions.state import DomainState, Row, data_text, vocabulary


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
    lookalikes: Sequence[Sequence[str]]
    questions: Sequence[Sequence[str]]
    levels: Mapping[str, LevelSpec]


@cache
def request_specs() -> RequestSpecs:
    """Return how requests are drawn and worded."""
    tables = tomllib.loads(data_text("requests.toml"))
    tables["levels"] = {level: LevelSpec(**row) for level, row in tables["levels"].items()}
    return RequestSpecs(**tables)


@dataclass(frozen=True, slots=True)
class Link:
    """An argument from the field `name`, of this kind, of the result of the step at `place`."""

    place: int
    name: str
    kind: str


@dataclass(frozen=True)
class PlanStep:
    """A call with the values that the request states and links to earlier results."""

    function: Function
    values: Mapping[str, JSON]
    links: Mapping[str, Link] = field(default_factory=dict)

    def say(self, verb: str, *, without: str = "", masked: bool = False) -> str:
        """Return the request for this step, without one parameter; `masked` writes kinds instead of values."""
        pieces = [verb]
        for param in self.function.params:
            if param.name == without:
                continue
            if param.name in self.links:
                pieces.append(param.piece.format(vocabulary().kinds[self.links[param.name].kind].reference))
            elif param.name in self.values:
                value = f"<{param.kind}>" if masked else param.of.say(self.values[param.name])
                pieces.append(param.piece.format(value))
        return " ".join(pieces)

    @property
    def shape(self) -> str:
        """The step without values: `name(argument, argument<-place)`."""
        given = [*self.values, *(f"{name}<-{link.place}" for name, link in self.links.items())]
        return f"{self.function.name}({', '.join(sorted(given))})"


Plan = tuple[PlanStep, ...]


def arguments_of(plan: Plan, state: DomainState) -> list[dict[str, JSON]]:
    """Run the plan on the state, and return the arguments of each step by the names of the catalogue.

    Raises LookupError or ValueError if a call fails.
    """
    results: list[Row] = []
    found: list[dict[str, JSON]] = []
    for step in plan:
        arguments = {**step.values, **{name: results[link.place][link.name] for name, link in step.links.items()}}
        defaults = {param.name: param.default for param in step.function.params if not param.is_required}
        results.append(step.function.run(state, **{**defaults, **arguments}))
        found.append(arguments)
    return found


@cache
def functions_for(split: str) -> tuple[Function, ...]:
    """Return the functions that tasks of a split may offer."""
    held_out = request_specs().held_out_domain
    return tuple(one for one in catalogue().values() if split == "composition" or one.domain != held_out)


@cache
def targets_for(split: str) -> tuple[Function, ...]:
    """Return the functions that single requests of a split need."""
    held_out = request_specs().held_out_domain
    return tuple(one for one in functions_for(split) if (one.domain == held_out) == (split == "composition"))


@cache
def pairs_for(split: str) -> tuple[tuple[Function, Function], ...]:
    """Return the pairs of functions of which the second takes a result of the first.

    `composition` has the held-out pairs, every other split all others.
    """
    every = tuple(catalogue().values())
    found = [(a, b) for a in every for b in every if a != b and _links(a, b, 0)]
    return tuple(pair for pair in found if _is_held_out(*pair) == (split == "composition"))


@cache
def fans_for(split: str) -> tuple[tuple[Function, Function, Function], ...]:
    """Return the triples of which the third takes a result of the first and another kind of the second."""
    pairs = set(pairs_for(split)) | (set(pairs_for("train")) if split == "composition" else set())
    ordered = sorted(pairs, key=lambda pair: (pair[0].name, pair[1].name))
    found = [
        (first, second, last)
        for first, last in ordered
        for second, other in ordered
        if other == last and second.domain != first.domain and len(_fan_links(first, second, last)) == 2
    ]
    if split == "composition":
        found = [(a, b, c) for a, b, c in found if _is_held_out(a, c) or _is_held_out(b, c)]
    return tuple(found)


@dataclass(frozen=True, slots=True)
class PlanMaker:
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
                steps = (self._step(first), self._step(second))
                return (*steps, self._step(last, _fan_links(first, second, last)))
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
        return tuple(map(self._step, functions, [{}, *links]))

    def _step(self, function: Function, links: Mapping[str, Link] | None = None) -> PlanStep:
        """Return the function with values of the split; a parameter with a default has one two times in five."""
        values: dict[str, JSON] = {}
        for param in function.params:
            if param.name not in (links or {}) and (param.is_required or self.rng.random() < 0.4):
                values[param.name] = self._value(param, list(values.values()))
        return PlanStep(function, values, links or {})

    def _value(self, param: Param, used: Sequence[JSON]) -> JSON:
        """Return a value that no other parameter of the step has and that is not the default."""
        while True:
            value = param.of.draw(self.rng, self.split)
            if value not in used and value != param.default:
                return value


def _links(first: Function, second: Function, place: int) -> dict[str, Link]:
    """Return links for the required parameters of `second` from the result of `first`, which is at `place`."""
    found: dict[str, Link] = {}
    left = dict(first.gives)
    for param in second.required:
        name = next((name for name, kind in left.items() if kind == param.kind), None)
        if name is not None:
            found[param.name] = Link(place, name, left.pop(name))
    return found


def _fan_links(first: Function, second: Function, last: Function) -> dict[str, Link]:
    """Return one link to each of two first steps, of kinds that only one of them returns."""
    one, other = _links(first, last, 0), _links(second, last, 1)
    return {**one, **other} if len(one) == len(other) == 1 and not set(one) & set(other) else {}


def _is_held_out(first: Function, second: Function) -> bool:
    domains, specs = [first.domain, second.domain], request_specs()
    return domains in specs.held_out_links or specs.held_out_domain in domains
