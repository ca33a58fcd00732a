"""Replies that are streamed while they are sampled.

Text is sent as it grows up to the first character that may begin a call or a thought, as `ludus serve` does; the rest
follows when the reply is complete. The last byte is sent after the reply has become part of the rollout. Engines that
do not report tokens, and formats in which text may precede thoughts, have the whole reply at the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from starlette.requests import Request

from ludus.chat.render import Renderer
from ludus.gateway.dialects.base import Dialect, Sent, SessionRequest, event_bytes
from ludus.gateway.protocol.detokenize import StreamedText, TextRules
from ludus.rollouts.agent_session import PendingTurn

_POLL_S = 0.25  # interval of checks whether the client has disconnected

Sample = Callable[[SessionRequest], Awaitable[Sequence[PendingTurn]]]


def streamed_text(asked: SessionRequest, renderer: Renderer | None) -> StreamedText | None:
    """Return the text of a reply to stream; None if it cannot be streamed before its end."""
    is_raw = asked.limits.prompt is not None
    if not asked.stream or asked.num > 1 or renderer is None or not (is_raw or renderer.streams_text):
        return None
    return StreamedText(TextRules(renderer.tokenizer, asked.limits.stop), plain_only=not is_raw)


@dataclass
class LiveReply:
    """A reply that is being sampled. `turns` is set when it is complete, `sent` is the text that was streamed."""

    dialect: Dialect
    asked: SessionRequest
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

        asked = replace(self.asked, limits=replace(self.asked.limits, watch=watch))
        task = asyncio.ensure_future(sample(asked))
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
                    events = [] if self.sent.text else self.dialect.begin(self.asked, self.name, news[0])
                    events.append(self.dialect.delta(self.asked, self.name, new, self.sent.num + len(events)))
                    self.sent = Sent(self.sent.text + new, self.sent.num + len(events))
                    yield b"".join(event_bytes(*event) for event in events)
        finally:
            task.cancel()

    def rest(self) -> bytes:
        """Return the events that complete the reply."""
        assert self.turns is not None
        events = self.dialect.events(self.asked, self.name, self.turns, self.sent)
        return b"".join(event_bytes(*event) for event in events) + self.dialect.end

    def error(self, status: int, message: str, code: str | None) -> bytes:
        """Return the event of an error after the first byte."""
        return event_bytes("error", self.dialect.error(status, message, code))
