"""A bound on the bytes of replies of HTTP servers, counted while they stream in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass

import httpx

MOST_BYTES = 64 * 2**20
PLAIN = {"Accept-Encoding": "identity"}
"""Headers of a request whose reply is counted as it is."""
_PACKED = 100
"""A compressed reply may have this many times fewer bytes."""


@dataclass(frozen=True)
class _Counted(httpx.AsyncByteStream):
    stream: httpx.AsyncByteStream
    most: int

    async def __aiter__(self) -> AsyncIterator[bytes]:
        count = 0
        async for part in self.stream:
            count += len(part)
            if count > self.most:
                raise httpx.DecodingError(f"the reply has more than {self.most} bytes")
            yield part

    async def aclose(self) -> None:
        await self.stream.aclose()


def bounded_replies(
    most: int = MOST_BYTES,
) -> Mapping[str, list[Callable[[httpx.Response], Awaitable[None]]]]:
    """Return `event_hooks` of an `httpx.AsyncClient` that raises DecodingError for a longer reply."""

    async def count(response: httpx.Response) -> None:
        assert isinstance(response.stream, httpx.AsyncByteStream)
        packed = response.headers.get("Content-Encoding", "identity") != "identity"
        response.stream = _Counted(response.stream, most // _PACKED if packed else most)

    return {"response": [count]}
