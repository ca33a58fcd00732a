"""Backend that runs programs on a `ludus sandbox serve` server: HTTP client and message types.

Every request has a deadline: the limits plus a margin. Requests are never retried. Messages are JSON, with bytes as
base64; dataclasses of the sandbox interface are encoded by their fields.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from ludus.errors import UserError, WorldError
from ludus.sandbox.base import (
    FileChange,
    Limits,
    Outcome,
    Process,
    RunRequest,
    Sandbox,
    SandboxSession,
    SandboxSettings,
    SessionKind,
    Snapshot,
    validate_files,
)
from ludus.untrusted.replies import PLAIN, bounded_replies

MAX_RESPONSE_BYTES = 256 * 2**20
"""Maximum size of a response with all files of a run."""
Reply = TypeVar("Reply", bound=BaseModel)
Content = TypeVar("Content")


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")


class Payload(_Message, Generic[Content]):
    """Message with an outcome, the code of a call, files of a session or changes to them, or nothing."""

    content: Content


class RunMessage(_Message):
    """One run: `source` (Python, UTF-8) or `argv`."""

    source: bytes | None = None
    argv: list[str] = []
    files: dict[str, bytes] = {}
    stdin: bytes = b""
    limits: Limits


class SessionMessage(_Message):
    """Request to open a session."""

    kind: SessionKind
    files: dict[str, bytes] = {}
    limits: Limits


class ErrorMessage(_Message):
    """Error response; `kind` is input, environment or token."""

    kind: str
    message: str
    hint: str = ""


@dataclass(eq=False)
class HttpClient:
    """Client of a service at `url`, for one event loop at a time; `hint` is shown if it is unreachable.

    `max_bytes` bounds a response, by default as `ludus.untrusted.replies` does.
    """

    url: str
    token: str
    hint: str
    max_bytes: int | None = None
    _client: httpx.AsyncClient | None = field(default=None, init=False)
    _loop: asyncio.AbstractEventLoop | None = field(default=None, init=False)

    async def post(self, path: str, content: str, timeout_s: float) -> httpx.Response:
        """POST JSON and return the response. Raises WorldError if none arrives within `timeout_s`."""
        url = f"{self.url.rstrip('/')}{path}"
        try:
            async with asyncio.timeout(timeout_s):
                return await self._loop_client().post(url, content=content)
        except TimeoutError as error:
            raise WorldError(f"The sandbox server {url} did not respond within {timeout_s:g} s.") from error
        except httpx.DecodingError as error:
            raise WorldError(f"{url} sent an unreadable response: {error}.") from error
        except httpx.HTTPError as error:
            message = f"The sandbox server {url} is unreachable: {type(error).__name__}: {error}."
            raise WorldError(message, self.hint) from error

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.aclose()

    def _loop_client(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            headers = {"Content-Type": "application/json", **PLAIN}
            if self.token:
                headers["Authorization"] = f"Bearer {self.token}"
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            hooks = bounded_replies(self.max_bytes)
            self._client = httpx.AsyncClient(
                headers=headers, limits=limits, timeout=None, trust_env=False, event_hooks=hooks
            )
            self._loop = loop
        return self._client


@dataclass(eq=False)
class HttpSandbox(Sandbox):
    """Base class of backends behind a URL. `margin_s` is added to the limits of a request."""

    settings: SandboxSettings
    margin_s: float = 30.0
    http: HttpClient = field(init=False)

    async def close(self) -> None:
        await self.http.close()


@dataclass(eq=False)
class RemoteSandbox(HttpSandbox):
    """The remote backend. Use and close it on one event loop."""

    name = "remote"

    def __post_init__(self) -> None:
        if not self.settings.url.startswith(("http://", "https://")) or not self.settings.token:
            raise UserError(
                "The remote backend needs a server's URL and token.",
                "Start a server with `ludus sandbox serve`; then set sandbox.url and sandbox.token.",
            )
        hint = "Check its log, or start it with `ludus sandbox serve`."
        self.http = HttpClient(self.settings.url, self.settings.token, hint, MAX_RESPONSE_BYTES)

    async def _run(self, request: RunRequest) -> Outcome:
        message = RunMessage.model_construct(
            source=None if request.source is None else request.source_bytes,
            argv=list(request.argv),
            files=dict(request.files),
            stdin=request.stdin,
            limits=request.limits,
        )
        return (await self.post("/v1/runs", message, Payload[Outcome], request.limits)).content

    async def _open_session(self, kind: SessionKind, files: Mapping[str, bytes], limits: Limits) -> SandboxSession:
        message = SessionMessage.model_construct(kind=kind, files=dict(files), limits=limits)
        created = await self.post("/v1/sessions", message, Payload[str], limits)
        return RemoteSession(self, created.content, limits)

    async def post(self, path: str, message: BaseModel, reply: type[Reply], limits: Limits) -> Reply:
        """POST a message and parse the response. Raises UserError if refused, WorldError on failures."""
        response = await self.http.post(path, message.model_dump_json(), limits.wall_s + self.margin_s)
        try:
            if response.status_code == httpx.codes.OK:
                return reply.model_validate_json(response.content)
            refused = ErrorMessage.model_validate_json(response.content)
        except ValidationError as error:
            raise WorldError(f"{response.url} returned {response.status_code} with an unreadable body.") from error
        kind = WorldError if refused.kind == "environment" else UserError
        raise kind(refused.message, refused.hint)


@dataclass(eq=False)
class RemoteSession(SandboxSession):
    """Client of a session on the server."""

    sandbox: RemoteSandbox
    session: str
    limits: Limits

    async def run(self, code: str) -> Outcome:
        message = Payload[bytes].model_construct(content=code.encode("utf-8", "surrogatepass"))
        return await self._post("run", message, Payload[Outcome])

    async def change(self, change: FileChange) -> None:
        validate_files(change.write)
        await self._post("change", Payload[FileChange].model_construct(content=change), Payload[None])

    async def snapshot(self) -> Snapshot:
        return await self._post("snapshot", Payload[None](content=None), Payload[Snapshot])

    async def processes(self) -> tuple[Process, ...]:
        return await self._post("processes", Payload[None](content=None), Payload[tuple[Process, ...]])

    async def restore(self, snapshot: Snapshot) -> None:
        validate_files(snapshot.files)
        await self._post("restore", Payload[Snapshot].model_construct(content=snapshot), Payload[None])

    async def reset(self) -> None:
        await self._post("reset", Payload[None](content=None), Payload[None])

    async def close(self) -> None:
        await self._post("close", Payload[None](content=None), Payload[None])

    async def _post(self, operation: str, message: BaseModel, reply: type[Payload[Content]]) -> Content:
        path = f"/v1/sessions/{self.session}/{operation}"
        return (await self.sandbox.post(path, message, reply, self.limits)).content
