"""Drafts of problems, filled from random numbers and the tables of `problems.toml`."""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, lru_cache
from pathlib import Path
from typing import TypedDict, TypeVar

from ludus.tools.calculator import calculate
from ludus.worlds.math.problems import fill_in

T = TypeVar("T")
Bound = int | str
"""A number, or an expression of the variables drawn before it."""


class DrawRule(TypedDict, total=False):
    """Rule for a variable: a nonzero integer between -nonzero and nonzero, or an entry of a list of words."""

    nonzero: Bound
    word: str


class KindTable(TypedDict, total=False):
    """A kind of problems, an event of word problems, or a table that completes one."""

    levels: list[int]
    part: bool
    held_out: bool
    divide_by: list[int]
    draw: dict[str, list[Bound] | DrawRule | str]
    text: str | list[str]
    steps: list[str]
    unit: str
    answer: str
    by_level: dict[str, KindTable]
    either: list[KindTable]
    choice: list[KindTable]


@dataclass(frozen=True, slots=True)
class ProblemTables:
    """The data file: lists of words, events of word problems, and the kinds of each topic, by name."""

    words: Mapping[str, Sequence[object]]
    events: Mapping[str, KindTable]
    kinds: Mapping[str, Mapping[str, KindTable]]


@cache
def tables() -> ProblemTables:
    """Return the data file."""
    data = tomllib.loads(Path(__file__).with_name("problems.toml").read_text("utf-8"))
    return ProblemTables(data["words"], data["events"], data["topics"])


@dataclass(slots=True)
class Draft:
    """A problem under construction: its steps, the unit of its answer, and the answer if it is an expression."""

    rng: random.Random
    level: int
    steps: list[str] = field(default_factory=list)
    unit: str = ""
    answer: str = ""
    _values: list[Fraction] = field(default_factory=list)

    def do(self, expression: str) -> str:
        """Add a step and return the placeholder of its result."""
        self.steps.append(expression)
        return self.last

    @property
    def last(self) -> str:
        """The placeholder of the result of the last step."""
        return f"{{{len(self.steps) - 1}}}"

    def value(self, mark: str) -> Fraction:
        """Return the value of a number or of a placeholder."""
        for step in self.steps[len(self._values) :]:
            self._values.append(calculate(fill_in(step, self._values)))
        return calculate(fill_in(mark, self._values))

    def randint(self, low: int, high: int) -> int:
        """Return an integer from low to high, inclusive."""
        return self.rng.randint(low, high)

    def nonzero(self, most: int) -> int:
        """Return a nonzero integer between -most and most."""
        return self.rng.choice((-1, 1)) * self.rng.randint(1, most)

    def choice(self, options: Sequence[T]) -> T:
        """Return one of the options."""
        return self.rng.choice(options)

    def word(self, name: str) -> str:
        """Return an entry of a list of words."""
        return str(self.rng.choice(tables().words[name]))

    def coin(self) -> bool:
        """Return True with probability 1/2."""
        return self.rng.random() < 0.5

    def fill(self, table: KindTable, **names: int | str) -> str:
        """Draw the variables of a table, add its steps, and return its text."""
        names["level"] = self.level
        self._draw(table, names)
        for part in self._parts(table):
            table = table | part
            self._draw(part, names)
        text = table["text"] if isinstance(table["text"], str) else self.choice(table["text"])
        for place, step in enumerate(table["steps"]):
            names[f"r{place}"] = self.do(step.format(**names))
        self.unit = table.get("unit", "")
        self.answer = table.get("answer", "").format(**names)
        return text.format(**names)

    def _parts(self, table: KindTable) -> Sequence[KindTable]:
        if "by_level" in table:
            return [table["by_level"][max(key for key in table["by_level"] if int(key) <= self.level)]]
        if "either" in table:
            return [table["either"][0 if self.coin() else 1]]
        return [self.choice(table["choice"])] if "choice" in table else []

    def _draw(self, table: KindTable, names: dict[str, int | str]) -> None:
        for name, rule in table.get("draw", {}).items():
            if isinstance(rule, list):
                names[name] = self.randint(_number(rule[0], names), _number(rule[1], names))
            elif isinstance(rule, str):
                names[name] = _number(rule, names)
            elif "nonzero" in rule:
                names[name] = self.nonzero(_number(rule["nonzero"], names))
            else:
                names[name] = self.word(rule["word"])


def _number(bound: Bound, names: Mapping[str, int | str]) -> int:
    if isinstance(bound, int):
        return bound
    return _whole(re.sub(r"[a-z]+", lambda name: str(names.get(name[0], name[0])), bound))


@lru_cache(maxsize=4096)
def _whole(expression: str) -> int:
    return int(calculate(expression))


def signed(value: int) -> str:
    """Return a term to be added: `+ 3` or `- 3`."""
    return f"+ {value}" if value >= 0 else f"- {-value}"


def term(factor: int, name: str) -> str:
    """Return a multiple of a variable: x, -x or 3x."""
    return {1: name, -1: f"-{name}"}.get(factor, f"{factor}{name}")


def listed(values: Sequence[object]) -> str:
    """Join values as text: 1, 2 and 3."""
    return f"{', '.join(map(str, values[:-1]))} and {values[-1]}"
