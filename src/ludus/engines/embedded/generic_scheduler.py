"""Passes over the cache class of a model: slower than paged passes, for any causal model.

Sequences of equal length form a `Batch` with one cache; each step computes one pass per batch. The state of an episode
is kept between its turns and extended by the new tokens. The state of each new prompt, without its last token, is also
kept, and copied for the other members of a group. States are not cut: only a whole one can be a prefix.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from ludus.engines.base import DEFAULT
from ludus.engines.embedded.kv_cache import adapter_of
from ludus.engines.embedded.model_runner import Chunk, ModelRunner, agreement, check_positions, largest_difference
from ludus.engines.embedded.scheduler import SCORE_CHUNK, Pass, SequenceScheduler, SequenceState
from ludus.engines.models.lora import AdapterBank
from ludus.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

State = Any
"""A cache as returned by a model: an object of transformers, or tensors in lists; None before the first token."""

_CACHE_NAMES = ("past_key_values", "cache_params", "state")
_NODES = (Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin)
_TRIAL_TOKENS, _TRIAL_PROMPT = 40, 17
_STRICT = 0.2
"""Fraction of the usual tolerance: some models compute single tokens differently, for which only no cache is exact."""
_HINT = "Serve it with an inference server."


@dataclass(frozen=True, slots=True)
class CacheMode:
    """How a model's cache is used; `description` is part of a warning."""

    has_cache: bool
    extends: bool
    """Whether several tokens at once extend a cache."""
    merges: bool
    """Whether caches of equal length are merged into one batch."""
    description: str


_MODES = (
    CacheMode(True, True, True, "one cache per episode, batches of equal length"),
    CacheMode(True, False, True, "one cache per episode, extended token by token, batches of equal length"),
    CacheMode(True, True, False, "one cache per episode, one sequence per pass"),
    CacheMode(True, False, False, "one cache per episode, extended token by token, one sequence per pass"),
    CacheMode(False, True, True, "no cache, the whole history is computed for each token"),
)


class GenericForward(ModelRunner):
    """Forward passes of a causal language model over its own cache.

    For models that `RaggedForward` rejects: linear attention, state spaces, convolutions, sinks, latent attention. A
    cache (`State`) covers sequences of equal length, one in each batch row. A trial at start compares several ways to
    use it with a plain pass, and the first that agrees is used: some models cannot extend a cache by several tokens at
    once, some caches cannot be split and merged by rows, and some models have none. Raises UserError if no way agrees,
    and restores the model.
    """

    def __init__(self, model: PreTrainedModel, max_tokens: int) -> None:
        super().__init__(model)
        self._takes_positions = "position_ids" in self._parameters
        self._cache_name = next((name for name in _CACHE_NAMES if name in self._parameters), "")
        with self._undo as undo:
            check_positions(model, max_tokens)
            rows = torch.arange(_TRIAL_TOKENS, device=self.device) * 7 % self.vocab_size
            ids = torch.stack([rows, rows.flip(0)])
            try:
                with torch.inference_mode():
                    expected = model(input_ids=ids, use_cache=False).logits.double().log_softmax(-1)
                self.adapters = AdapterBank(model)
            except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as error:
                raise UserError(f"The local engine cannot run {type(model).__name__}: {error}.", _HINT) from error
            undo.callback(self.adapters.close)
            self.mode = self._choose_mode(ids, expected)
            self._undo = undo.pop_all()

    def logits(
        self, ids: Tensor, start: int, state: State, adapter: str, *, all_rows: bool = False
    ) -> tuple[Tensor, State]:
        """Extend `state` in place by the tokens `ids` `[B, T]`, the first at position `start`. Return logits
        `[B, 1, V]`, or `[B, T, V]` for `all_rows`, and the new state."""
        self.adapters.select([adapter], [1], 1, self.device)
        arguments: dict[str, object] = {"use_cache": self.mode.has_cache}
        if self._selects_logits and not all_rows:
            arguments["logits_to_keep"] = 1
        if self._takes_positions:  # not every model derives them from its cache
            arguments["position_ids"] = torch.arange(start, start + ids.shape[1], device=self.device).expand(ids.shape)
        if self.mode.has_cache and state is not None:
            arguments[self._cache_name] = state
        output = self.model(input_ids=ids, **arguments)
        logits: Tensor = output.logits
        return (logits if all_rows else logits[:, -1:]), output.get(self._cache_name) if self.mode.has_cache else None

    def _choose_mode(self, ids: Tensor, expected: Tensor) -> CacheMode:
        """Return the first way of caching whose log-probabilities are those of a plain pass."""
        reason = ""
        for mode in _MODES:
            self.mode = mode
            try:
                difference = largest_difference(self._run_trial(ids), expected, self.dtype)
            except Exception as error:  # boundary: a model's code may raise anything
                reason = f": {error}"
                continue
            if difference < _STRICT * agreement(expected, self.dtype):
                return mode
            reason = f": cached and plain passes differ by {difference:.2g} in log-probability"
        raise UserError(f"The local engine cannot run {type(self.model).__name__}{reason}.", _HINT)

    @torch.inference_mode()
    def _run_trial(self, ids: Tensor) -> Tensor:
        """Return log-probabilities `[2, T, V]`: two prompts apart, some tokens in one batch if merged, then apart again
        with copies of their states."""
        adapter = DEFAULT if DEFAULT in self.adapters.names else ""
        if not self.mode.has_cache:
            return self.logits(ids, 0, None, adapter, all_rows=True)[0].double().log_softmax(-1)
        states: list[State] = [None, None]

        def extend(row: int, begin: int, end: int) -> list[Tensor]:
            step, found = (end - begin if self.mode.extends or not begin else 1), []
            for at in range(begin, end, step):
                part = ids[row : row + 1, at : at + step]
                logits, states[row] = self.logits(part, at, states[row], adapter, all_rows=True)
                found.append(logits)
            return found

        parts = [extend(row, 0, _TRIAL_PROMPT) for row in range(2)]
        begin = _TRIAL_PROMPT + 2
        merged = merge(states) if self.mode.merges else None
        for at in range(_TRIAL_PROMPT, begin):
            if self.mode.merges:
                logits, merged = self.logits(ids[:, at : at + 1], at, merged, adapter)
            for row in range(2):
                parts[row] += [logits[row : row + 1]] if self.mode.merges else extend(row, at, at + 1)
        if self.mode.merges:
            states = [select(merged, [row], 2) for row in range(2)]
        copies = [fork(state) for state in states]
        for row in range(2):  # the copies must not change with the originals
            extend(row, begin, _TRIAL_TOKENS)
        states = copies
        for row in range(2):
            parts[row] += extend(row, begin, _TRIAL_TOKENS)
        return torch.cat([torch.cat(row, dim=1) for row in parts]).double().log_softmax(-1)


def merge(states: Sequence[State]) -> State:
    """Return one state with the rows of all."""
    return _map(lambda *tensors: torch.cat(tensors) if tensors[0].dim() else tensors[0].clone(), *states)


def select(state: State, rows: Sequence[int], num_rows: int) -> State:
    """Return a copy of some rows of a state."""
    if list(rows) == list(range(num_rows)):
        return fork(state)
    return _map(lambda x: x[list(rows)] if x.dim() and x.shape[0] == num_rows else x.clone(), state)


def fork(state: State) -> State:
    """Return an independent copy of a state."""
    return _map(torch.clone, state)


def _map(function: Callable[..., Tensor], *states: State) -> State:
    """Return a copy of the first state with each tensor replaced by the function of that tensor of all states."""
    first = states[0]
    if isinstance(first, Tensor):
        return function(*states)
    if isinstance(first, Mapping):
        return {name: _map(function, *(state[name] for state in states)) for name in first}
    if isinstance(first, list | tuple):
        return type(first)(_map(function, *parts) for parts in zip(*states, strict=True))
    if not isinstance(first, _NODES):
        return first
    made = copy.copy(first)
    vars(made).update({name: _map(function, *(vars(state)[name] for state in states)) for name in vars(first)})
    return made


_Key = tuple[str, int, int, bool]


@dataclass(eq=False, slots=True)
class Batch:
    """Sequences with an equal number of computed tokens, and their state: one row each, in order."""

    state: State
    sequences: list[SequenceState]

    def row(self, sequence: SequenceState) -> State:
        return select(self.state, [self.sequences.index(sequence)], len(self.sequences))

    def rows(self) -> list[Batch]:
        return [Batch(self.row(sequence), [sequence]) for sequence in self.sequences]

    def remove(self, sequence: SequenceState) -> None:
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
        history = tuple(sequence.tokens)
        prefixes = (s for s in self._states if s.cache_root == sequence.cache_root and len(s.tokens) < len(history))
        matching = (s for s in prefixes if history[: len(s.tokens)] == s.tokens)
        found = max(matching, key=lambda stored: len(stored.tokens), default=None)
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
        total = sum(len(stored.tokens) for stored in self._states)
        while self._states and (total + reserved > self.max_tokens or len(self._states) > self.max_states):
            total -= len(self._states.pop(0).tokens)
            self.num_evicted += 1

    def release(self, episode: str) -> None:
        for stored in self._states:
            stored.episodes.discard(episode)
        self._states = [stored for stored in self._states if stored.episodes]

    def clear(self, adapter: str | None) -> None:
        """Drop the states (of one adapter and its versions)."""
        self._states = [s for s in self._states if adapter not in (None, s.cache_root, adapter_of(s.cache_root))]

    drop_adapter = clear


class GenericScheduler(SequenceScheduler):
    """Scheduler over a `GenericForward`."""

    runner: GenericForward
    _cache: StateStore
    _batches: Sequence[Batch] = ()

    def release_episode(self, episode: str, cache_root: str, tokens: tuple[int, ...]) -> None:
        self._cache.release(episode)

    def _try_start(self, sequence: SequenceState) -> tuple[bool, bool]:
        longest = sequence.num_prompt + sequence.limit
        if any(_computes_prefix_of(sequence, other) for other in self.running):
            return False, True
        if self.running and self._reserved + longest > self._cache.max_tokens:
            return False, False
        state, length = (None, 0) if sequence.scores is not None else self._cache.take(sequence)
        sequence.reserved = longest
        self._begin(sequence, length)
        self._cache.evict(self._reserved)
        self._batches = [*self._batches, Batch(state, [sequence])]
        return True, True

    def _plan(self) -> list[tuple[SequenceState, Chunk]]:
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
            if not self.runner.mode.has_cache:
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
            fits = batch is not None and self.runner.mode.merges and count + len(batch.sequences) <= size
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
        mode = self.runner.mode
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
        ids = torch.tensor([chunk.ids for _, chunk in plan], device=self.runner.device)
        first = batch.sequences[0]
        scored = first.scores is not None
        start = first.num_computed
        logits, batch.state = self.runner.logits(ids, start, batch.state, first.adapter, all_rows=scored)
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
                sequence.num_committed = sequence.num_computed
                if sequence.scores is None and self.runner.mode.has_cache:  # for the rest of its group
                    self._cache.put(sequence, self._batch_of(sequence).row(sequence), shared=True)
                    self._cache.evict(self._reserved)

    def _batch_of(self, sequence: SequenceState) -> Batch:
        return next(batch for batch in self._batches if any(other is sequence for other in batch.sequences))

    def _release_slot(self, sequence: SequenceState) -> None:
        """Remove a running sequence and keep the state of its episode."""
        super()._release_slot(sequence)
        batch = self._batch_of(sequence)
        kept = sequence.error is None and sequence.scores is None and sequence.request.episode
        if kept and sequence.num_computed and batch.state is not None:
            self._cache.put(sequence, batch.row(sequence), shared=False)
            self._cache.evict(self._reserved)
        batch.remove(sequence)
        if not batch.sequences:
            self._batches = [other for other in self._batches if other is not batch]


def _is_new_prompt(sequence: SequenceState) -> bool:
    """Return whether the prompt of a sequence without a stored prefix is being computed, up to its last token."""
    return sequence.num_committed == 0 and sequence.num_computed < sequence.num_prompt - 1


def _computes_prefix_of(sequence: SequenceState, other: SequenceState) -> bool:
    """Return whether `other` is computing a prompt that the prompt of `sequence` extends."""
    prefix = other.tokens[: other.num_prompt - 1]
    return (
        sequence.scores is None
        and other.scores is None
        and other.cache_root == sequence.cache_root
        and _is_new_prompt(other)
        and len(prefix) < len(sequence.tokens)
        and sequence.tokens[: len(prefix)] == prefix
    )
