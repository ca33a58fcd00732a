"""Continuous batching: sequences join and leave between any two forward passes.

Each `step` is one pass: one token for every decoding sequence, then chunks of prompts and observations in order
of arrival, up to the token limit. A sequence is admitted first come, first served, once a slot is free and its maximum
length fits. Only a sequence waiting for a prefix that another one computes can be overtaken. Not thread-safe.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from ludus.engines.base import EngineStats, Request
from ludus.engines.embedded.drafts import DraftIndex
from ludus.engines.embedded.kv_cache import PAGE, CacheMatch, RadixCache, RadixNode
from ludus.engines.embedded.model_runner import ROW_BLOCK, Chunk, ModelRunner, RaggedForward
from ludus.engines.embedded.sampler import GuideState, SamplingRules, StopStrings, TokenDraw, sample, top_tokens
from ludus.errors import EngineError
from ludus.images import IMAGE_IDS
from ludus.types import Completion, FinishReason, SamplingParams, TopLogprobs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SCORE_CHUNK = 256
"""Tokens of one scoring chunk: each needs a row of logits as wide as the vocabulary."""
_STOP_TAIL_TOKENS = 512
_STOP_CACHE_SIZE = 64


@dataclass(slots=True, eq=False)
class SequenceState:
    """One request: `tokens` is its history plus the tokens sampled so far, `cache_root` its branch of the cache."""

    request: Request
    limit: int
    done: Callable[[SequenceState], None]
    """Called with the sequence when it has ended, possibly on the worker thread."""
    adapter: str = ""
    cache_root: str = ""
    stops: StopStrings | None = None
    guide: GuideState | None = None
    scores: list[float] | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cut_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    error: EngineError | None = None
    deadline: float = math.inf
    slot: int = -1
    num_computed: int = 0
    num_committed: int = 0
    path: list[RadixNode] = field(default_factory=list)
    reserved: int = 0
    result: Future[Completion] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.tokens = list(self.request.token_ids)
        if self.request.timeout_s is not None:
            self.deadline = time.monotonic() + self.request.timeout_s

    @property
    def num_prompt(self) -> int:
        return len(self.request.token_ids)

    @property
    def num_drawn(self) -> int:
        """Number of action tokens so far: the counter of the random numbers."""
        return self.request.begun + len(self.logprobs)

    @property
    def num_pages(self) -> int:
        """Pages needed at maximum length; the last sampled token is never computed."""
        longest = len(self.tokens) if self.scores is not None else self.num_prompt + self.limit - 1
        return -(-longest // PAGE)

    @property
    def completion(self) -> Completion:
        return Completion(
            tokens=tuple(self.tokens[self.num_prompt :]),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            finish_reason=self.finish or "abort",
            cut_logprobs=tuple(self.cut_logprobs) if self.request.params.cuts else (),
            top_logprobs=tuple(self.top_logprobs),
        )

    def add(self, token: int, logprob: float, cut_logprob: float, version: int) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.cut_logprobs.append(cut_logprob)
        self.versions.append(version)
        begin = self.num_prompt - self.request.begun
        tail = self.tokens[max(begin, len(self.tokens) - _STOP_TAIL_TOKENS) :] if self.stops else []
        if self.guide is not None:
            self.guide.advance(token)
        if (
            token in self.request.params.stop_token_ids
            or (self.guide is not None and self.guide.ended)
            or (self.stops is not None and self.stops.completed(tail))
        ):
            self.finish = "stop"
        elif self.finish is None and len(self.logprobs) >= self.limit:
            self.finish = "length"

    def fail(self, message: str, hint: str = "") -> None:
        """End with an error at the end of the pass; an earlier error takes precedence."""
        self.error = self.error or EngineError(message, hint)
        self.finish = "abort"


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass: `rows` sample from the first logits, a sequence with a draft from several; other sequences of
    `plan` are scored or prefilled."""

    plan: list[tuple[SequenceState, Chunk]]
    rows: list[SequenceState]
    logits: Tensor
    draw: TokenDraw | None
    model_s: float
    sample_s: float


class PrefixCache(Protocol):
    """Keys and values of prefixes, kept after their sequences have ended."""

    num_evicted: int

    def clear(self, adapter: str | None) -> None:
        """Drop the prefixes (of one adapter and its versions); running sequences keep theirs."""

    def drop_adapter(self, adapter: str) -> None:
        """Drop everything of an unloaded adapter."""


class SequenceScheduler(ABC):
    """Request queue and running sequences; subclasses plan and compute the passes."""

    runner: ModelRunner
    _cache: PrefixCache

    def __init__(
        self,
        forward: ModelRunner,
        tokenizer: PreTrainedTokenizerBase | None,
        cache: PrefixCache,
        num_slots: int,
        pass_tokens: int,
    ) -> None:
        self.runner, self._cache = forward, cache
        self._stop_strings = None if tokenizer is None else lru_cache(_STOP_CACHE_SIZE)(partial(StopStrings, tokenizer))
        self._pass_tokens = pass_tokens
        self._free_slots = deque(range(num_slots))
        self._rules: tuple[list[SamplingParams], SamplingRules] | None = None
        self._reserved = 0
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []
        self.version = 0
        self.adapter_versions: dict[str, int] = {}
        self.stats = EngineStats()
        self.drafts = DraftIndex(0)

    def version_of(self, adapter: str) -> int:
        return self.adapter_versions.get(adapter, self.version)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def next_timeout_s(self) -> float | None:
        """Seconds to the earliest deadline, at least 0; None without a deadline."""
        earliest = min((s.deadline for s in (*self.running, *self.waiting)), default=math.inf)
        return None if earliest == math.inf else max(0.0, earliest - time.monotonic())

    def add(self, sequence: SequenceState) -> None:
        """Queue a sequence. It must fit an empty cache."""
        stop = sequence.request.params.stop
        sequence.stops = self._stop_strings(stop) if stop and self._stop_strings is not None else None
        self.waiting.append(sequence)

    @torch.inference_mode()
    def step(self) -> None:
        """Admit sequences, compute one pass, sample, and finish completed sequences."""
        begin = time.perf_counter()
        self._admit()
        if not self.running:
            return
        plan = self._plan()
        passes = self._compute(plan)
        computed = time.perf_counter()
        num_drawn = sum(_append_results(executed, self.version_of) for executed in passes)
        model_s, sample_s = sum(executed.model_s for executed in passes), sum(executed.sample_s for executed in passes)
        append_s = time.perf_counter() - computed
        prefill = sum(len(chunk.ids) for sequence, chunk in plan if chunk.start < sequence.num_prompt)
        stats = self.stats
        self.stats = replace(
            stats,
            steps=stats.steps + 1,
            prefill_tokens=stats.prefill_tokens + prefill,
            decode_tokens=stats.decode_tokens + num_drawn,
            batch_tokens=stats.batch_tokens + sum(len(chunk.ids) for _, chunk in plan),
            draft_tokens=stats.draft_tokens + sum(chunk.num_draft for _, chunk in plan),
            draft_hits=stats.draft_hits + max(0, num_drawn - len({id(s) for x in passes for s in x.rows})),
            evicted_pages=self._cache.num_evicted,
            queue_steps=stats.queue_steps + len(self.waiting),
            running_steps=stats.running_steps + len(self.running),
            model_s=stats.model_s + model_s,
            sample_s=stats.sample_s + sample_s + append_s,
        )
        self._finish_ended(plan)
        rest_s = time.perf_counter() - begin - model_s - sample_s - append_s
        self.stats = replace(self.stats, schedule_s=self.stats.schedule_s + rest_s)

    def abort(self, sequence: SequenceState) -> None:
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.running:
            self._release_slot(sequence)
        else:
            return
        sequence.finish = "abort"
        sequence.done(sequence)

    def fail_all(self, error: EngineError) -> None:
        sequences = [*self.running, *self.waiting]
        for sequence in self.running[:]:
            self._release_slot(sequence)
        self.waiting.clear()
        self._cache.clear(None)
        for sequence in sequences:
            sequence.error = error
            sequence.done(sequence)

    def new_weights(self, version: int, *, recompute: bool, adapter: str | None = None) -> None:
        """Set the version of further tokens (of one adapter); `recompute` discards older keys and values."""
        if adapter is None:
            self.version = version
        else:
            self.adapter_versions[adapter] = version
        if not recompute:
            return
        self._cache.clear(adapter)
        stale = [s for s in self.running if adapter is None or s.adapter == adapter]
        num_recomputed = sum(sequence.num_computed for sequence in stale)
        for sequence in stale:
            sequence.num_computed = sequence.num_committed = 0
        self.stats = replace(self.stats, recomputed_tokens=self.stats.recomputed_tokens + num_recomputed)

    def abort_where(self, matches: Callable[[SequenceState], bool], error: EngineError | None = None) -> None:
        """End the sequences that match, with the tokens so far or an error."""
        for sequence in [s for s in (*self.running, *self.waiting) if matches(s)]:
            sequence.error = error or sequence.error
            self.abort(sequence)

    def expire(self) -> None:
        now = time.monotonic()
        self.abort_where(lambda sequence: sequence.deadline <= now)

    def _draw(self, rows: list[SequenceState], logits: Tensor) -> TokenDraw | None:
        if not rows:
            return None
        params = [sequence.request.params for sequence in rows]
        if self._rules is None or self._rules[0] != params:  # cached while the same requests sample
            self._rules = params, SamplingRules.of(params, self.runner.vocab_size, self.runner.device)
        steps = [sequence.num_drawn for sequence in rows]
        for i in range(1, len(rows)):
            if rows[i] is rows[i - 1]:
                steps[i] = steps[i - 1] + 1
        return sample(
            logits[: len(rows)], self._rules[1], np.array(steps, dtype=np.uint64), _guide_mask(rows, self.runner)
        )

    def _admit(self) -> None:
        """Start waiting sequences, oldest first; skip those that wait for a prefix, stop if one does not fit."""
        skipped: deque[SequenceState] = deque()
        fits = True
        while fits and self.waiting and self._free_slots:
            sequence = self.waiting.popleft()
            started, fits = self._try_start(sequence)
            if not started:
                skipped.append(sequence)
        self.waiting.extendleft(reversed(skipped))

    def _begin(self, sequence: SequenceState, num_cached: int) -> None:
        """Assign a slot to a sequence that starts with a cached prefix."""
        sequence.slot = self._free_slots.popleft()
        sequence.num_computed = sequence.num_committed = num_cached
        self._reserved += sequence.reserved
        self.running.append(sequence)
        self.drafts.add(sequence.tokens, num_cached)
        self.stats = replace(self.stats, cached_tokens=self.stats.cached_tokens + num_cached)

    def _release_slot(self, sequence: SequenceState) -> None:
        self.running.remove(sequence)
        self._free_slots.append(sequence.slot)
        self._reserved -= sequence.reserved
        sequence.slot, sequence.reserved = -1, 0

    def _finish(self, sequence: SequenceState) -> None:
        self._release_slot(sequence)
        self.drafts.add(sequence.tokens, sequence.num_prompt)
        sequence.done(sequence)

    def drop_adapter(self, adapter: str) -> None:
        """Drop all cache entries of an unloaded adapter without running sequences."""
        self.adapter_versions.pop(adapter, None)
        self._cache.drop_adapter(adapter)

    def sleep(self) -> None:
        """Clear the KV cache and free its memory until the next pass. Raises EngineError if there are requests."""
        if self.busy:
            raise EngineError("The engine cannot sleep: it has requests.")
        self._cache.clear(None)

    @abstractmethod
    def release_episode(self, episode: str, cache_root: str, tokens: tuple[int, ...]) -> None:
        """Free the cache entries of an ended episode with this history that it shares with no other."""

    @abstractmethod
    def _try_start(self, sequence: SequenceState) -> tuple[bool, bool]:
        """Start a sequence on a free slot; return whether it has started, and whether later ones may start."""

    @abstractmethod
    def _plan(self) -> list[tuple[SequenceState, Chunk]]:
        """Choose the tokens of the next pass."""

    @abstractmethod
    def _compute(self, plan: list[tuple[SequenceState, Chunk]]) -> list[Pass]:
        """Compute the plan and sample; a sequence whose pass fails ends with the error."""

    @abstractmethod
    def _finish_ended(self, plan: list[tuple[SequenceState, Chunk]]) -> None:
        """Update the cache after a step and finish the sequences that have ended."""


class BatchScheduler(SequenceScheduler):
    """Scheduler of ragged passes over a paged cache: every pass may hold tokens of all sequences."""

    runner: RaggedForward

    def __init__(
        self,
        forward: RaggedForward,
        tokenizer: PreTrainedTokenizerBase | None,
        tree: RadixCache,
        slots: tuple[int, int],
        pass_tokens: int,
    ) -> None:
        """`slots` is (maximum number of running sequences, maximum length in tokens)."""
        super().__init__(forward, tokenizer, tree, slots[0], pass_tokens)
        self.tree = tree
        self._table = np.zeros((slots[0], -(-slots[1] // PAGE)), dtype=np.int32)
        self.block = ROW_BLOCK

    def release_episode(self, episode: str, cache_root: str, tokens: tuple[int, ...]) -> None:
        self.tree.free_suffix(tokens, cache_root)

    def new_weights(self, version: int, *, recompute: bool, adapter: str | None = None) -> None:
        super().new_weights(version, recompute=recompute, adapter=adapter)
        if not recompute:
            self.tree.drop_empty_roots()

    def sleep(self) -> None:
        super().sleep()
        self.runner.pool.free()

    def _try_start(self, sequence: SequenceState) -> tuple[bool, bool]:
        match = CacheMatch([])
        if sequence.scores is None:  # scoring needs every row of logits
            match = self.tree.match(tuple(sequence.tokens), sequence.cache_root)
        if match.wait:
            return False, True
        path = self.tree.acquire(match)
        num_pages = sequence.num_pages - len(path)
        if self.tree.num_available - self._reserved < num_pages:
            self.tree.release(path)
            return False, False
        sequence.path, sequence.reserved = path, num_pages
        self._begin(sequence, match.num_tokens)
        self._table[sequence.slot, : len(path)] = [node.page for node in path]
        if match.source is not None and not match.owned:
            source = match.source.page
            self._take_page(sequence, listed=True)
            self.runner.pool.copy(source, path[-1].page)
        while len(path) * PAGE < len(sequence.tokens):
            self._take_page(sequence, listed=sequence.scores is None)
        return True, True

    def _take_page(self, sequence: SequenceState, *, listed: bool) -> None:
        """Take one of the sequence's reserved pages; prompt pages are `listed` for others to share."""
        at = len(sequence.path)
        tokens = tuple(sequence.tokens[at * PAGE : (at + 1) * PAGE]) if listed else ()
        node = self.tree.allocate(sequence.path, tokens, listed=listed, adapter=sequence.cache_root)
        sequence.reserved -= 1
        self._reserved -= 1
        self._table[sequence.slot, at] = node.page

    def _plan(self) -> list[tuple[SequenceState, Chunk]]:
        plan: list[tuple[SequenceState, Chunk]] = []
        budget = self._pass_tokens
        num_decoding = sum(len(s.tokens) - s.num_computed == 1 for s in self.running)
        num_rest = sum(len(s.tokens) - s.num_computed for s in self.running)
        share = self.drafts.share(num_decoding, num_rest)
        for sequence in sorted(self.running, key=lambda s: len(s.tokens) - s.num_computed > 1):  # decoding first
            at = sequence.num_computed
            limit = budget if sequence.scores is None else min(budget, SCORE_CHUNK)
            ids = tuple(sequence.tokens[at : at + max(0, limit)])
            if ids:
                draft = self._draft(sequence, min(share, limit - 1)) if at + 1 == len(sequence.tokens) else ()
                plan.append((sequence, Chunk(ids + draft, at, sequence.slot, sequence.adapter, len(draft))))
                budget -= len(ids) + len(draft)
        return plan

    def _draft(self, sequence: SequenceState, num: int) -> tuple[int, ...]:
        """Return a draft of at most `num` tokens and take the pages that it needs."""
        if sequence.guide is not None or sequence.scores is not None:
            return ()
        draft = self.drafts.draft(sequence.tokens, min(num, sequence.limit - len(sequence.logprobs) - 1))
        while len(sequence.path) * PAGE < len(sequence.tokens) + len(draft):
            self._take_page(sequence, listed=False)
        return draft

    def _compute(self, plan: list[tuple[SequenceState, Chunk]]) -> list[Pass]:
        """Compute the plan in one pass; if that raises, in one per sequence, so that only the faulty one fails."""
        begin = time.perf_counter()
        try:
            keep, rows = _select_rows(plan)
            logits = self.runner.logits([chunk for _, chunk in plan], self._table, keep, self.block)
            computed = time.perf_counter()
            draw = self._draw(rows, logits)
            return [Pass(plan, rows, logits, draw, computed - begin, time.perf_counter() - computed)]
        except Exception as error:  # boundary: torch errors (memory, device, index)
            if len(plan) == 1:
                plan[0][0].fail(f"Inference failed: {error}")
                return []
        return [done for item in plan for done in self._compute([item])]

    def _finish_ended(self, plan: list[tuple[SequenceState, Chunk]]) -> None:
        for sequence, _ in plan:
            if sequence.error is not None:  # its results are not cached
                self._finish(sequence)
                continue
            if sequence.scores is not None:
                if sequence.num_computed == len(sequence.tokens):
                    self._finish(sequence)
                continue
            self._commit(sequence)
            if sequence.finish is not None:
                self._finish(sequence)
            elif sequence.num_computed == len(sequence.path) * PAGE:
                self._take_page(sequence, listed=False)
        if not self.running and any(sequence.error is not None for sequence, _ in plan):
            self.tree.clear()  # all computed results may be faulty

    def _commit(self, sequence: SequenceState) -> None:
        """Share computed pages: full ones, the last one of the prompt, and all when the sequence ends."""
        ended = sequence.finish is not None or sequence.num_computed == sequence.num_prompt
        while sequence.num_committed < sequence.num_computed:
            place = sequence.num_committed // PAGE
            until = min((place + 1) * PAGE, sequence.num_computed)
            if until % PAGE and not ended:
                return
            tokens = tuple(sequence.tokens[place * PAGE : until])
            self.tree.commit(sequence.path, place, tokens)
            self._table[sequence.slot, place] = sequence.path[place].page
            if until % PAGE:
                return
            sequence.num_committed = until

    def _release_slot(self, sequence: SequenceState) -> None:
        super()._release_slot(sequence)
        self.tree.release(sequence.path)
        sequence.path = []


def _select_rows(plan: list[tuple[SequenceState, Chunk]]) -> tuple[np.ndarray, list[SequenceState]]:
    """Return the tokens whose logits are needed, and the sequences that sample from the first of them: those with all
    tokens computed, once for each token of a draft and once more."""
    last: list[int] = []
    scored: list[int] = []
    rows: list[SequenceState] = []
    at = 0
    for sequence, chunk in plan:
        if sequence.scores is not None:
            scored.extend(range(at, at + len(chunk.ids)))
        elif chunk.start + len(chunk.ids) - chunk.num_draft == len(sequence.tokens):
            end = at + len(chunk.ids)
            last.extend(range(end - chunk.num_draft - 1, end))
            rows.extend([sequence] * (chunk.num_draft + 1))
        at += len(chunk.ids)
    return np.array([*last, *scored], dtype=np.int64), rows


def _append_results(done: Pass, version_of: Callable[[str], int]) -> int:
    """Append the sampled tokens and the scores to the sequences; return the number of tokens appended."""
    for sequence, chunk in done.plan:
        sequence.num_computed += len(chunk.ids)
    num_drawn = at = 0
    draw = done.draw
    drawn: list[tuple[int, float, float]] = []
    if draw is not None:
        columns = (draw.tokens.tolist(), draw.logprobs.tolist(), draw.cut_logprobs.tolist())
        drawn = list(zip(*columns, strict=True))
    sampling = {id(sequence) for sequence in done.rows}
    for sequence, chunk in done.plan:
        if draw is not None and id(sequence) in sampling:
            end = at + chunk.num_draft + 1
            num = _append_draws(sequence, chunk, drawn[at:end], draw.top[at:end], version_of(sequence.adapter))
            sequence.num_computed -= chunk.num_draft + 1 - max(num, 1)
            num_drawn += num
            at = end
    for sequence, chunk in done.plan:
        if sequence.scores is not None:
            at += _append_scores(sequence, chunk, done.logits[at : at + len(chunk.ids)])
    return num_drawn


def _append_draws(
    sequence: SequenceState,
    chunk: Chunk,
    drawn: Sequence[tuple[int, float, float]],
    tops: Sequence[TopLogprobs],
    version: int,
) -> int:
    """Append the sampled tokens, each with its two log-probabilities, up to the first that differs from the chunk's
    draft; return their number. `tops` is empty if no row requests top log-probabilities."""
    draft = chunk.ids[len(chunk.ids) - chunk.num_draft :]
    for i, (token, logprob, cut) in enumerate(drawn):
        if not math.isfinite(logprob):
            sequence.fail("The model's logits are not finite.", "Its weights have diverged.")
            return i
        if tops and sequence.request.params.top_logprobs:
            sequence.top_logprobs.append(tops[i])
        try:
            sequence.add(token, logprob, cut, version)
        except Exception as error:  # boundary: guide and tokenizer of this sequence
            sequence.fail(f"The request failed: {error}")
        if sequence.finish is not None or i == len(draft) or token != draft[i]:
            return i + 1
    return len(drawn)


def _guide_mask(rows: list[SequenceState], forward: ModelRunner) -> Tensor | None:
    """Return the guides' mask for these rows; a row whose guide fails ends with the error."""
    states = [sequence.guide for sequence in rows]
    if all(state is None for state in states):
        return None
    allowed = np.ones((len(rows), forward.vocab_size), dtype=bool)
    for i, (sequence, state) in enumerate(zip(rows, states, strict=True)):
        try:
            if state is not None:
                allowed[i] = state.allowed(forward.vocab_size)
        except EngineError as error:
            sequence.guide = None
            sequence.fail(error.message, error.hint)
    return torch.from_numpy(allowed).to(forward.device)


def _append_scores(sequence: SequenceState, chunk: Chunk, logits: Tensor) -> int:
    """Append log-probabilities of the tokens that follow each of the chunk's; return the rows used."""
    after = sequence.tokens[chunk.start + 1 : chunk.start + 1 + len(chunk.ids)]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logprobs = torch.log_softmax(logits[: len(after)], dim=-1)
    targets = torch.tensor(after, device=logits.device)[:, None]
    index = torch.where(targets < IMAGE_IDS, targets, 0)
    assert sequence.scores is not None
    del sequence.scores[chunk.start + 1 :]  # after a weight update, drop scores of older weights
    scores = logprobs.gather(1, index).masked_fill(targets >= IMAGE_IDS, 0.0)[:, 0].tolist()
    if any(map(math.isnan, scores)):
        sequence.fail("The model's logits are not finite.", "Its weights have diverged.")
    sequence.scores.extend(scores)
    num_top = sequence.request.params.top_logprobs
    if num_top and after:
        del sequence.top_logprobs[chunk.start :]
        sequence.top_logprobs.extend(top_tokens(logprobs, [num_top] * len(after)))
    return len(chunk.ids)
