"""Evaluation tasks whose text occurs in training texts: shared word n-grams, and the most similar training task.

Only 64-bit hashes of the n-grams of evaluation tasks are kept in memory; training texts are streamed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ludus.chat.hints import full_text
from ludus.diagnostics.behavior_metrics import passage_hashes
from ludus.evaluation.scripted_agents import plain_answer
from ludus.types import Message, Task

SIMILARITY_NGRAM = 3
"""Words of an n-gram of the similarity."""
COPIED = 0.8
"""Least share of a task's n-grams that counts as a copy."""
_TEMPLATE = 0.05
"""Share of evaluation tasks, and at least 2, above which an n-gram belongs to a template and is ignored."""
_WORD = re.compile(r"\w+")

Hashes = NDArray[np.int64]
_NONE = np.empty(0, np.int64)


class NamedText(NamedTuple):
    """A training text and a name that the report shows."""

    name: str
    text: str


def dialogue_text(messages: Iterable[Message]) -> str:
    """Return the text of messages except system messages."""
    return "\n".join(full_text(message) for message in messages if message["role"] != "system")


def task_text(task: Task) -> str:
    """Return the prompt of a task and its reference answer, if that is a text or number."""
    return f"{dialogue_text(task.prompt)}\n{plain_answer(task) or ''}"


@lru_cache(maxsize=1_000_000)
def _word_hash(word: str) -> int:
    return int.from_bytes(blake2b(word.encode("utf-8", "replace"), digest_size=8).digest(), signed=True)


@lru_cache(maxsize=1)  # a text is searched by several indices
def _words(text: str) -> Hashes:
    return np.array([_word_hash(word) for word in _WORD.findall(text.lower())], np.int64)


def _ngrams(words: Hashes, n: int) -> Hashes:
    """Return the distinct hashes of the passages of `n` words, [G]."""
    return np.unique(passage_hashes(words, n)) if 0 < n <= len(words) else _NONE


class NgramIndex:
    """The n-grams of evaluation tasks; a task with fewer than `n` words is a single n-gram of all of them.

    `sizes` [T] is the number of n-grams of each task outside templates, 0 for a task that cannot be checked.
    """

    def __init__(self, texts: Sequence[str], n: int) -> None:
        words = [_words(text) for text in texts]
        own = [_ngrams(one, min(n, len(one))) for one in words]
        owners = np.repeat(np.arange(len(texts)), [len(one) for one in own])
        found = np.unique(np.concatenate([*own, _NONE]), return_inverse=True, return_counts=True)
        self.n = n
        self._lengths = {min(n, len(one)) for one in words}
        self._hashes, places, counts = found
        self._specific = counts <= max(2, _TEMPLATE * len(texts))
        self._owners = np.split(owners[np.argsort(places, kind="stable")], np.cumsum(counts)[:-1])
        self.sizes = np.zeros(len(texts), np.int64)
        self.sizes = self.per_task(np.flatnonzero(self._specific))

    def find(self, text: str) -> tuple[NDArray[np.intp], int]:
        """Return the indices of a text's n-grams that occur in tasks, and the number of all; both without templates."""
        words = _words(text)
        grams = np.concatenate([_ngrams(words, length) for length in self._lengths])
        places = np.searchsorted(self._hashes, grams)
        is_known = places < len(self._hashes)
        is_known[is_known] = self._hashes[places[is_known]] == grams[is_known]
        known = places[is_known]
        specific = known[self._specific[known]]
        return specific, len(grams) - len(known) + len(specific)

    def per_task(self, found: NDArray[np.intp]) -> NDArray[np.int64]:
        """Return how many of the n-grams `found` each task has, [T]."""
        owners = np.concatenate([*(self._owners[place] for place in found), _NONE])
        return np.bincount(owners, minlength=len(self.sizes))


class SourceOverlap:
    """The n-grams of tasks that occur in a source of training texts."""

    def __init__(self, index: NgramIndex, source: str = "") -> None:
        self.index, self.source = index, source
        self.examples = [""] * len(index.sizes)
        """Name of the text with most of a task's n-grams; empty if there is none."""
        self._seen: set[int] = set()
        self._most = np.zeros(len(index.sizes), np.int64)

    def add(self, one: NamedText) -> None:
        found, _ = self.index.find(one.text)
        if len(found):
            self._seen.update(found.tolist())
            counts = self.index.per_task(found)
            for task in np.flatnonzero(counts > self._most):
                self._most[task], self.examples[task] = counts[task], one.name

    @cached_property
    def shares(self) -> list[float]:
        """The share of each task's n-grams that were found in all texts, [T]."""
        found = self.index.per_task(np.array(sorted(self._seen), np.intp)) / np.maximum(1, self.index.sizes)
        return [float(share) for share in found]


def nearest_tasks(index: NgramIndex, training: Iterable[NamedText]) -> list[tuple[float, str]]:
    """Return for each task the highest Jaccard similarity of distinct n-grams with a training task, and its name."""
    best, names = np.zeros(len(index.sizes)), [""] * len(index.sizes)
    for one in training:
        found, size = index.find(one.text)
        if len(found):
            common = index.per_task(found)
            similarity = common / np.maximum(1, index.sizes + size - common)
            for task in np.flatnonzero(similarity > best):
                best[task], names[task] = similarity[task], one.name
    return list(zip(best.tolist(), names, strict=True))
