"""Write all tasks as JSON lines: a header with the kinds of tasks, then the tasks of each kind in that order.

`ludus.worlds.terminal.splits` reads them. Bytes are written as text if they are UTF-8, as the uncompressed content
if zlib compresses it to the same bytes (git objects), and else in base64.
"""

from __future__ import annotations

import base64
import hashlib
import inspect
import json
import lzma
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache
from typing import Final

from generators.terminal import draw
from generators.terminal.makers import TaskMaker
from generators.terminal.topics import (
    archives,
    configs,
    files,
    git,
    git_asked,
    logs,
    processes,
    processes_found,
    scripts,
    tables,
    text,
)

from ludus.worlds.terminal.checks import CHECKS, Check
from ludus.worlds.terminal.splits import LEVELS, TENTHS, TaskKind, pairs_of_kinds
from ludus.worlds.terminal.task import TerminalTask

MAKERS: Final[Mapping[str, Sequence[TaskMaker]]] = {
    "files": files.MAKERS,
    "text": text.MAKERS,
    "tables": tables.MAKERS,
    "logs": logs.MAKERS,
    "git": (*git.MAKERS, *git_asked.MAKERS),
    "archives": archives.MAKERS,
    "scripts": scripts.MAKERS,
    "configs": configs.MAKERS,
    "processes": (*processes.MAKERS, *processes_found.MAKERS),
}
WORDS: Final = (
    *draw.WORDS,
    *draw.PEOPLE,
    *draw.TOWNS,
    *draw.THINGS,
    *draw.FOLDERS,
    *draw.SERVICES,
    *draw.LEVELS,
    *draw.VERBS,
    *draw.TABLE_WORDS,
    *(ending.removeprefix(".") for ending in files.ENDINGS),
)
"""Drawn words: tasks that differ only in these have the same form."""
NUM_TASKS, NUM_DEMONSTRATIONS = 12, 8
"""Tasks of each kind."""
RECIPE_TOPICS: Final = ("files", "text", "archives")
NUM_RECIPE_TASKS, NUM_RECIPE_DEMONSTRATIONS = 100, 140
"""Tasks of each kind of level 1 in these topics, on which the recipe trains a small model."""
NUM_DRAWS: Final = 26
"""Draws of the two kinds that are used by the pairs of the default settings."""


@cache
def kinds() -> Mapping[str, TaskKind]:
    """Return the kinds by name as the header lists them, with the numbers of the tasks that are written."""
    found: dict[str, TaskKind] = {}
    for topic, makers in MAKERS.items():
        for maker in makers:
            often = topic in RECIPE_TOPICS and maker.level == 1
            num, shown = (NUM_RECIPE_TASKS, NUM_RECIPE_DEMONSTRATIONS) if often else (NUM_TASKS, NUM_DEMONSTRATIONS)
            found[maker.name] = TaskKind(maker.name, topic, maker.level, splits()[maker.name], num, (), shown)
    trained = [kind for kind in found.values() if kind.split == "train"]
    for number, *both in pairs_of_kinds(trained, LEVELS, 0, NUM_DRAWS):
        for name in (kind.name for kind in both if number >= kind.num):
            found[name] = replace(found[name], paired=(*found[name].paired, number))
    return found


@cache
def splits() -> Mapping[str, str]:
    """Return the split of each kind by name: `composition` if held out, else 7 : 1 : 2 at each level."""
    makers = [maker for found in MAKERS.values() for maker in found]
    homes = {maker.name: "composition" for maker in makers if maker.held_out}
    for level in LEVELS:
        names = [maker.name for maker in makers if maker.level == level and not maker.held_out]
        names.sort(key=lambda name: hashlib.sha256(name.encode()).hexdigest())
        homes |= {name: TENTHS[place % len(TENTHS)] for place, name in enumerate(names)}
    return homes


def lines(topics: Sequence[str] = tuple(MAKERS)) -> Iterator[str]:
    """Yield the header, and a line for each task of these topics."""
    makers = [(kinds()[maker.name], maker) for topic in topics for maker in MAKERS[topic]]
    yield _json([encoded(kind) for kind, _ in makers])
    for kind, maker in makers:
        for number in kind.numbers:
            yield line(maker.task(number))


def line(task: TerminalTask) -> str:
    """Return a task as JSON."""
    return _json(encoded(task))


def packed() -> bytes:
    """Return the compressed file."""
    return lzma.compress("".join(f"{one}\n" for one in lines()).encode(), preset=9 | lzma.PRESET_EXTREME)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def encoded(value: object) -> object:
    """Return a value for JSON: types other than text, number, list and mapping have a key that begins with $."""
    match value:
        case bytes():
            return _encoded_bytes(value)
        case tuple() | list():
            return [encoded(one) for one in value]
        case frozenset():
            return {"$set": sorted(value)}
        case Mapping():
            assert not any(key.startswith("$") for key in value)
            return {key: encoded(one) for key, one in value.items()}
        case None | bool() | int() | str():
            return value
        case Check():
            given = {
                name: one for name, one in value.arguments.items() if one != _defaults(value.kind).get(name, MISSING)
            }
            return {"$type": value.kind} | {name: encoded(one) for name, one in given.items()}
    assert is_dataclass(value), value
    return {"$type": type(value).__name__} | {
        name: encoded(one) for name, one, default in _fields_of(value) if one != default
    }


@cache
def _defaults(kind: str) -> Mapping[str, object]:
    """Return the default values of a check's arguments."""
    parameters = inspect.signature(CHECKS[kind][1]).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not one.empty}


def _fields_of(value: object) -> Iterator[tuple[str, object, object]]:
    """Yield the name, value and default of each field of a dataclass."""
    assert is_dataclass(value)
    held = {one.name: one for one in fields(value)}
    for name, one in held.items():
        default = one.default if one.default_factory is MISSING else one.default_factory()
        yield name, value.__getattribute__(name), default


def _encoded_bytes(data: bytes) -> Mapping[str, object]:
    try:
        return {"$utf8": data.decode()}
    except UnicodeDecodeError:
        pass
    if data.startswith(b"x\x9c"):
        plain = zlib.decompress(data)
        if zlib.compress(plain) == data:
            return {"$zlib": encoded(plain)}
    return {"$base64": base64.b64encode(data).decode()}
