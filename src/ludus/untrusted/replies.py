"""Limit the size of HTTP responses while they are received."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass

import httpx

MAX_BYTES = 64 * 2**20
PLAIN = {"Accept-Encoding": "identity"}  # headers of a request whose response must be uncompressed
_NO_LIMITS = httpx.Limits()
_COMPRESSION_FACTOR = 100  # divisor of the size limit for a compressed response


@dataclass
class _CountedStream(httpx.AsyncByteStream, httpx.SyncByteStream):
    stream: httpx.AsyncByteStream | httpx.SyncByteStream
    most: int
    count: int = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        assert isinstance(self.stream, httpx.AsyncByteStream)
        async for part in self.stream:
            yield self._check_size(part)

    def __iter__(self) -> Iterator[bytes]:
        assert isinstance(self.stream, httpx.SyncByteStream)
        for part in self.stream:
            yield self._check_size(part)

    async def aclose(self) -> None:
        assert isinstance(self.stream, httpx.AsyncByteStream)
        await self.stream.aclose()

    def close(self) -> None:
        assert isinstance(self.stream, httpx.SyncByteStream)
        self.stream.close()

    def _check_size(self, part: bytes) -> bytes:
        self.count += len(part)
        if self.count > self.most:
            raise httpx.DecodingError(f"the response has more than {self.most} bytes")
        return part


def bounded_client(
    limits: httpx.Limits = _NO_LIMITS,
    *,
    headers: Mapping[str, str] | None = None,
    most: int | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> httpx.AsyncClient:
    """Create a client without timeouts and proxies; raises DecodingError for a response above `most` or `MAX_BYTES`."""

    async def count(response: httpx.Response) -> None:
        _count(response, MAX_BYTES if most is None else most)

    return httpx.AsyncClient(
        limits=limits,
        transport=transport,
        headers=PLAIN | dict(headers or {}),
        timeout=None,
        trust_env=False,
        event_hooks={"response": [count]},
    )


def get_bounded(url: str, timeout_s: float) -> httpx.Response:
    """Send a GET outside an event loop and return the response. Raises as `bounded_client`."""
    hooks = {"response": [lambda response: _count(response, MAX_BYTES)]}
    with httpx.Client(timeout=timeout_s, trust_env=False, headers=PLAIN, event_hooks=hooks) as client:
        return client.get(url)


def _count(response: httpx.Response, most: int) -> None:
    assert isinstance(response.stream, httpx.AsyncByteStream | httpx.SyncByteStream)
    compressed = response.headers.get("Content-Encoding", "identity") != "identity"
    response.stream = _CountedStream(response.stream, most // _COMPRESSION_FACTOR if compressed else most)
