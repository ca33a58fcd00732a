"""The questions of the world `search`: the hops from its tables, chains of hops, and their words.

A *chain* starts at a head entity (named in the question) and follows relations. Heads are split by a hash of
their name. The chain in `HELD_OUT` is the only one of the split `composition`.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ludus.envs.task_archive import SPLITS
from ludus.worlds.search.questions import WEIGHTS, Hop, SearchQuestion

HELD_OUT = ("airport", "city", "timezone")
CHAINS = [tuple(family.split("/")) for family in WEIGHTS if "/" in family]
NOUNS = {"city": "the city that {} serves", "country": "the country of {}"}
QUESTION_FORMS = {
    "city": ("Which city does {} serve?", "{} serves which city?"),
    "code": ("What is the code of {}?", "Which code does {} have?"),
    "country": ("In which country is {}?", "What is the country of {}?"),
    "population": ("What is the population of {}?", "How many people live in {}?"),
    "timezone": ("Which time zone does {} keep?", "What is the time zone of {}?"),
    "nearest": ("What is the closest neighbour of {}?", "Which city is closest to {}?"),
    "capital": ("What is the capital of {}?", "Which city is the capital of {}?"),
    "currency": ("What is the currency of {}?", "Which currency does {} use?"),
}
QUERIES = {
    "city": "{}",
    "code": "{}",
    "country": "{} city country",
    "population": "{} population",
    "timezone": "{} time zone",
    "nearest": "{} closest neighbour",
    "capital": "{} capital",
    "currency": "{} currency",
}
KEEP_FRACTIONS = {"United States": 1 / 8, "Brazil": 1 / 3}
"""Fraction of the heads in these countries that have country questions. Otherwise, 40 % of the answers are the
United States, so that guessing succeeds."""


def plain(text: str) -> str:
    """Return a name without accents."""
    decomposed = unicodedata.normalize("NFKD", text)
    return "".join(c for c in decomposed if not unicodedata.combining(c))


class Country(NamedTuple):
    name: str
    iso3: str
    capital: str
    currency: str
    currency_code: str

    def hop(self, subject: str, query: str, described: str) -> Hop:
        """Return the hop from a city to this country."""
        passage = f"{described} is a city in the country of {self.name}."
        return Hop("country", subject, query, self.name, [plain(self.name), self.iso3], passage)


@dataclass
class Facts:
    """All hops in the order of their passages, and those of the entities of each kind by name and relation.

    The rows of the tables are `countries` (name, ISO code, capital, currency, code of the currency), `cities` (name,
    country, population, time zone, nearest city, spellings), `airports` (name, city, code) and `homonyms` (name, time
    zone, country). An integer in place of a city or country is its position in the table.
    """

    tables: Mapping[str, Sequence[Sequence[Any]]]
    hops: list[Hop] = field(default_factory=list)
    entities: defaultdict[str, dict[str, dict[str, Hop]]] = field(default_factory=lambda: defaultdict(dict))
    homonyms: list[Hop] = field(default_factory=list)

    def __post_init__(self) -> None:
        countries = [Country(*row) for row in self.tables["countries"]]
        cities = self.tables["cities"]
        for airport, city, code in self.tables["airports"]:
            name, spellings = cities[city][0], cities[city][5]
            passage = f"{airport} is an airport. It serves {name} and has the code {code}."
            self._add("airport", "city", airport, name, spellings, passage)
            self._add("airport", "code", airport, code, [], passage)
        for name, country, people, timezone, nearest, _ in cities:
            hop = countries[country].hop(name, QUERIES["country"].format(name), name)
            self._keep("city", hop)
            self._add("city", "population", name, str(people), [], f"{name} has a population of {people} people.")
            others = [timezone.replace("_", " ")]
            self._add("city", "timezone", name, timezone, others, f"{name} keeps the time zone {timezone}.")
            passage = f"The closest neighbour of {name} is {nearest}."
            self._add("city", "nearest", name, nearest, [plain(nearest)], passage)
        for name, _, capital, currency, code in countries:
            self.entities["country"][name] = {}
            if capital:
                self._add("country", "capital", name, capital, [plain(capital)], f"The capital of {name} is {capital}.")
            if currency:
                self._add("country", "currency", name, currency, [code], f"The currency of {name} is the {currency}.")
        for name, timezone, country in self.tables["homonyms"]:
            hop = countries[country].hop(name, f"{name} {timezone}", f"{name}, in the time zone {timezone},")
            self.homonyms.append(hop)
        self.hops += self.homonyms

    def _add(self, kind: str, relation: str, subject: str, value: str, aliases: Sequence[str], passage: str) -> None:
        self._keep(kind, Hop(relation, subject, QUERIES[relation].format(subject), value, aliases, passage))

    def _keep(self, kind: str, hop: Hop) -> None:
        self.hops.append(hop)
        self.entities[kind].setdefault(hop.subject, {})[hop.relation] = hop


def questions_of(facts: Facts, split: str) -> list[SearchQuestion]:
    """Return all questions of a split by family. `composition` has the chain `HELD_OUT` with the test heads."""
    if split == "composition":
        return list(chained(facts, HELD_OUT, "test"))
    found = [question for chain in CHAINS for question in chained(facts, chain, split)]
    pairs = [intersection(hop) for hop in facts.homonyms if split_of("homonym", hop.subject) == split]
    return [*found, *(pair for pair in pairs if not is_too_common(pair.hops, pair.id))]


def hash_fraction(text: str) -> float:
    """Return a number in [0, 1) that depends only on the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64


def split_of(kind: str, head: str) -> str:
    """Return the split of a head entity: 74 % train, 6 % validation, 20 % test."""
    share = hash_fraction(f"{kind}:{head}")
    return "train" if share < 0.74 else "validation" if share < 0.80 else "test"


def chained(facts: Facts, chain: Sequence[str], split: str) -> Iterator[SearchQuestion]:
    """Yield the questions of a chain whose heads belong to the split."""
    kind, *relations = chain
    family = "/".join(chain)
    for head in facts.entities[kind]:
        hops = follow(facts, kind, head, relations) if split_of(kind, head) == split else None
        if hops is None or is_too_common(hops, family + head):
            continue
        forms = QUESTION_FORMS[relations[-1]]
        form = forms[int(hash_fraction(f"{family}:{head}") * len(forms))]
        subject = head
        for relation in relations[:-1]:
            subject = NOUNS[relation].format(subject)
        yield SearchQuestion(f"{family}:{head}", family, form.format(subject), hops)


def follow(facts: Facts, kind: str, name: str, relations: Sequence[str]) -> tuple[Hop, ...] | None:
    """Return the hops from an entity, or None if one of the relations is unknown."""
    hops: list[Hop] = []
    for relation in relations:
        known = facts.entities[kind][name]
        if relation not in known:
            return None
        hops.append(known[relation])
        kind, name = relation, known[relation].value
    return tuple(hops)


def is_too_common(hops: Sequence[Hop], key: str) -> bool:
    """Return whether a question is dropped because its country is the answer of too many."""
    countries = [hop.value for hop in hops if hop.relation == "country" and hop.value in KEEP_FRACTIONS]
    return any(hash_fraction(f"kept:{key}") >= KEEP_FRACTIONS[country] for country in countries)


def intersection(hop: Hop) -> SearchQuestion:
    """Return the question about a city with two conditions, name and time zone; each alone fits several places."""
    timezone = hop.query.removeprefix(f"{hop.subject} ")
    text = f"In which country is the {hop.subject} that keeps the time zone {timezone}?"
    return SearchQuestion(f"intersection:{hop.subject}:{timezone}", "intersection", text, (hop,))


def lines_of(facts: Facts) -> Iterator[list[list[object]]]:
    """Yield the lines of the data file: all hops, then the questions of each split, which number their hops."""
    yield [[hop.relation, hop.subject, hop.query, hop.value, list(hop.aliases), hop.passage] for hop in facts.hops]
    place = {id(hop): number for number, hop in enumerate(facts.hops)}
    for split in SPLITS:
        yield [
            [one.family, one.id.removeprefix(f"{one.family}:"), one.text, [place[id(hop)] for hop in one.hops]]
            for one in questions_of(facts, split)
        ]
