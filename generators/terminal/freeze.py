"""All tasks as lines of JSON: a header that lists the kinds of tasks, then each kind's tasks in its order.

`ludus.worlds.terminal.tasks` reads them. Bytes are written as text where they are UTF-8, as what they
unpack to where zlib packs that to the same bytes (the objects of git), and in base64 otherwise.
"""

from __future__ import annotations

import base64
import json
import lzma
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache
from typing import Final

from generators.terminal import draw
from generators.terminal.makers import JobMaker
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

from ludus.worlds.terminal.job import JobDraft
from ludus.worlds.terminal.tasks import LEVELS, TaskKind, pairs_of_kinds, splits_of_kinds

MAKERS: Final[Mapping[str, Sequence[JobMaker]]] = {
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
"""Words that are drawn: tasks that differ in these alone have one form."""
NUM_TASKS, NUM_DEMONSTRATIONS = 12, 8
"""Of each kind."""
RECIPE_TOPICS: Final = ("files", "text", "archives")
NUM_RECIPE_TASKS, NUM_RECIPE_DEMONSTRATIONS = 100, 140
"""Of each kind of level 1 of these topics, on which the recipe trains a small model."""
NUM_DRAWS: Final = 26
"""Draws of two kinds that the pairs of the default settings take."""


@cache
def kinds() -> Mapping[str, TaskKind]:
    """The makers by their names as the header lists them, with the numbers of the tasks that are written."""
    found: dict[str, TaskKind] = {}
    for topic, makers in MAKERS.items():
        for maker in makers:
            often = topic in RECIPE_TOPICS and maker.level == 1
            num, shown = (NUM_RECIPE_TASKS, NUM_RECIPE_DEMONSTRATIONS) if often else (NUM_TASKS, NUM_DEMONSTRATIONS)
            found[maker.name] = TaskKind(maker.name, topic, maker.level, maker.held_out, num, (), shown)
    homes = splits_of_kinds(tuple(found.values()))
    trained = [kind for kind in found.values() if homes[kind.name] == "train"]
    for number, *both in pairs_of_kinds(trained, LEVELS, 0, NUM_DRAWS):
        for name in (kind.name for kind in both if number >= kind.num):
            found[name] = replace(found[name], paired=(*found[name].paired, number))
    return found


def lines(topics: Sequence[str] = tuple(MAKERS)) -> Iterator[str]:
    """The header, and a line for each task of these topics."""
    makers = [(kinds()[maker.name], maker) for topic in topics for maker in MAKERS[topic]]
    words = sorted(set(WORDS), key=lambda word: (-len(word), word))
    yield _json({"words": words, "kinds": [encoded(kind) for kind, _ in makers]})
    for kind, maker in makers:
        for number in kind.numbers:
            yield line(maker.draft(number))


def line(draft: JobDraft) -> str:
    """A task as JSON."""
    return _json(encoded(draft))


def packed() -> bytes:
    """The whole file."""
    return lzma.compress("".join(f"{one}\n" for one in lines()).encode(), preset=9 | lzma.PRESET_EXTREME)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def encoded(value: object) -> object:
    """A value as JSON has it: what is neither text, number, list nor mapping has a key that begins with $."""
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
    assert is_dataclass(value), value
    return {"$type": type(value).__name__} | {
        name: encoded(one) for name, one, default in _fields_of(value) if one != default
    }


def _fields_of(value: object) -> Iterator[tuple[str, object, object]]:
    """The name, the value and the default of each field of a dataclass."""
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
