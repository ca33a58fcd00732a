"""Resource limits per HTTP listener: bytes, time, connections and concurrent requests.

`http_server` applies the limits to every listener of the package. Each chunk of a body is counted before it is
buffered, and must arrive in time. The response to a refused request is an HTTP error with a message; a
connection that sends no request is closed.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import ClassVar

import uvicorn
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ludus.errors import UserError

MIB = 2**20
_TIMEOUT, _TOO_LARGE, _BUSY = 408, 413, 503
_DRAIN_S = 5.0
_SPARE_FILES = 256  # file descriptors reserved for purposes other than connections

ErrorResponder = Callable[[int, str], Response]  # create an error response from a status and a message


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of one listener; times in seconds.

    `body_bytes` bounds one body and `buffered_bytes` all bodies of running requests. The request line and
    headers must arrive within `head_s`, each next chunk of a body within `part_s` and the whole body within
    `body_s`; the client must read sent data within `send_s`. An idle connection is closed after `idle_s`.
    `requests` bounds requests that may have a body.
    """

    body_bytes: int
    buffered_bytes: int = 256 * MIB
    connections: int = 4096
    requests: int = 4096
    head_s: float = 10.0
    part_s: float = 10.0
    body_s: float = 60.0
    send_s: float = 60.0
    idle_s: float = 5.0


def model_limits(context_tokens: int) -> HttpLimits:
    """Return the limits of a served model: a body may hold several prompts of the whole context."""
    return HttpLimits(body_bytes=max(8 * MIB, 64 * context_tokens))


def http_server(app: ASGIApp, limits: HttpLimits, refuse: ErrorResponder, *, lifespan: bool = False) -> uvicorn.Server:
    """Create a server of `app` with limits. `refuse` creates the error responses."""
    process_limits = replace(limits, connections=_max_connections(limits.connections))

    class Limited(_Protocol):
        limits = process_limits

    config = uvicorn.Config(
        LimitsMiddleware(app, limits, refuse),
        log_level="error",
        http=Limited,
        ws="none",
        lifespan="on" if lifespan else "off",
        timeout_graceful_shutdown=5,
        timeout_keep_alive=max(1, round(limits.idle_s)),
    )
    return uvicorn.Server(config)


def _max_connections(connections: int) -> int:
    """Raise the process's file descriptor limit for `connections`; return the possible number of connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return connections
    wanted = connections + _SPARE_FILES
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(connections, soft - min(_SPARE_FILES, soft // 2)))


@dataclass
class LimitsMiddleware:
    """ASGI middleware that enforces the limits."""

    app: ASGIApp
    limits: HttpLimits
    refuse: ErrorResponder
    _num_requests: int = field(default=0, init=False)
    _num_bytes: int = field(default=0, init=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self.app(scope, receive, self._timed(send))
            return
        body = _Body(self, receive)
        refusal = self._refusal(Headers(scope=scope))
        self._num_requests += refusal is None
        try:
            await (refusal or self.app)(scope, body.receive, self._timed(send, body))
        except TimeoutError:  # the client does not read the response; the server closes the connection
            return
        finally:
            self._num_requests -= refusal is None
            self._num_bytes -= body.num_bytes

    def take(self, body: _Body, num: int) -> None:
        """Count bytes of a body before they are buffered. Raises HTTPException above a limit."""
        if body.num_bytes + num > self.limits.body_bytes:
            raise HTTPException(_TOO_LARGE, self._too_large, {"Connection": "close"})
        if self._num_bytes + num > self.limits.buffered_bytes:
            raise HTTPException(_BUSY, _AT_LIMIT, {"Retry-After": "1", "Connection": "close"})
        body.num_bytes += num
        self._num_bytes += num

    @property
    def _too_large(self) -> str:
        return f"The body exceeds the limit of {self.limits.body_bytes} bytes"

    def _refusal(self, headers: Headers) -> Response | None:
        """Return the response to a request that is refused before its body is read, or None."""
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self.limits.body_bytes:
            response = self.refuse(_TOO_LARGE, f"{self._too_large}.")
        elif self._num_requests >= self.limits.requests:
            response = self.refuse(_BUSY, f"{_AT_LIMIT}.")
            response.headers["Retry-After"] = "1"
        else:
            return None
        response.headers["Connection"] = "close"
        return response

    def _timed(self, send: Send, body: _Body | None = None) -> Send:
        """Wrap `send` with a timeout. Before the end of a refusal, the unread request body is drained."""
        refused = False

        async def timed(message: Message) -> None:
            nonlocal refused
            async with asyncio.timeout(self.limits.send_s):
                if message["type"] == "http.response.start":
                    refused = message["status"] in (_TOO_LARGE, _BUSY)
                if refused and body is not None and message["type"] == "http.response.body":
                    await body.drain(send, message)
                else:
                    await send(message)

        return timed


@dataclass
class _Body:
    limiter: LimitsMiddleware
    _receive: Receive
    num_bytes: int = 0
    _ended: bool = False
    _deadline: float | None = None

    async def receive(self) -> Message:
        """Return the next message. Raises HTTPException if the body is too large or too slow."""
        if self._ended:
            return await self._receive()
        loop = asyncio.get_running_loop()
        if self._deadline is None:
            self._deadline = loop.time() + self.limiter.limits.body_s
        try:
            async with asyncio.timeout_at(min(self._deadline, loop.time() + self.limiter.limits.part_s)):
                message = await self._receive()
        except TimeoutError as error:
            self._ended = True
            text = "The body did not arrive in time"
            raise HTTPException(_TIMEOUT, text, {"Connection": "close"}) from error
        self._ended = not message.get("more_body", False)
        if message["type"] == "http.request":
            self.limiter.take(self, len(message.get("body", b"")))
        return message

    async def drain(self, send: Send, message: Message) -> None:
        """Send a refusal, but discard the rest of the body before its end, so that the client reads the response."""
        await send({**message, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                while not self._ended:
                    self._ended = not (await self._receive()).get("more_body", False)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


_AT_LIMIT = "The server is at its request limit; retry later"


class _Protocol(H11Protocol):
    """HTTP protocol of uvicorn with a connection limit and a timeout for the request line and headers."""

    limits: ClassVar[HttpLimits]
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            self._close(_BUSY)
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_request:
            self._stop_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and not self._in_request:
            self._expect_head()

    @property
    def _in_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_head(self) -> None:
        self._stop_timer()
        self._head_timer = self.loop.call_later(self.limits.head_s, self._close, _TIMEOUT)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _close(self, status: int) -> None:
        if self.transport.is_closing():
            return
        header = b"Retry-After: 1\r\n" if status == _BUSY else b""
        self.transport.write(b"HTTP/1.1 %d \r\n%sContent-Length: 0\r\nConnection: close\r\n\r\n" % (status, header))
        self.transport.close()


def open_socket(host: str, port: int) -> socket.socket:
    """Create a listening socket. Raises UserError if the address is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the socket names its protocol; otherwise responses take 40 ms more
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        listener.close()
        hint = "Set another --port, or 0 for a free one."
        raise UserError(f"{host}:{port} cannot be bound: {str(error).rstrip('.')}.", hint) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
