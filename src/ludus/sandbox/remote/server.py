"""HTTP server for any backend, for `ludus sandbox serve`. Needs the `serve` extra.

Every request must carry the token. Limits above the server's are refused. Idle sessions are closed. The listener bounds
bodies (`MAX_BODY_BYTES`).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request

from ludus.errors import UserError, WorldError
from ludus.sandbox.base import FileChange, Limits, Outcome, Process, RunRequest, Sandbox, SandboxSession, Snapshot
from ludus.sandbox.remote.client import Payload, SessionMessage
from ludus.untrusted.json_service import JsonService, parse

MAX_BODY_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class SandboxServerSettings:
    """Upper bounds: `ceiling` for the limits of clients, `sessions` for open sessions, `idle_s` for their idle time."""

    token: str
    ceiling: Limits
    sessions: int = 64
    idle_s: float = 900.0


@dataclass
class _OpenSession:
    session: SandboxSession
    lock: asyncio.Lock
    used: float


@dataclass
class _Service:
    sandbox: Sandbox
    settings: SandboxServerSettings
    sessions: dict[str, _OpenSession] = field(default_factory=dict)
    starting: int = 0

    async def run(self, _: Request, body: bytes) -> BaseModel:
        parsed = (await parse(Payload[RunRequest], body)).content
        self._check_limits(parsed.limits)
        program = parsed.argv if parsed.source is None else _decode("source", parsed.source)
        outcome = await self.sandbox.run(program, files=parsed.files, stdin=parsed.stdin, limits=parsed.limits)
        return Payload[Outcome].model_construct(content=outcome)

    async def open_session(self, _: Request, body: bytes) -> BaseModel:
        message = await parse(SessionMessage, body)
        self._check_limits(message.limits)
        await self.close_idle()
        num = len(self.sessions) + self.starting
        if num >= self.settings.sessions:
            raise WorldError(f"The sandbox server is at its limit of {num} sessions.")
        self.starting += 1
        try:
            session = await self.sandbox.session(message.kind, files=message.files, limits=message.limits)
        finally:
            self.starting -= 1
        name = secrets.token_urlsafe(16)
        self.sessions[name] = _OpenSession(session, asyncio.Lock(), time.monotonic())
        return Payload[str](content=name)

    async def use_session(self, request: Request, body: bytes) -> BaseModel:
        name = request.path_params["name"]
        entry = self.sessions.get(name)
        if entry is None:
            raise WorldError("The session does not exist on the sandbox server; idle sessions are closed.")
        async with entry.lock:
            try:
                if request.path_params["operation"] == "close":
                    self.sessions.pop(name, None)
                return await _use(entry.session, request.path_params["operation"], body)
            finally:
                entry.used = time.monotonic()

    async def close_idle(self) -> None:
        now = time.monotonic()
        for name, entry in list(self.sessions.items()):
            if now - entry.used > self.settings.idle_s and not entry.lock.locked():
                self.sessions.pop(name, None)
                await entry.session.close()

    async def close_idle_forever(self) -> None:
        while True:
            await asyncio.sleep(max(1.0, self.settings.idle_s / 10))
            await self.close_idle()

    def _check_limits(self, limits: Limits) -> None:
        ceiling = asdict(self.settings.ceiling)
        for name, value in asdict(limits).items():
            if value > ceiling[name]:
                raise UserError(f"The limit {name} is {value}, but this sandbox server allows {ceiling[name]}.")


async def _use(session: SandboxSession, operation: str, body: bytes) -> BaseModel:
    match operation:
        case "run":
            code = _decode("code", (await parse(Payload[bytes], body)).content)
            return Payload[Outcome].model_construct(content=await session.run(code))
        case "snapshot":
            return Payload[Snapshot].model_construct(content=await session.snapshot())
        case "processes":
            return Payload[tuple[Process, ...]].model_construct(content=await session.processes())
        case "change":
            await session.change((await parse(Payload[FileChange], body)).content)
        case "restore":
            await session.restore((await parse(Payload[Snapshot], body)).content)
        case "reset":
            await session.reset()
        case "close":
            await session.close()
        case _:
            raise UserError(f"Unknown session operation {operation!r}.")
    return Payload[None](content=None)


def make_app(sandbox: Sandbox, settings: SandboxServerSettings) -> Starlette:
    """Create the application; it closes `sandbox` on shutdown."""
    service = _Service(sandbox, settings)
    http = JsonService("sandbox server", settings.token)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(service.close_idle_forever())
        try:
            yield
        finally:
            task.cancel()
            service.sessions.clear()
            await sandbox.close()

    routes = [
        http.route("/v1/runs", service.run),
        http.route("/v1/sessions", service.open_session),
        http.route("/v1/sessions/{name}/{operation}", service.use_session),
    ]
    handlers = {HTTPException: http.handle_error, Exception: http.handle_error}
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)


def _decode(name: str, source: bytes) -> str:
    try:
        return source.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise UserError(f"The sandbox server cannot read {name}: it is not UTF-8 ({error.reason}).") from error
