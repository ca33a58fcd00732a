"""Deterministic BM25 search over short passages (library `bm25s`)."""

from __future__ import annotations

import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ludus.tools.base import Tool, tool

MAX_PASSAGES = 10


def words(text: str) -> list[str]:
    """Return the lower-case words of a text, without accents, used for matching."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    return re.findall(r"[^\W_]+", "".join(c for c in plain if not unicodedata.combining(c)))


class RankedIndex(ABC):
    """Passages that are ranked by relevance to a query."""

    passages: tuple[str, ...]

    @abstractmethod
    def ranking(self, query: str, depth: int) -> list[int]:
        """Return the indices of at most `depth` best passages, best first."""

    def search(self, query: str, k: int = 2) -> list[str]:
        """Return the `k` best passages of `ranking`, best first; `k` is clamped to 1 to `MAX_PASSAGES`."""
        return [self.passages[i] for i in self.ranking(query, max(1, min(k, MAX_PASSAGES)))]


class PassageIndex(RankedIndex):
    """BM25 index over passages. Ties are broken by passage order."""

    def __init__(self, passages: Sequence[str]) -> None:
        import bm25s

        self.passages = tuple(passages)
        self._bm25: Any = bm25s.BM25(method="lucene", k1=1.2, b=0.75)
        self._bm25.index([words(p) for p in self.passages], show_progress=False)
        self._vocabulary: dict[str, int] = self._bm25.vocab_dict
        self._ranking = lru_cache(maxsize=4096)(self._rank)

    def ranking(self, query: str, depth: int) -> list[int]:
        """Return the indices of at most `depth` best passages that share a word, best first."""
        return self._ranking(query, max(depth, MAX_PASSAGES))[:depth]

    def _rank(self, query: str, depth: int) -> list[int]:
        known = [word for word in words(query) if word in self._vocabulary]
        if not known:
            return []
        scores = np.asarray(self._bm25.get_scores(known))
        k = min(depth, len(self.passages))
        cut = np.partition(scores, -k)[-k]
        candidates = np.flatnonzero((scores >= cut) & (scores > 0))
        order: list[int] = candidates[np.argsort(-scores[candidates], kind="stable")][:k].tolist()
        return order


def search_tool(index: RankedIndex, default_k: int = 2) -> Tool:
    """Create the tool `search(query, k)` over an index."""

    def search(query: str, k: int = default_k) -> str:
        """Search the encyclopedia.

        Args:
            query: the words to look for.
            k: how many passages to return.
        """
        found = index.search(query, k)
        return "\n".join(found) if found else "No passage matches."

    return tool(search)
