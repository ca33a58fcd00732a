"""Routes of endpoints (path, body type, handler), access control, and JSON responses.

Parses all request bodies. Refuses requests of web pages of other origins; control endpoints need the token.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ludus.gateway.protocol.bodies import BadRequest, JsonBody, RequestBody, error_body, json_bytes, read_body
from ludus.gateway.service import RequestThreads

Result = TypeVar("Result")

_CONTAINERS, _COMMAS = 2**13, 2**17
_NO_TOKEN, _FORBIDDEN, _CONTENT_TOO_LARGE, _WRONG_TYPE = 401, 403, 413, 415


@dataclass(frozen=True)
class ControlAccess:
    """Token of the control endpoints, and the host names allowed in addition to IP addresses."""

    token: str
    hosts: frozenset[str] = frozenset()

    def check(self, request: Request) -> None:
        """Raise BadRequest if the token is missing or a web page may have sent the request."""
        host = _hostname(request.headers.get("host", ""))
        known = {"localhost", socket.gethostname().lower(), *(name.lower() for name in self.hosts)}
        if not _is_address(host) and host not in known:
            raise BadRequest(
                f"Control endpoints are not served under the host name {host[:80]!r}; use the address, or "
                "start the server with --allow-host.",
                _FORBIDDEN,
            )
        header = request.headers.get("authorization", "")
        if not secrets.compare_digest(header.encode(), f"Bearer {self.token}".encode()):
            raise BadRequest(
                "This path needs the server's control token, as Authorization: Bearer TOKEN; "
                "trainers read it from engine.token_file.",
                _NO_TOKEN,
            )


def check_origin(request: Request) -> None:
    """Raise BadRequest for a request from a web page of another origin."""
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
        raise BadRequest(f"Cross-origin requests are refused; the origin is {origin[:80]!r}.", _FORBIDDEN)


def check_json(request: Request) -> None:
    """Raise BadRequest unless the content type is JSON, which plain web forms cannot send."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise BadRequest(f"The content type is {kind[:80]!r}; send Content-Type: application/json.", _WRONG_TYPE)


def _hostname(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False


def check_shape(body: bytes, context_tokens: int) -> None:
    """Raise BadRequest if JSON has more values than any valid request, before it is parsed.

    Punctuation inside strings counts too; a text within the context length stays below the limits.
    """
    num_containers, num_commas = sum(map(body.count, (b"[", b"{", b":"))), body.count(b",")
    if num_containers > _CONTAINERS + context_tokens or num_commas > _COMMAS + 8 * context_tokens:
        raise BadRequest(
            f"The body has {num_commas} commas and {num_containers} colons and opening brackets, more than a request "
            "of this context; send several requests.",
            _CONTENT_TOO_LARGE,
        )


class NoBody(BaseModel):
    """Body of an endpoint without parameters; all fields are ignored."""


@dataclass(frozen=True)
class HttpRouter:
    """Routes of a server. Control routes need the token of `access`; if it is None, control is disabled."""

    threads: RequestThreads
    context_tokens: int
    access: ControlAccess | None
    routes: list[Route] = field(default_factory=list)

    def add(
        self,
        path: str,
        body: type[RequestBody],
        act: Callable[[Request, RequestBody], Awaitable[Response]],
        *,
        method: Literal["GET", "POST"] = "POST",
        control: bool = False,
    ) -> None:
        """Add a route; `act` handles a request with its parsed body. `check_shape` limits public bodies."""

        async def endpoint(request: Request) -> Response:
            check_origin(request)
            if control:
                if self.access is None:
                    raise BadRequest("Control is disabled on this server; start it with --control.", _FORBIDDEN)
                self.access.check(request)
            raw = b"" if method == "GET" else await request.body()
            if raw:
                check_json(request)
            if not control:
                check_shape(raw, self.context_tokens)
            return await act(request, await self.threads.do(partial(read_body, body, raw or b"{}")))

        self.routes.append(Route(path, endpoint, methods=[method]))


def json_response(body: JsonBody, status: int = 200) -> Response:
    """Create a JSON response."""
    return Response(json_bytes(body), status, media_type="application/json")


def error_response(status: int, message: str) -> Response:
    """Create an error response."""
    return json_response(error_body(status, message), status)


async def until_disconnect(request: Request, work: Awaitable[Result]) -> Result | None:
    """Return the result of `work`. If the client disconnects first, cancel it and return None."""

    async def wait() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, disconnected = asyncio.ensure_future(work), asyncio.ensure_future(wait())
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        disconnected.cancel()
        task.cancel()
