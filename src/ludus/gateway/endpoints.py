"""Endpoints as data: path, body type and handler. All request bodies are parsed here."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Literal, Protocol

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ludus.gateway.access import ControlAccess, check_json, check_origin
from ludus.gateway.door import RequestThreads, check_shape
from ludus.gateway.protocol.requests import BadRequest, RequestBody, read_body
from ludus.gateway.protocol.responses import EncodedJson, ErrorAnswer, ErrorInfo

FORBIDDEN, FAILED = 403, 500


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

    async def answer(self, request: Request, door: RequestThreads, context_tokens: int | None) -> Response:
        """Parse the body and call the handler; `context_tokens` bounds the body's shape."""
        ...


@dataclass(frozen=True)
class HttpEndpoint(Generic[RequestBody]):
    """`act` handles a request with its parsed body of type `body`."""

    path: str
    body: type[RequestBody]
    act: Callable[[Request, RequestBody], Awaitable[Response]]
    method: Literal["GET", "POST"] = "POST"

    async def answer(self, request: Request, door: RequestThreads, context_tokens: int | None) -> Response:
        """Implement `EndpointResult`."""
        raw = b"" if self.method == "GET" else await request.body()
        if raw:
            check_json(request)
        if context_tokens is not None:
            check_shape(raw, context_tokens)
        return await self.act(request, await door.do(partial(read_body, self.body, raw or b"{}")))


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

    door: RequestThreads
    context_tokens: int
    access: ControlAccess | None

    def public(self, endpoint: EndpointResult) -> Route:
        """Create a public endpoint."""

        async def answer(request: Request) -> Response:
            check_origin(request)
            return await endpoint.answer(request, self.door, self.context_tokens)

        return Route(endpoint.path, answer, methods=[endpoint.method])

    def control(self, endpoint: EndpointResult) -> Route:
        """Create an endpoint that requires the token."""

        async def answer(request: Request) -> Response:
            check_origin(request)
            if self.access is None:
                raise BadRequest("This server is not to be controlled; start it with --control.", FORBIDDEN)
            self.access.check(request)
            return await endpoint.answer(request, self.door, None)

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
