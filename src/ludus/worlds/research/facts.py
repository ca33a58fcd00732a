"""Facts about countries, cities and airports, from the data file that `python -m generators.research` writes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import NamedTuple

from ludus.envs.task_archive import packed_lines
from ludus.types import grouped

KINDS = {"airport": ("airports", "m"), "city": ("cities", "people")}
"""Kind of a place -> its plural and the unit of its value."""
EARTH_KM = 6371.0


class Country(NamedTuple):
    """A country. `capital` is the title of a city, or empty; `borders` are titles of countries."""

    title: str
    continent: str
    capital: str
    area_km2: int
    population: int
    currency: str
    borders: Sequence[str]


class Place(NamedTuple):
    """A city or an airport. `value` is the population or the elevation in meters.

    The title of an airport is its code; only airports have a `name`, and a `city` that they serve.
    """

    kind: str
    title: str
    country: str
    value: int
    lat: float
    lon: float
    timezone: str
    name: str = ""
    city: str = ""

    @property
    def unit(self) -> str:
        """The unit of the value."""
        return KINDS[self.kind][1]

    @property
    def degrees(self) -> tuple[str, str]:
        """Latitude and longitude in whole degrees, such as `13 N` and `20 E`."""
        return degree(self.lat, "NS"), degree(self.lon, "EW")

    @property
    def spellings(self) -> tuple[str, ...]:
        """Accepted names: title and full name."""
        return (self.title, self.name) if self.name else (self.title,)


def degree(angle: float, letters: str) -> str:
    """Return an angle in whole degrees with the letter of its direction; 0 has the first one."""
    whole = round(angle)
    return f"{abs(whole)} {letters[whole < 0]}"


def distance_km(one: Place, other: Place) -> float:
    """Return the great-circle distance (haversine formula, sphere of radius `EARTH_KM`)."""
    lat, lat2 = math.radians(one.lat), math.radians(other.lat)
    across = math.sin((lat2 - lat) / 2) ** 2
    along = math.cos(lat) * math.cos(lat2) * math.sin(math.radians(other.lon - one.lon) / 2) ** 2
    return 2 * EARTH_KM * math.asin(math.sqrt(across + along))


@dataclass(frozen=True)
class Facts:
    """All facts by title."""

    countries: Mapping[str, Country]
    places: Mapping[str, Place]
    _nearest: dict[str, tuple[Place, int] | None] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def _by_country(self) -> Mapping[tuple[str, str], list[Place]]:
        found: dict[tuple[str, str], list[Place]] = {(c, kind): [] for c in self.countries for kind in KINDS}
        for one in self.places.values():
            found[one.country, one.kind].append(one)
        return found

    @cached_property
    def _airports_of(self) -> Mapping[str, list[Place]]:
        return grouped((one for one in self.places.values() if one.city), lambda one: one.city)

    def of_country(self, country: str, kind: str) -> Sequence[Place]:
        """Return the places of a kind in a country, by title."""
        return self._by_country[country, kind]

    def airports_of(self, city: str) -> Sequence[Place]:
        """Return the airports that serve a city."""
        return self._airports_of.get(city, ())

    def nearest(self, place: Place) -> tuple[Place, int] | None:
        """Return the nearest other place of its kind in its country, and the distance in km; None if it is alone."""
        if place.title not in self._nearest:
            others = (one for one in self.of_country(place.country, place.kind) if one is not place)
            found = min(((distance_km(place, one), one) for one in others), default=None)
            self._nearest[place.title] = found and (found[1], round(found[0]))
        return self._nearest[place.title]


@cache
def load_facts() -> Facts:
    """Return the facts of the data file."""
    countries, cities, airports = ([*json.loads(line)] for line in packed_lines("research", "facts"))
    return Facts({row[0]: Country(*row) for row in countries}, {row[1]: Place(*row) for row in (*cities, *airports)})
