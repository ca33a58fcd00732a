"""Replies in the dialects of sessions and of `ludus serve`: whole ones, and those that are streamed while sampled.

Text is sent as it grows up to the first character that may begin a call or a thought; the rest follows when the reply
is complete. The last byte is sent after the reply has become part of the rollout. Engines that do not report tokens,
and formats in which text may precede thoughts, have the whole reply at the end.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ludus.chat.render import Renderer
from ludus.errors import EngineBusy, EngineError, RequestRejected, SyncError, UserError
from ludus.gateway.dialects.base import Dialect, Sent, SessionRequest, event_bytes
from ludus.gateway.dialects.messages import read
from ludus.gateway.endpoints import json_response, until_disconnect
from ludus.gateway.protocol.bodies import BadRequest, JsonBody
from ludus.gateway.protocol.detokenize import StreamedText, TextRules
from ludus.rollouts.agent_session import InvalidRequest, PendingTurn, RolloutEnded
from ludus.types import StopReason

CLIENT_GONE: Final = 499
"""Status of a response to a client that has disconnected."""
BUSY: Final = 429
ERRORS: Final = (BadRequest, InvalidRequest, RolloutEnded, EngineError, HTTPException)
"""Errors of requests, which `described` turns into responses."""
_REFUSED, _CONFLICT, _FAILED = 400, 409, 500
_POLL_S = 0.25  # interval of checks whether the client has disconnected
_TOO_LONG = frozenset({StopReason.PROMPT_TOO_LONG, StopReason.MAX_TOKENS})

Name = TypeVar("Name", bound=Hashable)
Value = TypeVar("Value")
Sample = Callable[[SessionRequest], Awaitable[Sequence[PendingTurn]]]
Commit = Callable[[str, Sequence[PendingTurn], Response], Awaitable[None]]
"""Called before the last byte of a reply with its name, which its id contains, its turns, and the whole reply."""


async def respond(
    request: Request, dialect: Dialect, body: SessionRequest, renderer: Renderer | None, sample: Sample, commit: Commit
) -> Response:
    """Sample the reply to a request, and return or stream it. Without a renderer, a stream is sent at its end."""
    name = secrets.token_hex(12)

    async def commit_all(turns: Sequence[PendingTurn]) -> None:
        content, kind = dialect.content(body, name, turns)
        await commit(name, turns, Response(content, media_type=kind))

    if (text := _streamed_text(body, renderer)) is not None:
        live = _LiveReply(dialect, body, name, text)
        pieces = live.pieces(request, sample)
        if first := await anext(pieces, b""):
            return _LiveResponse(live, first, pieces, request, commit_all)
        turns = live.turns
    else:
        turns = await until_disconnect(request, sample(body))
    if turns is None:
        return Response(status_code=CLIENT_GONE)
    content, kind = dialect.content(body, name, turns)
    return _Reply(content, kind, request, partial(commit, name, turns, Response(content, media_type=kind)))


def count_tokens(raw: bytes, renderer: Renderer | None) -> JsonBody:
    """Return the reply to a body of `count_tokens`, 0 without a renderer. Raises BadRequest."""
    body = read(raw)
    try:
        return {"input_tokens": 0 if renderer is None else len(renderer.prompt(body.messages, body.tools))}
    except (UserError, ValueError, TypeError, LookupError) as error:
        raise BadRequest(f"The messages cannot be rendered: {error}.") from error


def keep_last(entries: OrderedDict[Name, Value], name: Name, value: Value, max_entries: int) -> None:
    """Add an entry, and remove the oldest one if there are more than `max_entries`."""
    entries[name] = value
    if len(entries) > max_entries:
        entries.popitem(last=False)


def described(error: Exception) -> tuple[int, str, str | None]:
    """Return status, message and code of an error."""
    match error:
        case BadRequest():
            return error.status, error.message, error.code
        case InvalidRequest() | RequestRejected() | UserError() | SyncError():
            return _REFUSED, str(error), None
        case RolloutEnded():
            too_long = error.reason in _TOO_LONG
            code = "context_length_exceeded" if too_long else "rollout_ended"
            return _REFUSED if too_long else _CONFLICT, f"{error}.", code
        case HTTPException():
            return error.status_code, f"{error.detail}.", None
        case EngineError():
            return BUSY if isinstance(error, EngineBusy) else _FAILED, str(error), None
    return _FAILED, f"{type(error).__name__}: {error}", None


def error_reply(error: Exception, form: Callable[[int, str, str | None], JsonBody]) -> Response:
    """Return the response to a request that failed; `form` is that of a dialect's errors."""
    status, message, code = described(error)
    response = json_response(form(status, message, code), status)
    if status == BUSY:
        response.headers["Retry-After"] = "1"
    return response


def _streamed_text(body: SessionRequest, renderer: Renderer | None) -> StreamedText | None:
    """Return the text of a reply to stream; None if it cannot be streamed before its end."""
    is_raw = body.limits.prompt is not None
    if not body.stream or body.num > 1 or renderer is None or not (is_raw or renderer.streams_text):
        return None
    return StreamedText(TextRules(renderer.tokenizer, body.limits.stop), plain_only=not is_raw)


@dataclass
class _LiveReply:
    """A reply that is being sampled. `turns` is set when it is complete, `sent` is the text that was streamed."""

    dialect: Dialect
    body: SessionRequest
    name: str
    text: StreamedText
    turns: Sequence[PendingTurn] | None = None
    sent: Sent = field(default_factory=Sent)
    _news: asyncio.Queue[tuple[int, Sequence[int]] | None] = field(default_factory=asyncio.Queue)

    async def pieces(self, request: Request, sample: Sample) -> AsyncIterator[bytes]:
        """Yield all events but those of `rest`, and raise the errors of sampling. Ends early if the client is gone."""
        loop = asyncio.get_running_loop()

        def watch(num_prompt: int, tokens: Sequence[int]) -> None:
            with suppress(RuntimeError):  # the server has stopped
                loop.call_soon_threadsafe(self._news.put_nowait, (num_prompt, tokens))

        body = replace(self.body, limits=replace(self.body.limits, watch=watch))
        task = asyncio.ensure_future(sample(body))
        task.add_done_callback(lambda _: self._news.put_nowait(None))
        try:
            while not await request.is_disconnected():
                news: tuple[int, Sequence[int]] | None = (0, ())
                with suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_S):
                        news = await self._news.get()
                if news is None:
                    self.turns = task.result()
                    return
                if new := self.text.add(news[1], None):
                    events = [] if self.sent.text else self.dialect.begin(self.body, self.name, news[0])
                    events.append(self.dialect.delta(self.body, self.name, new, self.sent.num + len(events)))
                    self.sent = Sent(self.sent.text + new, self.sent.num + len(events))
                    yield b"".join(event_bytes(*event) for event in events)
        finally:
            task.cancel()

    def rest(self) -> bytes:
        """Return the events that complete the reply."""
        assert self.turns is not None
        events = self.dialect.events(self.body, self.name, self.turns, self.sent)
        return b"".join(event_bytes(*event) for event in events) + self.dialect.end


class _Reply(Response):
    """A response that awaits `on_sent` before its last byte, unless the client has disconnected.

    So the client cannot act on a reply that is not yet recorded: neither send the next request nor end the rollout.
    """

    def __init__(
        self, content: bytes, media_type: str, request: Request, on_sent: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(content, media_type=media_type)
        self._request, self._on_sent = request, on_sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await self._finish(send, bytes(self.body))

    async def _finish(self, send: Send, body: bytes) -> None:
        await send({"type": "http.response.body", "body": body[:-1], "more_body": True})
        if not await self._request.is_disconnected():
            await self._on_sent()
        await send({"type": "http.response.body", "body": body[-1:]})


class _LiveResponse(_Reply):
    """A response whose events are sent while the reply is sampled: the `first` ones, then the `pieces`.

    An error is its last event, and adds nothing.
    """

    def __init__(
        self,
        live: _LiveReply,
        first: bytes,
        pieces: AsyncIterator[bytes],
        request: Request,
        commit: Callable[[Sequence[PendingTurn]], Awaitable[None]],
    ) -> None:
        super().__init__(first, "text/event-stream", request, lambda: commit(live.turns or ()))
        self._live, self._pieces = live, pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": bytes(self.body), "more_body": True})
        try:
            async for piece in self._pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except ERRORS as error:
            event = event_bytes("error", self._live.dialect.error(*described(error)))
            await send({"type": "http.response.body", "body": event})
            return
        if self._live.turns is not None:
            await self._finish(send, self._live.rest())
