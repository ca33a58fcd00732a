"""Endpoints as data (path, body type, handler), access control, and JSON bodies.

All request bodies are parsed here. Web pages of other origins are refused; control endpoints need the token.
"""

from __future__ import annotations

import ipaddress
import json
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Literal, Protocol
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ludus.gateway.protocol.requests import BadRequest, RequestBody, read_body
from ludus.gateway.protocol.responses import EncodedJson, ErrorAnswer, ErrorInfo
from ludus.gateway.service import RequestThreads

_CONTAINERS, _COMMAS = 2**13, 2**17
_NO_TOKEN, FORBIDDEN, _MANY, _WRONG_TYPE, FAILED = 401, 403, 413, 415, 500


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
                FORBIDDEN,
            )
        given = request.headers.get("authorization", "")
        if not secrets.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
            raise BadRequest(
                "This path needs the server's control token, as Authorization: Bearer TOKEN; set "
                "in engine.token_file of a trainer.",
                _NO_TOKEN,
            )


def check_origin(request: Request) -> None:
    """Raise BadRequest for a request from a web page of another origin."""
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise BadRequest(f"Cross-origin requests are refused; the origin is {origin[:80]!r}.", FORBIDDEN)


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
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def check_shape(body: bytes, context_tokens: int) -> None:
    """Raise BadRequest for JSON with more values than a valid request has, since parsing each takes time.

    Punctuation inside strings counts too; text that fits the context has less.
    """
    containers = body.count(b"[") + body.count(b"{") + body.count(b":")
    commas = body.count(b",")
    if containers > _CONTAINERS + context_tokens or commas > _COMMAS + 8 * context_tokens:
        raise BadRequest(
            f"The body has {commas} commas and {containers} colons and opening brackets, more than a request "
            "of this context; send several requests.",
            _MANY,
        )


class NoBody(BaseModel):
    """An ignored body."""

    model_config = ConfigDict(extra="ignore")


class EndpointResult(Protocol):
    """An endpoint with any body type."""

    @property
    def path(self) -> str: ...

    @property
    def method(self) -> Literal["GET", "POST"]: ...

    @property
    def body(self) -> type[BaseModel]: ...

    async def answer(self, request: Request, threads: RequestThreads, context_tokens: int | None) -> Response:
        """Parse the body and call the handler; `context_tokens` bounds the body's shape."""
        ...


@dataclass(frozen=True)
class HttpEndpoint(Generic[RequestBody]):
    """`act` handles a request with its parsed body of type `body`."""

    path: str
    body: type[RequestBody]
    act: Callable[[Request, RequestBody], Awaitable[Response]]
    method: Literal["GET", "POST"] = "POST"

    async def answer(self, request: Request, threads: RequestThreads, context_tokens: int | None) -> Response:
        """Implement `EndpointResult`."""
        raw = b"" if self.method == "GET" else await request.body()
        if raw:
            check_json(request)
        if context_tokens is not None:
            check_shape(raw, context_tokens)
        return await self.act(request, await threads.do(partial(read_body, self.body, raw or b"{}")))


def endpoint(
    path: str,
    body: type[RequestBody],
    act: Callable[[Request, RequestBody], Awaitable[Response]],
    method: Literal["GET", "POST"] = "POST",
) -> EndpointResult:
    """Create an endpoint of any body type."""
    return HttpEndpoint(path, body, act, method)


@dataclass(frozen=True)
class HttpRouter:
    """Context of all endpoints. `access` is None if control is disabled."""

    threads: RequestThreads
    context_tokens: int
    access: ControlAccess | None

    def public(self, endpoint: EndpointResult) -> Route:
        """Create a public endpoint."""

        async def answer(request: Request) -> Response:
            check_origin(request)
            return await endpoint.answer(request, self.threads, self.context_tokens)

        return Route(endpoint.path, answer, methods=[endpoint.method])

    def control(self, endpoint: EndpointResult) -> Route:
        """Create an endpoint that requires the token."""

        async def answer(request: Request) -> Response:
            check_origin(request)
            if self.access is None:
                raise BadRequest("Control is disabled on this server; start it with --control.", FORBIDDEN)
            self.access.check(request)
            return await endpoint.answer(request, self.threads, None)

        return Route(endpoint.path, answer, methods=[endpoint.method])


def json_bytes(body: BaseModel) -> bytes:
    """Serialize a body to JSON. Invalid Unicode (unpaired surrogates) is escaped, not rejected."""
    apart = {name: value for name, value in body if _is_apart(value)}
    rest = body.model_dump(exclude=set(apart))
    if not apart:
        return _json(rest)
    fields = [_json(name) + b":" + (_apart(apart[name]) if name in apart else _json(rest[name])) for name, _ in body]
    return b"{" + b",".join(fields) + b"}"


def _is_apart(value: object) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(item, BaseModel) for item in value)
    return isinstance(value, EncodedJson)


def _apart(value: Sequence[BaseModel] | EncodedJson) -> bytes:
    if isinstance(value, EncodedJson):
        return value.text
    return b"[" + b",".join(map(json_bytes, value)) + b"]"


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def json_response(body: BaseModel, status: int = 200) -> Response:
    """Create a JSON response."""
    return Response(json_bytes(body), status, media_type="application/json")


def error_body(message: str, status: int, code: str | None = None) -> ErrorAnswer:
    """Return an error body in OpenAI's format."""
    kind = "invalid_request_error" if status < FAILED else "server_error"
    return ErrorAnswer(error=ErrorInfo(message=message, type=kind, code=code or status))


def error_response(status: int, message: str) -> Response:
    """Create an error response."""
    return json_response(error_body(message, status), status)
