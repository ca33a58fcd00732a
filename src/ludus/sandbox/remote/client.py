"""The backend whose programs run elsewhere: behind `ludus sandbox serve` on another machine.

Every question has a deadline: what the limits allow and a margin. A question is never sent twice.
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
    """`url` is the server's, `token` what it asks for; `margin_s` is added to the limits of each run."""

    url: str
    token: str
    margin_s: float = _MARGIN_S


@dataclass(eq=False)
class RemoteSandbox:
    """See the module. Use it on one event loop at a time, and `close` it there."""

    settings: RemoteSettings
    name: str = field(default="remote", init=False)
    _asker: HttpClient = field(init=False)

    def __post_init__(self) -> None:
        if not self.settings.url.startswith(("http://", "https://")) or not self.settings.token:
            raise UserError(
                "The remote backend needs the address and the token of a server.",
                "Start one: ludus sandbox serve; then set sandbox.url and sandbox.token.",
            )
        hint = "Look at its log, or start it: ludus sandbox serve"
        self._asker = HttpClient(self.settings.url, self.settings.token, hint, MOST_BYTES)

    async def run(
        self,
        program: str | Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        limits: Limits | None = None,
    ) -> Outcome:
        """One run on the server. Raises UserError and WorldError as the protocol says."""
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
        self,
        kind: SessionKind = "python",
        *,
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
    ) -> SandboxSession:
        """A session on the server. Raises UserError and WorldError."""
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
        """A POST and its answer. Raises UserError for what the server refuses, WorldError for what fails."""
        content, within_s = asked.model_dump_json(), wall_s + self.settings.margin_s
        response = await self._asker.post(path, content, within_s)
        try:
            if response.status_code == httpx.codes.OK:
                return reply.model_validate_json(response.content)
            refusal = Refusal.model_validate_json(response.content)
        except ValidationError as error:
            raise WorldError(
                f"{response.url} answered {response.status_code} and nothing that can be read."
            ) from error
        kind = WorldError if refusal.kind == "environment" else UserError
        raise kind(refusal.message, refusal.hint)


@dataclass(eq=False)
class RemoteSession:
    """A session that the server keeps."""

    sandbox: RemoteSandbox
    session: str
    limits: Limits

    async def run(self, code: str) -> Outcome:
        """One call. Raises UserError and WorldError."""
        asked = CallMessage.model_construct(code=code.encode("utf-8", "surrogatepass"))
        return (await self._ask("run", asked, OutcomeMessage)).outcome()

    async def write(self, files: Mapping[str, bytes]) -> None:
        """Put files into its folder. Raises UserError and WorldError."""
        await self.change(FileChange(checked_files(files)))

    async def change(self, change: FileChange) -> None:
        """Write, mark and remove files of its folder. Raises UserError and WorldError."""
        asked = ChangeMessage.model_construct(
            write=dict(change.write), executable=dict(change.executable), remove=sorted(change.remove)
        )
        await self._ask("change", asked, Nothing)

    async def snapshot(self) -> Snapshot:
        """Its regular files. Raises WorldError."""
        return (await self._ask("snapshot", Nothing(), SnapshotMessage)).snapshot()

    async def processes(self) -> tuple[Process, ...]:
        """What runs in it. Raises WorldError."""
        return (await self._ask("processes", Nothing(), ProcessesMessage)).told()

    async def restore(self, snapshot: Snapshot) -> None:
        """Replace its files by those of the snapshot. Raises WorldError."""
        executable = sorted(snapshot.executable)
        files = dict(checked_files(snapshot.files))
        await self._ask(
            "restore", SnapshotMessage.model_construct(files=files, executable=executable), Nothing
        )

    async def reset(self) -> None:
        """Start anew. Raises WorldError."""
        await self._ask("reset", Nothing(), Nothing)

    async def close(self) -> None:
        """End it on the server."""
        await self._ask("close", Nothing(), Nothing)

    async def _ask(self, act: str, asked: BaseModel, reply: type[Reply]) -> Reply:
        return await self.sandbox.ask(f"/v1/sessions/{self.session}/{act}", asked, reply, self.limits.wall_s)
