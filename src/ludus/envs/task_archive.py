"""Tasks that ship with a world: `data/tasks.zip`, with JSON lines in its members, or packed files of lines."""

from __future__ import annotations

import lzma
import random
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.resources import files
from io import BytesIO
from itertools import zip_longest
from typing import TypeVar
from zipfile import ZipFile

T = TypeVar("T")
SPLITS = ("train", "validation", "test", "composition")
SHARES = (1.0, 0.1, 0.25, 0.2)
"""Number of tasks of each split relative to training."""


def split_sizes(num_tasks: int, num_held_out: int | None) -> dict[str, int]:
    """Return the number of tasks of each split; `num_held_out`, unless None, sets it for test and for composition."""
    sizes = {split: max(round(num_tasks * share), 1) for split, share in zip(SPLITS, SHARES, strict=True)}
    return sizes if num_held_out is None else sizes | dict.fromkeys(SPLITS[2:], num_held_out)


def packed_lines(world: str, name: str) -> list[str]:
    """Return the lines of the file `data/NAME.jsonl.xz` of a world."""
    packed = (files(f"ludus.worlds.{world}") / f"data/{name}.jsonl.xz").read_bytes()
    return lzma.decompress(packed).decode().removesuffix("\n").split("\n")


@cache
def open_archive(world: str) -> ZipFile:
    """Return the archive of a world, in memory."""
    return ZipFile(BytesIO((files(f"ludus.worlds.{world}") / "data/tasks.zip").read_bytes()))


def read_lines(world: str, member: str, seed: int = 0) -> Iterator[bytes]:
    """Yield the lines of a member, none if the archive lacks it; seeds other than 0 shuffle them."""
    archive = open_archive(world)
    if member not in archive.NameToInfo:
        return
    with archive.open(member) as lines:
        if not seed:
            yield from lines
        else:
            every = list(lines)
            yield from random.Random(f"{seed}/{member}").sample(every, len(every))


def repeat_lines(world: str, member: str, rng: random.Random) -> Iterator[bytes]:
    """Yield the lines of a member without end, in a random order that differs each time."""
    lines = list(read_lines(world, member))
    while lines:
        rng.shuffle(lines)
        yield from lines


def in_turn(streams: Iterable[Iterable[T]]) -> Iterator[T]:
    """Yield the items of several streams in turn, until all have ended."""
    return (item for row in zip_longest(*streams) for item in row if item is not None)
