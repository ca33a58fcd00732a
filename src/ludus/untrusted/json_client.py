"""Client of JSON services: a bounded HTTP client per event loop, deadlines, limits of size, and error messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from ludus.errors import UserError, WorldError
from ludus.untrusted.worker import run_in_thread

MAX_BYTES = 64 * 2**20
PLAIN = {"Accept-Encoding": "identity"}  # headers of a request whose response must be uncompressed
_NO_LIMITS = httpx.Limits()
_COMPRESSION_FACTOR = 100  # divisor of the size limit for a compressed response


@dataclass
class _CountedStream(httpx.AsyncByteStream):
    stream: httpx.AsyncByteStream
    most: int

    async def __aiter__(self) -> AsyncIterator[bytes]:
        count = 0
        async for part in self.stream:
            count += len(part)
            if count > self.most:
                raise httpx.DecodingError(f"the response has more than {self.most} bytes")
            yield part

    async def aclose(self) -> None:
        await self.stream.aclose()


def bounded_client(
    limits: httpx.Limits = _NO_LIMITS,
    *,
    headers: Mapping[str, str] | None = None,
    most: int | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> httpx.AsyncClient:
    """Create a client without timeouts and proxies; raises DecodingError for a response above `most` or `MAX_BYTES`."""

    async def count(response: httpx.Response) -> None:
        assert isinstance(response.stream, httpx.AsyncByteStream)
        bound = MAX_BYTES if most is None else most
        if response.headers.get("Content-Encoding", "identity") != "identity":
            bound //= _COMPRESSION_FACTOR
        response.stream = _CountedStream(response.stream, bound)

    return httpx.AsyncClient(
        limits=limits,
        transport=transport,
        headers=PLAIN | dict(headers or {}),
        timeout=None,
        trust_env=False,
        event_hooks={"response": [count]},
    )


def get_bounded(url: str, timeout_s: float) -> httpx.Response:
    """Send a GET and wait for the response. Raises as `bounded_client`."""

    async def get() -> httpx.Response:
        async with bounded_client() as client:
            return await client.get(url, timeout=timeout_s)

    return run_in_thread("http-get", lambda: asyncio.run(get())).result()


Reply = TypeVar("Reply", bound=BaseModel)

_KEEPALIVE_S = 3.0
"""Time for which an idle connection is reused (s), less than that after which servers close it."""


class ErrorMessage(BaseModel):
    """Error response; `kind` is input, environment or token."""

    model_config = ConfigDict(extra="forbid")

    kind: str
    message: str
    hint: str = ""


class ServiceUnreachable(WorldError):
    """Raised if the connection to a service could not be established, or broke."""


@dataclass(eq=False)
class JsonClient:
    """Client of services called `what` in errors, for one event loop at a time.

    `max_bytes` bounds a response, and `connections` the requests at a time: further ones wait.
    """

    what: str
    token: str = field(default="", repr=False)
    hint: str = ""
    max_bytes: int | None = None
    connections: int = 4096
    _client: tuple[asyncio.AbstractEventLoop, httpx.AsyncClient, asyncio.Semaphore] | None = field(
        default=None, init=False
    )

    async def send(self, url: str, content: str, timeout_s: float) -> httpx.Response:
        """POST JSON and return the response. Raises WorldError if none arrives in time."""
        client, slots = self._loop_client()
        try:
            async with slots, asyncio.timeout(timeout_s):
                return await client.post(url, content=content)
        except TimeoutError as error:
            raise WorldError(f"The {self.what} {url} did not respond within {timeout_s:g} s.") from error
        except httpx.DecodingError as error:
            raise WorldError(f"{url} sent an unreadable response: {error}.") from error
        except httpx.HTTPError as error:
            message = f"The {self.what} {url} is unreachable: {type(error).__name__}: {error}."
            raise ServiceUnreachable(message, self.hint) from error

    async def post(self, url: str, message: BaseModel, reply: type[Reply], timeout_s: float) -> Reply:
        """POST a message and parse the response. Raises UserError if refused, WorldError on failures."""
        response = await self.send(url, message.model_dump_json(exclude_unset=True), timeout_s)
        try:
            if response.status_code == httpx.codes.OK:
                return reply.model_validate_json(response.content)
            refused = ErrorMessage.model_validate_json(response.content)
        except ValidationError as error:
            raise WorldError(f"{response.url} returned {response.status_code} with an unreadable body.") from error
        kind = WorldError if refused.kind == "environment" else UserError
        raise kind(refused.message, refused.hint)

    async def close(self) -> None:
        """Close the connections; those of another event loop are left to it."""
        client, self._client = self._client, None
        if client is not None and client[0] is asyncio.get_running_loop():
            await client[1].aclose()

    def _loop_client(self) -> tuple[httpx.AsyncClient, asyncio.Semaphore]:
        loop = asyncio.get_running_loop()
        if self._client is None or self._client[0] is not loop:
            headers = {"Content-Type": "application/json"}
            if self.token:
                headers["Authorization"] = f"Bearer {self.token}"
            limits = httpx.Limits(max_connections=None, keepalive_expiry=_KEEPALIVE_S)
            client = bounded_client(limits, headers=headers, most=self.max_bytes)
            self._client = loop, client, asyncio.Semaphore(self.connections)
        return self._client[1:]
