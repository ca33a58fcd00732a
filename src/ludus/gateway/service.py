"""Serve an embedded engine: its model, tokenizer, LoRA adapters, worker threads and running requests.

A retried request with the same id joins the running one or gets its cached response, so nothing is computed
twice. A request is cancelled if all its clients disconnect. Aborted responses are never cached. An adapter can be
unloaded during requests that use it: new requests cannot use it, and the engine unloads it after the last one.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from ludus.chat.render import TemplateRenderer, Tokenizer
from ludus.engines.base import Request
from ludus.engines.embedded.engine import CompletionChunk, LocalEngine
from ludus.engines.models.lora import read_adapter
from ludus.errors import EngineBusy
from ludus.gateway.protocol.bodies import BadRequest, Sampling, TokenIds
from ludus.gateway.protocol.detokenize import TokenNames
from ludus.types import Completion, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_LONG = 64 * 2**10  # minimum length of a long text, in characters
_MAX_LONG = 32  # maximum number of long texts running or queued

Result = TypeVar("Result")


@dataclass
class RequestThreads:
    """The worker threads of one server."""

    _short: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "ludus-request"))
    _long: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "ludus-request-long"))
    _num_long: int = 0

    async def do(self, work: Callable[[], Result], size: int = 0) -> Result:
        """Run `work` on a thread; `size` is its text's length. Raises EngineBusy above `_MAX_LONG` long texts."""
        loop = asyncio.get_running_loop()
        if size < _LONG:
            return await loop.run_in_executor(self._short, work)
        if self._num_long >= _MAX_LONG:
            raise EngineBusy(f"The server is already processing {_MAX_LONG} long texts.", "Retry later.")
        self._num_long += 1
        future = loop.run_in_executor(self._long, work)
        future.add_done_callback(self._release_long)
        return await future

    def _release_long(self, _: object) -> None:
        self._num_long -= 1


@dataclass(eq=False)
class GatewayAdapter:
    """Loaded adapter. `key` is its name in the engine, `users` the number of running requests."""

    name: str
    key: str
    root: str
    version: int
    users: int = 0
    unload_when_unused: bool = False


@dataclass
class AdapterTable:
    """The loaded adapters that requests may name, oldest first."""

    engine: LocalEngine
    by_name: dict[str, GatewayAdapter] = field(default_factory=dict)
    _num_loaded: int = 0
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def load(self, name: str, root: str, version: int | None, *, in_place: bool) -> None:
        """Load an adapter from a folder; with `in_place`, replace a loaded adapter of that name.

        If `version` is None, versions count up from 0. If loading fails, raise UserError or SyncError; nothing changes.
        """
        async with self._lock:
            known = self.by_name.get(name)
            if known is not None and not in_place:
                raise BadRequest(f"The adapter {name!r} is already loaded; set load_inplace to replace it.")
            if version is None:
                version = 0 if known is None else known.version + 1
            self._num_loaded += known is None
            key = f"{name}#{self._num_loaded}" if known is None else known.key
            files = await asyncio.to_thread(read_adapter, Path(root))
            await self.engine.load_adapter(key, version, files.state, files.scaling)
            if known is None:
                self.by_name[name] = GatewayAdapter(name, key, root, version)
            else:
                known.root, known.version = root, version

    async def unload(self, name: str) -> None:
        """Unload an adapter. Raises BadRequest if the name is unknown."""
        async with self._lock:
            adapter = self.by_name.pop(name, None)
            if adapter is None:
                raise BadRequest(f"Adapter {name!r} is not loaded.", _NOT_FOUND)
            adapter.unload_when_unused = True
            if not adapter.users:
                await self.engine.unload_adapter(adapter.key)

    def release(self, adapter: GatewayAdapter) -> None:
        """Record the end of a request. Unload the adapter if that is pending and no other request uses it."""
        adapter.users -= 1
        if adapter.unload_when_unused and not adapter.users:
            task = asyncio.get_running_loop().create_task(self.engine.unload_adapter(adapter.key))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


PauseMode = Literal["abort", "wait", "keep"]
Batch = Sequence[tuple[tuple[int, ...], SamplingParams]]

_MAX_CACHED_RESPONSES, _MAX_CACHED_BYTES = 1024, 64 * 2**20
_NOT_FOUND, _CONFLICT = 404, 409


@dataclass(frozen=True)
class ServedModel:
    """The served model. `longest_token` is in characters, `end_ids` end a text, `renderer` needs a chat template."""

    name: str
    root: str
    created: int
    tokenizer: Tokenizer
    end_ids: tuple[int, ...]
    vocab_size: int
    longest_token: int = 256
    renderer: TemplateRenderer | None = None


@dataclass
class _CachedResponse:
    digest: bytes
    task: asyncio.Task[bytes]
    waiting: int = 0

    @property
    def num_bytes(self) -> int | None:
        """Size of a finished response in bytes, 0 if it failed, None if it is running."""
        if not self.task.done():
            return None
        failed = self.task.cancelled() or self.task.exception() is not None
        return 0 if failed else len(self.task.result())


@dataclass
class ResponseCache:
    """Cache of running and recent responses by request id."""

    _by_name: dict[str, _CachedResponse] = field(default_factory=dict)

    async def get_or_compute(self, name: str, body: bytes, work: Callable[[], Coroutine[None, None, bytes]]) -> bytes:
        """Return the response to `body`, computed once. Raises BadRequest if the id was used with another body."""
        digest = hashlib.sha256(body).digest()
        response = self._by_name.get(name)
        if response is not None and response.digest != digest:
            raise BadRequest(f"The request_id {name} was used for another request.", _CONFLICT)
        if response is None:
            response = self._by_name[name] = _CachedResponse(digest, asyncio.create_task(work()))
            self._evict()
        response.waiting += 1
        try:
            return await asyncio.shield(response.task)
        finally:
            response.waiting -= 1
            if is_abandoned := response.num_bytes is None and not response.waiting:
                response.task.cancel()
            if (is_abandoned or response.num_bytes == 0) and self._by_name.get(name) is response:
                del self._by_name[name]

    def discard(self, name: str) -> None:
        self._by_name.pop(name, None)

    def _evict(self) -> None:
        sizes = {name: num for name, response in self._by_name.items() if (num := response.num_bytes) is not None}
        num_bytes = sum(sizes.values())
        for name, num in sizes.items():
            if len(self._by_name) <= _MAX_CACHED_RESPONSES and num_bytes <= _MAX_CACHED_BYTES:
                return
            num_bytes -= num
            del self._by_name[name]


@dataclass
class CompletionService:
    """Serve requests with an engine and its model.

    Clients with `control_token` (empty: none) may control it, under its IP addresses and names in `control_hosts`.
    """

    engine: LocalEngine
    model: ServedModel
    control_token: str = ""
    control_hosts: frozenset[str] = frozenset()
    threads: RequestThreads = field(default_factory=RequestThreads)
    responses: ResponseCache = field(default_factory=ResponseCache)
    num_requests: int = 0
    is_paused: bool = False
    adapters: AdapterTable = field(init=False)
    _running: set[str] = field(default_factory=set)
    _names: dict[bool, TokenNames] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.adapters = AdapterTable(self.engine)

    def token_names(self, request: Sampling) -> TokenNames:
        """Return the token names of a request's format, shared by requests so that each token is decoded once."""
        as_ids = bool(request.return_tokens_as_token_ids)
        return self._names.setdefault(as_ids, TokenNames(self.model.tokenizer, as_ids))

    @property
    def num_unfinished(self) -> int:
        return len(self._running)

    async def prompt_ids(self, prompt: str | TokenIds, *, add_special: bool) -> tuple[int, ...]:
        """Return a prompt's token ids. Raises BadRequest if it is empty, out of vocabulary or too long."""
        if isinstance(prompt, str):
            ids = await self.encoded(prompt, add_special=add_special)
        else:
            self.check_room(prompt, sample=False)
            ids = tuple(prompt)
        if not ids:
            raise BadRequest(f"The prompt is empty{' or has no token' if isinstance(prompt, str) else ''}.")
        if max(ids) >= self.model.vocab_size:
            raise BadRequest(f"The prompt has token id {max(ids)}; the model's vocabulary has {self.model.vocab_size}.")
        return ids

    async def encoded(self, text: str, *, add_special: bool) -> tuple[int, ...]:
        """Tokenize a text. Raises BadRequest if it is not valid or, judged by its characters first, cannot fit."""
        limit = self.engine.context_tokens
        min_tokens = -(-len(text) // self.model.longest_token)
        if min_tokens > limit:
            raise BadRequest(
                f"The prompt has {len(text)} characters, at least {min_tokens} tokens; this model's "
                f"maximum context length is {limit} tokens.",
                code="context_length_exceeded",
            )
        encode = partial(self.model.tokenizer.encode, text, add_special_tokens=add_special)
        try:
            return tuple(await self.threads.do(encode, len(text)))
        except UnicodeEncodeError as error:
            raise BadRequest("The prompt has an unpaired surrogate, which is not valid text.") from error

    def check_room(self, ids: Sequence[int], *, sample: bool) -> None:
        """Raise BadRequest if a prompt exceeds the context length or, with `sample`, leaves no token to sample."""
        limit = self.engine.context_tokens
        if len(ids) > limit - sample:
            raise BadRequest(
                f"The prompt has {len(ids)} tokens, and this model's maximum context length is {limit} "
                "tokens, including the completion.",
                code="context_length_exceeded",
            )

    def adapter(self, model: str | None) -> GatewayAdapter | None:
        """Resolve a request's `model`; None is the base model. Raises BadRequest for an unknown name."""
        if model in (None, self.model.name):
            return None
        found = self.adapters.by_name.get(model)
        if found is None:
            served = ", ".join(map(repr, [self.model.name, *self.adapters.by_name]))
            raise BadRequest(f"The model {model!r} is not served; available: {served}.", _NOT_FOUND)
        return found

    @contextmanager
    def use_adapter(self, model: str | None) -> Iterator[str | None]:
        """Hold the adapter of a request's `model` during the block; yield its name in the engine."""
        adapter = self.adapter(model)
        if adapter is None:
            yield None
            return
        adapter.users += 1
        try:
            yield adapter.key
        finally:
            self.adapters.release(adapter)

    async def sample(self, name: str, batch: Batch, adapter: str | None) -> list[Completion]:
        """Sample a completion per prompt concurrently; choice `i` has the id `NAME-i`."""
        requests = _requests(name, batch, adapter)
        with self._registered(requests):
            return await self.engine.generate_batch(requests)

    async def stream(self, name: str, batch: Batch, adapter: str | None) -> AsyncIterator[tuple[int, CompletionChunk]]:
        """Yield pieces of several completions as they are sampled, with the index of the completion."""
        requests = _requests(name, batch, adapter)
        queue: asyncio.Queue[tuple[int, CompletionChunk | BaseException]] = asyncio.Queue()

        async def follow(index: int, request: Request) -> None:
            try:
                async for piece in self.engine.stream(request):
                    queue.put_nowait((index, piece))
            except Exception as error:  # boundary: raised by the consumer of the pieces
                queue.put_nowait((index, error))

        with self._registered(requests):
            tasks = [asyncio.create_task(follow(i, request)) for i, request in enumerate(requests)]
            remaining = len(tasks)
            try:
                while remaining:
                    index, piece = await queue.get()
                    if isinstance(piece, BaseException):
                        raise piece
                    remaining -= piece.finish_reason is not None
                    await asyncio.sleep(0)  # yield to other requests while the queue is full
                    yield index, piece
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def abort(self, names: Sequence[str] = ()) -> int:
        """Abort requests (all if no name is given); return the number of choices aborted."""
        found = [e for e in self._running if not names or e in names or e.rpartition("-")[0] in names]
        for episode in found:
            self.engine.abort(episode)
        return len(found)

    async def pause(self, mode: PauseMode) -> None:
        """Pause the engine: after running requests end (wait), after aborting them (abort), or immediately (keep)."""
        if mode == "abort":
            self.abort()
        while mode != "keep" and self._running:
            await asyncio.sleep(0.01)
        await self.engine.pause()
        self.is_paused = True

    async def resume(self) -> None:
        await self.engine.resume()
        self.is_paused = False

    @contextmanager
    def _registered(self, requests: Sequence[Request]) -> Iterator[None]:
        names = [request.episode for request in requests]
        self.num_requests += len(names)
        self._running.update(names)
        try:
            yield
        finally:
            self._running.difference_update(names)
            for name in names:
                self.engine.end_episode(name)


def _requests(name: str, batch: Batch, adapter: str | None) -> list[Request]:
    return [Request(f"{name}-{i}", ids, params, adapter=adapter) for i, (ids, params) in enumerate(batch)]


def choices(params: SamplingParams, num: int) -> list[SamplingParams]:
    """Return the parameters of several choices of one prompt, with distinct seeds."""
    return [replace(params, seed=params.seed + i) for i in range(num)]


def served_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, root: str, renderer: TemplateRenderer | None
) -> ServedModel:
    """Create the description of a model; `root` is its folder or name."""
    given = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = [*([given] if isinstance(given, int) else given or ()), tokenizer.eos_token_id]
    end_ids = tuple(dict.fromkeys(token for token in ids if isinstance(token, int)))
    vocab_size = model.get_input_embeddings().num_embeddings
    longest = max(map(len, tokenizer.get_vocab()), default=1)
    return ServedModel(name, root, int(time.time()), tokenizer, end_ids, vocab_size, longest, renderer)
