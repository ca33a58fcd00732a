"""HTTP calls to an inference server, with deadlines and retries.

A call is retried if the server is unreachable, drops the connection or is busy (429, 503); never after a timeout,
since the server may still process it. If a server was unreachable for `connect_timeout_s`, calls are not retried.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from ludus.engines.control_tokens import find_token
from ludus.errors import EngineError, UserError
from ludus.untrusted.json_client import bounded_client, get_bounded

_EXCERPT_CHARS = 300
_LONGEST_WAIT_S, _HEALTH_S = 5.0, 5.0
_ABORT = "/abort"
_BUSY, _UNAUTHORIZED = (429, 503), 401
CONNECTION_ERRORS = (httpx.NetworkError, httpx.ConnectTimeout, httpx.RemoteProtocolError)

Reply = TypeVar("Reply", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class RemoteEngineSettings:
    """Settings of the connection to servers.

    `timeout_s` bounds each call; `connect_timeout_s` is how long to retry an unreachable server, with delays
    of `backoff_s`, doubled up to 5 s. Weights are sent through `weights_folder` (empty: a temporary folder),
    which must have the same path on the server. With a `broadcast_host`, an address at which servers reach
    this process, they are sent over a gloo process group instead, with `delta` only the changes; with
    `keeps_weights` a copy is stored for servers that join later. `keeps_adapters` keeps each episode on the
    adapter version that it started with. `moves_episodes` moves episodes off a draining engine between two
    turns. `token` authorizes the control endpoints; empty uses the token stored by a local server.
    """

    timeout_s: float = 600.0
    connect_timeout_s: float = 60.0
    backoff_s: float = 0.25
    weights_folder: str = ""
    broadcast_host: str = ""
    delta: bool = False
    keeps_weights: bool = False
    keeps_adapters: bool = False
    moves_episodes: bool = False
    token: str = field(default="", repr=False)


class HttpStatusError(EngineError):
    """Raised if the server rejects a request. `status` is the HTTP status."""

    def __init__(self, message: str, hint: str = "", status: int = 0) -> None:
        super().__init__(message, hint)
        self.status = status

    def __reduce__(self) -> tuple[type[HttpStatusError], tuple[str, str, int]]:  # type: ignore[override]
        return HttpStatusError, (self.message, self.hint, self.status)


class ServerUnreachable(EngineError):
    """Raised if no server responds at `url`; no request was sent."""

    def __init__(self, message: str, hint: str = "", url: str = "") -> None:
        super().__init__(message, hint)
        self.url = url


class _Connection(NamedTuple):
    """Connection state of one event loop: HTTP client and weight lock."""

    loop: asyncio.AbstractEventLoop
    client: httpx.AsyncClient
    lock: asyncio.Lock


@dataclass(eq=False)
class Replica:
    """One server. `load` counts its running calls; `weight_version` is None if unknown.

    `stale_version` is the older version it serves until its episodes end; None if it should hold the newest.
    `restore` ensures its weights before a sampling call is retried, since the server may have been restarted.
    No calls are made if `removed`.
    """

    url: str
    settings: RemoteEngineSettings
    restore: Callable[[Replica], Awaitable[None]] | None = None
    load: int = 0
    weight_version: int | None = None
    stale_version: int | None = None
    removed: bool = False

    def __post_init__(self) -> None:
        self._token = self.settings.token or find_token(self.url)
        self._down_since: float | None = None
        self._connection: _Connection | None = None
        self._last_response_s = 0.0

    @property
    def is_down(self) -> bool:
        return self._down_since is not None

    @property
    def lock(self) -> asyncio.Lock:
        """Lock for updates and checks of its weights."""
        return self._loop_connection().lock

    async def get(self, path: str, reply: type[Reply]) -> Reply:
        """Send a GET and return the parsed response. Raises EngineError."""
        return _parse(await self._call("GET", path), reply)

    async def post(self, path: str, body: Mapping[str, object], reply: type[Reply], *, samples: bool = False) -> Reply:
        """POST JSON and return the parsed response; set `samples` if it depends on the weights."""
        return _parse(await self._call("POST", path, body, samples=samples), reply)

    async def send(self, path: str, body: Mapping[str, object]) -> None:
        """POST JSON and ignore the response body. Raises EngineError."""
        await self._call("POST", path, body)

    def remove(self) -> None:
        """Stop making calls. Connections close when running calls have ended."""
        self.removed = True
        self._close_idle()

    async def close(self) -> None:
        """Close the connections; those of a closed event loop are already closed."""
        connection, self._connection = self._connection, None
        if connection is not None and connection.loop is asyncio.get_running_loop():
            await connection.client.aclose()

    async def _call(
        self, method: str, path: str, body: Mapping[str, object] | None = None, *, samples: bool = False
    ) -> httpx.Response:
        content = None if body is None else json.dumps(body).encode()
        if not self.load:  # no call is running
            self._last_response_s = time.time()
        self.load += 1
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                return await self._send_with_retries(method, path, content, samples=samples)
        except TimeoutError as error:
            raise await self._timeout_error(path) from error
        finally:
            self.load -= 1
            if self.removed:
                self._close_idle()

    async def _timeout_error(self, path: str) -> EngineError:
        """Return the error for a timed-out call: the server either hangs or is overloaded."""
        limit_s, silent_s = self.settings.timeout_s, time.time() - self._last_response_s
        if silent_s < limit_s:
            return EngineError(
                f"{self.url}{path} did not respond within {limit_s:g} s, but responded to another request "
                f"{silent_s:.0f} s ago.",
                "Decrease rollout.concurrency or increase engine.timeout_s.",
            )
        try:
            await self._loop_connection().client.get(f"{self.url}/health", timeout=min(limit_s, _HEALTH_S))
            alive = "/health still responds, so its engine hangs or is far too slow"
        except httpx.HTTPError:
            alive = "/health does not respond either"
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self._last_response_s))
        return EngineError(
            f"The replica {self.url} hangs: no response since {since} ({silent_s:.0f} s ago), "
            f"{self.load} requests waiting ({path} for {limit_s:g} s); {alive}.",
            "Check its log and restart it. If it is only slow, increase engine.timeout_s.",
        )

    def _close_idle(self) -> None:
        if self.load or self._connection is None or self._connection.loop.is_closed():
            return
        connection, self._connection = self._connection, None
        self._closing = connection.loop.create_task(connection.client.aclose())

    async def _send_with_retries(self, method: str, path: str, body: bytes | None, *, samples: bool) -> httpx.Response:
        """Retry within `connect_timeout_s`. Raises the last attempt's error."""
        begin, attempt = time.monotonic(), 0
        while True:
            try:
                response = await self._send(method, path, body)
            except CONNECTION_ERRORS as error:
                self.weight_version = None
                self._down_since = begin if self._down_since is None else self._down_since
                if self.removed or time.monotonic() - self._down_since >= self.settings.connect_timeout_s:
                    raise self._unreachable_error(path, error, attempt + 1) from error
            except httpx.DecodingError as error:
                raise EngineError(f"{self.url}{path} sent an unreadable response: {error}.") from error
            else:
                self._down_since = None
                if not path.startswith(_ABORT):  # the abort endpoint responds even if the engine hangs
                    self._last_response_s = time.time()
                if response.status_code == _UNAUTHORIZED:  # a restarted local server stores a new token
                    token, self._token = self._token, self.settings.token or find_token(self.url)
                    if self._token not in ("", token):
                        continue
                busy = response.status_code in _BUSY
                if not busy or time.monotonic() - begin >= self.settings.connect_timeout_s:
                    return _raise_for_status(response)
            await asyncio.sleep(min(self.settings.backoff_s * 2**attempt, _LONGEST_WAIT_S))
            attempt += 1
            if samples and self.weight_version is None and self.restore is not None:
                await self.restore(self)

    async def _send(self, method: str, path: str, body: bytes | None) -> httpx.Response:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        client = self._loop_connection().client
        return await client.request(method, f"{self.url}{path}", content=body, headers=headers)

    def _loop_connection(self) -> _Connection:
        loop = asyncio.get_running_loop()
        if self._connection is None or self._connection.loop is not loop:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
            self._connection = _Connection(loop, bounded_client(limits), asyncio.Lock())
        return self._connection

    def _unreachable_error(self, path: str, error: httpx.HTTPError, attempts: int) -> EngineError:
        times = "attempt" if attempts == 1 else "attempts"
        return EngineError(
            f"The inference server {self.url} is unreachable or closed the connection ({path}, {attempts} {times}): "
            f"{type(error).__name__}: {error or 'no details'}.",
            "Check its log and restart it. engine.connect_timeout_s sets how long to retry.",
        )


class _AnyObject(BaseModel):
    """Any JSON object."""


def get_once(url: str, path: str, reply: type[Reply]) -> Reply:
    """Send a GET and wait, blocking an event loop. Raises EngineError, UserError for an invalid address."""
    try:
        response = get_bounded(f"{url}{path}", 10.0)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise UserError(f"{url!r} is not a valid URL: {error}.", "Start engine.url with http://.") from error
    except httpx.DecodingError as error:
        raise EngineError(f"{url}{path} sent an unreadable response: {error}.") from error
    except httpx.HTTPError as error:
        raise ServerUnreachable(
            f"The inference server {url} is unreachable: {type(error).__name__}: {error}.",
            f"Start it first, for example with: {serve_command(url, 'MODEL')}",
            url,
        ) from error
    return _parse(_raise_for_status(response), reply)


def check_reachable(url: str) -> None:
    """Raise ServerUnreachable if an OpenAI-compatible server does not respond to `GET /models`, with any status."""
    try:
        get_once(url, "/models", _AnyObject)
    except ServerUnreachable:
        raise
    except EngineError:  # the server responded; a list of models is optional
        return


def _raise_for_status(response: httpx.Response) -> httpx.Response:
    if response.is_success:
        return response
    status = response.status_code
    raise HttpStatusError(f"{response.request.url} responded with {status}: {error_message(response)}", status=status)


def _parse(response: httpx.Response, reply: type[Reply]) -> Reply:
    try:
        return reply.model_validate_json(response.content or b"{}")
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise EngineError(
            f"{response.request.url} sent an unexpected response (at {where or 'the top'}): "
            f"{excerpt(response.content)}",
            "Check engine.url and engine.api.",
        ) from error


def serve_command(url: str, model: str) -> str:
    """Return the command that starts a trainable server of `model` at `url`."""
    place = httpx.URL(url)
    host = "" if place.host in ("127.0.0.1", "localhost") else f" --host {place.host}"
    port = place.port or (443 if place.scheme == "https" else 80)
    return f"ludus serve {shlex.quote(model)}{host} --port {port} --control"


def error_message(response: httpx.Response) -> str:
    """Return the error message in the body, or else the beginning of the body."""
    try:
        body = response.json()
    except (ValueError, RecursionError):
        return excerpt(response.content)
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message") if isinstance(error, dict) else error
    return excerpt(message.encode("utf-8", "replace") if isinstance(message, str) else response.content)


def excerpt(body: bytes) -> str:
    """Return the beginning of a body as one line."""
    text = " ".join(body.decode("utf-8", "replace").split())
    cut = text[:_EXCERPT_CHARS] + (" ..." if len(text) > _EXCERPT_CHARS else "")
    return cut or "an empty body"
