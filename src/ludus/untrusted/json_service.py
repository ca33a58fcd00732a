"""Routes of HTTP servers that exchange JSON messages, for `ludus sandbox serve` and `ludus env serve`.

Needs the `serve` extra. Bodies are parsed and responses serialized off the event loop.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ludus.errors import LudusError, UserError
from ludus.untrusted.json_client import ErrorMessage

_BAD_REQUEST, _UNAUTHORIZED, _INTERNAL_ERROR, _BAD_GATEWAY = 400, 401, 500, 502
Message = TypeVar("Message", bound=BaseModel)
Handler = Callable[[Request, bytes], Awaitable[BaseModel]]


@dataclass(frozen=True, slots=True)
class JsonService:
    """Routes of a service called `what` in errors. Requests must carry the token.

    Without a token, they must come from clients of this machine that are no web pages: with a Host in `hosts`, and
    with a content type that browsers do not send to other origins.
    """

    what: str
    token: str
    hosts: Sequence[str] = ()

    def route(self, path: str, handler: Handler) -> Route:
        """Return the route of a POST handler. Its LudusErrors become error messages."""

        async def endpoint(request: Request) -> Response:
            if not self._is_allowed(request):
                return _response(_UNAUTHORIZED, ErrorMessage(kind="token", message=f"Invalid {self.what} token."))
            try:
                message = await handler(request, await request.body())
                return await asyncio.to_thread(_response, 200, message)
            except UserError as error:
                return _response(_BAD_REQUEST, ErrorMessage(kind="input", message=error.message, hint=error.hint))
            except LudusError as error:
                refused = ErrorMessage(kind="environment", message=error.message, hint=error.hint)
                return _response(_BAD_GATEWAY, refused)

        return Route(path, endpoint, methods=["POST"])

    async def handle_error(self, _: Request, error: Exception) -> Response:
        """Return the response to a request that raised."""
        if not isinstance(error, HTTPException):
            text = f"The {self.what} failed: {type(error).__name__}: {error}."
            return error_response(_INTERNAL_ERROR, text)
        response = error_response(error.status_code, f"{error.detail}.")
        response.headers.update(error.headers or {})
        return response

    def _is_allowed(self, request: Request) -> bool:
        if self.token:
            authorization = request.headers.get("authorization", "")
            return secrets.compare_digest(authorization.encode(), f"Bearer {self.token}".encode())
        is_json = request.headers.get("content-type", "").startswith("application/json")
        return is_json and request.url.hostname in self.hosts


async def parse(kind: type[Message], body: bytes) -> Message:
    """Parse a body. Raises UserError."""
    try:
        return await asyncio.to_thread(kind.model_validate_json, body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise UserError(f"The server cannot read {where}: {first['msg']}.") from error


def error_response(status: int, message: str) -> Response:
    """Return the response to a request that failed with a status code."""
    kind = "input" if status < _INTERNAL_ERROR else "environment"
    return _response(status, ErrorMessage(kind=kind, message=message))


def _response(status: int, message: BaseModel) -> Response:
    return Response(message.model_dump_json(exclude_unset=True), status_code=status, media_type="application/json")
