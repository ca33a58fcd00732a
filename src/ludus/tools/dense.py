"""Search by meaning: passages and queries as vectors of a small encoder; and its fusion with BM25.

The encoder is any Hugging Face model in a local folder: an embedding model, or a policy, whose last hidden
states are averaged over the tokens. Nothing is downloaded, and no package beyond torch and transformers is
needed. Orders are deterministic: scores are rounded, and ties broken by the order of the passages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from ludus.errors import UserError
from ludus.tools.search import held

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DECIMALS: Final = 5
"""Cosines are rounded to these: what differs by less is float noise, and a tie."""
RRF_K: Final = 60
"""The constant of reciprocal rank fusion (Cormack, Clarke and Büttcher, SIGIR 2009)."""
DEPTH: Final = 100
"""Passages that each ranking puts into the fusion."""


class Encoder(Protocol):
    """Turns texts into vectors of length 1."""

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Unit vectors, `[len(texts), D]` float32. The vector of a text depends on nothing else."""
        ...


class RankedPassages(Protocol):
    """An index that orders its passages by a query."""

    @property
    def passages(self) -> tuple[str, ...]: ...

    def ranking(self, query: str, depth: int) -> list[int]:
        """The places of the best passages, best first, at most `depth`."""
        ...


class FolderEncoder:
    """The model in a folder, its last hidden states averaged over a text's tokens and scaled to length 1.

    `prefix` stands before every text: "query: " and the like, for models that were trained so, with an
    encoder each for passages and queries. Raises UserError for a folder that holds no model.
    """

    def __init__(self, folder: Path, *, prefix: str = "", max_tokens: int = 256, batch: int = 32) -> None:
        self._model, self._tokenizer = _load(folder)
        self._prefix, self._max_tokens, self._batch = prefix, max_tokens, batch

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Unit vectors, `[len(texts), D]` float32. Texts of equally many tokens share a batch, unpadded."""
        rows = [self._ids(text) for text in texts]
        by_length = sorted(range(len(rows)), key=lambda i: (len(rows[i]), i))
        found: dict[int, np.ndarray] = {}
        while by_length:
            size = len(rows[by_length[0]])
            together = [i for i in by_length[: self._batch] if len(rows[i]) == size]
            by_length = by_length[len(together) :]
            found |= zip(together, self._forward([rows[i] for i in together]), strict=True)
        return np.stack([found[i] for i in range(len(rows))])

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(self._prefix + text)["input_ids"][: self._max_tokens]
        return ids or [0]

    def _forward(self, rows: list[list[int]]) -> np.ndarray:
        import torch

        with torch.no_grad():
            ids = torch.tensor(rows)
            hidden = self._model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
            pooled = torch.nn.functional.normalize(hidden.float().mean(dim=1), dim=-1)
        vectors: np.ndarray = pooled.numpy()
        return vectors


class DenseIndex:
    """Passages by the cosine of their vectors with the query's. `asking` encodes queries, if another does."""

    def __init__(self, passages: Sequence[str], encoder: Encoder, asking: Encoder | None = None) -> None:
        self.passages = tuple(passages)
        self._vectors = encoder.encode(self.passages)  # [P, D]
        self._asking = asking or encoder
        self._scores = lru_cache(maxsize=4096)(self._order)

    def search(self, query: str, k: int = 2) -> list[str]:
        """The `k` best passages, best first. There is always one, however far it is."""
        return [self.passages[i] for i in self.ranking(query, held(k))]

    def ranking(self, query: str, depth: int) -> list[int]:
        """The places of the best passages, best first, at most `depth` and at most `DEPTH`."""
        return list(self._scores(query)[:depth])

    def _order(self, query: str) -> tuple[int, ...]:
        scores = np.round(self._vectors @ self._asking.encode([query])[0], DECIMALS)
        order: list[int] = np.argsort(-scores, kind="stable")[:DEPTH].tolist()
        return tuple(order)


class HybridIndex:
    """Several rankings of the same passages in one, by reciprocal rank fusion: the sum of `1 / (60 + rank)`.

    Ranks count from 1; a passage beyond the first 100 of a ranking gets nothing from it. Raises ValueError
    for indices over different passages.
    """

    def __init__(self, *indices: RankedPassages) -> None:
        if len({index.passages for index in indices}) != 1:
            raise ValueError("a hybrid index needs indices over the same passages")
        self.passages = indices[0].passages
        self._indices = indices

    def search(self, query: str, k: int = 2) -> list[str]:
        """The `k` best passages, best first."""
        return [self.passages[i] for i in self.ranking(query, held(k))]

    def ranking(self, query: str, depth: int) -> list[int]:
        """The places of the best passages, best first, at most `depth`."""
        return fuse([index.ranking(query, DEPTH) for index in self._indices])[:depth]


def fuse(rankings: Sequence[Sequence[int]]) -> list[int]:
    """Reciprocal rank fusion of rankings of places. Ties go to the lower place."""
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, place in enumerate(ranking, start=1):
            scores[place] = scores.get(place, 0.0) + 1 / (RRF_K + rank)
    return sorted(scores, key=lambda place: (-round(scores[place], 12), place))


def _load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if not (folder / "config.json").is_file():
        raise UserError(
            f"There is no model in {folder}.",
            "The encoder is a local folder with config.json, weights and tokenizer; nothing is downloaded.",
        )
    from transformers import AutoModel, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        model = AutoModel.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, weights_only=True
        )
    except UnpicklingError as error:
        raise UserError(
            f"The weights in {folder} are pickled with more than tensors.",
            "Unpickling them could run code. Save them as safetensors.",
        ) from error
    except (OSError, EOFError, ValueError, RuntimeError) as error:
        raise UserError(f"The encoder in {folder} cannot be read: {error}", "Is the folder whole?") from error
    return model.eval(), tokenizer
