"""The shipped tasks, and their splits.

`generators/terminal` draws the tasks and writes them as JSON lines: the first line lists the kinds of tasks, then
the tasks of each kind follow in the order of their numbers. A line is decoded when its task is requested.
"""

from __future__ import annotations

import base64
import hashlib
import lzma
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.resources import files
from itertools import islice
from json import loads
from typing import Final

from ludus.errors import ConfigError
from ludus.worlds.terminal.checks import Archive, Executable, Gzipped, Lives, Only, Runs, ServiceEnded, Text
from ludus.worlds.terminal.git import At, Clean, GitTree, Reaches, Refs, Subjects
from ludus.worlds.terminal.job import JobDraft, Ran, TerminalJob, pair
from ludus.worlds.terminal.services import TerminalService

SPLITS: Final = ("train", "validation", "test", "composition")
LEVELS: Final = (1, 2, 3, 4)
TOPICS: Final = ("files", "text", "tables", "logs", "git", "archives", "scripts", "configs", "processes")
NUM_PAIRS: Final = 24
"""Pairs of tasks in the split `composition`, for each task of a kind."""
FIRST_DEMONSTRATION: Final = 10**6
_TENTHS: Final = (*("train",) * 7, "validation", "test", "test")
_MAX_DRAWS: Final = 200


@dataclass(frozen=True)
class TaskKind:
    """Tasks that differ only in names and numbers.

    `num` tasks are numbered from 0, those from which pairs are made have the numbers `paired`, and the
    `demonstrations` are numbered from FIRST_DEMONSTRATION.
    """

    name: str
    topic: str
    level: int
    held_out: bool
    num: int
    paired: tuple[int, ...]
    demonstrations: int

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of all tasks, in file order."""
        return (*range(self.num), *self.paired, *self.shown)

    @property
    def shown(self) -> range:
        """The numbers of the demonstrations."""
        return range(FIRST_DEMONSTRATION, FIRST_DEMONSTRATION + self.demonstrations)


@dataclass(frozen=True)
class TaskFile:
    """The kinds, the vocabulary of their texts, and one line per task."""

    kinds: tuple[TaskKind, ...]
    words: tuple[str, ...]
    lines: Mapping[tuple[str, int], str] = field(repr=False)

    def draft(self, name: str, number: int) -> JobDraft:
        """Return a task by kind and number."""
        found = loads(self.lines[name, number], object_hook=decode)
        assert isinstance(found, JobDraft)
        return found


@cache
def task_file() -> TaskFile:
    """Return the shipped tasks."""
    packed = files("ludus.worlds.terminal").joinpath("data/tasks.jsonl.xz").read_bytes()
    return read_tasks(lzma.decompress(packed).decode())


def read_tasks(text: str) -> TaskFile:
    """Return the tasks in a file's text."""
    head, *lines = text.removesuffix("\n").split("\n")
    header = loads(head, object_hook=decode)
    kinds: tuple[TaskKind, ...] = tuple(header["kinds"])
    places = [(kind.name, number) for kind in kinds for number in kind.numbers]
    return TaskFile(kinds, tuple(header["words"]), dict(zip(places, lines, strict=True)))


_TYPES: Final[Mapping[str, Callable[..., object]]] = {
    one.__name__: one
    for one in (
        *(Text, Only, Executable, Archive, Gzipped),
        *(At, Clean, GitTree, Reaches, Refs, Subjects),
        *(Lives, Runs, ServiceEnded, TerminalService),
        *(TaskKind, JobDraft, Ran),
    )
}


def decode(plain: dict[str, object]) -> object:
    """Return the value of a JSON object; a key that begins with $ names a type other than a mapping."""
    match plain:
        case {"$type": str(name)}:
            del plain["$type"]
            return _TYPES[name](**{key: tuple(one) if isinstance(one, list) else one for key, one in plain.items()})
        case {"$set": list(members)}:
            return frozenset(members)
        case {"$utf8": str(text)}:
            return text.encode()
        case {"$zlib": bytes(data)}:
            return zlib.compress(data)
        case {"$base64": str(text)}:
            return base64.b64decode(text)
    return plain


def make_job(kind: TaskKind, number: int, seed: int) -> TerminalJob:
    """Return a task by kind and number; seeds other than 0 permute the tasks of a kind.

    Numbers that the file does not have start over at the first task.
    """
    place = number
    if seed or number not in kind.numbers:
        order = list(range(kind.num))
        if seed:
            random.Random(f"{seed}/{kind.name}").shuffle(order)
        place = order[number % kind.num]
    return TerminalJob((kind.name,), kind.topic, kind.level, number, task_file().draft(kind.name, place))


def splits_of(
    levels: Sequence[int], topics: Sequence[str], per_shape: int, seed: int, by_shape: bool, held_out: int = 0
) -> dict[str, tuple[TerminalJob, ...]]:
    """Return the tasks of each split, in an order that mixes levels and topics.

    If `by_shape`, all tasks of a kind are in one split; otherwise the tasks of each kind are distributed over the
    splits, and `test` has at least `held_out`. `composition` has the held-out kinds, and pairs of training tasks,
    of these levels. Raises ConfigError if there are too few tasks.
    """
    found: dict[str, list[TerminalJob]] = {split: [] for split in SPLITS}
    homes = splits_of_shipped_kinds()
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
            split = homes[kind.name] if kind.held_out or by_shape else _TENTHS[number % len(_TENTHS)]
            found[split].append(make_job(kind, number, seed))
    if not by_shape:
        seen = {job.text for jobs in found.values() for job in jobs}
        more = _more_tasks([kind for kind in kinds if not kind.held_out], per_shape, seed, seen)
        found["test"] += islice(more, max(held_out - len(found["test"]), 0))
        if (num := len(found["test"])) < held_out:
            raise ConfigError(
                f"env.settings.num_held_out is {held_out}, but there are {num} tasks to test.",
                f"Set it to {num} at most, or lower per_shape, or choose other topics and levels.",
            )
    found["composition"] += _pairs(of_topics, levels, per_shape * NUM_PAIRS, seed)
    return {split: tuple(sorted(jobs, key=lambda job: _digest(job.id))) for split, jobs in found.items()}


def kinds_of(topics: Sequence[str]) -> list[TaskKind]:
    """Return the kinds of tasks of these topics, topic by topic."""
    return [kind for topic in dict.fromkeys(topics) for kind in task_file().kinds if kind.topic == topic]


def _more_tasks(kinds: Sequence[TaskKind], first: int, seed: int, seen: set[str]) -> Iterator[TerminalJob]:
    """Yield tasks of these kinds, numbered from `first`, whose texts are not in `seen`."""
    for number in range(first, max((kind.num for kind in kinds), default=0)):
        for kind in kinds:
            if number < kind.num:
                job = make_job(kind, number, seed)
                if job.text not in seen:
                    seen.add(job.text)
                    yield job


@cache
def splits_of_shipped_kinds() -> Mapping[str, str]:
    """Return `splits_of_kinds` of the shipped kinds."""
    return splits_of_kinds(task_file().kinds)


def splits_of_kinds(kinds: Sequence[TaskKind]) -> dict[str, str]:
    """Return the split of each kind by name: `composition` if held out, else 7 : 1 : 2 at each level."""
    homes: dict[str, str] = {}
    for level in LEVELS:
        same = [kind for kind in kinds if kind.level == level]
        homes |= {kind.name: "composition" for kind in same if kind.held_out}
        dealt = sorted((kind.name for kind in same if not kind.held_out), key=_digest)
        homes |= {name: _TENTHS[place % len(_TENTHS)] for place, name in enumerate(dealt)}
    return homes


def _pairs(kinds: Sequence[TaskKind], levels: Sequence[int], num: int, seed: int) -> Iterator[TerminalJob]:
    """Yield pairs of training tasks, no two of the same kinds."""
    homes = splits_of_shipped_kinds()
    trained = [kind for kind in kinds if homes[kind.name] == "train"]
    draws = num * _MAX_DRAWS if len({kind.topic for kind in kinds}) > 1 else 0
    seen: set[frozenset[str]] = set()
    for number, one, two in pairs_of_kinds(trained, levels, seed, draws):
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
    """Yield those of `num` numbered draws of two kinds that have two topics and together one of the levels."""
    rng = random.Random(f"{seed}/pairs")
    for number in range(num):
        one, two = rng.sample(kinds, 2)
        level = min(LEVELS[-1], max(one.level, two.level) + 1)
        if one.topic != two.topic and level in levels:
            yield number, one, two


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
