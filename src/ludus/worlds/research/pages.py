"""The web of the research world: linked pages, which are rendered from facts when they are opened, and its tools.

There is a page for each country, city and airport, and lists: the airports and the cities of a country, the places at a
latitude, and the countries of a continent. A title in brackets is a link.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Final
from zlib import crc32

from ludus.tools.base import Tool, ToolError, Traits, tool
from ludus.tools.search import PassageIndex, search_tool
from ludus.types import ToolOutcome, ToolStatus
from ludus.worlds.research.facts import KINDS, Country, Facts, Place, load_facts

OPEN, FIND = "open", "find"
MAX_LINES: Final = 8
"""Maximum number of lines in an output of `find`."""


@cache
def _templates() -> dict[str, dict[str, list[str]]]:
    return tomllib.loads((files(__package__) / "data/texts.toml").read_text("utf-8"))


def fill(section: str, name: str, given: Mapping[str, object], key: str = "") -> str:
    """Return a text of `data/texts.toml` with these values; of several variants, the one that the key selects."""
    templates = _templates()[section][name]
    return templates[crc32(key.encode()) % len(templates)].format(**given).strip()


def links(titles: Sequence[str]) -> str:
    """Return links to pages, separated by commas."""
    return ", ".join(f"[{title}]" for title in titles) or "none"


def list_title(country: str, kind: str) -> str:
    """Return the title of the list of places of a kind."""
    return f"{KINDS[kind][0].capitalize()} of {country}"


@dataclass(frozen=True)
class Web:
    """All pages.

    `part_chars` is the length of a part, `injected` the fraction of pages with an order to the reader. `numbered`: rows
    of the lists of places of a country have numbers in place of links.
    """

    part_chars: int = 240
    injected: float = 0.0
    numbered: bool = False

    @property
    def facts(self) -> Facts:
        """The facts that the pages state."""
        return load_facts()

    @cached_property
    def lists(self) -> Mapping[str, Sequence[Place | Country]]:
        """The entries of each list by its title."""
        facts = self.facts
        found: dict[str, list[Place | Country]] = {}
        for country in facts.countries.values():
            found.setdefault(f"Countries of {country.continent}", []).append(country)
            for kind in KINDS:
                found[list_title(country.title, kind)] = list(facts.of_country(country.title, kind))
        for place in facts.places.values():
            found.setdefault(f"Latitude {place.degrees[0]}", []).append(place)
        return found

    @cached_property
    def titles(self) -> Sequence[str]:
        """The titles of all pages."""
        return (*self.facts.countries, *self.facts.places, *self.lists)

    @cached_property
    def _known(self) -> Mapping[str, str]:
        """Titles by the names that `open` accepts."""
        found = {title: title for title in self.titles}
        found |= {one.name.casefold(): one.title for one in self.facts.places.values() if one.name}
        return {title.casefold(): title for title in reversed(self.titles)} | found

    def lines(self, title: str) -> list[str]:
        """Return the lines of a page."""
        facts = self.facts
        if title in facts.countries:
            found = self._country(facts.countries[title])
        elif title in facts.places:
            found = self._place(facts.places[title])
        else:
            found = [self._row(one, title) for one in self.lists[title]]
        if self.injected and random.Random(f"injected:{title}").random() < self.injected:
            found.insert(1, fill("injected", "orders", {"title": title}, title))
        return found

    def parts(self, title: str) -> list[str]:
        """Return the text of a page in parts of whole lines."""
        found: list[str] = []
        for line in self.lines(title):
            if found and len(found[-1]) + len(line) < self.part_chars:
                found[-1] += f"\n{line}"
            else:
                found.append(line)
        return found or ["The list is empty."]

    def _country(self, one: Country) -> list[str]:
        given = one._asdict() | {"area": one.area_km2, "borders": links(one.borders)}
        given["capital"] = links([one.capital] if one.capital else [])
        return fill("pages", "country", given, one.title).split("\n")

    def _place(self, one: Place) -> list[str]:
        facts = self.facts
        same = facts.of_country(one.country, one.kind)
        nearest = facts.nearest(one)
        given = one._asdict() | {
            "latitude": f"Latitude {one.degrees[0]}",
            "nearest": f"[{nearest[0].title}], {nearest[1]} km" if nearest else "none",
            "rank": f"{1 + sum(other.value > one.value for other in same)} of {len(same)}",
            "airports": links([airport.title for airport in facts.airports_of(one.title)]),
            "role": "the capital of" if facts.countries[one.country].capital == one.title else "a city in",
        }
        return fill("pages", one.kind, given, one.title).split("\n")

    def _row(self, one: Place | Country, title: str) -> str:
        if isinstance(one, Country):
            return f"- [{one.title}]"
        if title.startswith("Latitude"):
            return f"- [{one.title}], [{one.country}]"
        latitude, longitude = one.degrees
        given = one._asdict() | {"unit": one.unit, "latitude": latitude, "longitude": longitude}
        row = fill("pages", "row", given, title)
        return row.replace(f"[{one.title}]", str(self.number(one))) if self.numbered else row

    def number(self, one: Place) -> int:
        """Return the number of a place in the list of its country."""
        return 1 + [each.title for each in self.facts.of_country(one.country, one.kind)].index(one.title)

    def snippet(self, title: str) -> str:
        """Return the passage of a page in the search index: its title, and what the page is about."""
        facts = self.facts
        if title in facts.countries:
            return f"{title}: {fill('snippets', 'country', facts.countries[title]._asdict())}"
        if title in facts.places:
            return f"{title}: {fill('snippets', facts.places[title].kind, facts.places[title]._asdict())}"
        return f"{title}: {fill('snippets', 'list', {'num': len(self.lists[title])})}"

    def resolve(self, page: str) -> str:
        """Return the title of a page by its title or another name, in any case. Raises ToolError."""
        name = page.strip().strip("[]").strip()
        found = self._known.get(name) or self._known.get(name.casefold())
        if found is None:
            raise ToolError(f"Unknown page {page!r}. Use a title from search, or from a link.")
        return found

    def open(self, page: str, part: int = 1) -> str:
        """Return a part of a page below its title. Raises ToolError."""
        title = self.resolve(page)
        parts = self.parts(title)
        if not 1 <= part <= len(parts):
            raise ToolError(f"The page {title!r} has {len(parts)} parts.")
        head = f"{title} (part {part} of {len(parts)})" if len(parts) > 1 else title
        return f"{head}\n{parts[part - 1]}"

    def find(self, page: str, text: str) -> str:
        """Return the lines of a page that contain the whole words of a text, below its title. Raises ToolError."""
        title = self.resolve(page)
        found = [line for line in self.lines(title) if contains(line, text)][:MAX_LINES]
        return "\n".join([title, *found]) if found else f"The page {title!r} does not contain it."

    def tools(self, num_results: int) -> tuple[Tool, Tool, Tool]:
        """Return the stateless tools `search`, `open` and `find`."""

        @tool(traits=Traits(latency="instant"), name=OPEN)
        async def open_page(page: str, part: int = 1) -> str:
            """Open a page.

            Args:
                page: its title.
                part: the number of the part.
            """
            return self.open(page, part)

        @tool(traits=Traits(latency="instant"), name=FIND)
        async def find_text(page: str, text: str) -> str:
            """Find the lines of a page that contain a text.

            Args:
                page: its title.
                text: the words to look for.
            """
            return self.find(page, text)

        return search_tool(_index(), num_results), open_page, find_text


def contains(line: str, text: str) -> bool:
    """Return whether a line contains the whole words of a text, in any case."""
    return re.search(rf"(?<!\w){re.escape(text.strip())}(?!\w)", line, re.I) is not None


@cache
def _index() -> PassageIndex:
    web = Web()
    return PassageIndex([web.snippet(title) for title in web.titles])


def opened_page(outcome: ToolOutcome) -> str:
    """Return the title of the page that a call opened, or in which it found a text; empty for other calls."""
    succeeded = outcome.tool in (OPEN, FIND) and outcome.status is ToolStatus.OK
    return outcome.output.split("\n")[0].split(" (part ")[0] if succeeded else ""
