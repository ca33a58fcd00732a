"""Composed problems: word problems of several events, and links, which combine numbers of several topics."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from ludus.worlds.math.problems import Draft, KindTable, tables

Pairs = frozenset[tuple[str, str]]
HELD_OUT: Pairs = frozenset(
    {
        *(("share", "packs"), ("percent", "multiply"), ("fraction", "lose"), ("multiply", "percent")),
        *(("numbers", "counting"), ("counting", "geometry"), ("ratios", "numbers")),
    }
)
"""Pairs of consecutive events or topics that only the split `composition` has."""
_ENDS: Mapping[int, Sequence[str]] = {
    2: ("a + b", "a - b", "a * b", "gcd", "larger"),
    3: ("a + b + c", "a * b - c", "(a + b) * c", "a - b + c", "a + b * c"),
    4: ("a + b + c + d", "a * b + c * d", "(a - b) * (c + d)", "a * b - c - d", "(a + b + c) * d"),
}


def make_story(d: Draft) -> tuple[str, Pairs]:
    """Return the question of a story of `level` events and the pairs of consecutive events."""
    start = d.choice((12, 20, 24, 30, 36, 40, 48, 60, 72, 80, 90)) + d.choice((0, 0, 0, 5, 7))
    who, things, mark = d.word("people"), d.word("counted"), str(start)
    events = tables().events
    sentences = [f"{who} has {start} {things}."]
    names: list[str] = []
    for _ in range(d.level):
        few = d.value(mark) < 4
        options = [n for n in events if n not in names[-1:] and not (few and n not in ("gain", "packs"))]
        names.append(d.choice(options))
        event = events[names[-1]]
        n, mark = _divisor(d, event, mark, sentences, who)
        sentences.append(d.fill(event, who=who, things=things, mark=mark, value=int(d.value(mark)), n=n))
        mark = d.last
    return f"{' '.join(sentences)} How many {things} does {who} have now?", frozenset(itertools.pairwise(names))


def _divisor(d: Draft, event: KindTable, mark: str, sentences: list[str], who: str) -> tuple[int, str]:
    """Return a divisor that the event allows; if the number has none, an event before it increases the number."""
    divisors, value = event.get("divide_by", [1]), d.value(mark)
    fitting = [n for n in divisors if value % n == 0]
    if divisors == [1]:
        return 1, mark
    n = d.choice(fitting or divisors)
    if fitting:
        return n, mark
    sentences.append(f"{who} finds {-value % n} more.")
    return n, d.do(f"{mark} + {-value % n}")


def combine_topics(d: Draft, parts: Mapping[str, Sequence[tuple[int, Callable[[Draft], str]]]]) -> tuple[str, Pairs]:
    """Combine `level - 1` numbers, each with its level, of the topics in `parts`; a number may depend on the
    previous one. Return the question and the pairs of consecutive topics."""
    topics = [d.choice(list(parts)) for _ in range(d.level - 1)]
    sentences: list[str] = []
    marks: dict[str, str] = {}
    for name, topic in zip("abcd", topics, strict=False):
        level, make = d.choice(parts[topic])
        text = make(part := Draft(d.rng, level, d.steps))
        mark = part.last
        if marks and d.rng.random() < 0.4:
            times, (before, earlier) = d.randint(2, 5), list(marks.items())[-1]
            text = f"{times} times {before} plus the following: {text}"
            mark = d.do(f"{times} * {earlier} + {mark}")
        sentences.append(f"Let {name} be {text}.")
        marks[name] = mark
    return f"{' '.join(sentences)} {_end(d, marks)}", frozenset(itertools.pairwise(topics))


def _end(d: Draft, marks: Mapping[str, str]) -> str:
    end = d.choice(_ENDS[len(marks)])
    if end == "gcd":
        values = [d.value(mark) for mark in marks.values()]
        if all(value.denominator == 1 and value > 0 for value in values):
            d.do(f"gcd({', '.join(marks.values())})")
            return "What is the greatest common divisor of a and b?"
        end = "a + b"
    if end == "larger":
        d.do(f"max({', '.join(marks.values())})")
        return "What is the larger one of a and b?"
    d.do("".join(marks.get(character, character) for character in end))
    return f"What is {end}?"
