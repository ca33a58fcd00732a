"""Which tasks each split has: those of the kinds, dealt out, and pairs of them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Final

from ludus.errors import ConfigError
from ludus.worlds.terminal.job import TerminalJob, pair
from ludus.worlds.terminal.task_file import TaskKind, make_job, task_file

SPLITS: Final = ("train", "validation", "test", "composition")
LEVELS: Final = (1, 2, 3, 4)
TOPICS: Final = ("files", "text", "tables", "logs", "git", "archives", "scripts", "configs", "processes")
NUM_PAIRS: Final = 24
"""Pairs of tasks in the split `composition`, for each task of a kind."""
_TENTHS: Final = (*("train",) * 7, "validation", "test", "test")
_MOST_DRAWS: Final = 200


def splits_of(
    levels: Sequence[int], topics: Sequence[str], per_shape: int, seed: int, by_shape: bool, held_out: int = 0
) -> dict[str, tuple[TerminalJob, ...]]:
    """The tasks of each split, in an order that mixes levels and topics.

    `by_shape` keeps all tasks of a kind in one split; otherwise those of each kind are dealt out, and `test`
    has more of each until there are `held_out`.
    `composition` has the kinds that are held out, and pairs of those in training, of the levels asked for.
    Raises ConfigError for more tasks than there are.
    """
    found: dict[str, list[TerminalJob]] = {split: [] for split in SPLITS}
    homes = homes_of_kinds()
    of_topics = kinds_of(topics)
    kinds = [kind for kind in of_topics if kind.level in levels]
    most = min((kind.num for kind in kinds), default=per_shape)
    if per_shape > most:
        raise ConfigError(
            f"env.settings.per_shape is {per_shape}, but a kind of task has {most} tasks.",
            f"Set it to {most} at most, or choose other topics and levels.",
        )
    for kind in kinds:
        for number in range(per_shape):
            dealt = kind.held_out or by_shape
            split = homes[kind.name] if dealt else _TENTHS[number % len(_TENTHS)]
            found[split].append(make_job(kind, number, seed))
    if not by_shape:
        dealt_out = [kind for kind in kinds if not kind.held_out]
        found["test"] += _more(dealt_out, per_shape, seed, found, held_out - len(found["test"]))
        if (num := len(found["test"])) < held_out:
            raise ConfigError(
                f"env.settings.num_held_out is {held_out}, but there are {num} tasks to test.",
                f"Set it to {num} at most, or lower per_shape, or choose other topics and levels.",
            )
    found["composition"] += _pairs(of_topics, levels, per_shape * NUM_PAIRS, seed)
    return {split: tuple(sorted(jobs, key=lambda job: _digest(job.id))) for split, jobs in found.items()}


def kinds_of(topics: Sequence[str]) -> list[TaskKind]:
    """The kinds of tasks of these topics, topic by topic."""
    return [kind for topic in dict.fromkeys(topics) for kind in task_file().kinds if kind.topic == topic]


def _more(
    kinds: Sequence[TaskKind], first: int, seed: int, found: Mapping[str, Sequence[TerminalJob]], num: int
) -> list[TerminalJob]:
    """At most `num` tasks of these kinds, numbered from `first`, whose texts no task found so far has."""
    seen = {job.text for jobs in found.values() for job in jobs}
    more: list[TerminalJob] = []
    for number in range(first, max((kind.num for kind in kinds), default=0)):
        for kind in kinds:
            if len(more) >= num:
                return more
            if number >= kind.num:
                continue
            job = make_job(kind, number, seed)
            if job.text not in seen:
                seen.add(job.text)
                more.append(job)
    return more


@cache
def homes_of_kinds() -> Mapping[str, str]:
    """The split of each kind's tasks, by the kind's name."""
    return homes_of(task_file().kinds)


def homes_of(kinds: Sequence[TaskKind]) -> dict[str, str]:
    """The split of each kind's tasks: `composition` for what is held out, else 7 : 1 : 2 at each level."""
    homes: dict[str, str] = {}
    for level in LEVELS:
        same = [kind for kind in kinds if kind.level == level]
        homes |= {kind.name: "composition" for kind in same if kind.held_out}
        dealt = sorted((kind.name for kind in same if not kind.held_out), key=_digest)
        homes |= {name: _TENTHS[place % len(_TENTHS)] for place, name in enumerate(dealt)}
    return homes


def _pairs(kinds: Sequence[TaskKind], levels: Sequence[int], num: int, seed: int) -> Iterator[TerminalJob]:
    """Pairs of tasks of training, no two pairs with the same kinds."""
    homes = homes_of_kinds()
    trained = [kind for kind in kinds if homes[kind.name] == "train"]
    most = num * _MOST_DRAWS if len({kind.topic for kind in kinds}) > 1 else 0
    seen: set[frozenset[str]] = set()
    for number, one, two in pairs_of_kinds(trained, levels, seed, most):
        names = frozenset({one.name, two.name})
        if names in seen:
            continue
        try:
            job = pair(make_job(one, number, seed), make_job(two, number, seed), number)
        except ValueError:
            continue
        seen.add(names)
        yield job
        if len(seen) == num:
            return


def pairs_of_kinds(
    kinds: Sequence[TaskKind], levels: Sequence[int], seed: int, num: int
) -> Iterator[tuple[int, TaskKind, TaskKind]]:
    """Draws of two kinds, of two topics and together of the levels asked for, out of `num`, with numbers."""
    rng = random.Random(f"{seed}/pairs")
    for number in range(num):
        one, two = rng.sample(kinds, 2)
        level = min(LEVELS[-1], max(one.level, two.level) + 1)
        if one.topic != two.topic and level in levels:
            yield number, one, two


def _digest(text_: str) -> str:
    return hashlib.sha256(text_.encode()).hexdigest()
