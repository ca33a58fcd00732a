"""Reports: texts on the places of a country, judged by a tree of checks against the facts.

The places are those with a value above a limit. A report states their number, the first by value, the value of each,
and from pages of places the distance of each from the nearest place. A number with a unit is a *statement* about a
place: the last one named before it in its sentence, or else the first one of the sentence. One false statement, or a
citation of a page that was not opened, halves the score.
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, NamedTuple

from ludus.rewards.base import truth_of
from ludus.rewards.rubric import Rubric
from ludus.types import Task
from ludus.worlds.research.facts import KINDS, Facts
from ludus.worlds.research.pages import fill, list_title
from ludus.worlds.research.questions import MAX_ROWS, Step, countries_of

Sources = Literal["places", "list", "shown"]
MAX_CHARS: Final = 20_000
"""Longer reports have no leaf that holds."""
TRUE_NUMBERS, TRUE_CITATIONS = "no false number", "no citation of an unopened page"
GATES: Final = (TRUE_NUMBERS, TRUE_CITATIONS)
"""Leaves that halve the score if they do not hold."""
_FIRST = {"airport": ("highest", r"\bhighest\b"), "city": ("largest", r"\b(?:largest|biggest|most populous)\b")}
_UNITS = {"m": "m", "meters": "m", "metres": "m", "km": "km", "people": "people", "inhabitants": "people"}
_ABOUT = {"km": "distance", "m": "height", "people": "population"}
_SENTENCE = re.compile(r"(?<=[.!?;])\s+|\n")
_CITATION = re.compile(r"\[([^\[\]\n]{1,80})\]")


class Item(NamedTuple):
    """A place of a report: its title, its value, and the distance in km from the nearest place."""

    title: str
    value: int
    distance: int


@dataclass(frozen=True)
class ExpectedReport:
    """The truth of a report: places by title, how many the list has, what it is written from, and the shown rows."""

    kind: str
    country: str
    limit: int
    items: tuple[Item, ...]
    num_listed: int
    sources: Sources = "places"
    rows: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The request."""
        given = {"country": self.country, "limit": self.limit}
        return "\n".join([fill(f"reports_on_{self.sources}", self.kind, given, f"{self.items}"), *self.rows])

    @property
    def steps(self) -> tuple[Step, ...]:
        """The pages that the report needs and cites."""
        places = (Step(one.title, (f"{one.distance} km",), "") for one in self.items)
        listed = Step(list_title(self.country, self.kind), (), "")
        return {"places": (listed, *places), "list": (listed,), "shown": ()}[self.sources]

    @property
    def pages(self) -> frozenset[str]:
        """The titles of the pages that the report needs."""
        return frozenset(step.title for step in self.steps)

    @property
    def required(self) -> frozenset[str]:
        """All pages."""
        return self.pages

    @property
    def first(self) -> str:
        """The title of the place with the largest value."""
        return max(self.items, key=lambda one: one.value).title

    @cached_property
    def facts(self) -> Mapping[tuple[str, str], int]:
        """The numbers by title and unit."""
        unit = KINDS[self.kind][1]
        numbers = {(one.title, unit): one.value for one in self.items}
        return numbers | {(one.title, "km"): one.distance for one in self.items}

    @property
    def asked(self) -> Mapping[tuple[str, str], int]:
        """The numbers that the report has to state."""
        return {key: value for key, value in self.facts.items() if self.sources == "places" or key[1] != "km"}

    @property
    def rubric(self) -> Rubric:
        """The tree of checks."""
        plural, first = KINDS[self.kind][0], _FIRST[self.kind][0]
        numbers = tuple(
            Rubric(f"{unit} of {title}", text=f"The report gives the {_ABOUT[unit]} of {title} as {value} {unit}.")
            for (title, unit), value in self.asked.items()
        )
        cited = tuple(Rubric(f"cites {one.title}", text=f"The report cites [{one.title}].") for one in self.steps)
        counted = f"The report states that there are {len(self.items)} {plural}."
        summary = (
            Rubric("number", text=counted),
            Rubric(first, text=f"The report states that {self.first} is the {first}."),
        )
        parts = Rubric("facts", 0.6, numbers), Rubric("summary", 0.2, summary), Rubric("citations", 0.2, cited)
        return Rubric("report", 1.0, parts if cited else parts[:2])

    def solution(self) -> str:
        """Return a report on which all leaves hold."""
        plural, unit = KINDS[self.kind]
        lines = [f"{len(self.items)} {plural}. The {_FIRST[self.kind][0]} is {self.first}."]
        far = [f", {one.distance} km" if self.sources == "places" else "" for one in self.items]
        lines += [f"{one.title}: {one.value} {unit}{km}." for one, km in zip(self.items, far, strict=True)]
        return "\n".join([*lines, " ".join(f"[{step.title}]" for step in self.steps)]).strip()


class ReportScope(NamedTuple):
    """What reports are about: the kinds and numbers of places, the longest list they are selected from, what they are
    written from, and whether a place is called by its number in the list."""

    kinds: Sequence[str] = tuple(KINDS)
    sizes: Sequence[int] = (3, 4, 5, 6)
    max_rows: int = MAX_ROWS
    sources: Sources = "places"
    numbered: bool = False


def reports(facts: Facts, split: str, num: int, seed: str, scope: ReportScope) -> Iterator[ExpectedReport]:
    """Yield up to `num` different reports on places of the countries of a split.

    A list that is shown is a sample of the country's, so that there are more different ones.
    """
    countries = countries_of(facts, split)
    options = [(one.title, kind, size) for one in countries for kind in scope.kinds for size in scope.sizes]
    rng = random.Random(f"reports:{split}:{seed}")
    rng.shuffle(options)
    for country, kind, size in options:
        rows = facts.of_country(country, kind)
        most = min(len(rows), scope.max_rows)
        if scope.sources == "shown" and size < most:
            kept = rng.sample(range(len(rows)), rng.randint(size + 1, most))
            rows = [rows[i] for i in sorted(kept)]
        listed = sorted(rows, key=lambda one: -one.value)
        if not size < len(listed) <= scope.max_rows or listed[size - 1].value == listed[size].value or num <= 0:
            continue
        names = {one.title: f"{kind} {i}" if scope.numbered else one.title for i, one in enumerate(rows, 1)}
        chosen = sorted(listed[:size], key=lambda one: one.title)
        nearest = [facts.nearest(one) for one in chosen]
        items = (Item(names[one.title], one.value, near[1]) for one, near in zip(chosen, nearest, strict=True) if near)
        shown = (f"{names[one.title]}: {one.value} {one.unit}" for one in rows if scope.sources == "shown")
        given = (kind, country, listed[size].value, tuple(items), len(listed), scope.sources, tuple(shown))
        yield ExpectedReport(*given)
        num -= 1


def leaves(task: Task, text: str, opened: Collection[str] | None = None) -> Mapping[str, bool]:
    """Return whether each leaf holds for a report, gates included.

    `opened` are the titles of opened pages; None: all citations count as opened.
    """
    return judge(truth_of(task, ExpectedReport), text, opened)


def judge(report: ExpectedReport, text: str, opened: Collection[str] | None = None) -> dict[str, bool]:
    """Return whether each leaf holds, as `leaves` does."""
    text = text if len(text) <= MAX_CHARS else ""
    cited = {found.strip() for found in _CITATION.findall(text)}
    sentences = [_Sentence(report, one) for one in _marked(report, text)]
    stated = {fact for one in sentences for fact in one.stated}
    right = [report.first in one.titles[:1] for one in sentences if one.names_first]
    counts = {number for one in sentences for number in one.counts}
    holds = {f"{unit} of {title}": (title, unit) in stated for title, unit in report.asked}
    holds |= {f"cites {title}": title in cited and (opened is None or title in opened) for title in report.pages}
    holds["number"] = len(report.items) in counts
    holds[_FIRST[report.kind][0]] = bool(right) and all(right)
    true_counts = counts <= {len(report.items), report.num_listed}
    holds[TRUE_NUMBERS] = bool(text) and true_counts and not any(one.is_false for one in sentences)
    holds[TRUE_CITATIONS] = opened is None or cited <= set(opened)
    return holds


def report_score(report: ExpectedReport, holds: Mapping[str, bool]) -> float:
    """Return the score in [0, 1]: that of the rubric, halved for each gate that does not hold."""
    return report.rubric.score(holds) * 0.5 ** sum(not holds[gate] for gate in GATES)


def _marked(report: ExpectedReport, text: str) -> list[str]:
    """Return the sentences of a text, without citations.

    The title of a place becomes its number between NUL characters.
    """
    titles = [one.title for one in report.items]
    kept = _CITATION.sub(lambda found: found[1] if found[1].strip() in titles else " ", text)
    longest = sorted(titles, key=len, reverse=True)
    pattern = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest))})(?!\w)")
    return _SENTENCE.split(pattern.sub(lambda found: f"\0{titles.index(found[0])}\0", kept.replace("\0", " ")))


class _Sentence:
    """The statements of a sentence."""

    def __init__(self, report: ExpectedReport, text: str) -> None:
        plural, words = KINDS[report.kind][0], "|".join(_UNITS)
        tokens = re.compile(rf"\0(\d+)\0|(?<![\d.,])(\d[\d,]*(?:\.\d+)?)\s*({words}|{plural})\b", re.I)
        self.titles = [report.items[int(found[1])].title for found in tokens.finditer(text) if found[1]]
        self.names_first = re.search(_FIRST[report.kind][1], text, re.I) is not None
        self.stated: list[tuple[str, str]] = []
        self.counts: list[float] = []
        self.is_false = False
        last = self.titles[0] if self.titles else ""
        for found in tokens.finditer(text):
            if found[1]:
                last = report.items[int(found[1])].title
                continue
            number, unit = float(found[2].replace(",", "")), found[3].lower()
            if unit == plural:
                self.counts.append(number)
            else:
                self._state(report, (last, *self.titles[:1]), number, _UNITS[unit])

    def _state(self, report: ExpectedReport, titles: Sequence[str], number: float, unit: str) -> None:
        known = (
            {report.facts.get((title, unit)) for title in titles}
            if self.titles
            else {value for (_, own), value in report.facts.items() if own == unit}
        )
        self.is_false |= number not in known and not (unit in KINDS[report.kind] and number == report.limit)
        self.stated += [(title, unit) for title in titles if title and report.facts.get((title, unit)) == number][:1]
