"""Backend that runs programs on another machine through `ludus sandbox serve`, and its HTTP client.

Every request has a deadline: the limits plus a margin. Requests are never retried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from ludus.errors import UserError, WorldError
from ludus.sandbox.base import (
    FileChange,
    Limits,
    Outcome,
    Process,
    RunRequest,
    Sandbox,
    SandboxSession,
    SessionKind,
    Snapshot,
    validate_files,
)
from ludus.sandbox.remote import messages
from ludus.untrusted.replies import PLAIN, bounded_replies

MAX_RESPONSE_BYTES = 256 * 2**20
"""Maximum size of a response with all files of a run."""
Reply = TypeVar("Reply", bound=BaseModel)


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
        """Close the connections; must run on the same event loop."""
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


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """`url` of a server or service; `token` is sent as a bearer token; `margin_s` is added to a run's limits."""

    url: str
    token: str = ""
    margin_s: float = 30.0


@dataclass(eq=False)
class RemoteSandbox(Sandbox):
    """The remote backend. Use and close it on one event loop."""

    name = "remote"
    settings: RemoteSettings
    _http: HttpClient = field(init=False)

    def __post_init__(self) -> None:
        if not self.settings.url.startswith(("http://", "https://")) or not self.settings.token:
            raise UserError(
                "The remote backend needs a server's URL and token.",
                "Start a server with `ludus sandbox serve`; then set sandbox.url and sandbox.token.",
            )
        hint = "Check its log, or start it with `ludus sandbox serve`."
        self._http = HttpClient(self.settings.url, self.settings.token, hint, MAX_RESPONSE_BYTES)

    async def _run(self, request: RunRequest) -> Outcome:
        message = messages.RunMessage.model_construct(
            source=None if request.source is None else request.source_bytes,
            argv=list(request.argv),
            files=dict(request.files),
            stdin=request.stdin,
            limits=request.limits,
        )
        return (await self.post("/v1/runs", message, messages.OutcomeMessage, request.limits)).outcome

    async def _open_session(self, kind: SessionKind, files: Mapping[str, bytes], limits: Limits) -> SandboxSession:
        message = messages.SessionMessage.model_construct(kind=kind, files=dict(files), limits=limits)
        created = await self.post("/v1/sessions", message, messages.SessionCreated, limits)
        return RemoteSession(self, created.session, limits)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def post(self, path: str, message: BaseModel, reply: type[Reply], limits: Limits) -> Reply:
        """POST a message and parse the response. Raises UserError if refused, WorldError on failures."""
        response = await self._http.post(path, message.model_dump_json(), limits.wall_s + self.settings.margin_s)
        try:
            if response.status_code == httpx.codes.OK:
                return reply.model_validate_json(response.content)
            refused = messages.ErrorMessage.model_validate_json(response.content)
        except ValidationError as error:
            raise WorldError(f"{response.url} returned {response.status_code} with an unreadable body.") from error
        kind = WorldError if refused.kind == "environment" else UserError
        raise kind(refused.message, refused.hint)


@dataclass(eq=False)
class RemoteSession(SandboxSession):
    """A session on the server."""

    sandbox: RemoteSandbox
    session: str
    limits: Limits

    async def run(self, code: str) -> Outcome:
        message = messages.CallMessage.model_construct(code=code.encode("utf-8", "surrogatepass"))
        return (await self._post("run", message, messages.OutcomeMessage)).outcome

    async def change(self, change: FileChange) -> None:
        validate_files(change.write)
        await self._post("change", messages.ChangeMessage.model_construct(change=change), messages.EmptyMessage)

    async def snapshot(self) -> Snapshot:
        return (await self._post("snapshot", messages.EmptyMessage(), messages.SnapshotMessage)).snapshot

    async def processes(self) -> tuple[Process, ...]:
        return (await self._post("processes", messages.EmptyMessage(), messages.ProcessesMessage)).processes

    async def restore(self, snapshot: Snapshot) -> None:
        validate_files(snapshot.files)
        await self._post("restore", messages.SnapshotMessage.model_construct(snapshot=snapshot), messages.EmptyMessage)

    async def reset(self) -> None:
        await self._post("reset", messages.EmptyMessage(), messages.EmptyMessage)

    async def close(self) -> None:
        await self._post("close", messages.EmptyMessage(), messages.EmptyMessage)

    async def _post(self, operation: str, message: BaseModel, reply: type[Reply]) -> Reply:
        return await self.sandbox.post(f"/v1/sessions/{self.session}/{operation}", message, reply, self.limits)
