"""Draw distinct problems by level and topic, and assign them to splits.

Two topics are composed: word problems of several events, and links, which combine numbers of several topics.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

from generators.math import topics as topic_functions
from generators.math.drafts import Draft, KindTable, tables
from ludus.envs.task_archive import in_turn
from ludus.rewards.math.math_verify import Expression
from ludus.worlds.math.problems import MathProblem

_UNITS: Mapping[str, Sequence[str]] = {"": (), "cm^2": ("cm^2", "cm²"), "cm^3": ("cm^3", "cm³"), "°": ("°", "degrees")}
"""Notations of units; other units have one notation."""
_MAX_FAILED_DRAWS = 100
"""Consecutive failed draws after which a topic counts as exhausted."""
_MAKERS: Mapping[str, Callable[[Draft], str]] = {
    name: make
    for name, make in vars(topic_functions).items()
    if inspect.isfunction(make) and make.__module__ == topic_functions.__name__ and not name.startswith("_")
}


def make_text(topic: str, kind: str, draft: Draft) -> str:
    """Draw a problem of a kind and return its question, or the number in words if the kind is a part."""
    return _MAKERS[kind](draft) if kind in _MAKERS else draft.fill(tables().kinds[topic][kind])


@cache
def _link_parts() -> Mapping[str, Sequence[tuple[int, Callable[[Draft], str]]]]:
    """Return the kinds that links are composed of, with their levels, by topic."""
    return {
        topic: [
            (min(kind["levels"]), partial(make_text, topic, name))
            for name, kind in kinds.items()
            if kind.get("part") and min(kind["levels"]) < 4
        ]
        for topic, kinds in tables().kinds.items()
        if topic not in ("algebra", "expressions")
    }


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


@dataclass(frozen=True)
class DrawnProblem:
    """A problem, and the pairs of parts that follow each other if it is composed of parts."""

    problem: MathProblem
    links: Pairs


@dataclass(frozen=True)
class ProblemMaker:
    """Draws problems of one level and split. The split of a problem depends only on its steps."""

    level: int
    split: str
    topics: tuple[str, ...]

    def open_topics(self) -> tuple[str, ...]:
        """Return the topics that have problems of this level and split."""
        composed = {"stories": self.split != "composition" or self.level > 1, "links": self.level > 2}
        return tuple(one for one in self.topics if (composed[one] if one in composed else self._kinds(one)))

    def draw(self, rng: random.Random, topic: str) -> DrawnProblem | None:
        """Return a problem of the topic, or None if the drawn one belongs to another split."""
        draft, kind, pairs = Draft(rng, self.level), topic, Pairs()
        if topic == "stories":
            question, pairs = make_story(draft)
        elif topic == "links":
            question, pairs = combine_topics(draft, _link_parts())
        else:
            kind = rng.choice(self._kinds(topic))
            question = make_text(topic, kind, draft)
            if tables().kinds[topic][kind].get("part"):
                question = rng.choice(("What is {}?", "Work out {}.", "Find {}.")).format(question)
        steps = tuple(draft.steps)
        held_out = bool(pairs & HELD_OUT) if kind == topic else self.split == "composition"
        if ("composition" if held_out else split_of_steps(steps)) != self.split:
            return None
        answer = Expression(draft.answer) if draft.answer else draft.value(draft.last)
        units = dict.fromkeys(_UNITS.get(draft.unit, (draft.unit,)), 1.0)
        return DrawnProblem(MathProblem(kind, topic, self.level, question, steps, answer, units), pairs)

    def _kinds(self, topic: str) -> list[str]:
        fitting = [name for name, kind in tables().kinds[topic].items() if self.level in kind["levels"]]
        held_out = self.split == "composition"
        return [name for name in fitting if tables().kinds[topic][name].get("held_out", False) == held_out]


def split_of_steps(steps: Sequence[str]) -> str:
    """Return the split of a problem that is not held out, by a hash of its steps, 7 : 1 : 2."""
    digest = hashlib.sha256("\n".join(steps).encode()).digest()[0] / 256
    return "train" if digest < 0.7 else "validation" if digest < 0.8 else "test"


def make_problems(split: str, levels: Sequence[int], topics: Sequence[str], seed: int) -> Iterator[DrawnProblem]:
    """Yield problems with distinct steps, levels and topics in turn, until all topics are exhausted."""
    seen: set[tuple[str, ...]] = set()
    makers = [ProblemMaker(level, split, tuple(topics)) for level in levels]
    return in_turn(_stream(maker, random.Random(f"{seed}/{split}/{maker.level}"), seen) for maker in makers)


def _stream(maker: ProblemMaker, rng: random.Random, seen: set[tuple[str, ...]]) -> Iterator[DrawnProblem]:
    """Yield problems with steps that are not in `seen`, topics in turn, until all topics are exhausted."""
    topics = list(maker.open_topics())
    while topics:
        for topic in tuple(topics):
            for _ in range(_MAX_FAILED_DRAWS):
                drawn = maker.draw(rng, topic)
                if drawn is not None and drawn.problem.steps not in seen:
                    seen.add(drawn.problem.steps)
                    yield drawn
                    break
            else:
                topics.remove(topic)


def draw_questions(level: int, topic: str) -> Iterator[MathProblem]:
    """Yield training problems of a topic with distinct questions, until it is exhausted; steps may be equal."""
    maker, rng = ProblemMaker(level, "train", (topic,)), random.Random(f"demonstrations/{level}/{topic}")
    seen: set[str] = set()
    failed = 0 if maker.open_topics() else _MAX_FAILED_DRAWS
    while failed < _MAX_FAILED_DRAWS:
        drawn = maker.draw(rng, topic)
        if drawn is None or drawn.problem.question in seen:
            failed += 1
            continue
        failed = 0
        seen.add(drawn.problem.question)
        yield drawn.problem
