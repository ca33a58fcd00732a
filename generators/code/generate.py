"""Draw problems level by level, no two with the same solution shape, and assign them to splits."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from generators.code.problems import Chain, CodeProblem, Style, examples_of
from generators.code.steps import (
    folds,
    graphs,
    grids,
    lists,
    machines,
    numbers,
    parsing,
    planning,
    spans,
    tables,
    texts,
    words,
)
from generators.code.steps.base import CodeStep

SPLITS = ("train", "validation", "test", "composition")
LEVELS = (1, 2, 3, 4, 5)
POINTS: Mapping[int, tuple[int, int]] = {1: (1, 2), 2: (3, 3), 3: (4, 5), 4: (6, 7), 5: (8, 11)}
"""Minimum and maximum points of the chains of a level."""
MODULES = (*(lists, folds, texts, words, numbers, tables), *(spans, graphs, grids, parsing, planning, machines))
FAMILIES = tuple(module.__name__.rpartition(".")[2] for module in MODULES)
_MOST_DRAWS = 400
"""Number of failed draws after which a level counts as exhausted."""
_HELD_OUT = 9
"""One in `_HELD_OUT` pairs of steps is held out."""


@cache
def catalogue() -> tuple[CodeStep, ...]:
    """Return all steps, in the order of their modules."""
    return tuple(one for module in MODULES for one in vars(module).values() if isinstance(one, CodeStep))


def is_held_out(chain: Chain) -> bool:
    """Return whether the chain has two consecutive steps that are reserved for the split `composition`."""
    return any(digest(f"{first}>{second}") % _HELD_OUT == 0 for first, second in chain.pairs)


def digest(text: str) -> int:
    """Return a deterministic hash of a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])


def split_of_chain(chain: Chain) -> str:
    """Return `composition` for held-out chains, else a split by a hash of the shape, in the ratio 7 : 1 : 2."""
    if is_held_out(chain):
        return "composition"
    share = digest(chain.shape) % 10
    return "train" if share < 7 else "validation" if share < 8 else "test"


@dataclass(frozen=True)
class CodeQuota:
    """Number, levels, families and styles of the drawn problems, and their number of tests."""

    num: int
    levels: tuple[int, ...] = LEVELS
    families: tuple[str, ...] = FAMILIES
    styles: tuple[Style, ...] = ("function", "stdin")
    tests: int = 15
    seed: int = 0


@dataclass
class _Drawer:
    """Draws chains, preferring steps that were used less."""

    wanted: CodeQuota
    rng: random.Random
    used: Counter[str] = field(default_factory=Counter)
    seen: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.steps = [one for one in catalogue() if one.family in self.wanted.families]

    def problem(self, level: int) -> CodeProblem | None:
        """Return a new problem, or None if none is found."""
        for _ in range(_MOST_DRAWS):
            chain = self._chain(*POINTS[level])
            if chain is None or chain.shape in self.seen:
                continue
            self.seen.add(chain.shape)
            examples = examples_of(chain, self.rng, self.wanted.tests)
            if examples is not None:
                self.used.update(step.name for step in chain.steps)
                styles = self.wanted.styles
                style = styles[0] if digest(chain.shape) % 3 else styles[-1]
                return CodeProblem(chain, style, level, examples)
        return None

    def _chain(self, low: int, high: int) -> Chain | None:
        """Return a chain: a little-used step, extended at both ends until it has enough points."""
        steps = [self._pick([one for one in self.steps if one.points <= high])]
        while (points := sum(one.points for one in steps)) < low or (
            points < high and len(steps) < 3 and self.rng.random() < 0.4
        ):
            room = [one for one in self.steps if one.points <= high - points and one not in steps]
            first = steps[0]
            before = [one for one in room if len(first.takes) == 1 and one.gives is first.takes[0]]
            behind = [one for one in room if one.takes == (steps[-1].gives,)]
            if not before and not behind:
                return None if points < low else self._numbered(steps)
            if before and (not behind or self.rng.random() < 0.5):
                steps.insert(0, self._pick(before))
            else:
                steps.append(self._pick(behind))
        return self._numbered(steps)

    def _pick(self, steps: Sequence[CodeStep]) -> CodeStep:
        return self.rng.choices(steps, [1 / (1 + self.used[one.name]) ** 2 for one in steps])[0]

    def _numbered(self, steps: Sequence[CodeStep]) -> Chain:
        numbers = [{name: self.rng.randint(*bounds) for name, bounds in one.draws.items()} for one in steps]
        return Chain(tuple(steps), tuple(numbers))


def make_problems(wanted: CodeQuota) -> list[CodeProblem]:
    """Return problems in the order in which they are drawn, levels mixed evenly; fewer than `wanted.num` if
    levels run out."""
    return list(_drawn(wanted))


def by_split(problems: Iterable[CodeProblem]) -> dict[str, list[CodeProblem]]:
    """Return the problems of each split."""
    splits: dict[str, list[CodeProblem]] = {split: [] for split in SPLITS}
    for problem in problems:
        splits[split_of_chain(problem.chain)].append(problem)
    return splits


def _drawn(wanted: CodeQuota) -> Iterator[CodeProblem]:
    drawer = _Drawer(wanted, random.Random(f"code/{wanted.seed}"))
    levels, count = list(dict.fromkeys(wanted.levels)), 0
    while levels and count < wanted.num:
        for level in tuple(levels):
            problem = drawer.problem(level) if count < wanted.num else None
            if problem is not None:
                count += 1
                yield problem
            elif count < wanted.num:
                levels.remove(level)
