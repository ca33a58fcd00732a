"""The tasks of the world, drawn once by `generators/terminal` and shipped as lines of JSON.

The first line lists the kinds of tasks; then each kind's tasks follow in the order of its numbers. A line is
decoded when its task is asked for.
"""

from __future__ import annotations

import base64
import lzma
import random
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.resources import files
from json import loads
from typing import Final

from ludus.worlds.terminal.checks import Archive, Executable, Gzipped, Only, Text
from ludus.worlds.terminal.git_checks import At, Clean, GitTree, Reaches, Refs, Subjects
from ludus.worlds.terminal.job import JobDraft, Ran, TerminalJob
from ludus.worlds.terminal.services import Lives, Runs, ServiceEnded, TerminalService

FIRST_DEMONSTRATION: Final = 10**6


@dataclass(frozen=True)
class TaskKind:
    """Tasks that differ in names and numbers alone.

    `num` tasks have the numbers from 0 on, further ones the numbers in `paired` (pairs are made of them), and
    `demonstrations` the numbers from FIRST_DEMONSTRATION on.
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
        """The numbers of all tasks, in the order of their lines."""
        return (*range(self.num), *self.paired, *self.shown)

    @property
    def shown(self) -> range:
        """The numbers of the demonstrations."""
        return range(FIRST_DEMONSTRATION, FIRST_DEMONSTRATION + self.demonstrations)


@dataclass(frozen=True)
class TaskFile:
    """The kinds, the words that their texts are drawn from, and a line for each task."""

    kinds: tuple[TaskKind, ...]
    words: tuple[str, ...]
    lines: Mapping[tuple[str, int], str] = field(repr=False)

    def draft(self, name: str, number: int) -> JobDraft:
        """The task of a kind with a number."""
        found = loads(self.lines[name, number], object_hook=revived)
        assert isinstance(found, JobDraft)
        return found


@cache
def task_file() -> TaskFile:
    """The file of the package, read once in a process."""
    packed = files("ludus.worlds.terminal").joinpath("data/tasks.jsonl.xz").read_bytes()
    return read_tasks(lzma.decompress(packed).decode())


def read_tasks(text: str) -> TaskFile:
    """The tasks of a file's text."""
    head, *lines = text.removesuffix("\n").split("\n")
    header = loads(head, object_hook=revived)
    kinds: tuple[TaskKind, ...] = tuple(header["kinds"])
    places = [(kind.name, number) for kind in kinds for number in kind.numbers]
    return TaskFile(kinds, tuple(header["words"]), dict(zip(places, lines, strict=True)))


def make_job(kind: TaskKind, number: int, seed: int) -> TerminalJob:
    """The task of a kind and a number. Seeds other than 0 order the tasks of a kind in another way.

    Numbers that the file does not have begin again with the first task.
    """
    place = number
    if seed or number not in kind.numbers:
        order = list(range(kind.num))
        if seed:
            random.Random(f"{seed}/{kind.name}").shuffle(order)
        place = order[number % kind.num]
    return TerminalJob((kind.name,), kind.topic, kind.level, number, task_file().draft(kind.name, place))


_TYPES: Final[Mapping[str, Callable[..., object]]] = {
    one.__name__: one
    for one in (
        *(Text, Only, Executable, Archive, Gzipped),
        *(At, Clean, GitTree, Reaches, Refs, Subjects),
        *(Lives, Runs, ServiceEnded, TerminalService),
        *(TaskKind, JobDraft, Ran),
    )
}


def revived(plain: dict[str, object]) -> object:
    """What an object of JSON stands for: a key that begins with $ says what is no mapping."""
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
