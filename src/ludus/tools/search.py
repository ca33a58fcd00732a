"""Deterministic search over short passages: BM25 (library `bm25s`), dense retrieval, and their fusion.

The encoder of dense retrieval is any Hugging Face model in a local folder: an embedding model, or a policy, whose last
hidden states are averaged over tokens. Nothing is downloaded. Scores are rounded, and ties broken by passage order.
"""

from __future__ import annotations

import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ludus.errors import UserError
from ludus.tools.base import Tool, tool

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MAX_PASSAGES = 10
DECIMALS: Final = 5  # decimals of rounded cosines; smaller differences are rounding errors and count as ties
RRF_K: Final = 60  # constant of reciprocal rank fusion (Cormack, Clarke and Büttcher, SIGIR 2009)
DEPTH: Final = 100  # number of passages per ranking in the fusion


def words(text: str) -> list[str]:
    """Return the lower-case words of a text, without accents, used for matching."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    return re.findall(r"[^\W_]+", "".join(c for c in plain if not unicodedata.combining(c)))


class RankedIndex(ABC):
    """Passages that are ranked by relevance to a query."""

    passages: tuple[str, ...]

    @abstractmethod
    def ranking(self, query: str, depth: int) -> list[int]:
        """Return the indices of the best passages, best first, at most `depth`."""

    def search(self, query: str, k: int = 2) -> list[str]:
        """Return the `k` best passages for a query, best first; `k` is clamped to [1, `MAX_PASSAGES`]."""
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
        """Return the indices of the best passages that share a word with the query, best first, at most `depth`."""
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


class FolderEncoder:
    """Encoder from a model folder: mean of the last hidden states over a text's tokens, normalized.

    `prefix` is prepended to every text (such as "query: ", for models trained with different prefixes for
    passages and queries). Raises UserError for a folder without a model.
    """

    def __init__(self, folder: Path, *, prefix: str = "", max_tokens: int = 256, batch: int = 32) -> None:
        self._model, self._tokenizer = _load(folder)
        self._prefix, self._max_tokens, self._batch = prefix, max_tokens, batch

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return unit vectors, `[len(texts), D]` float32. Texts of equal token count share an unpadded batch."""
        import torch

        rows = [self._tokenizer(self._prefix + text)["input_ids"][: self._max_tokens] or [0] for text in texts]
        by_length = sorted(range(len(rows)), key=lambda i: (len(rows[i]), i))
        vectors: dict[int, np.ndarray] = {}
        while by_length:
            size = len(rows[by_length[0]])
            chunk = [i for i in by_length[: self._batch] if len(rows[i]) == size]
            by_length = by_length[len(chunk) :]
            with torch.no_grad():
                ids = torch.tensor([rows[i] for i in chunk])
                hidden = self._model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
                pooled = torch.nn.functional.normalize(hidden.float().mean(dim=1), dim=-1)
            vectors |= zip(chunk, pooled.numpy(), strict=True)
        return np.stack([vectors[i] for i in range(len(rows))])


class DenseIndex(RankedIndex):
    """Index that ranks passages by cosine similarity. `query_encoder` encodes queries; if None, `encoder` does."""

    def __init__(
        self, passages: Sequence[str], encoder: FolderEncoder, query_encoder: FolderEncoder | None = None
    ) -> None:
        self.passages = tuple(passages)
        self._vectors = encoder.encode(self.passages)  # [P, D]
        self._query_encoder = query_encoder or encoder
        self._ranking = lru_cache(maxsize=4096)(self._rank)

    def ranking(self, query: str, depth: int) -> list[int]:
        """Return the indices of the best passages, best first, at most `depth` and `DEPTH`."""
        return list(self._ranking(query)[:depth])

    def _rank(self, query: str) -> tuple[int, ...]:
        scores = np.round(self._vectors @ self._query_encoder.encode([query])[0], DECIMALS)
        order: list[int] = np.argsort(-scores, kind="stable")[:DEPTH].tolist()
        return tuple(order)


class HybridIndex(RankedIndex):
    """Reciprocal rank fusion of several rankings of the same passages: the sum of `1 / (60 + rank)`.

    Ranks count from 1, up to 100 per ranking. Raises ValueError for indices over different passages.
    """

    def __init__(self, *indices: RankedIndex) -> None:
        if len({index.passages for index in indices}) != 1:
            raise ValueError("a hybrid index needs indices over the same passages")
        self.passages = indices[0].passages
        self._indices = indices

    def ranking(self, query: str, depth: int) -> list[int]:
        return fuse([index.ranking(query, DEPTH) for index in self._indices])[:depth]


def fuse(rankings: Sequence[Sequence[int]]) -> list[int]:
    """Return the indices of all rankings, fused by reciprocal rank. Ties are broken by index."""
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, passage in enumerate(ranking, start=1):
            scores[passage] = scores.get(passage, 0.0) + 1 / (RRF_K + rank)
    return sorted(scores, key=lambda passage: (-round(scores[passage], 12), passage))


def _load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if not (folder / "config.json").is_file():
        hint = "The encoder must be a local folder with config.json, weights and tokenizer."
        raise UserError(f"{folder} does not contain a model.", hint)
    from transformers import AutoModel, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        model = AutoModel.from_pretrained(folder, local_files_only=True, trust_remote_code=False, weights_only=True)
    except UnpicklingError as error:
        hint = "Unpickling them could execute code. Save them as safetensors."
        raise UserError(f"The pickled weights in {folder} contain objects other than tensors.", hint) from error
    except (OSError, EOFError, ValueError, RuntimeError) as error:
        raise UserError(f"The encoder in {folder} cannot be read: {error}", "Check the folder.") from error
    return model.eval(), tokenizer


def search_tool(index: RankedIndex, default_k: int = 2) -> Tool:
    """Create the tool `search(query, k)` over an index."""

    def search(query: str, k: int = default_k) -> str:
        """Search the encyclopedia.

        Args:
            query: the words to look for.
            k: how many passages to return.
        """
        return "\n".join(index.search(query, k)) or "No passage matches."

    return tool(search)
