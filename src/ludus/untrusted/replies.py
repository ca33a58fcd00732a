"""Limit the size of HTTP responses while they are received."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import httpx

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
