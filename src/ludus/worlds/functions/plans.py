"""Plans: the calls that a request needs, what each takes from the request and what from an earlier call."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

from ludus.types import JSON
from ludus.worlds.functions.domains.catalogue import Function, Gift, Param, catalogue
from ludus.worlds.functions.domains.kinds import KINDS
from ludus.worlds.functions.domains.state import DomainState, KnownValues, Row

HELD_OUT_DOMAIN = "media"
"""Its functions occur in the split `composition` only."""
HELD_OUT_LINKS = frozenset(
    {("calendar", "weather"), ("messaging", "files"), ("travel", "finance"), ("messaging", "weather")}
)
"""Domains: a chain that takes a result of the first to a function of the second is in `composition` only."""

LOOKALIKES = tuple(
    frozenset(names.split())
    for names in (
        "get_weather get_forecast get_wind get_air_quality get_sunrise find_warmest_day get_temperature",
        "send_email send_text forward_message",
        "find_event list_events find_free_time",
        "create_event set_reminder set_alarm set_timer",
        "transfer_money pay_person create_invoice send_invoice",
        "search_messages read_message",
        "find_file read_file count_words",
        "get_flight_status search_flights",
        "search_song get_lyrics play_track",
        "search_film play_film",
    )
)
"""Functions that one may try for another's request: where nothing fits, none of them is on offer."""


def looks_like(function: Function) -> frozenset[str]:
    """The function and its lookalikes, by name."""
    return frozenset({function.name}).union(*(names for names in LOOKALIKES if function.name in names))


@dataclass(frozen=True, slots=True)
class Link:
    """An argument that is a result of the step at `place`."""

    place: int
    gift: Gift


@dataclass(frozen=True)
class PlanStep:
    """A call to make: the values that the request gives, and the arguments that earlier steps give."""

    function: Function
    values: Mapping[str, JSON]
    links: Mapping[str, Link] = field(default_factory=dict)

    def say(self, verb: str, *, without: str = "", masked: bool = False) -> str:
        """The request for this step, without one parameter; `masked` puts kinds for values."""
        pieces = [verb]
        for param in self.function.params:
            if param.name == without:
                continue
            if param.name in self.links:
                pieces.append(param.piece.format(KINDS[self.links[param.name].gift.kind].reference))
            elif param.name in self.values:
                said = f"<{param.kind}>" if masked else param.of.say(self.values[param.name])
                pieces.append(param.piece.format(said))
        return " ".join(pieces)

    @property
    def shape(self) -> str:
        """The step without values: `name(argument, argument<-place)`."""
        given = [*self.values, *(f"{name}<-{link.place}" for name, link in self.links.items())]
        return f"{self.function.name}({', '.join(sorted(given))})"


Plan = tuple[PlanStep, ...]


def known_in(plan: Sequence[PlanStep]) -> tuple[KnownValues, ...]:
    """The identifiers that the request names."""
    return tuple(
        KnownValues(param.kind, str(step.values[param.name]))
        for step in plan
        for param in step.function.params
        if param.of.letter and param.name in step.values
    )


def arguments_of(plan: Sequence[PlanStep], state: DomainState) -> list[dict[str, JSON]]:
    """The arguments of each step, by the catalogue's names, from running the plan on the state.

    Raises LookupError or ValueError where a function refuses.
    """
    results: list[Row] = []
    found: list[dict[str, JSON]] = []
    for step in plan:
        linked = {name: results[link.place][link.gift.name] for name, link in step.links.items()}
        arguments = {**step.values, **linked}
        defaults = {param.name: param.default for param in step.function.params if not param.is_required}
        results.append(step.function.run(state, **{**defaults, **arguments}))
        found.append(arguments)
    return found


@cache
def functions_for(split: str) -> tuple[Function, ...]:
    """The functions that tasks of a split may offer."""
    return tuple(
        function for function in catalogue().values() if split == "composition" or function.domain != HELD_OUT_DOMAIN
    )


@cache
def targets_for(split: str) -> tuple[Function, ...]:
    """The functions that a single request of a split asks for."""
    held = split == "composition"
    return tuple(f for f in functions_for(split) if (f.domain == HELD_OUT_DOMAIN) == held)


@cache
def pairs_for(split: str) -> tuple[tuple[Function, Function], ...]:
    """Pairs of functions of which the second takes a result of the first.

    `composition` has those that are held out, every other split all others.
    """
    everything = tuple(catalogue().values())
    found = [(a, b) for a in everything for b in everything if a != b and _links(a, b, 0)]
    return tuple(pair for pair in found if _is_held_out(*pair) == (split == "composition"))


@cache
def fans_for(split: str) -> tuple[tuple[Function, Function, Function], ...]:
    """Triples of which the third takes a result of the first and one of the second, of another kind."""
    pairs = set(pairs_for(split)) | (set(pairs_for("train")) if split == "composition" else set())
    found = []
    for first, last in sorted(pairs, key=_names):
        for second, other in sorted(pairs, key=_names):
            fits = other == last and second.name != first.name and second.domain != first.domain
            if fits and len(_fan_links(first, second, last)) == 2:
                found.append((first, second, last))
    if split == "composition":
        found = [(a, b, c) for a, b, c in found if _is_held_out(a, c) or _is_held_out(b, c)]
    return tuple(found)


def draw_step(rng: random.Random, split: str, function: Function, links: Mapping[str, Link] = {}) -> PlanStep:
    """The function with values of the split; a parameter with a default is given two times in five."""
    values: dict[str, JSON] = {}
    for param in function.params:
        if param.name not in links and (param.is_required or rng.random() < 0.4):
            values[param.name] = _draw(rng, split, param, list(values.values()))
    return PlanStep(function, values, links)


def single(rng: random.Random, split: str) -> Plan:
    """One call."""
    return (draw_step(rng, split, rng.choice(targets_for(split))),)


def several(rng: random.Random, split: str, num: int) -> Plan:
    """Calls of different functions, in any order."""
    return tuple(draw_step(rng, split, function) for function in rng.sample(targets_for(split), num))


def parallel(rng: random.Random, split: str, num: int) -> Plan:
    """Calls of one function with different values."""
    function, steps = rng.choice(targets_for(split)), list[PlanStep]()
    for _ in range(20 * num):
        step = draw_step(rng, split, function)
        if len(steps) < num and all(step.values != other.values for other in steps):
            steps.append(step)
    return tuple(steps)


def chain(rng: random.Random, split: str, num: int) -> Plan:
    """Each call takes results of the one before. In `composition` at least one link is held out."""
    pairs = pairs_for(split)
    functions = list(rng.choice(pairs))
    while len(functions) < num:
        usual = pairs_for("train")
        after = [b for a, b in usual if a == functions[-1] and b not in functions]
        before = [a for a, b in usual if b == functions[0] and a not in functions]
        if after and (not before or rng.random() < 0.7):
            functions.append(rng.choice(after))
        elif before:
            functions.insert(0, rng.choice(before))
        else:
            functions = list(rng.choice(pairs))
    steps = [draw_step(rng, split, functions[0])]
    for place, (first, second) in enumerate(pairwise(functions)):
        steps.append(draw_step(rng, split, second, _links(first, second, place)))
    return tuple(steps)


def fan(rng: random.Random, split: str) -> Plan:
    """Two calls whose results a third takes."""
    first, second, last = rng.choice(fans_for(split))
    links = _fan_links(first, second, last)
    steps = (draw_step(rng, split, first), draw_step(rng, split, second))
    return (*steps, draw_step(rng, split, last, links))


def mixed(rng: random.Random, split: str) -> Plan:
    """A chain of two, and a call of another domain that has nothing to do with it."""
    linked = chain(rng, split, 2)
    domains = {step.function.domain for step in linked}
    others = [function for function in functions_for(split) if function.domain not in domains]
    return (*linked, draw_step(rng, split, rng.choice(others)))


def _links(first: Function, second: Function, place: int) -> dict[str, Link]:
    """The required parameters of the second function that results of the first, at `place`, can fill."""
    found: dict[str, Link] = {}
    left = list(first.gives)
    for param in second.required:
        gift = next((one for one in left if one.kind == param.kind), None)
        if gift is not None:
            found[param.name] = Link(place, gift)
            left.remove(gift)
    return found


def _fan_links(first: Function, second: Function, last: Function) -> dict[str, Link]:
    """One link to each of two first steps, over kinds that only one of them gives."""
    one, other = _links(first, last, 0), _links(second, last, 1)
    if set(one) & set(other) or len(one) != 1 or len(other) != 1:
        return {}
    return {**one, **other}


def _is_held_out(first: Function, second: Function) -> bool:
    domains = (first.domain, second.domain)
    return domains in HELD_OUT_LINKS or HELD_OUT_DOMAIN in domains


def _names(pair: tuple[Function, Function]) -> tuple[str, str]:
    return pair[0].name, pair[1].name


def _draw(rng: random.Random, split: str, param: Param, used: Sequence[JSON]) -> JSON:
    """A value that no other parameter of the step has; a default is never drawn."""
    while True:
        value = param.of.draw(rng, split)
        if value not in used and value != param.default:
            return value
