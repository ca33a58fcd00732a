"""Questions of one to three hops over real facts about airports, cities and countries, and the passages with the facts.

`python -m generators.search` writes the data file. Questions are split by a hash of the entity that they name, so that
questions of two splits never begin at the same entity. The chain of the split `composition` occurs in no training
question, although each of its relations does.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from ludus.envs.task_archive import SPLITS, packed_lines

WEIGHTS: Mapping[str, float] = {
    "airport/city": 0.06,
    "airport/code": 0.02,
    "city/country": 0.03,
    "city/population": 0.03,
    "city/timezone": 0.03,
    "city/nearest": 0.03,
    "airport/city/country": 0.14,
    "airport/city/population": 0.12,
    "airport/city/nearest": 0.12,
    "city/country/capital": 0.06,
    "city/country/currency": 0.06,
    "airport/city/country/capital": 0.10,
    "airport/city/country/currency": 0.10,
    "intersection": 0.10,
}
"""Fraction of each family in a split; the sum is 1. The family of `composition` is the only one of its split."""


@dataclass(frozen=True, slots=True)
class Hop:
    """One step of a question: a relation of its subject, the search query, the value with other accepted spellings, and
    the passage that states it."""

    relation: str
    subject: str
    query: str
    value: str
    aliases: Sequence[str]
    passage: str


@dataclass(frozen=True, slots=True)
class SearchQuestion:
    """A question and its hops."""

    id: str
    family: str
    text: str
    hops: tuple[Hop, ...]

    @property
    def answers(self) -> tuple[str, ...]:
        """The accepted answers, the gold one first."""
        return tuple(dict.fromkeys([self.hops[-1].value, *self.hops[-1].aliases]))


@cache
def _lines() -> list[str]:
    return packed_lines("search", "questions")


@cache
def all_hops() -> tuple[Hop, ...]:
    """Return the hops of all questions, in the order of the passages."""
    return tuple(Hop(*row) for row in json.loads(_lines()[0]))


@cache
def passage_values() -> Mapping[str, str]:
    """Return all passages in a fixed order, each with the first value that it states."""
    found: dict[str, str] = {}
    for hop in all_hops():
        found.setdefault(hop.passage, hop.value)
    return found


@cache
def all_questions(split: str) -> Mapping[str, tuple[SearchQuestion, ...]]:
    """Return all questions of a split by family."""
    hops = all_hops()
    found: dict[str, list[SearchQuestion]] = {}
    for family, name, text, places in json.loads(_lines()[1 + SPLITS.index(split)]):
        question = SearchQuestion(f"{family}:{name}", family, text, tuple(hops[place] for place in places))
        found.setdefault(family, []).append(question)
    return {family: tuple(questions) for family, questions in found.items()}


def sample_questions(split: str, num: int, seed: int) -> list[SearchQuestion]:
    """Return `num` different questions in random order, families mixed by their weights.

    An exhausted family is skipped; if all are exhausted, fewer than `num` are returned.
    """
    rng = random.Random(f"{split}:{seed}")
    pools = {family: list(questions) for family, questions in all_questions(split).items()}
    for pool in pools.values():
        rng.shuffle(pool)
    chosen: list[SearchQuestion] = []
    while pools and len(chosen) < num:
        names = sorted(pools)
        (family,) = rng.choices(names, [WEIGHTS.get(name, 1.0) for name in names])
        chosen.append(pools[family].pop())
        if not pools[family]:
            del pools[family]
    return chosen
