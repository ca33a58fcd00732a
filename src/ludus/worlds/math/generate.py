"""Draw distinct problems by level and topic, and assign them to splits."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ludus.errors import ConfigError
from ludus.rewards.math.math_verify import Expression
from ludus.worlds.math import problem_chaining, word_problems
from ludus.worlds.math.problems import MathProblem, NamedQuantity, ProblemDraft, ProblemKind, WorkedSteps
from ludus.worlds.math.topics import algebra, arithmetic, counting, expressions, geometry, numbers, ratios

SPLITS = ("train", "validation", "test", "composition")
LEVELS = (1, 2, 3, 4, 5)
KINDS: Mapping[str, Sequence[ProblemKind | NamedQuantity]] = {
    "arithmetic": arithmetic.KINDS,
    "ratios": ratios.KINDS,
    "algebra": algebra.KINDS,
    "numbers": numbers.KINDS,
    "counting": counting.KINDS,
    "geometry": geometry.KINDS,
    "expressions": expressions.KINDS,
}
TOPICS = (*KINDS, "stories", "links")
"""`stories` are word problems of several steps, `links` combine numbers of several topics."""
DEFAULT_TOPICS = tuple(topic for topic in TOPICS if topic != "expressions")
HELD_OUT_KINDS = frozenset(
    {"third_angle", "handshakes", "series", "before_change", "last_digits", "paths", "frame", "roots"}
)
"""Kinds that only the split `composition` has."""
HELD_OUT_LINKS = problem_chaining.HELD_OUT | word_problems.HELD_OUT
_MOST_DRAWS = 100
"""Consecutive failed draws after which a topic counts as exhausted."""


@dataclass(frozen=True)
class ProblemMaker:
    """Draws problems of one level and split. The split of a problem depends only on its steps."""

    level: int
    split: str
    topics: tuple[str, ...]

    def open_topics(self) -> tuple[str, ...]:
        """Return the topics that have problems of this level and split."""
        return tuple(topic for topic in self.topics if self._has(topic))

    def draw(self, rng: random.Random, topic: str) -> MathProblem | None:
        """Return a problem of the topic, or None if the drawn one belongs to another split."""
        work = WorkedSteps()
        if topic in KINDS:
            kind = rng.choice(self._kinds(topic))
            problem = _finished(kind.name, topic, self.level, kind.draft(rng, self.level, work), work)
        else:
            make = self._story if topic == "stories" else self._link
            question, value, pairs = make(rng, work)
            problem = MathProblem(topic, topic, self.level, question, tuple(work.steps), value, links=frozenset(pairs))
        return problem if split_of_problem(problem) == self.split else None

    def _has(self, topic: str) -> bool:
        if topic == "stories":
            return self.split != "composition" or self.level > 1
        if topic == "links":
            return self.level > 2
        return bool(self._kinds(topic))

    def _kinds(self, topic: str) -> list[ProblemKind | NamedQuantity]:
        held_out = self.split == "composition"
        fitting = [kind for kind in KINDS[topic] if self.level in kind.levels]
        return [kind for kind in fitting if (kind.name in HELD_OUT_KINDS) == held_out]

    def _story(self, rng: random.Random, work: WorkedSteps) -> tuple[str, Fraction, frozenset[tuple[str, str]]]:
        return word_problems.tell(rng, self.level, work)

    def _link(self, rng: random.Random, work: WorkedSteps) -> tuple[str, Fraction, frozenset[tuple[str, str]]]:
        return problem_chaining.link(rng, self.level, work, _PARTS)


_PARTS: Mapping[str, Sequence[NamedQuantity]] = {
    topic: [kind for kind in kinds if isinstance(kind, NamedQuantity) and min(kind.levels) < 4]
    for topic, kinds in KINDS.items()
    if topic not in ("algebra", "expressions")
}
"""The kinds that links are composed of."""


def split_of_problem(problem: MathProblem) -> str:
    """Return `composition` for held-out problems, otherwise a split by a hash of the steps, 7 : 1 : 2."""
    if problem.kind in HELD_OUT_KINDS or problem.links & HELD_OUT_LINKS:
        return "composition"
    digest = hashlib.sha256("\n".join(problem.steps).encode()).digest()[0] / 256
    return "train" if digest < 0.7 else "validation" if digest < 0.8 else "test"


def make_problems(
    split: str, num: int, levels: Sequence[int], topics: Sequence[str], seed: int
) -> tuple[MathProblem, ...]:
    """Return problems with distinct steps, levels and topics in turn; fewer if a held-out split has fewer.

    Raises ConfigError if there are too few for training.
    """
    streams = []
    seen: set[tuple[str, ...]] = set()
    for level in levels:
        maker = ProblemMaker(level, split, tuple(topics))
        if maker.open_topics():
            streams.append(_stream(maker, random.Random(f"{seed}/{split}/{level}"), seen))
    problems: list[MathProblem] = []
    while streams and len(problems) < num:
        given = [(stream, next(stream, None)) for stream in streams]
        streams = [stream for stream, problem in given if problem is not None]
        problems += [problem for _, problem in given if problem is not None]
    if len(problems) < num and split == "train":
        raise ConfigError(
            f"The levels and topics have {len(problems)} different problems for training, not {num}.",
            "Lower env.settings.num_tasks, or add levels or topics.",
        )
    return tuple(problems[:num])


def _stream(maker: ProblemMaker, rng: random.Random, seen: set[tuple[str, ...]]) -> Iterator[MathProblem]:
    """Yield problems with steps that are not in `seen`, topics in turn, until all topics are exhausted."""
    topics = list(maker.open_topics())
    while topics:
        for topic in tuple(topics):
            for _ in range(_MOST_DRAWS):
                problem = maker.draw(rng, topic)
                if problem is not None and problem.steps not in seen:
                    seen.add(problem.steps)
                    yield problem
                    break
            else:
                topics.remove(topic)


def draw_forever(rng: random.Random, levels: Sequence[int], topics: Sequence[str]) -> Iterator[MathProblem]:
    """Yield training problems without end, levels in turn.

    Raises ConfigError if the topics have no problems of the levels.
    """
    makers = [maker for level in levels if (maker := ProblemMaker(level, "train", tuple(topics))).open_topics()]
    if not makers:
        raise ConfigError("The topics have no problems of these levels.", "Add topics or levels.")
    for maker in itertools.cycle(makers):
        problem = maker.draw(rng, rng.choice(maker.open_topics()))
        if problem is not None:
            yield problem


def _finished(kind: str, topic: str, level: int, draft: ProblemDraft, work: WorkedSteps) -> MathProblem:
    value = draft.value if isinstance(draft.value, Expression) else Fraction(draft.value)
    return MathProblem(kind, topic, level, draft.question, tuple(work.steps), value, draft.units)
