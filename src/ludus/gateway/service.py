"""What is served: an embedded engine with its tokenizer, and the requests that are under way.

Takes checked requests. Gives completions, whole or in pieces. A request that comes again under the same name,
because its client lost the connection, joins the one under way or gets its answer: nothing is computed
twice. One that nobody waits for any more is cancelled. Never keeps an answer that was broken off.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from ludus.chat.render import TemplateRenderer, Tokenizer
from ludus.engines.base import Request
from ludus.engines.embedded.engine import LocalEngine, Piece
from ludus.gateway.adapters import AdapterTable, GatewayAdapter
from ludus.gateway.door import RequestThreads
from ludus.gateway.protocol.logprobs import TokenNames
from ludus.gateway.protocol.requests import BadRequest, Sampling, TokenIds
from ludus.types import Completion, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


PauseMode = Literal["abort", "wait", "keep"]

_KEPT_ANSWERS, _KEPT_BYTES = 1024, 64 * 2**20
_MOST_CHOICES = 4096
"""Choices of one request, of all its prompts together."""
_NOT_FOUND, _CONFLICT = 404, 409


@dataclass(frozen=True)
class ServedModel:
    """A model as clients see it.

    `end_ids` end its texts; `longest_token` is in characters; `renderer` is None without a chat template.
    """

    name: str
    root: str
    created: int
    tokenizer: Tokenizer
    end_ids: tuple[int, ...]
    vocab_size: int
    longest_token: int = 256
    renderer: TemplateRenderer | None = None


@dataclass
class _Answer:
    digest: bytes
    task: asyncio.Task[bytes]
    waiting: int = 0

    @property
    def num_bytes(self) -> int:
        """Of an answer that is there."""
        failed = self.task.cancelled() or self.task.exception() is not None
        return 0 if failed else len(self.task.result())


@dataclass
class FinishedRequests:
    """Answers by the names that clients gave their requests: those under way, and the last ones."""

    _by_name: OrderedDict[str, _Answer] = field(default_factory=OrderedDict)

    async def once(self, name: str, body: bytes, work: Callable[[], Awaitable[bytes]]) -> bytes:
        """The answer to `body`, computed at most once. Raises BadRequest where the name had another body."""
        digest = hashlib.sha256(body).digest()
        answer = self._by_name.get(name)
        if answer is not None and answer.digest != digest:
            raise BadRequest(f"The request_id {name} was used for another request.", _CONFLICT)
        if answer is None:
            answer = self._by_name[name] = _Answer(digest, asyncio.ensure_future(_run(work)))
            self._trim()
        answer.waiting += 1
        try:
            return await asyncio.shield(answer.task)
        finally:
            answer.waiting -= 1
            self._settle(name, answer)

    def forget(self, name: str) -> None:
        """Compute it anew if it comes again."""
        self._by_name.pop(name, None)

    def _settle(self, name: str, answer: _Answer) -> None:
        """Cancel what nobody waits for, and keep no failure."""
        if not answer.task.done():
            if answer.waiting:
                return
            answer.task.cancel()
        elif not answer.task.cancelled() and answer.task.exception() is None:
            return
        if self._by_name.get(name) is answer:
            del self._by_name[name]

    def _trim(self) -> None:
        done = [name for name, answer in self._by_name.items() if answer.task.done()]
        num_bytes = sum(self._by_name[name].num_bytes for name in done)
        for name in done:
            if len(self._by_name) <= _KEPT_ANSWERS and num_bytes <= _KEPT_BYTES:
                return
            num_bytes -= self._by_name.pop(name).num_bytes


async def _run(work: Callable[[], Awaitable[bytes]]) -> bytes:
    return await work()


@dataclass
class CompletionService:
    """An engine with its model, open for requests.

    Clients with the `control_token` may pause it and change its weights (nobody if it is empty), under its
    addresses and the names in `control_hosts`.
    """

    engine: LocalEngine
    model: ServedModel
    control_token: str = ""
    control_hosts: frozenset[str] = frozenset()
    door: RequestThreads = field(default_factory=RequestThreads)
    answers: FinishedRequests = field(default_factory=FinishedRequests)
    num_requests: int = 0
    is_paused: bool = False
    adapters: AdapterTable = field(init=False)
    _under_way: set[str] = field(default_factory=set)
    _names: dict[bool, TokenNames] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.adapters = AdapterTable(self.engine)

    def token_names(self, request: Sampling) -> TokenNames:
        """What the request wants tokens to be called. Kept, so that each token is decoded once."""
        as_ids = bool(request.return_tokens_as_token_ids)
        return self._names.setdefault(as_ids, TokenNames(self.model.tokenizer, as_ids))

    @property
    def num_under_way(self) -> int:
        """Choices that wait or are being sampled."""
        return len(self._under_way)

    async def prompt_ids(self, prompt: str | TokenIds, *, add_special: bool) -> tuple[int, ...]:
        """A prompt's token ids. Raises BadRequest for one that is empty, foreign or too long."""
        if isinstance(prompt, str):
            ids = await self.encoded(prompt, add_special=add_special)
        else:
            self.check_room(prompt, sample=False)
            ids = tuple(prompt)
        if not ids:
            raise BadRequest(f"The prompt is empty{', or is no token' if isinstance(prompt, str) else ''}.")
        if max(ids) >= self.model.vocab_size:
            raise BadRequest(
                f"The prompt has token id {max(ids)}; the model's vocabulary has {self.model.vocab_size}."
            )
        return ids

    async def encoded(self, text: str, *, add_special: bool) -> tuple[int, ...]:
        """The token ids of a text. Raises BadRequest for one that cannot fit or cannot be encoded.

        A text of more characters than the context times the longest token has too many tokens: it is refused
        before it is tokenised.
        """
        limit = self.engine.context_tokens
        least = -(-len(text) // self.model.longest_token)
        if least > limit:
            raise BadRequest(
                f"The prompt has {len(text)} characters, which is {least} tokens at least, and this model's "
                f"maximum context length is {limit} tokens.",
                code="context_length_exceeded",
            )
        encode = partial(self.model.tokenizer.encode, text, add_special_tokens=add_special)
        try:
            return tuple(await self.door.do(encode, len(text)))
        except UnicodeEncodeError as error:
            raise BadRequest("The prompt has half of a surrogate pair, which is not text.") from error

    def check_num(self, num: int) -> None:
        """Raise BadRequest for more choices than one request may have."""
        if num > _MOST_CHOICES:
            raise BadRequest(f"The request asks for {num} choices, and {_MOST_CHOICES} is the most.")

    def check_room(self, ids: Sequence[int], *, sample: bool) -> None:
        """Raise BadRequest for a prompt that leaves no room."""
        limit = self.engine.context_tokens
        if len(ids) > limit - sample:
            raise BadRequest(
                f"The prompt has {len(ids)} tokens, and this model's maximum context length is {limit} "
                "tokens with what is sampled.",
                code="context_length_exceeded",
            )

    def adapter(self, model: str | None) -> GatewayAdapter | None:
        """What a request's `model` means; None is the model itself. Raises BadRequest for an unknown name."""
        if model in (None, self.model.name):
            return None
        found = self.adapters.find(model)
        if found is None:
            names = [self.model.name, *(adapter.name for adapter in self.adapters.listed)]
            served = ", ".join(map(repr, names))
            raise BadRequest(f"The model {model!r} is not served here; {served} is.", _NOT_FOUND)
        return found

    @contextmanager
    def under(self, model: str | None) -> Iterator[str | None]:
        """The engine's name for a request's `model`, which stays for the time of the block."""
        with self.adapters.using(self.adapter(model)) as key:
            yield key

    async def sample(
        self, name: str, asked: Sequence[tuple[tuple[int, ...], SamplingParams]], adapter: str | None
    ) -> list[Completion]:
        """A completion for each prompt, all at once; choice `i` is known as `NAME-i`."""
        requests = _requests(name, asked, adapter)
        with self._noted(requests):
            return await self.engine.generate_batch(requests)

    async def stream(
        self, name: str, asked: Sequence[tuple[tuple[int, ...], SamplingParams]], adapter: str | None
    ) -> AsyncIterator[tuple[int, Piece]]:
        """The pieces of several completions, each with the number of its own, as they come."""
        requests = _requests(name, asked, adapter)
        queue: asyncio.Queue[tuple[int, Piece | BaseException]] = asyncio.Queue()

        async def follow(index: int, request: Request) -> None:
            try:
                async for piece in self.engine.stream(request):
                    queue.put_nowait((index, piece))
            except Exception as error:  # boundary: whoever reads the pieces raises it
                queue.put_nowait((index, error))

        with self._noted(requests):
            tasks = [asyncio.create_task(follow(i, request)) for i, request in enumerate(requests)]
            left = len(tasks)
            try:
                while left:
                    index, piece = await queue.get()
                    if isinstance(piece, BaseException):
                        raise piece
                    left -= piece.finish_reason is not None
                    await asyncio.sleep(0)  # a full queue does not keep other requests from the loop
                    yield index, piece
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def abort(self, names: Sequence[str] = ()) -> int:
        """End requests (all, where none is named) with what they have; gives the number of choices."""
        found = [e for e in self._under_way if not names or e in names or e.rpartition("-")[0] in names]
        for episode in found:
            self.engine.abort(episode)
        return len(found)

    async def pause(self, mode: PauseMode) -> None:
        """Compute nothing more, after what is under way has ended, was ended, or at once."""
        if mode == "abort":
            self.abort()
        while mode != "keep" and self._under_way:
            await asyncio.sleep(0.01)
        await self.engine.pause()
        self.is_paused = True

    async def resume(self) -> None:
        """Go on."""
        await self.engine.resume()
        self.is_paused = False

    @contextmanager
    def _noted(self, requests: Sequence[Request]) -> Iterator[None]:
        """What is under way, for as long as it is."""
        names = [request.episode for request in requests]
        self.num_requests += len(names)
        self._under_way.update(names)
        try:
            yield
        finally:
            self._under_way.difference_update(names)
            for name in names:
                self.engine.forget_name(name)


def _requests(
    name: str, asked: Sequence[tuple[tuple[int, ...], SamplingParams]], adapter: str | None
) -> list[Request]:
    return [Request(f"{name}-{i}", ids, params, adapter=adapter) for i, (ids, params) in enumerate(asked)]


def choices(params: SamplingParams, num: int) -> list[SamplingParams]:
    """The parameters of several choices for one prompt: they differ in their seeds alone."""
    return [replace(params, seed=params.seed + i) for i in range(num)]


def served_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    root: str,
    renderer: TemplateRenderer | None,
) -> ServedModel:
    """A model under a name, as clients see it; `root` is where it came from."""
    return ServedModel(
        name=name,
        root=root,
        created=int(time.time()),
        tokenizer=tokenizer,
        end_ids=_end_ids(model, tokenizer),
        vocab_size=model.get_input_embeddings().num_embeddings,
        longest_token=max(map(len, tokenizer.get_vocab()), default=1),
        renderer=renderer,
    )


def _end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokens that end a text, by the model's generation settings and its tokenizer."""
    given = model.generation_config.eos_token_id if model.generation_config is not None else None
    listed = [given] if isinstance(given, int) else list(given or ())
    own = tokenizer.eos_token_id
    return tuple(dict.fromkeys([*listed, *([own] if isinstance(own, int) else [])]))
