"""HTTP server for any backend, for `ludus sandbox serve`. Needs the `serve` extra.

Every request must carry the token. Limits above the server's are refused. Idle sessions are closed. The
listener bounds bodies (`LARGEST_BODY`); they are decoded off the event loop.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ludus.errors import LudusError, UserError, WorldError
from ludus.sandbox.base import Limits, Sandbox, SandboxSession
from ludus.sandbox.remote.messages import (
    CallMessage,
    ChangeMessage,
    LimitsMessage,
    NamedSession,
    Nothing,
    OutcomeMessage,
    ProcessesMessage,
    Refusal,
    RunMessage,
    SessionMessage,
    SnapshotMessage,
)

LARGEST_BODY = 64 * 2**20
_BAD, _NO_TOKEN, _UNFORESEEN, _FAILED = 400, 401, 500, 502
Asked = TypeVar("Asked", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class SandboxServerSettings:
    """`ceiling` bounds the limits of clients, `sessions` the open sessions, `idle_s` their idle time."""

    token: str
    ceiling: Limits
    sessions: int = 64
    idle_s: float = 900.0


@dataclass
class _Open:
    session: SandboxSession
    lock: asyncio.Lock
    used: float


@dataclass
class _Service:
    sandbox: Sandbox
    settings: SandboxServerSettings
    opened: dict[str, _Open] = field(default_factory=dict)
    starting: int = 0

    async def runs(self, body: bytes) -> BaseModel:
        asked = await _read(RunMessage, body)
        limits = self._allowed(asked.limits)
        source = None if asked.source is None else _text("source", asked.source)
        program = list(asked.argv) if source is None else source
        outcome = await self.sandbox.run(program, files=asked.files, stdin=asked.stdin, limits=limits)
        return OutcomeMessage.of(outcome)

    async def open(self, body: bytes) -> BaseModel:
        asked = await _read(SessionMessage, body)
        limits = self._allowed(asked.limits)
        await self.sweep()
        num = len(self.opened) + self.starting
        if num >= self.settings.sessions:
            raise WorldError(f"The sandbox server is at its limit of {num} sessions.")
        self.starting += 1
        try:
            session = await self.sandbox.session(asked.kind, files=asked.files, limits=limits)
        finally:
            self.starting -= 1
        name = secrets.token_urlsafe(16)
        self.opened[name] = _Open(session, asyncio.Lock(), time.monotonic())
        return NamedSession(session=name)

    async def act(self, name: str, act: str, body: bytes) -> BaseModel:
        kept = self.opened.get(name)
        if kept is None:
            raise WorldError("The session does not exist on the sandbox server; idle sessions are closed.")
        async with kept.lock:
            try:
                return await self._act(kept.session, name, act, body)
            finally:
                kept.used = time.monotonic()

    async def _act(self, session: SandboxSession, name: str, act: str, body: bytes) -> BaseModel:
        if act == "run":
            code = _text("code", (await _read(CallMessage, body)).code)
            return OutcomeMessage.of(await session.run(code))
        if act == "snapshot":
            made = await session.snapshot()
            executable = sorted(made.executable)
            return SnapshotMessage.model_construct(
                files=dict(made.files), executable=executable, left_out=made.left_out
            )
        if act == "processes":
            return ProcessesMessage.of(await session.processes())
        if act == "change":
            await session.change((await _read(ChangeMessage, body)).change())
        elif act == "restore":
            await session.restore((await _read(SnapshotMessage, body)).snapshot())
        elif act == "reset":
            await session.reset()
        elif act == "close":
            self.opened.pop(name, None)
            await session.close()
        else:
            raise UserError(f"Unknown session operation {act!r}.")
        return Nothing()

    async def sweep(self) -> None:
        """Close sessions idle for too long."""
        now = time.monotonic()
        for name, kept in list(self.opened.items()):
            if now - kept.used > self.settings.idle_s and not kept.lock.locked():
                self.opened.pop(name, None)
                await kept.session.close()

    async def close(self) -> None:
        """End all sessions and the backend."""
        self.opened.clear()
        await self.sandbox.close()

    def _allowed(self, message: LimitsMessage) -> Limits:
        limits, ceiling = message.limits(), asdict(self.settings.ceiling)
        for name, asked in asdict(limits).items():
            if asked > ceiling[name]:
                raise UserError(f"The limit {name} is {asked}, but this sandbox server allows {ceiling[name]}.")
        return limits


def make_app(sandbox: Sandbox, settings: SandboxServerSettings) -> Starlette:
    """Create the application; it closes `sandbox` on shutdown."""
    service = _Service(sandbox, settings)

    def route(path: str, act: Callable[[Request, bytes], Awaitable[BaseModel]]) -> Route:
        async def endpoint(request: Request) -> Response:
            return await _answer(request, settings.token, act)

        return Route(path, endpoint, methods=["POST"])

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        sweeping = asyncio.create_task(_sweep_on(service))
        try:
            yield
        finally:
            sweeping.cancel()
            await service.close()

    routes = [
        route("/v1/runs", lambda _, body: service.runs(body)),
        route("/v1/sessions", lambda _, body: service.open(body)),
        route(
            "/v1/sessions/{name}/{act}",
            lambda request, body: service.act(request.path_params["name"], request.path_params["act"], body),
        ),
    ]
    handlers = {HTTPException: _failed, Exception: _failed}
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)


async def _sweep_on(service: _Service) -> None:
    while True:
        await asyncio.sleep(max(1.0, service.settings.idle_s / 10))
        await service.sweep()


async def _answer(request: Request, token: str, act: Callable[[Request, bytes], Awaitable[BaseModel]]) -> Response:
    """Check the token, parse the body, act, and convert errors to responses."""
    told = request.headers.get("authorization", "")
    if not secrets.compare_digest(told.encode(), f"Bearer {token}".encode()):
        return _response(_NO_TOKEN, Refusal(kind="token", message="Invalid sandbox server token."))
    body = await request.body()
    try:
        done = await act(request, body)
        return await asyncio.to_thread(_response, 200, done)
    except UserError as error:
        return _response(_BAD, Refusal(kind="input", message=error.message, hint=error.hint))
    except LudusError as error:
        return _response(_FAILED, Refusal(kind="environment", message=error.message, hint=error.hint))


def refusal(status: int, message: str) -> Response:
    """Return the response to an invalid request."""
    kind = "input" if status < _UNFORESEEN else "environment"
    return _response(status, Refusal(kind=kind, message=message))


async def _failed(_: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        return refusal(_UNFORESEEN, f"The sandbox server failed: {type(error).__name__}: {error}.")
    answer = refusal(error.status_code, f"{error.detail}.")
    answer.headers.update(error.headers or {})
    return answer


def _response(status: int, message: BaseModel) -> Response:
    return Response(message.model_dump_json(), status_code=status, media_type="application/json")


def _text(name: str, source: bytes) -> str:
    try:
        return source.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise UserError(f"The sandbox server cannot read {name}: it is not UTF-8 ({error.reason}).") from error


async def _read(kind: type[Asked], body: bytes) -> Asked:
    """Parse a message. Raises UserError."""
    try:
        return await asyncio.to_thread(kind.model_validate_json, body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise UserError(f"The sandbox server cannot read {where}: {first['msg']}.") from error
