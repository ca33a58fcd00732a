"""Samples one action for each of a batch of requests: plan, prefill, decode.

Prefill computes only what is new: not what an episode's cache holds, not a prompt twice (the samples of a
group share theirs), and a prefix that several fresh prompts have in common (a system prompt with its tools)
once. Decode goes one token at a time for all rows that are not finished; a row that finishes gives its place
to another at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ludus.engines.base import Request
from ludus.engines.forward import CausalForward, Pass
from ludus.engines.kv import Entry, KvBatch, KvStore, common_prefix
from ludus.engines.sampling import SamplingRules, sample
from ludus.engines.stopping import StopStrings
from ludus.errors import EngineError
from ludus.types import Completion, FinishReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MIN_SHARED_TOKENS = 16
"""A shorter common prefix of fresh prompts is not worth a forward pass of its own."""
_SPARE_TOKENS = 128
"""Columns of the batch cache that are made at once for new tokens."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine did, in tokens and wall-clock seconds.

    `prefill_tokens` were computed as context; `cached_tokens` were served by the episodes' caches, and
    `shared_tokens` by other rows of the same batch, and not computed. `decode_tokens` were sampled.
    """

    batches: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    shared_tokens: int = 0
    decode_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def plus(self, other: EngineStats) -> EngineStats:
        return EngineStats(
            batches=self.batches + other.batches,
            prefill_tokens=self.prefill_tokens + other.prefill_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            shared_tokens=self.shared_tokens + other.shared_tokens,
            decode_tokens=self.decode_tokens + other.decode_tokens,
            prefill_s=self.prefill_s + other.prefill_s,
            decode_s=self.decode_s + other.decode_s,
        )


@dataclass(frozen=True, slots=True)
class Work:
    """One distinct history to prefill, of which `entry` serves the first `num_reused` tokens."""

    tokens: tuple[int, ...]
    entry: Entry | None = None
    num_reused: int = 0

    @property
    def num_new(self) -> int:
        return len(self.tokens) - self.num_reused


@dataclass(frozen=True, slots=True)
class Plan:
    """The rows of a batch.

    The first rows are `works`, sorted by their new tokens; the rows after them copy the row named in
    `copies`. `requests` holds the index of the request of each row.
    """

    works: tuple[Work, ...]
    copies: tuple[int, ...]
    requests: tuple[int, ...]


class BatchSampler:
    """Runs batches on a model with the caches in `store`. Not thread-safe: one batch at a time."""

    def __init__(
        self,
        forward: CausalForward,
        store: KvStore,
        tokenizer: PreTrainedTokenizerBase | None,
        context_tokens: int,
        prefill_tokens: int,
    ) -> None:
        self._forward = forward
        self._store = store
        self._tokenizer = tokenizer
        self._context_tokens = context_tokens
        self._prefill_tokens = prefill_tokens
        self._cache = KvBatch(forward.layout)
        self._stop_strings: dict[tuple[str, ...], StopStrings] = {}
        self.stats = EngineStats()

    @torch.inference_mode()
    def run(self, requests: Sequence[Request], version: int) -> list[Completion]:
        """One completion for each request, in order."""
        started = time.perf_counter()
        works = distinct_works(requests, self._store)
        cached = sum(work.num_reused for work in works.values())
        works, shared_computed = self._share_prefixes(works)
        plan = plan_rows(requests, works)
        longest = max(len(request.token_ids) for request in requests)
        cache = self._cache
        cache.begin(len(requests), longest, self._spare(requests))
        logits = self._prefill(plan.works, cache)
        if plan.copies:
            cache.copy_rows(range(len(plan.works), len(requests)), plan.copies)
            logits = torch.cat([logits, logits[torch.tensor(plan.copies, device=logits.device)]])
        prefilled = time.perf_counter()
        actions = [self._action(request) for request in requests]
        self._decode(plan.requests, actions, cache, logits)
        computed = sum(work.num_new for work in plan.works) + shared_computed
        self.stats = self.stats.plus(
            EngineStats(
                batches=1,
                prefill_tokens=computed,
                cached_tokens=cached,
                shared_tokens=sum(len(r.token_ids) for r in requests) - computed - cached,
                decode_tokens=sum(len(action.tokens) for action in actions),
                prefill_s=prefilled - started,
                decode_s=time.perf_counter() - prefilled,
            )
        )
        return [action.completion(version) for action in actions]

    @torch.inference_mode()
    def forget(self) -> None:
        """Drop every cache: the weights have changed, or a batch has failed."""
        self._store.clear()
        self._cache.forget()

    def _spare(self, requests: Sequence[Request]) -> int:
        return min(_SPARE_TOKENS, max(request.params.max_new_tokens for request in requests))

    def _share_prefixes(self, works: dict[tuple[int, ...], Work]) -> tuple[dict[tuple[int, ...], Work], int]:
        """Compute what fresh prompts have in common: the works that use it, and the tokens computed."""
        clusters = shared_prefixes([tokens for tokens, work in works.items() if work.num_reused == 0])
        if not clusters:
            return works, 0
        prefixes = sorted(clusters, key=len)
        longest = len(prefixes[-1])
        cache = self._cache
        cache.begin(len(prefixes), longest, spare=0)
        self._prefill([Work(prefix) for prefix in prefixes], cache)
        shared = dict(works)
        for row, prefix in enumerate(prefixes):
            entry = cache.entry(row, prefix)
            for tokens in clusters[prefix]:
                shared[tokens] = Work(tokens, entry, entry.shared(tokens))
        return shared, sum(len(prefix) for prefix in prefixes)

    def _prefill(self, works: Sequence[Work], cache: KvBatch) -> Tensor:
        """Fill the first rows of `cache`; the logits `[rows, V]` at the last token of each."""
        parts = [
            self._prefill_rows(works, rows, cache)
            for rows in chunks([work.num_new for work in works], self._prefill_tokens)
        ]
        return torch.cat(parts)

    def _prefill_rows(self, works: Sequence[Work], rows: slice, cache: KvBatch) -> Tensor:
        part = works[rows]
        width = max(work.num_new for work in part)
        ids = np.zeros((len(part), width), dtype=np.int64)
        for row, work in enumerate(part):
            ids[row, width - work.num_new :] = work.tokens[work.num_reused :]
            if work.entry is not None and work.num_reused:
                cache.load(rows.start + row, work.entry, work.num_reused, cache.end - work.num_new)
        lengths = np.array([len(work.tokens) for work in part])
        num_new = np.array([work.num_new for work in part])
        from_end = np.arange(-width, 0)
        positions = np.maximum(lengths[:, None] + from_end, 0)
        real = (from_end >= -num_new[:, None])[:, None, :, None]
        low, at = cache.end - max(lengths.max(), width), cache.end - width
        padded = bool(num_new.min() < width)
        cache.focus(rows, low, at, self._tensor(real) if padded else None)
        starts = self._tensor(cache.end - lengths)
        return self._forward.logits(
            cache, Pass(self._tensor(ids), self._tensor(positions), starts, int(low), int(at))
        )

    def _decode(
        self, rows: Sequence[int], actions: Sequence[_Action], cache: KvBatch, logits: Tensor
    ) -> None:
        """Sample until every action is complete; then the episodes' caches are in the store.

        `rows` names the action of each row; `logits` `[rows, V]` are those of the first token.
        """
        active = list(rows)
        lengths = np.array([len(actions[i].request.token_ids) for i in active])
        rules = SamplingRules.of(
            [actions[i].request.params for i in active], self._forward.vocab_size, self._forward.device
        )
        step = 0
        while True:
            tokens, logprobs = sample(logits, rules, step)
            if not torch.isfinite(logprobs).all():
                raise EngineError("The model's logits are not finite.", "Its weights have diverged.")
            keep = _record(actions, active, tokens.tolist(), logprobs.tolist())
            if len(keep) < len(active):
                self._save(actions, active, set(keep), cache)
                if not keep:
                    return
                order = cache.compact(keep)
                active = [active[row] for row in order]
                lengths, rules = lengths[order], rules.select(order)
                tokens = tokens[torch.tensor(order, device=tokens.device)]
            cache.reserve(len(active), max(_SPARE_TOKENS, step))
            logits = self._decode_step(cache, tokens, lengths + step)
            step += 1

    def _decode_step(self, cache: KvBatch, tokens: Tensor, positions: np.ndarray) -> Tensor:
        starts = cache.end - positions
        low, at = int(starts.min()), cache.end
        cache.focus(slice(0, len(positions)), low, at)
        cache.end += 1
        return self._forward.logits(
            cache, Pass(tokens[:, None], self._tensor(positions)[:, None], self._tensor(starts), low, at)
        )

    def _save(
        self, actions: Sequence[_Action], active: Sequence[int], going_on: set[int], cache: KvBatch
    ) -> None:
        """Keep the caches of rows that have finished: all but their last token has been computed."""
        for row, index in enumerate(active):
            if row not in going_on:
                action = actions[index]
                tokens = action.request.token_ids + tuple(action.tokens[:-1])
                self._store.put(action.request.episode, tokens, cache, row)

    def _action(self, request: Request) -> _Action:
        params = request.params
        limit = min(params.max_new_tokens, self._context_tokens - len(request.token_ids))
        return _Action(request, limit, self._stops(params.stop))

    def _stops(self, stop: tuple[str, ...]) -> StopStrings | None:
        if not stop or self._tokenizer is None:
            return None
        if stop not in self._stop_strings:
            self._stop_strings[stop] = StopStrings(self._tokenizer, stop)
        return self._stop_strings[stop]

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._forward.device)


class _Action:
    """One action as it grows."""

    __slots__ = ("_limit", "_stop_ids", "_stops", "finish", "logprobs", "request", "tokens")

    def __init__(self, request: Request, limit: int, stops: StopStrings | None) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.finish: FinishReason = "length"
        self._limit = limit
        self._stops = stops
        self._stop_ids = frozenset(request.params.stop_token_ids)

    def add(self, token: int, logprob: float) -> bool:
        """Append a token; True if the action goes on."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self._stop_ids or (self._stops is not None and self._stops.completed(self.tokens)):
            self.finish = "stop"
            return False
        return len(self.tokens) < self._limit

    def completion(self, version: int) -> Completion:
        return Completion(
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            versions=(version,) * len(self.tokens),
            finish_reason=self.finish,
        )


def _record(
    actions: Sequence[_Action], active: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float]
) -> list[int]:
    """Give each active action its token; returns the rows that go on."""
    return [
        row
        for row, (index, token, logprob) in enumerate(zip(active, tokens, logprobs, strict=True))
        if actions[index].add(token, logprob)
    ]


def distinct_works(requests: Sequence[Request], store: KvStore) -> dict[tuple[int, ...], Work]:
    """Each distinct history once, with the cache entry that serves most of it."""
    works: dict[tuple[int, ...], Work] = {}
    for request in requests:
        tokens = request.token_ids
        entry = store.get(request.episode)
        num_reused = entry.shared(tokens) if entry is not None else 0
        known = works.get(tokens)
        if known is None or num_reused > known.num_reused:
            works[tokens] = Work(tokens, entry if num_reused else None, num_reused)
    return works


def shared_prefixes(histories: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], list[tuple[int, ...]]]:
    """Common prefixes of at least `_MIN_SHARED_TOKENS` tokens, each with the histories that begin with it.

    Sorted histories that share less with their neighbour than that belong to different clusters; the
    prefix of a cluster is that of its first and last.
    """
    ordered = sorted(histories)
    bounds = [0]
    for index, (left, right) in enumerate(pairwise(ordered)):
        if common_prefix(left, right) < _MIN_SHARED_TOKENS:
            bounds.append(index + 1)
    bounds.append(len(ordered))
    clusters = [ordered[first:last] for first, last in pairwise(bounds) if last - first > 1]
    return {cluster[0][: common_prefix(cluster[0], cluster[-1])]: cluster for cluster in clusters}


def plan_rows(requests: Sequence[Request], works: dict[tuple[int, ...], Work]) -> Plan:
    """Rows for the requests: one for each work, sorted by new tokens, then one for each repeated history."""
    ordered = sorted(works.values(), key=lambda work: work.num_new)
    row_of = {work.tokens: row for row, work in enumerate(ordered)}
    owners: list[int | None] = [None] * len(ordered)
    copies: list[int] = []
    copied: list[int] = []
    for index, request in enumerate(requests):
        row = row_of[request.token_ids]
        if owners[row] is None:
            owners[row] = index
        else:
            copies.append(row)
            copied.append(index)
    firsts = [owner for owner in owners if owner is not None]
    return Plan(tuple(ordered), tuple(copies), tuple(firsts + copied))


def chunks(num_new: Sequence[int], budget_tokens: int) -> Iterator[slice]:
    """Split rows, sorted by their new tokens, into runs of at most `budget_tokens` padded tokens each."""
    first = 0
    for row, width in enumerate(num_new):
        if row > first and (row - first + 1) * width > budget_tokens:
            yield slice(first, row)
            first = row
    yield slice(first, len(num_new))
