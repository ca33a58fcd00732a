"""The embedded engine: sampling from a Hugging Face causal language model in this process.

Accepts requests from any number of asyncio tasks. All computation and cache access runs on one worker thread;
requests, weight updates and cancellations take effect between two forward passes. Requests are never retried.
"""

from __future__ import annotations

import asyncio
import copy as copying
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from ludus.engines.base import (
    BASE,
    DEFAULT,
    ROLE_ADAPTER,
    TOKEN_WATCHERS,
    AdapterVersions,
    EngineStats,
    Request,
    check_fits,
    check_params,
)
from ludus.engines.embedded.drafts import DraftIndex
from ludus.engines.embedded.generic_scheduler import GenericForward, GenericScheduler, StateStore
from ludus.engines.embedded.kv_cache import PAGE, RadixCache, root_name
from ludus.engines.embedded.model_runner import RaggedForward
from ludus.engines.embedded.sampler import GuideCompiler, GuideState
from ludus.engines.embedded.scheduler import BatchScheduler, SequenceScheduler, SequenceState
from ludus.engines.models.fingerprint import fingerprint_adapted
from ludus.engines.models.lora import is_peft, role_adapters
from ludus.engines.models.vision import image_tokens
from ludus.errors import EngineBusy, EngineError, RequestRejected, SyncError, UserError
from ludus.images import IMAGE_IDS
from ludus.types import Completion, FinishReason, SamplingParams, TopLogprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_STREAM_INTERVAL_S = 0.02
_DRAFT_TOKENS = 8

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Limits of the embedded engine, in tokens except `max_batch` (requests) and `threads`."""

    context_tokens: int = 1024
    """Maximum length of prompt plus completion."""
    max_batch: int = 128
    """Maximum number of requests computed together; others wait."""
    kv_cache_tokens: int = 131_072
    """Capacity of the KV cache, for running requests and cached prefixes; evicts the least recently used."""
    pass_tokens: int = 512
    """Tokens of one forward pass: decoding first, then prompts and observations."""
    threads: int = 0
    """CPU compute threads, separate from the learner's; 0 keeps torch's default."""
    batch_invariant: bool = True
    """Make results bit-identical in any batch. If matrix products do not treat all rows alike (tested at
    start), every pass has one fixed shape, which is slower. Requires float32 on a CPU with the compiled
    kernel."""
    draft_tokens: int | None = None
    """Maximum number of draft tokens of a sequence in one pass (speculative decoding, `drafts`), on a CPU with the
    compiled kernel; 0 disables drafts. If unset, 8; but 0 if `batch_invariant` is set and the engine is not, since
    drafts then change the rounding of results."""
    max_requests: int = 0
    """Maximum number of running and waiting requests; further ones raise `EngineBusy`. 0: unlimited."""
    recompute_on_update: bool = True
    """Recompute the histories of episodes after a weight update. Otherwise an episode keeps its old keys and
    values, its log-probabilities mix versions, and it shares its cache only with episodes that started under
    the same weights."""
    adapter_versions: bool = False
    """For models with adapters: load new weights as an additional adapter and keep each episode on the
    version that it started with. A version that no episode uses is unloaded."""


@dataclass(frozen=True, slots=True)
class CompletionChunk:
    """New tokens of a streamed action. `finish_reason` is None until the last chunk."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason | None
    top_logprobs: tuple[TopLogprobs, ...] = ()


class LocalEngine:
    """An `Engine` for any causal language model; it owns `model` unless it makes a `copy`. A model without standard
    attention runs over its own cache class, with a warning. `tokenizer` is needed only for stop strings and guides.
    Raises `UserError` for an unsupported model."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        settings: EngineSettings = EngineSettings(),
        *,
        version: int = 0,
        copy: bool = True,
    ) -> None:
        self._model = copying.deepcopy(model) if copy else model
        self._model.requires_grad_(False).eval()
        self._tokenizer = tokenizer
        self._guides: GuideCompiler | None = None
        adapted = is_peft(model)
        self._versions = AdapterVersions(DEFAULT if adapted else BASE, adapted and settings.adapter_versions)
        self._drained = EngineStats()
        self._unfinished: set[SequenceState] = set()
        self._settings = settings
        before = torch.get_num_threads()
        _set_num_threads(settings.threads)
        try:
            self._scheduler, self._invariant = _make_scheduler(self._model, tokenizer, settings)
        finally:
            _set_num_threads(before)
        self._forward = self._scheduler.runner
        self._scheduler.version = version
        self._roles = frozenset(name.removeprefix(ROLE_ADAPTER) for name in role_adapters(self._model))
        self._sessions = SessionCache(self._scheduler, keep_on_update=not settings.recompute_on_update)
        self._worker = ComputeThread(self._scheduler, settings.threads)

    @property
    def context_tokens(self) -> int:
        return self._settings.context_tokens

    @property
    def version(self) -> int:
        return self._scheduler.version_of(self._versions.current)

    @property
    def batch_invariant(self) -> bool:
        return self._invariant

    @property
    def continues_actions(self) -> bool:
        return True

    @property
    def roles(self) -> Collection[str]:
        return self._roles

    async def generate(self, request: Request) -> Completion:
        (completion,) = await self.generate_batch([request])
        return completion

    async def generate_batch(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample one action per request, queued in order. Raises RequestRejected for an invalid one, or EngineBusy."""
        sequences = await self._sequences(requests)
        self._worker.submit(lambda: list(map(self._sessions.add, sequences)))
        watched = [one for one in sequences if one.request.episode in TOKEN_WATCHERS]
        watching = [asyncio.create_task(_watch(one, TOKEN_WATCHERS[one.request.episode])) for one in watched]
        try:
            return [await asyncio.wrap_future(sequence.result) for sequence in sequences]
        except (asyncio.CancelledError, EngineError):  # abort the rest of the batch
            self._worker.submit(lambda: list(map(self._scheduler.abort, sequences)))
            raise
        finally:
            for task in watching:
                task.cancel()

    async def stream(self, request: Request) -> AsyncIterator[CompletionChunk]:
        """Sample one action and yield its new tokens every 20 ms; the last chunk has the finish reason."""
        (sequence,) = await self._sequences([request])
        self._worker.submit(partial(self._sessions.add, sequence))
        done, num_sent = asyncio.wrap_future(sequence.result), 0
        try:
            while not done.done():
                await asyncio.wait({done}, timeout=_STREAM_INTERVAL_S)
                until = len(sequence.versions)  # the worker appends a token's version last
                if until > num_sent and not done.done():
                    yield _chunk(sequence, num_sent, until, None)
                    num_sent = until
            completion = done.result()
            yield _chunk(sequence, num_sent, len(completion.tokens), completion.finish_reason)
        finally:
            if not done.done():
                done.cancel()
                self._worker.submit(partial(self._scheduler.abort, sequence))

    def abort(self, episode: str) -> None:
        """End the episode's requests with the tokens so far and `finish_reason` "abort"."""
        self._worker.submit(partial(self._scheduler.abort_where, lambda sequence: sequence.request.episode == episode))

    async def pause(self) -> None:
        """Pause computation until `resume`; requests stay queued. Returns between two passes."""
        await self._worker.call(partial(self._worker.set_paused, True))

    async def resume(self) -> None:
        await self._worker.call(partial(self._worker.set_paused, False))

    def throttle(self, factor: float) -> None:
        self._worker.throttle(factor)

    async def sleep(self) -> None:
        """Free the KV cache's memory until the next request. Raises EngineError if there are requests."""
        await self._worker.call(self._scheduler.sleep)

    async def relabel(self, version: int) -> None:
        """Set the version of the current weights; all later tokens carry it."""
        await self._worker.call(partial(setattr, self._scheduler, "version", version))

    def end_episode(self, episode: str) -> None:
        """End the episode but keep its cache entries for others until evicted."""
        self._end_episode(episode, self._sessions.end)

    def release(self, episode: str) -> None:
        """End the episode and free the cache entries that it shares with no other."""
        self._end_episode(episode, self._sessions.release)

    def _end_episode(self, episode: str, end: Callable[[str], object]) -> None:
        if not self._worker.closed:
            self._worker.submit(partial(end, episode))
            if (unused := self._versions.release(episode)) is not None:
                self._worker.submit(partial(self._unload_adapter, unused))

    async def load_weights(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Copy `state`, all or some parameters, into the model between two passes; each token carries the version that
        sampled it. Raises `SyncError`, without changes, for an unknown name or a different shape."""
        if not self._versions.keeps:
            await self._worker.call(partial(self._load, version, state))
            return
        scaling = next(iter(self._forward.adapters.pairs(DEFAULT).values())).scaling
        name = f"{DEFAULT}#{version}"
        await self.load_adapter(name, version, state, scaling)
        if (unused := self._versions.renew(name)) is not None:
            await self.unload_adapter(unused)

    async def fingerprint(self, *, adapter: str | None = None) -> str:
        self._check_adapter(adapter)
        name = self._versions.current if adapter is None else adapter
        return await self._worker.call(lambda: fingerprint_adapted(self._model, self._forward.adapters.pairs(name)))

    async def load_adapter(self, name: str, version: int, state: Mapping[str, torch.Tensor], scaling: float) -> None:
        """Load LoRA factors, named as in PEFT; `scaling` is alpha over rank. On SyncError nothing changes."""
        await self._worker.call(partial(self._load_adapter, name, version, state, scaling))

    async def unload_adapter(self, name: str) -> None:
        await self._worker.call(partial(self._unload_adapter, name))

    async def score(self, token_ids: Sequence[int], *, adapter: str | None = None) -> list[float]:
        """Return the log-probability of each token at temperature 1; 0 for the first.

        Raises `EngineError` for no tokens or more than `context_tokens`.
        """
        return (await self.score_top(token_ids, 0, adapter=adapter))[0]

    async def score_top(
        self, token_ids: Sequence[int], num_top: int, *, adapter: str | None = None
    ) -> tuple[list[float], list[TopLogprobs]]:
        """Return `score` and the `num_top` most likely tokens at each position; none for the first."""
        params = SamplingParams(top_logprobs=num_top)
        check_params(params)
        self._check_adapter(adapter)
        if not 0 < len(token_ids) <= self.context_tokens:
            raise EngineError(
                f"A sequence of {len(token_ids)} tokens cannot be scored: "
                f"the engine accepts 1 to {self.context_tokens}."
            )
        sequence = self._sequence(Request("", tuple(token_ids), params, adapter=adapter))
        sequence.scores = [0.0]
        self._worker.submit(partial(self._sessions.add, sequence))
        await asyncio.wrap_future(sequence.result)
        return sequence.scores, [(), *(sequence.top_logprobs or [()] * (len(token_ids) - 1))]

    async def close(self) -> None:
        """Finish the current pass, reject further requests and stop the worker."""
        await self._worker.close()
        self._forward.close()

    def stats(self, *, reset: bool = False) -> EngineStats:
        now, before = self._scheduler.stats, self._drained
        if reset:
            self._drained = now
        return now - before

    def _check_adapter(self, adapter: str | None) -> None:
        if adapter and adapter not in self._forward.adapters.names:
            loaded = ", ".join(sorted(self._forward.adapters.names)) or "none"
            raise RequestRejected(f"Adapter {adapter!r} is not loaded; loaded: {loaded}.")

    async def _sequences(self, requests: Sequence[Request]) -> list[SequenceState]:
        """Create sequences for valid requests; guides are compiled on another thread."""
        for request in requests:
            check_fits(request, self.context_tokens)
            largest = max(request.token_ids)
            if largest >= IMAGE_IDS and image_tokens(self._model) is not None:
                largest = max((token for token in request.token_ids if token < IMAGE_IDS), default=0)
            if not 0 <= min(request.token_ids) <= largest < self._forward.vocab_size:
                raise RequestRejected(
                    f"Episode {request.episode} has token ids outside the model's vocabulary of "
                    f"{self._forward.vocab_size}.",
                    "Use the model's own tokenizer.",
                )
            if (request.params.stop or request.params.guide) and self._tokenizer is None:
                raise RequestRejected(
                    "Stop strings and guides need a tokenizer.", "Pass a tokenizer or use stop_token_ids."
                )
            self._check_adapter(request.adapter)
        _check_capacity(len(self._unfinished), len(requests), self._settings.max_requests)
        guides: list[GuideState | None] = [None] * len(requests)
        if any(request.params.guide is not None for request in requests):
            assert self._tokenizer is not None
            self._guides = self._guides or GuideCompiler(self._tokenizer)
            guides = await asyncio.to_thread(self._guides.start_all, requests)
            _check_capacity(len(self._unfinished), len(requests), self._settings.max_requests)
        return [self._sequence(request, guide) for request, guide in zip(requests, guides, strict=True)]

    def _sequence(self, request: Request, guide: GuideState | None = None) -> SequenceState:
        limit = min(request.params.max_new_tokens, self.context_tokens - len(request.token_ids))
        adapter = self._versions.of(request.episode) if request.adapter is None else request.adapter
        sequence = SequenceState(request, limit, self._ended, adapter, guide=guide)
        self._unfinished.add(sequence)
        return sequence

    def _ended(self, sequence: SequenceState) -> None:
        self._unfinished.discard(sequence)
        self._sessions.ended(sequence)
        if sequence.result.set_running_or_notify_cancel():
            if sequence.error is not None:
                sequence.result.set_exception(sequence.error)
            else:
                sequence.result.set_result(sequence.completion)

    @torch.no_grad()
    def _load(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        parameters = self._model.state_dict(keep_vars=True)
        unknown = sorted(set(state) - set(parameters))
        if unknown or not state:
            shown = ", ".join(unknown[:3]) or "no tensors"
            raise SyncError(f"The weights of version {version} do not match the engine's model: {shown}.")
        for name, tensor in state.items():
            if parameters[name].shape != tensor.shape:
                raise SyncError(
                    f"Weight {name} of version {version} has shape {tuple(tensor.shape)}, "
                    f"the engine's has {tuple(parameters[name].shape)}."
                )
        for name, tensor in state.items():
            parameters[name].copy_(tensor)
        self._scheduler.new_weights(version, recompute=self._settings.recompute_on_update)

    def _load_adapter(self, name: str, version: int, state: Mapping[str, torch.Tensor], scaling: float) -> None:
        self._forward.adapters.load(name, state, scaling)
        self._scheduler.new_weights(version, recompute=self._settings.recompute_on_update, adapter=name)

    def _unload_adapter(self, name: str) -> None:
        self._scheduler.abort_where(lambda one: one.adapter == name, EngineError(f"The adapter {name!r} was unloaded."))
        self._forward.adapters.unload(name)
        self._scheduler.drop_adapter(name)


def _make_scheduler(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, settings: EngineSettings
) -> tuple[SequenceScheduler, bool]:
    """Return a scheduler and whether it is batch-invariant: paged if the model supports it, otherwise generic."""
    num_pages = max(-(-settings.kv_cache_tokens // PAGE), -(-settings.context_tokens // PAGE), 16)
    pass_tokens = max(settings.pass_tokens, settings.max_batch)
    try:
        forward = RaggedForward(model, num_pages, settings.context_tokens, settings.threads or torch.get_num_threads())
    except UserError as error:
        generic = GenericForward(model, settings.context_tokens)
        log.warning(
            "%s Using the generic engine instead, which is slower: %s.", error.message, generic.mode.description
        )
        store = StateStore(settings.kv_cache_tokens, 2 * settings.max_batch)
        return GenericScheduler(generic, tokenizer, store, settings.max_batch, pass_tokens), False
    slots = (settings.max_batch, settings.context_tokens)
    scheduler = BatchScheduler(forward, tokenizer, RadixCache(num_pages), slots, pass_tokens)
    # In 16-bit types a row depends on the number of rows, and padding all passes to one size costs more than lockstep.
    invariant = settings.batch_invariant and forward.compiled and forward.dtype == torch.float32
    scheduler.block = forward.block_for(pass_tokens) if invariant else 1
    if forward.compiled:
        default = 0 if settings.batch_invariant and not invariant else _DRAFT_TOKENS
        scheduler.drafts = DraftIndex(default if settings.draft_tokens is None else settings.draft_tokens)
    return scheduler, invariant


def _check_capacity(num_unfinished: int, num: int, limit: int) -> None:
    """Raise RequestRejected if `num` exceeds the limit (0: none), EngineBusy if the queue is full."""
    if 0 < limit < num:
        raise RequestRejected(f"{num} requests in one batch; the engine accepts {limit} (max_requests).")
    if limit and num_unfinished + num > limit:
        raise EngineBusy(
            f"The engine has {num_unfinished} requests and accepts {limit} at most (max_requests).",
            "Retry when some have finished.",
        )


async def _watch(sequence: SequenceState, watcher: Callable[[Sequence[int]], None]) -> None:
    """Call `watcher` with new tokens every 20 ms until the action is complete; the last ones may be missing."""
    num_sent = 0
    while not sequence.result.done():
        await asyncio.sleep(_STREAM_INTERVAL_S)
        until = len(sequence.versions)
        if until > num_sent:
            watcher(_chunk(sequence, num_sent, until, None).tokens)
            num_sent = until


def _chunk(sequence: SequenceState, start: int, end: int, finish: FinishReason | None) -> CompletionChunk:
    at = sequence.num_prompt
    return CompletionChunk(
        tokens=tuple(sequence.tokens[at + start : at + end]),
        logprobs=tuple(sequence.logprobs[start:end]),
        versions=tuple(sequence.versions[start:end]),
        finish_reason=finish,
        top_logprobs=tuple(sequence.top_logprobs[start:end]),
    )


@dataclass
class SessionCache:
    """Cache entries of episodes by name, until release or eviction.

    With `keep_on_update` they stay valid across weight updates. Only the engine's worker calls this, between two
    passes, so that no weight update falls between an episode's cache lookup and its first pass.
    """

    scheduler: SequenceScheduler
    keep_on_update: bool
    _histories: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict, init=False)
    _cache_roots: dict[str, str] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._histories.keys() | self._cache_roots.keys())

    def add(self, sequence: SequenceState) -> None:
        """Queue a sequence on its episode's cache branch."""
        episode, sequence.cache_root = sequence.request.episode, sequence.adapter
        if self.keep_on_update and episode:  # separate from episodes that started under other weights
            root = root_name(sequence.adapter, self.scheduler.version_of(sequence.adapter))
            sequence.cache_root = self._cache_roots.setdefault(episode, root)
        self.scheduler.add(sequence)

    def ended(self, sequence: SequenceState) -> None:
        """Record the computed history of the sequence; the last token has no cache entry."""
        if sequence.error is None and sequence.scores is None:
            self._histories[sequence.request.episode] = (sequence.cache_root, tuple(sequence.tokens[:-1]))

    def end(self, episode: str) -> tuple[str, tuple[int, ...]] | None:
        self._cache_roots.pop(episode, None)
        return self._histories.pop(episode, None)

    def release(self, episode: str) -> None:
        """End the episode and free the cache entries that it shares with no other."""
        if (history := self.end(episode)) is not None:
            self.scheduler.release_episode(episode, *history)


class ComputeThread:
    """Thread that runs a scheduler; `submit` and `call` run functions on it between two passes."""

    def __init__(self, scheduler: SequenceScheduler, threads: int) -> None:
        self._scheduler, self._threads = scheduler, threads
        self._commands: deque[Callable[[], object]] = deque()
        self._wake = threading.Condition()
        self.closed = self._paused = False
        self._throttle = self._pass_s = self._pass_ended = 0.0
        self._thread = threading.Thread(target=self._work, name="ludus-engine", daemon=True)
        self._thread.start()

    def submit(self, command: Callable[[], object]) -> None:
        """Run `command` on the thread between two passes. Raises EngineError if closed."""
        with self._wake:
            if self.closed:
                raise EngineError("The engine is closed.")
            self._commands.append(command)
            self._wake.notify()

    async def call(self, work: Callable[[], Result]) -> Result:
        """Run `work` on the thread, unless the caller is cancelled before it starts, and return its result."""
        future: Future[Result] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except BaseException as error:  # boundary: re-raised in the caller
                future.set_exception(error)

        self.submit(command)
        return await asyncio.wrap_future(future)

    def set_paused(self, paused: bool) -> None:
        """Pause or resume computation. Must run on the thread itself, through `call`."""
        self._paused = paused

    def throttle(self, factor: float) -> None:
        with self._wake:
            self._throttle = factor
            self._wake.notify()

    async def close(self) -> None:
        """Finish the current pass, reject further work and join the thread."""
        with self._wake:
            self.closed = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    def _work(self) -> None:
        _set_num_threads(self._threads)
        while True:
            commands, closed = self._next()
            for command in commands:
                command()
            if closed:
                self._scheduler.fail_all(EngineError("The engine is closed."))
                return
            self._scheduler.expire()
            if self._has_work and not self._pause_s:
                self._step()

    def _next(self) -> tuple[deque[Callable[[], object]], bool]:
        """Wait for a command, for work or for a deadline; return the pending commands and `closed`."""
        with self._wake:
            while not (self.closed or self._commands):
                pause_s = self._pause_s
                if self._has_work and not pause_s:
                    break
                timeouts = [left for left in (self._scheduler.next_timeout_s, pause_s or None) if left is not None]
                self._wake.wait(min(timeouts, default=None))
                if self._scheduler.next_timeout_s == 0:
                    break
            commands, self._commands = self._commands, deque()
            return commands, self.closed

    @property
    def _has_work(self) -> bool:
        return self._scheduler.busy and not self._paused

    @property
    def _pause_s(self) -> float:
        """Remaining seconds of sleep after the last pass, at least 0."""
        return max(0.0, self._pass_ended + self._throttle * self._pass_s - time.monotonic())

    def _step(self) -> None:
        """Run a pass. An error in one sequence fails that sequence; an error outside fails all."""
        begin = time.monotonic()
        try:
            self._scheduler.step()
        except EngineError as error:
            self._scheduler.fail_all(error)
        except Exception as error:  # boundary: if the thread died, all callers would block forever
            count = len(self._scheduler.running)
            self._scheduler.fail_all(EngineError(f"Inference failed on a batch of {count}: {error}"))
        self._pass_ended = time.monotonic()
        self._pass_s = self._pass_ended - begin


def _set_num_threads(threads: int) -> None:
    """Set the calling thread's number of compute threads, which OpenMP stores per thread."""
    if threads:
        torch.zeros(1).sum()  # torch applies its global number on first use, so trigger that first
        torch.set_num_threads(threads)
