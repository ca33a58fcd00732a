"""All tasks: what each topic draws, pairs of them, and which split they are in."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Final

from ludus.worlds.terminal import draw
from ludus.worlds.terminal.job import JobDraft, JobMaker, TerminalJob, pair
from ludus.worlds.terminal.topics import (
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

SPLITS: Final = ("train", "validation", "test", "composition")
LEVELS: Final = (1, 2, 3, 4)
TOPICS: Final[Mapping[str, Sequence[JobMaker]]] = {
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
NUM_PAIRS: Final = 24
"""Pairs of tasks in the split `composition`, for each task of a maker."""
_TENTHS: Final = (*("train",) * 7, "validation", "test", "test")
_MOST_DRAWS: Final = 200


def splits_of(
    levels: Sequence[int], topics: Sequence[str], per_shape: int, seed: int, by_shape: bool, held_out: int = 0
) -> dict[str, tuple[TerminalJob, ...]]:
    """The tasks of each split, in an order that mixes levels and topics.

    `by_shape` keeps all tasks of a maker in one split; otherwise those of each maker are dealt out, and
    `test` has more of each until there are `held_out`.
    `composition` has the makers that are held out, and pairs of those in training, of the levels asked for.
    """
    found: dict[str, list[TerminalJob]] = {split: [] for split in SPLITS}
    homes = homes_of_makers()
    chosen = {topic: TOPICS[topic] for topic in dict.fromkeys(topics)}
    for topic, makers in chosen.items():
        for maker in makers:
            if maker.level not in levels:
                continue
            for number in range(per_shape):
                dealt = maker.held_out or by_shape
                split = homes[maker.name] if dealt else _TENTHS[number % len(_TENTHS)]
                found[split].append(make_job(topic, maker, number, seed))
    if not by_shape:
        dealt_out = [
            (topic, maker)
            for topic, makers in chosen.items()
            for maker in makers
            if maker.level in levels and not maker.held_out
        ]
        found["test"] += _more(dealt_out, per_shape, seed, found, held_out - len(found["test"]))
    found["composition"] += _pairs(chosen, levels, per_shape * NUM_PAIRS, seed)
    return {split: tuple(sorted(jobs, key=lambda job: _digest(job.id))) for split, jobs in found.items()}


def _more(
    makers: Sequence[tuple[str, JobMaker]],
    first: int,
    seed: int,
    found: Mapping[str, Sequence[TerminalJob]],
    num: int,
) -> list[TerminalJob]:
    """At most `num` tasks of these makers, numbered from `first`, whose texts no task found so far has."""
    seen = {job.text for jobs in found.values() for job in jobs}
    more: list[TerminalJob] = []
    for number in range(first, first + _MOST_DRAWS):
        for topic, maker in makers:
            if len(more) >= num:
                return more
            job = make_job(topic, maker, number, seed)
            if job.text not in seen:
                seen.add(job.text)
                more.append(job)
    return more


def make_job(topic: str, maker: JobMaker, number: int, seed: int) -> TerminalJob:
    """The task of a maker and a number; equal arguments give equal tasks."""
    drawn = maker.draw(random.Random(f"{seed}/{maker.name}/{number}"))
    return TerminalJob((maker.name,), topic, maker.level, number, drawn)


@cache
def homes_of_makers() -> Mapping[str, str]:
    """The split of each maker's tasks: `composition` for what is held out, else 7 : 1 : 2 at each level."""
    homes: dict[str, str] = {}
    for level in LEVELS:
        makers = [maker for all_ in TOPICS.values() for maker in all_ if maker.level == level]
        homes |= {maker.name: "composition" for maker in makers if maker.held_out}
        dealt = sorted((m.name for m in makers if not m.held_out), key=_digest)
        homes |= {name: _TENTHS[place % len(_TENTHS)] for place, name in enumerate(dealt)}
    return homes


def _pairs(
    chosen: Mapping[str, Sequence[JobMaker]], levels: Sequence[int], num: int, seed: int
) -> Iterator[TerminalJob]:
    """Pairs of tasks of training, of two topics, no two pairs with the same makers."""
    homes, rng = homes_of_makers(), random.Random(f"{seed}/pairs")
    makers = [(topic, m) for topic, all_ in chosen.items() for m in all_ if homes[m.name] == "train"]
    seen: set[frozenset[str]] = set()
    for number in range(num * _MOST_DRAWS if len(chosen) > 1 else 0):
        (one, first), (two, second) = rng.sample(makers, 2)
        names = frozenset({first.name, second.name})
        level = min(LEVELS[-1], max(first.level, second.level) + 1)
        if one == two or level not in levels or names in seen:
            continue
        try:
            job = pair(make_job(one, first, number, seed), make_job(two, second, number, seed), number)
        except ValueError:
            continue
        seen.add(names)
        yield job
        if len(seen) == num:
            return


def _digest(text_: str) -> str:
    return hashlib.sha256(text_.encode()).hexdigest()


def form_of(words: str) -> str:
    """A text or a script without what is drawn: names, words of files, and numbers."""
    plain = _drawn().sub("W", words)
    plain = re.sub(r"\b[0-9a-f]{7,40}\b", "N", plain)
    plain = re.sub(r"-?\d+(?:[.:-]\d+)*", "N", plain)
    plain = re.sub(r"\bW(?:[-._]W)*\b", "W", plain)
    return re.sub(r"\b([\w'\";,=:$/-]+)(?:[ ,]+\1\b)+", r"\1", " ".join(plain.split()))


@cache
def _drawn() -> re.Pattern[str]:
    words = {
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
    }
    return re.compile(rf"(?<![A-Za-z])(?:{'|'.join(sorted(words, key=len, reverse=True))})(?![A-Za-z])", re.I)


def shape_of(draft: JobDraft) -> str:
    """The solution without names and numbers."""
    return form_of("\n".join(draft.steps))


def distinct(jobs: Iterable[TerminalJob]) -> tuple[int, int, int]:
    """How many tasks, how many differ in their words, and how many in their solutions."""
    all_ = list(jobs)
    return len(all_), len({form_of(j.draft.text) for j in all_}), len({shape_of(j.draft) for j in all_})
