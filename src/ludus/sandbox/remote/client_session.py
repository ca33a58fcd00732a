"""HTTP client with a deadline per request and no retries."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import httpx

from ludus.errors import WorldError
from ludus.untrusted.replies import PLAIN, bounded_replies

MOST_BYTES = 256 * 2**20
"""Maximum size of a response with all files of a run."""


@dataclass(eq=False)
class HttpClient:
    """Client of a service at `url`; `hint` is shown if it is unreachable. For one event loop at a time.

    A response has at most `most_bytes`, by default the limit of `ludus.untrusted.replies`.
    """

    url: str
    token: str = ""
    hint: str = ""
    most_bytes: int | None = None
    _client: httpx.AsyncClient | None = field(default=None, init=False)
    _loop: asyncio.AbstractEventLoop | None = field(default=None, init=False)

    async def post(self, path: str, content: str, within_s: float) -> httpx.Response:
        """POST JSON and return the response. Raises WorldError if none arrives within `within_s`."""
        url = f"{self.url.rstrip('/')}{path}"
        try:
            async with asyncio.timeout(within_s):
                return await self._own_client().post(url, content=content)
        except TimeoutError as error:
            raise WorldError(f"The sandbox server {url} did not respond within {within_s:g} s.") from error
        except httpx.DecodingError as error:
            raise WorldError(f"{url} sent an unreadable response: {error}.") from error
        except httpx.HTTPError as error:
            words = f"The sandbox server {url} is unreachable: {type(error).__name__}: {error}."
            raise WorldError(words, self.hint) from error

    async def close(self) -> None:
        """Close the connections; must run on the same event loop."""
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.aclose()

    def _own_client(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            headers = {"Content-Type": "application/json", **PLAIN}
            if self.token:
                headers["Authorization"] = f"Bearer {self.token}"
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            hooks = bounded_replies(self.most_bytes)
            self._client = httpx.AsyncClient(
                headers=headers, limits=limits, timeout=None, trust_env=False, event_hooks=hooks
            )
            self._loop = loop
        return self._client
