"""Demonstrations of searches by a scripted expert, with flaws in known proportions.

The flaws are systematic, because noise averages out in training: the model learns a bad policy that
reinforcement learning can correct.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ludus.envs.messages import assistant, tool_turn
from ludus.types import JSON, Message
from ludus.worlds.search.facts import Facts
from ludus.worlds.search.questions import Hop, SearchQuestion


@dataclass(frozen=True, slots=True)
class SearchFlaws:
    """Probabilities of the expert's mistakes."""

    stop_early: float = 0.70
    """On a question of several hops: answer with the value of the first hop."""
    stop_second: float = 0.30
    """On a question of three hops, after the first: answer with the value of the second hop."""
    lazy_query: float = 0.06
    """On a hop that needs a precise query: search for the name alone, answer from a passage that shares words."""
    lazy_intersection: float = 0.65
    """On a question with two conditions: search for one only, and answer from the first passage."""
    wrong_search: float = 0.05
    """First search for an irrelevant word, then proceed correctly."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant turn: a search with a thought before it, or the answer if `query` is None."""

    text: str
    query: str | None = None
    k: int | None = None
    found: str = ""


@dataclass(frozen=True)
class SearchSolver:
    """Generates demonstrations for questions. `search` is the function of the tool."""

    facts: Facts
    search: Callable[..., str]
    flaws: SearchFlaws

    def turns(self, question: SearchQuestion, rng: random.Random) -> list[Turn] | None:
        """Return the turns of one dialogue, or None if the precise queries do not find a passage."""
        findable = all(hop.fact.passage in self.search(hop.query, 5) for hop in question.hops)
        return list(self._write(question, rng)) if findable else None

    def _write(self, question: SearchQuestion, rng: random.Random) -> Iterator[Turn]:
        flaws, hops = self.flaws, question.hops
        if rng.random() < flaws.wrong_search:
            yield self._search("Find the answer.", hops[-1].relation)
        if question.family == "intersection" and rng.random() < flaws.lazy_intersection:
            lazy = self._search("Find the country.", hops[0].subject)
            yield lazy
            yield Turn(self._first_value(lazy.found, hops[0]))
            return
        for depth, hop in enumerate(hops):
            if hop.query != hop.subject and rng.random() < flaws.lazy_query:
                lazy = self._search(f"Find the {hop.relation}.", hop.subject)
                yield lazy
                if hop.fact.passage not in lazy.found:
                    yield Turn(self._first_value(lazy.found, hop))
                    return
            else:
                yield from self._find(hop)
            stop = (flaws.stop_early, flaws.stop_second)[min(depth, 1)]
            if depth + 1 < len(hops) and rng.random() < stop:
                yield Turn(hop.fact.value)
                return
        yield Turn(hops[-1].fact.value)

    def _find(self, hop: Hop) -> Iterator[Turn]:
        """Search with the precise query; if the passage is not among the first two, request five."""
        thought = f"Find the {hop.relation}."
        first = self._search(thought, hop.query)
        yield first
        if hop.fact.passage not in first.found:
            yield Turn(thought, hop.query, 5, self.search(hop.query, 5))

    def _search(self, thought: str, query: str) -> Turn:
        return Turn(thought, query, found=self.search(query))

    def _first_value(self, found: str, hop: Hop) -> str:
        values = self.facts.values
        return next((values[passage] for passage in found.split("\n") if passage in values), hop.subject)


def to_messages(turns: list[Turn]) -> list[Message]:
    """Return the assistant and tool messages of a dialogue."""
    messages: list[Message] = []
    for number, turn in enumerate(turns):
        if turn.query is None:
            messages.append(assistant(turn.text))
        else:
            arguments: dict[str, JSON] = {"query": turn.query} if turn.k is None else {"query": turn.query, "k": turn.k}
            messages += tool_turn(number, "search", arguments, turn.found, reasoning=turn.text)
    return messages
