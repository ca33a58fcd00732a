"""Questions of the research world: an entity described by several conditions, whose name is asked for.

A *shape* is how the country is described (by name, by its capital, by two neighbours), what is asked, and the kind of
place. Entities that fulfil all conditions but one are the near misses. Each question is checked on the facts: exactly
one entity fulfils its conditions.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final, Literal, NamedTuple
from zlib import crc32

from ludus.rewards.exact_match import ExpectedAnswers, matches
from ludus.worlds.research.facts import KINDS, Country, Facts, Place, distance_km
from ludus.worlds.research.pages import contains, fill, list_title

Level = Literal[1, 2, 3, 4, 5]
MAX_ROWS: Final = 30
"""Maximum length of a list that a question needs as a whole."""
MAX_TRIES: Final = 40
"""Maximum number of draws per question."""
MAX_NEAR_MISSES: Final = 8
"""Maximum number of near misses that a question records."""


class Shape(NamedTuple):
    """The form of a question. `where` describes the country, `asked` is what to find out, `kind` of which places."""

    where: str
    asked: str
    kind: str


WHERE: Final = {"named": 0, "capital": 1, "borders": 2}
"""Number of pages that identify the country."""
PLAIN: Final = {"lookup": 1, "follow": 2, "filter": 3}
"""What is asked without a computation, and the number of pages that it needs in the country."""
LEVELS: Final[Mapping[Shape, int]] = {
    **{
        Shape(where, asked, kind): min(WHERE[where] + PLAIN[asked], 4)
        for kind in KINDS
        for asked in PLAIN
        for where in WHERE
    },
    Shape("named", "distance", "airport"): 5,
    Shape("named", "total", "city"): 5,
}
"""Level of each shape: the number of pages that its solution needs, at most 4; level 5 also needs a computation."""
HELD_OUT: Final = frozenset({Shape("capital", "lookup", "city"), Shape("borders", "follow", "airport")})
"""The shapes of `composition`. Each part of theirs occurs in other shapes."""


class Step(NamedTuple):
    """A page of the solution.

    `clues` are the texts by which the solver recognizes the row that it needs; none: it reads the whole page. `guess`
    is the answer of a reader who stops there.
    """

    title: str
    clues: tuple[str, ...]
    guess: str


@dataclass(frozen=True)
class Question(ExpectedAnswers):
    """A question with its solution. `near_misses` are wrong answers that fulfil all conditions but one.

    `program` computes the answer of level 5 from numbers on the pages.
    """

    text: str
    shape: Shape
    steps: tuple[Step, ...]
    near_misses: tuple[str, ...]
    program: str = ""

    @property
    def pages(self) -> frozenset[str]:
        """The titles of the pages that the solution needs."""
        return frozenset(step.title for step in self.steps)

    @property
    def required(self) -> frozenset[str]:
        """The pages that prove the answer: without those of other candidates."""
        return self.pages.difference(self.near_misses if self.shape.asked == "filter" else ())

    def renamed(self, names: Callable[[str], str]) -> Question:
        """Return the question with other names of the places that answer it and miss it."""
        near_misses = tuple(map(names, self.near_misses))
        steps = tuple(step._replace(guess=names(step.guess)) for step in self.steps)
        return replace(self, accepted=(names(self.accepted[0]),), near_misses=near_misses, steps=steps)


class Found(NamedTuple):
    """What the part of a question about a country asks for: see `Question`."""

    given: Mapping[str, object]
    answers: tuple[str, ...]
    steps: tuple[Step, ...]
    near_misses: tuple[str, ...]
    program: str = ""


def split_of(country: str) -> str:
    """Return the split of the questions about a country, by a hash of its name: 6 : 1 : 3."""
    share = crc32(f"research:{country}".encode()) % 10
    return "train" if share < 6 else "validation" if share < 7 else "test"


def countries_of(facts: Facts, split: str) -> list[Country]:
    """Return the countries of a split that have enough places. `composition` has those of `test`."""
    own = "test" if split == "composition" else split
    found = [one for one in facts.countries.values() if split_of(one.title) == own]
    return [one for one in found if all(len(facts.of_country(one.title, kind)) >= 3 for kind in KINDS)]


def questions(facts: Facts, split: str, shapes: Sequence[Shape], num: int, seed: str) -> Iterator[Question]:
    """Yield up to `num` different questions, the shapes in turn; fewer if a shape has no more."""
    rng, countries, seen = random.Random(f"research:{split}:{seed}"), countries_of(facts, split), set[str]()
    for number in range(num):
        for _ in range(MAX_TRIES):
            made = make_question(facts, rng.choice(countries), shapes[number % len(shapes)], rng)
            if made is not None and made.text not in seen:
                seen.add(made.text)
                yield made
                break


def make_question(facts: Facts, country: Country, shape: Shape, rng: random.Random) -> Question | None:
    """Return a question about a country.

    None if this draw has no unique answer, no near miss, or its answer in its text.
    """
    where, found = _where(facts, country, shape.where), ASKED[shape.asked](facts, country, shape.kind, rng)
    if where is None or found is None:
        return None
    phrase, steps = where
    right = ExpectedAnswers(found.answers)
    wrong = tuple(one for one in dict.fromkeys(found.near_misses) if not matches(one, right))[:MAX_NEAR_MISSES]
    if not wrong or {step.title for step in steps} & {step.title for step in found.steps}:
        return None
    text = fill(shape.kind, shape.asked, {"where": phrase, **found.given}, f"{found.answers[0]}{found.given}")
    if contains(text, found.answers[0]):
        return None
    return Question(found.answers, text, shape, (*steps, *found.steps), wrong, found.program)


def _where(facts: Facts, country: Country, how: str) -> tuple[str, tuple[Step, ...]] | None:
    """Return a description of a country and the steps that identify it; None if the description is not unique."""
    if how == "named":
        return country.title, ()
    if how == "capital":
        step = Step(country.capital, (f"[{country.title}]",), country.capital)
        return (fill("where", how, {"capital": country.capital}), (step,)) if country.capital else None
    for pair in combinations(country.borders, 2):
        if [one for one in facts.countries.values() if set(pair) <= set(one.borders)] == [country]:
            link = (f"[{country.title}]",)
            steps = tuple(Step(title, link, facts.countries[title].capital or title) for title in pair)
            return fill("where", how, {"borders": " and ".join(pair)}), steps
    return None


def _clues(places: Sequence[Place], target: Place) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return clues that together fit only the target, and the titles of other places that one of them fits.

    Returns no clues if there are none with such places.
    """
    value = f"{target.value} {target.unit}"
    for clues in (target.degrees, (value, target.degrees[0]), (value, target.degrees[1])):
        fits = [[one for one in places if clue in (*one.degrees, f"{one.value} {one.unit}")] for clue in clues]
        both = [one for one in fits[0] if one in fits[1]]
        others = tuple(one.title for one in (*fits[0], *fits[1]) if one not in both)
        if len(both) == 1 and others:
            return clues, others
    return (), ()


def _lookup(facts: Facts, country: Country, kind: str, rng: random.Random) -> Found | None:
    places = facts.of_country(country.title, kind)
    target = rng.choice(places)
    clues, others = _clues(places, target)
    step = Step(list_title(country.title, kind), clues, others[0] if others else "")
    return Found({"clues": ", ".join(clues)}, target.spellings, (step,), others) if clues else None


def _follow(facts: Facts, country: Country, kind: str, rng: random.Random) -> Found | None:
    """Ask for the nearest airport of an airport, or for the airport of a city."""
    found = _lookup(facts, country, kind, rng)
    if found is None:
        return None

    def airport(title: str) -> Place | None:
        """Return the airport that follows from a place; None if it is not unique."""
        if kind == "airport":
            nearest = facts.nearest(facts.places[title])
            return nearest[0] if nearest else None
        served = facts.airports_of(title)
        return served[0] if len(served) == 1 else None

    title = found.answers[0]
    target, others = airport(title), [airport(one) for one in found.near_misses]
    wrong = tuple(one.title for one in others if one is not None and one != target)
    if target is None:
        return None
    steps = (found.steps[0]._replace(guess=title), Step(title, (f"[{target.title}]",), title))
    return found._replace(answers=target.spellings, steps=steps, near_misses=(*wrong, title))


def _filter(facts: Facts, country: Country, kind: str, rng: random.Random) -> Found | None:
    """Ask for one of the two or three places of the largest values, by its distance from the nearest place."""
    places = sorted(facts.of_country(country.title, kind), key=lambda one: -one.value)
    num = rng.choice((2, 3))
    if not num < len(places) <= MAX_ROWS or places[num - 1].value == places[num].value:
        return None
    limit = rng.randint(places[num].value, places[num - 1].value - 1)
    candidates = sorted(places[:num], key=lambda one: one.title)
    target, distances = rng.choice(candidates), {one.title: (facts.nearest(one) or (one, 0))[1] for one in places}
    distance = distances[target.title]
    others = [one.title for one in candidates if one is not target]
    if any(distances[title] == distance for title in others):
        return None
    above = (Step(one.title, (f"{distances[one.title]} km",), one.title) for one in candidates)
    steps = (Step(list_title(country.title, kind), (), others[0]), *above)
    also = [one.title for one in places[num:] if distances[one.title] == distance]
    return Found({"value": limit, "distance": distance}, target.spellings, steps, (*others, *also))


def _distance(facts: Facts, country: Country, kind: str, rng: random.Random) -> Found | None:
    """Ask for the distance of two airports, each described by clues."""
    places = facts.of_country(country.title, kind)
    one, other = rng.sample(places, 2)
    (clues, wrong), (more, _) = _clues(places, one), _clues(places, other)
    exact, nearest = distance_km(one, other), (facts.nearest(one), facts.nearest(other))
    if not clues or not more or len(places) > MAX_ROWS or abs(exact % 1 - 0.5) < 0.01:
        return None
    if any(near is not None and near[1] == round(exact) for near in nearest):
        return None
    misses = [str(round(distance_km(facts.places[title], other))) for title in wrong if title != other.title]
    guess, title = str(nearest[0][1] if nearest[0] else 0), list_title(country.title, kind)
    rows = (Step(title, clues, guess), Step(title, more, guess))
    steps = (*rows, *(Step(place.title, (f"{place.lat}", f"{place.lon}"), guess) for place in (one, other)))
    given = {"clues": ", ".join(clues), "others": ", ".join(more)}
    program = (
        "from math import *\n"
        f"a, b, c, d = map(radians, ({one.lat}, {one.lon}, {other.lat}, {other.lon}))\n"
        "h = sin((c - a) / 2) ** 2 + cos(a) * cos(c) * sin((d - b) / 2) ** 2\n"
        "print(round(2 * 6371 * asin(sqrt(h))))"
    )
    return Found(given, (str(round(exact)),), steps, (*misses, guess), program)


def _total(facts: Facts, country: Country, kind: str, rng: random.Random) -> Found | None:
    """Ask for the sum of the values above a limit."""
    places = sorted(facts.of_country(country.title, kind), key=lambda one: -one.value)
    num = rng.randint(4, 8)
    if not num < len(places) <= MAX_ROWS or places[num - 1].value == places[num].value:
        return None
    limit = rng.randint(places[num].value, places[num - 1].value - 1)
    values = [one.value for one in places if one.value > limit]
    total, step = sum(values), Step(list_title(country.title, kind), (), str(places[0].value))
    misses = (str(total - values[-1]), str(total + places[num].value), str(places[0].value))
    return Found({"value": limit}, (str(total),), (step,), misses, f"print({' + '.join(map(str, values))})")


ASKED: Final[Mapping[str, Callable[[Facts, Country, str, random.Random], Found | None]]] = {
    "lookup": _lookup,
    "follow": _follow,
    "filter": _filter,
    "distance": _distance,
    "total": _total,
}
"""What can be asked for, and the function that asks for it in a country."""


def shapes_of(split: str, levels: Sequence[int]) -> list[Shape]:
    """Return the shapes of a split with these levels."""
    return [one for one, level in LEVELS.items() if level in levels and (one in HELD_OUT) == (split == "composition")]
