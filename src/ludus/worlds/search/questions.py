"""Generated questions of one to three hops, with gold answers and splits by head entity.

A *chain* starts at a head entity (named in the question) and follows relations. Heads are split by a hash of
their name, so that a head of one split never occurs as a head in another. The chain in `HELD_OUT` occurs in no
training question, although each of its relations does.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from ludus.worlds.search.facts import Entity, Fact, Facts, Homonym

SPLITS = ("train", "validation", "test", "composition")
HELD_OUT = ("airport", "city", "timezone")

CHAINS: dict[tuple[str, ...], float] = {
    ("airport", "city"): 0.06,
    ("airport", "code"): 0.02,
    ("city", "country"): 0.03,
    ("city", "population"): 0.03,
    ("city", "timezone"): 0.03,
    ("city", "nearest"): 0.03,
    ("airport", "city", "country"): 0.14,
    ("airport", "city", "population"): 0.12,
    ("airport", "city", "nearest"): 0.12,
    ("city", "country", "capital"): 0.06,
    ("city", "country", "currency"): 0.06,
    ("airport", "city", "country", "capital"): 0.10,
    ("airport", "city", "country", "currency"): 0.10,
}
WEIGHTS: dict[str, float] = {"/".join(chain): weight for chain, weight in CHAINS.items()} | {"intersection": 0.10}
"""Fraction of each family in a split, by name; the sum is 1. The held-out family is the only one of its split."""

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


@dataclass(frozen=True, slots=True)
class Hop:
    """One step of a chain: relation, subject, search query, and the fact to find."""

    relation: str
    subject: str
    query: str
    fact: Fact


@dataclass(frozen=True, slots=True)
class SearchQuestion:
    """A question with its accepted answers (the gold one first) and its hops."""

    id: str
    family: str
    head: str
    text: str
    answers: tuple[str, ...]
    hops: tuple[Hop, ...]


def _hash_fraction(text: str) -> float:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64


@cache
def split_of(kind: str, head: str) -> str:
    """Return the split of a head entity: 74 % train, 6 % validation, 20 % test."""
    share = _hash_fraction(f"{kind}:{head}")
    return "train" if share < 0.74 else "validation" if share < 0.80 else "test"


def all_questions(facts: Facts, split: str) -> dict[str, tuple[SearchQuestion, ...]]:
    """Return all questions of a split by family. `composition` has the chain `HELD_OUT` with the test heads."""
    if split == "composition":
        found = tuple(_chained(facts, HELD_OUT, "test"))
        return {found[0].family: found}
    families = [tuple(_chained(facts, chain, split)) for chain in CHAINS]
    pairs = [_intersection(h) for h in facts.homonyms if split_of("homonym", h.name) == split]
    families.append(tuple(q for q in pairs if not _too_common(q.hops, q.id)))
    return {questions[0].family: questions for questions in families}


def sample_questions(facts: Facts, split: str, num: int, seed: int) -> list[SearchQuestion]:
    """Return `num` different questions in random order, families mixed by their weights.

    An exhausted family is skipped; if all are exhausted, fewer than `num` are returned.
    """
    rng = random.Random(f"{split}:{seed}")
    pools = {family: list(questions) for family, questions in all_questions(facts, split).items()}
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


def _chained(facts: Facts, chain: tuple[str, ...], split: str) -> Iterator[SearchQuestion]:
    kind, *relations = chain
    heads = {"airport": facts.airports, "city": facts.cities}[kind]
    family = "/".join(chain)
    for name, entity in heads.items():
        if split_of(kind, name) != split:
            continue
        hops = _follow(facts, entity, relations)
        if hops is None or _too_common(hops, family + name):
            continue
        asks = QUESTION_FORMS[relations[-1]]
        ask = asks[int(_hash_fraction(f"{family}:{name}") * len(asks))]
        subject = name
        for relation in relations[:-1]:
            subject = NOUNS[relation].format(subject)
        gold = hops[-1].fact
        answers = tuple(dict.fromkeys([gold.value, *gold.aliases]))
        yield SearchQuestion(f"{family}:{name}", family, name, ask.format(subject), answers, hops)


def _follow(facts: Facts, entity: Entity, relations: Sequence[str]) -> tuple[Hop, ...] | None:
    hops: list[Hop] = []
    for relation in relations:
        if relation not in entity.facts:
            return None
        fact = entity.facts[relation]
        hops.append(Hop(relation, entity.name, QUERIES[relation].format(entity.name), fact))
        if len(hops) < len(relations):
            entity = facts.entity(relation, fact.value)
    return tuple(hops)


def _too_common(hops: Sequence[Hop], key: str) -> bool:
    countries = [hop.fact.value for hop in hops if hop.relation == "country" and hop.fact.value in KEEP_FRACTIONS]
    return any(_hash_fraction(f"kept:{key}") >= KEEP_FRACTIONS[country] for country in countries)


def _intersection(homonym: Homonym) -> SearchQuestion:
    """Return the question about a city with two conditions, name and time zone; each alone fits several places."""
    fact = homonym.country
    hop = Hop("country", homonym.name, f"{homonym.name} {homonym.timezone}", fact)
    text = f"In which country is the {homonym.name} that keeps the time zone {homonym.timezone}?"
    answers = tuple(dict.fromkeys([fact.value, *fact.aliases]))
    name = f"intersection:{homonym.name}:{homonym.timezone}"
    return SearchQuestion(name, "intersection", homonym.name, text, answers, (hop,))
