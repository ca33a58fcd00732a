"""Backend that runs programs on another machine through `ludus sandbox serve`.

Every request has a deadline: the limits plus a margin. Requests are never retried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    SandboxSession,
    SessionKind,
    Snapshot,
    checked_files,
    make_order,
)
from ludus.sandbox.remote.client_session import MOST_BYTES, HttpClient
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

_MARGIN_S = 30.0
Reply = TypeVar("Reply", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """`url` and `token` of the server; `margin_s` is added to the limits of each run."""

    url: str
    token: str
    margin_s: float = _MARGIN_S


@dataclass(eq=False)
class RemoteSandbox:
    """The remote backend. Use and close it on one event loop."""

    settings: RemoteSettings
    name: str = field(default="remote", init=False)
    _asker: HttpClient = field(init=False)

    def __post_init__(self) -> None:
        if not self.settings.url.startswith(("http://", "https://")) or not self.settings.token:
            raise UserError(
                "The remote backend needs a server's URL and token.",
                "Start a server with `ludus sandbox serve`; then set sandbox.url and sandbox.token.",
            )
        hint = "Check its log, or start it with `ludus sandbox serve`."
        self._asker = HttpClient(self.settings.url, self.settings.token, hint, MOST_BYTES)

    async def run(
        self,
        program: str | Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        limits: Limits | None = None,
    ) -> Outcome:
        """Run on the server. Raises UserError and WorldError as in the protocol."""
        order = make_order(program, files, stdin, limits)
        source = None if order.source is None else order.source.encode("utf-8", "surrogatepass")
        asked = RunMessage.model_construct(
            source=source,
            argv=list(order.argv),
            files=dict(order.files),
            stdin=stdin,
            limits=LimitsMessage.of(order.limits),
        )
        return (await self.ask("/v1/runs", asked, OutcomeMessage, order.limits.wall_s)).outcome()

    async def session(
        self, kind: SessionKind = "python", *, files: Mapping[str, bytes] | None = None, limits: Limits | None = None
    ) -> SandboxSession:
        """Open a session on the server. Raises UserError and WorldError."""
        own = limits or Limits()
        asked = SessionMessage.model_construct(
            kind=kind, files=dict(checked_files(files or {})), limits=LimitsMessage.of(own)
        )
        named = await self.ask("/v1/sessions", asked, NamedSession, own.wall_s)
        return RemoteSession(self, named.session, own)

    async def close(self) -> None:
        """Close the connections."""
        await self._asker.close()

    async def ask(self, path: str, asked: BaseModel, reply: type[Reply], wall_s: float) -> Reply:
        """POST a request and parse the response. Raises UserError if refused, WorldError on failures."""
        content, within_s = asked.model_dump_json(), wall_s + self.settings.margin_s
        response = await self._asker.post(path, content, within_s)
        try:
            if response.status_code == httpx.codes.OK:
                return reply.model_validate_json(response.content)
            refusal = Refusal.model_validate_json(response.content)
        except ValidationError as error:
            raise WorldError(f"{response.url} answered {response.status_code} with an unreadable body.") from error
        kind = WorldError if refusal.kind == "environment" else UserError
        raise kind(refusal.message, refusal.hint)


@dataclass(eq=False)
class RemoteSession:
    """A session on the server."""

    sandbox: RemoteSandbox
    session: str
    limits: Limits

    async def run(self, code: str) -> Outcome:
        """Run a call. Raises UserError and WorldError."""
        asked = CallMessage.model_construct(code=code.encode("utf-8", "surrogatepass"))
        return (await self._ask("run", asked, OutcomeMessage)).outcome()

    async def write(self, files: Mapping[str, bytes]) -> None:
        """Write files to the session's folder. Raises UserError and WorldError."""
        await self.change(FileChange(checked_files(files)))

    async def change(self, change: FileChange) -> None:
        """Write, mark and remove files. Raises UserError and WorldError."""
        asked = ChangeMessage.model_construct(
            write=dict(change.write), executable=dict(change.executable), remove=sorted(change.remove)
        )
        await self._ask("change", asked, Nothing)

    async def snapshot(self) -> Snapshot:
        """Return the regular files. Raises WorldError."""
        return (await self._ask("snapshot", Nothing(), SnapshotMessage)).snapshot()

    async def processes(self) -> tuple[Process, ...]:
        """List the processes. Raises WorldError."""
        return (await self._ask("processes", Nothing(), ProcessesMessage)).told()

    async def restore(self, snapshot: Snapshot) -> None:
        """Replace the files by those of the snapshot. Raises WorldError."""
        executable = sorted(snapshot.executable)
        files = dict(checked_files(snapshot.files))
        await self._ask("restore", SnapshotMessage.model_construct(files=files, executable=executable), Nothing)

    async def reset(self) -> None:
        """Restart the session. Raises WorldError."""
        await self._ask("reset", Nothing(), Nothing)

    async def close(self) -> None:
        """End the session on the server."""
        await self._ask("close", Nothing(), Nothing)

    async def _ask(self, act: str, asked: BaseModel, reply: type[Reply]) -> Reply:
        return await self.sandbox.ask(f"/v1/sessions/{self.session}/{act}", asked, reply, self.limits.wall_s)
