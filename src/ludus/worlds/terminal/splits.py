"""The shipped tasks, and their splits.

`generators/terminal` draws the tasks and writes them as JSON lines: the first line lists the kinds of tasks, then
the tasks of each kind follow in the order of their numbers. A line is decoded when its task is requested.
"""

from __future__ import annotations

import base64
import hashlib
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import islice
from json import loads
from typing import Final, Literal, get_args

from pydantic import Field

from ludus.envs.settings import WorldSettings
from ludus.envs.task_archive import SPLITS, packed_lines
from ludus.errors import ConfigError
from ludus.worlds.terminal.checks import CHECKS, make_check
from ludus.worlds.terminal.task import CommandCheck, TerminalService, TerminalTask, pair

LEVELS: Final = (1, 2, 3, 4)
Topic = Literal["files", "text", "tables", "logs", "git", "archives", "scripts", "configs", "processes"]
TOPICS: Final[tuple[Topic, ...]] = get_args(Topic)
NUM_PAIRS: Final = 24
"""Pairs of tasks in the split `composition`, for each task of a kind."""
FIRST_DEMONSTRATION: Final = 10**6
TENTHS: Final = (*("train",) * 7, "validation", "test", "test")
_MAX_DRAWS: Final = 200


class TerminalSettings(WorldSettings):
    """Settings of the terminal world (`env.settings`)."""

    levels: tuple[Literal[1, 2, 3, 4], ...] = Field(LEVELS, min_length=1)
    """Difficulty levels."""
    topics: tuple[Topic, ...] = Field(TOPICS, min_length=1)
    """Topics of the tasks."""
    per_shape: int = Field(1, ge=1)
    """Number of tasks that differ only in names and numbers; limited by the shipped file."""
    num_held_out: int = Field(0, ge=0)
    """Minimum number of tasks in `test` if `unseen = "names"`, limited by the number of different texts."""
    unseen: Literal["shapes", "names"] = "shapes"
    """Difference of validation and test from training: solutions, or only names and numbers."""
    tools: Literal["all", "shell", "none"] = "all"
    """A shell and file tools, a shell alone, or none (a baseline)."""
    wall_s: float = Field(20.0, gt=0)
    """Time limit of a call in seconds."""
    flaw_rate: float = Field(0.4, ge=0, le=1)
    """Fraction of demonstrations that only read files, or omit the last command."""
    well_formed_weight: float = Field(0.1, ge=0, lt=0.5)
    """Weight, relative to a solved task, of an episode without failed calls that made progress."""
    check_turns: bool = False
    """Check the files after each turn with calls, invisibly to the model, for the turn verifier."""
    bench: str | None = None
    """Folder with tasks in the layout of Terminal-Bench or Harbor, which become the split `bench`."""
    bench_workdir: str = "/app"
    """Working directory of those tasks, replaced by /box."""
    bench_scripts: Literal["refuse", "trust"] = "refuse"
    """Whether to accept tasks graded by `run-tests.sh` or `test.sh`, whose verdict the policy's programs can forge."""
    bench_dockerfile: Literal["refuse", "skip", "ignore"] = "refuse"
    """Treatment of tasks that need a container because their Dockerfile does more than copy files."""
    seed: int = 0
    """Seed of the choice of tasks and pairs, and of the flaws of demonstrations."""


@dataclass(frozen=True)
class TaskKind:
    """Tasks that differ only in names and numbers. All are in `split`, unless splits differ only in names.

    `num` tasks are numbered from 0, pairs are built from the numbers `paired`, and the
    `demonstrations` are numbered from FIRST_DEMONSTRATION.
    """

    name: str
    topic: str
    level: int
    split: str
    num: int
    paired: tuple[int, ...]
    demonstrations: int

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of all tasks, in file order."""
        return (*range(self.num), *self.paired, *self.shown)

    @property
    def shown(self) -> range:
        return range(FIRST_DEMONSTRATION, FIRST_DEMONSTRATION + self.demonstrations)


@cache
def shipped_tasks() -> tuple[tuple[TaskKind, ...], Mapping[tuple[str, int], str]]:
    """Return the kinds of the shipped tasks, and the line of each task by its kind and number."""
    head, *lines = packed_lines("terminal", "tasks")
    kinds: tuple[TaskKind, ...] = tuple(loads(head, object_hook=decode))
    places = [(kind.name, number) for kind in kinds for number in kind.numbers]
    return kinds, dict(zip(places, lines, strict=True))


_TYPES: Final[Mapping[str, Callable[..., object]]] = {
    one.__name__: one for one in (TaskKind, TerminalTask, CommandCheck, TerminalService)
}


def decode(plain: dict[str, object]) -> object:
    """Return the value of a JSON object; a key that begins with $ names a type other than a mapping."""
    match plain:
        case {"$type": str(name), **rest}:
            values = {key: tuple(one) if isinstance(one, list) else one for key, one in rest.items()}
            return make_check(name, **values) if name in CHECKS else _TYPES[name](**values)
        case {"$set": list(members)}:
            return frozenset(members)
        case {"$utf8": str(text)}:
            return text.encode()
        case {"$zlib": bytes(data)}:
            return zlib.compress(data)
        case {"$base64": str(text)}:
            return base64.b64decode(text)
    return plain


def make_task(kind: TaskKind, number: int, seed: int) -> TerminalTask:
    """Return a task by kind and number; seeds other than 0 permute the tasks of a kind.

    Numbers beyond the last task wrap around.
    """
    place = number if number in kind.numbers else number % kind.num
    if seed:
        order = list(range(kind.num))
        random.Random(f"{seed}/{kind.name}").shuffle(order)
        place = order[number % kind.num]
    found: TerminalTask = loads(shipped_tasks()[1][kind.name, place], object_hook=decode)
    return replace(found, parts=(kind.name,), topic=kind.topic, level=kind.level, number=number)


def splits_of(settings: TerminalSettings) -> dict[str, tuple[TerminalTask, ...]]:
    """Return the shipped tasks of each split, with levels and topics interleaved.

    With unseen shapes, all tasks of a kind are in one split; with unseen names, the tasks of each kind are distributed
    over the splits, and `test` has at least `num_held_out`. `composition` has the held-out kinds, and pairs of training
    tasks, of these levels. Raises ConfigError if there are too few tasks.
    """
    found: dict[str, list[TerminalTask]] = {split: [] for split in SPLITS}
    kinds = [kind for kind in kinds_of(settings.topics) if kind.level in settings.levels]
    num, seed, by_names = settings.per_shape, settings.seed, settings.unseen == "names"
    if num > (most := min((kind.num for kind in kinds), default=num)):
        raise ConfigError(
            f"env.settings.per_shape is {num}, but a kind of task has {most} tasks.",
            f"Set it to {most} at most, or choose other topics and levels.",
        )
    for kind in kinds:
        for number in range(num):
            by_number = by_names and kind.split != "composition"
            split = TENTHS[number % len(TENTHS)] if by_number else kind.split
            found[split].append(make_task(kind, number, seed))
    if by_names:
        seen = {task.text for tasks in found.values() for task in tasks}
        more = _unseen_tasks([kind for kind in kinds if kind.split != "composition"], num, seed, seen)
        found["test"] += islice(more, max(settings.num_held_out - len(found["test"]), 0))
        if (most := len(found["test"])) < settings.num_held_out:
            raise ConfigError(
                f"env.settings.num_held_out is {settings.num_held_out}, but there are {most} tasks to test.",
                f"Set it to {most} at most, or lower per_shape, or choose other topics and levels.",
            )
    found["composition"] += islice(_pairs(settings), num * NUM_PAIRS)

    def digest(task: TerminalTask) -> str:
        return hashlib.sha256(task.id.encode()).hexdigest()

    return {split: tuple(sorted(tasks, key=digest)) for split, tasks in found.items()}


def kinds_of(topics: Sequence[str]) -> list[TaskKind]:
    """Return the kinds of tasks of these topics, grouped by topic."""
    return [kind for topic in dict.fromkeys(topics) for kind in shipped_tasks()[0] if kind.topic == topic]


def _unseen_tasks(kinds: Sequence[TaskKind], first: int, seed: int, seen: set[str]) -> Iterator[TerminalTask]:
    """Yield tasks of these kinds, numbered from `first`, whose texts are not in `seen`."""
    for number in range(first, max((kind.num for kind in kinds), default=0)):
        for task in (make_task(kind, number, seed) for kind in kinds if number < kind.num):
            if task.text not in seen:
                seen.add(task.text)
                yield task


def _pairs(settings: TerminalSettings) -> Iterator[TerminalTask]:
    """Yield pairs of training tasks, no two of the same kinds."""
    kinds, seed = kinds_of(settings.topics), settings.seed
    trained = [kind for kind in kinds if kind.split == "train"]
    draws = settings.per_shape * NUM_PAIRS * _MAX_DRAWS if len({kind.topic for kind in kinds}) > 1 else 0
    seen: set[frozenset[str]] = set()
    for number, one, two in pairs_of_kinds(trained, settings.levels, seed, draws):
        names = frozenset({one.name, two.name})
        if names not in seen:
            try:
                task = pair(make_task(one, number, seed), make_task(two, number, seed), number)
            except ValueError:
                continue
            seen.add(names)
            yield task


def pairs_of_kinds(
    kinds: Sequence[TaskKind], levels: Sequence[int], seed: int, num: int
) -> Iterator[tuple[int, TaskKind, TaskKind]]:
    """Yield, of `num` numbered draws of two kinds, those with two topics whose combined level is in the settings."""
    rng = random.Random(f"{seed}/pairs")
    for number in range(num):
        one, two = rng.sample(kinds, 2)
        level = min(LEVELS[-1], max(one.level, two.level) + 1)
        if one.topic != two.topic and level in levels:
            yield number, one, two
