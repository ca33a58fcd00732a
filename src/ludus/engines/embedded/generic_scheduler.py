"""Scheduling over the cache class of a model: slower than paged passes, for any causal model.

Sequences of equal length form a `Batch` with one cache; each step computes one pass per batch. The state of an episode
is kept between its turns and extended by the new tokens. The state of each new prompt, without its last token, is also
kept, and copied for the other members of a group. States are not cut: only a whole one can be a prefix.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from ludus.engines.embedded.generic_runner import GenericForward, State, fork, merge, select
from ludus.engines.embedded.kv_cache import adapter_of
from ludus.engines.embedded.model_runner import Chunk
from ludus.engines.embedded.scheduler import SCORE_CHUNK, Pass, SequenceScheduler, SequenceState

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Key = tuple[str, int, int, bool]


@dataclass(eq=False, slots=True)
class Batch:
    """Sequences with an equal number of computed tokens, and their state: one row each, in order."""

    state: State
    sequences: list[SequenceState]

    def row(self, sequence: SequenceState) -> State:
        """Return a copy of one sequence's state."""
        return select(self.state, [self.sequences.index(sequence)], len(self.sequences))

    def rows(self) -> list[Batch]:
        """Return one batch per sequence."""
        return [Batch(self.row(sequence), [sequence]) for sequence in self.sequences]

    def remove(self, sequence: SequenceState) -> None:
        """Remove a sequence and its row."""
        rest = [i for i, other in enumerate(self.sequences) if other is not sequence]
        self.state = select(self.state, rest, len(self.sequences)) if rest else None
        self.sequences = [self.sequences[i] for i in rest]


@dataclass(eq=False, slots=True)
class StoredState:
    """The state after `tokens`: of an episode between turns, or, if `shared`, of a prompt without its last token."""

    state: State
    tokens: tuple[int, ...]
    cache_root: str
    shared: bool
    episodes: set[str]


@dataclass
class StateStore:
    """States by their tokens, least recently used first; at most `max_tokens` and `max_states`."""

    max_tokens: int
    max_states: int
    num_evicted: int = 0
    _states: list[StoredState] = field(default_factory=list, init=False)

    def take(self, sequence: SequenceState) -> tuple[State, int]:
        """Return the state of the longest stored prefix, a copy unless it is this episode's only, and its length."""
        found = self._find(sequence)
        if found is None:
            return None, 0
        self._states.remove(found)
        episode = sequence.request.episode
        if not found.shared and found.episodes == {episode}:
            return found.state, len(found.tokens)
        self._states.append(found)
        found.episodes.add(episode)
        return fork(found.state), len(found.tokens)

    def put(self, sequence: SequenceState, state: State, *, shared: bool) -> None:
        """Store the state of a sequence's computed tokens; it replaces the episode's earlier one."""
        tokens, episode = tuple(sequence.tokens[: sequence.num_computed]), sequence.request.episode
        if not shared:
            self._states = [s for s in self._states if s.shared or s.episodes != {episode}]
        self._states.append(StoredState(state, tokens, sequence.cache_root, shared, {episode}))

    def evict(self, reserved: int) -> None:
        """Evict states until the rest fits beside `reserved` tokens."""
        total = sum(len(stored.tokens) for stored in self._states)
        while self._states and (total + reserved > self.max_tokens or len(self._states) > self.max_states):
            total -= len(self._states.pop(0).tokens)
            self.num_evicted += 1

    def release(self, episode: str) -> None:
        """Drop the states that only this episode used."""
        for stored in self._states:
            stored.episodes.discard(episode)
        self._states = [stored for stored in self._states if stored.episodes]

    def clear(self, adapter: str | None) -> None:
        """Drop the states (of one adapter and its versions)."""
        self._states = [s for s in self._states if adapter not in (None, s.cache_root, adapter_of(s.cache_root))]

    def _find(self, sequence: SequenceState) -> StoredState | None:
        history, best = tuple(sequence.tokens), None
        for stored in self._states:
            length = len(stored.tokens)
            longer = best is None or length > len(best.tokens)
            if longer and length < len(history) and stored.cache_root == sequence.cache_root:
                best = stored if history[:length] == stored.tokens else best
        return best


class GenericScheduler(SequenceScheduler):
    """Scheduler over a `GenericForward`. `slots` is (maximum number of running sequences, cache capacity in tokens)."""

    def __init__(
        self,
        forward: GenericForward,
        tokenizer: PreTrainedTokenizerBase | None,
        slots: tuple[int, int],
        pass_tokens: int,
    ) -> None:
        super().__init__(forward, tokenizer, slots[0], pass_tokens)
        self._forward = forward
        self._batches: list[Batch] = []
        self._store = StateStore(slots[1], 2 * slots[0])

    @property
    def num_evicted(self) -> int:
        return self._store.num_evicted

    def clear_cache(self, adapter: str | None = None) -> None:
        """Drop the stored states (of one adapter); running sequences keep theirs."""
        self._store.clear(adapter)

    def release_episode(self, episode: str, cache_root: str, tokens: tuple[int, ...]) -> None:
        """Drop the states that only this episode used."""
        del cache_root, tokens
        self._store.release(episode)

    def drop_adapter(self, adapter: str) -> None:
        """Drop all states of an unloaded adapter without running sequences."""
        super().drop_adapter(adapter)
        self._store.clear(adapter)

    def _admit(self) -> None:
        """Start sequences, oldest first; skip those whose prefix another one is computing."""
        skipped: deque[SequenceState] = deque()
        while self.waiting and self._free_slots:
            sequence = self.waiting.popleft()
            longest = sequence.num_prompt + sequence.limit
            if any(_computes_prefix_of(sequence, other) for other in self.running):
                skipped.append(sequence)
            elif self.running and self._reserved + longest > self._store.max_tokens:
                skipped.append(sequence)
                break
            else:
                self._start(sequence, longest)
        skipped.extend(self.waiting)
        self.waiting = skipped

    def _start(self, sequence: SequenceState, longest: int) -> None:
        sequence.slot = self._free_slots.popleft()
        state, length = (None, 0) if sequence.scores is not None else self._store.take(sequence)
        sequence.num_computed = sequence.num_committed = length
        sequence.reserved = longest
        self._reserved += longest
        self._store.evict(self._reserved)
        self.running.append(sequence)
        self._batches.append(Batch(state, [sequence]))
        self.stats = replace(self.stats, cached_tokens=self.stats.cached_tokens + length)

    def _plan(self) -> list[tuple[SequenceState, Chunk]]:
        """Merge batches of equal length and plan the next tokens of each."""
        self._batches = list(self._merged())
        plan: list[tuple[SequenceState, Chunk]] = []
        for batch in self._batches:
            for sequence in batch.sequences:
                at = sequence.num_computed
                ids = tuple(sequence.tokens[at : at + self._num_next(sequence)])
                plan.append((sequence, Chunk(ids, at, sequence.slot, sequence.adapter)))
        return plan

    def _merged(self) -> Iterator[Batch]:
        """Yield the batches regrouped by equal length. Stale states, of sequences to recompute, are dropped."""
        groups: dict[_Key, list[Batch]] = {}
        for batch in self._batches:
            if not self._forward.mode.has_cache:
                for sequence in batch.sequences:
                    sequence.num_computed = 0
            if batch.sequences[0].num_computed == 0:
                batch.state = None
            keys = {self._key(sequence) for sequence in batch.sequences}
            for part in [batch] if len(keys) == 1 else batch.rows():
                groups.setdefault(self._key(part.sequences[0]), []).append(part)
        for (_, _, length, _), batches in groups.items():
            yield from self._joined(batches, max(1, self._pass_tokens // length))

    def _joined(self, batches: list[Batch], size: int) -> Iterator[Batch]:
        """Yield the batches merged to at most `size` sequences each, if their states can be merged."""
        chosen: list[Batch] = []
        for batch in [*batches, None]:
            count = sum(len(b.sequences) for b in chosen)
            fits = batch is not None and self._forward.mode.merges and count + len(batch.sequences) <= size
            if chosen and not fits:
                state = merge([b.state for b in chosen]) if len(chosen) > 1 else chosen[0].state
                yield Batch(state, [sequence for b in chosen for sequence in b.sequences])
                chosen = []
            if batch is not None:
                chosen.append(batch)

    def _key(self, sequence: SequenceState) -> _Key:
        return sequence.adapter, sequence.num_computed, self._num_next(sequence), sequence.scores is not None

    def _num_next(self, sequence: SequenceState) -> int:
        """Return how many tokens of a sequence are computed next; a new prompt without its last token first."""
        pending = len(sequence.tokens) - sequence.num_computed
        mode = self._forward.mode
        if not mode.has_cache:
            return pending
        if sequence.scores is None and _is_new_prompt(sequence):
            pending = sequence.num_prompt - 1 - sequence.num_computed
        if mode.extends:
            return min(pending, self._pass_tokens if sequence.scores is None else SCORE_CHUNK)
        return 1 if sequence.num_computed else pending

    def _compute(self, plan: list[tuple[SequenceState, Chunk]]) -> list[Pass]:
        chunks, passes = dict(plan), []
        for batch in self._batches:
            part = [(sequence, chunks[sequence]) for sequence in batch.sequences]
            try:
                passes.append(self._pass(batch, part))
            except Exception as error:  # boundary: torch errors (memory, device, index); the state may be corrupt
                for sequence in batch.sequences:
                    sequence.fail(f"Inference failed: {error}")
        return passes

    def _pass(self, batch: Batch, plan: list[tuple[SequenceState, Chunk]]) -> Pass:
        begin = time.perf_counter()
        ids = torch.tensor([chunk.ids for _, chunk in plan], device=self._forward.device)
        first = batch.sequences[0]
        scored = first.scores is not None
        start = first.num_computed
        logits, batch.state = self._forward.logits(ids, start, batch.state, first.adapter, all_rows=scored)
        ended = [start + ids.shape[1] == len(s.tokens) for s in batch.sequences]
        rows = [] if scored else [s for s, last in zip(batch.sequences, ended, strict=True) if last]
        flat = logits.flatten(0, 1)
        if rows:
            flat = flat[torch.tensor(ended, device=flat.device)]
        computed = time.perf_counter()
        draw = self._draw(rows, flat)
        return Pass(plan, rows, flat, draw, computed - begin, time.perf_counter() - computed)

    def _finish_ended(self, plan: list[tuple[SequenceState, Chunk]]) -> None:
        for sequence, _ in plan:
            scored = sequence.scores is not None and sequence.num_computed == len(sequence.tokens)
            if sequence.error is not None or scored or sequence.finish is not None:
                self._finish(sequence)
            elif sequence.num_committed == 0 and sequence.num_computed == sequence.num_prompt - 1:
                self._share(sequence)

    def _share(self, sequence: SequenceState) -> None:
        """Store the state of a new prompt for the other members of its group."""
        sequence.num_committed = sequence.num_computed
        if sequence.scores is None and self._forward.mode.has_cache:
            self._store.put(sequence, self._batch_of(sequence).row(sequence), shared=True)
            self._store.evict(self._reserved)

    def _batch_of(self, sequence: SequenceState) -> Batch:
        return next(batch for batch in self._batches if any(other is sequence for other in batch.sequences))

    def _release_slot(self, sequence: SequenceState) -> None:
        """Remove a running sequence and keep the state of its episode."""
        self.running.remove(sequence)
        self._free_slots.append(sequence.slot)
        self._reserved -= sequence.reserved
        batch = self._batch_of(sequence)
        kept = sequence.error is None and sequence.scores is None and sequence.request.episode
        if kept and sequence.num_computed and batch.state is not None:
            self._store.put(sequence, batch.row(sequence), shared=False)
            self._store.evict(self._reserved)
        batch.remove(sequence)
        if not batch.sequences:
            self._batches.remove(batch)
        sequence.slot, sequence.reserved = -1, 0


def _is_new_prompt(sequence: SequenceState) -> bool:
    """Return whether the prompt of a sequence without a stored prefix is being computed, up to its last token."""
    return sequence.num_committed == 0 and sequence.num_computed < sequence.num_prompt - 1


def _computes_prefix_of(sequence: SequenceState, other: SequenceState) -> bool:
    """Return whether `other` is computing a prompt that continues with the one of `sequence`."""
    prefix = other.tokens[: other.num_prompt - 1]
    return (
        sequence.scores is None
        and other.scores is None
        and other.cache_root == sequence.cache_root
        and _is_new_prompt(other)
        and len(prefix) < len(sequence.tokens)
        and sequence.tokens[: len(prefix)] == prefix
    )
