"""Backends behind a URL: a `ludus sandbox serve` server, and the public services SandboxFusion and Piston.

Every request has a deadline: the limits plus a margin. Requests are never retried. The isolation of a public service
depends on its setup. Of the limits, only wall time and memory per process are requested; output beyond `output_bytes`
is cut here. Files are not returned, and there are no sessions.
"""

from __future__ import annotations

import base64
import json
import shlex
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Annotated, ClassVar, Generic, Literal, TypeVar

import httpx
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from ludus.errors import UserError, WorldError
from ludus.sandbox.base import (
    MIB,
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
from ludus.sandbox.guest.streams import BoundedOutput
from ludus.untrusted.json_client import JsonClient

Reply = TypeVar("Reply", bound=BaseModel)
Content = TypeVar("Content")


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")


class Payload(_Message, Generic[Content]):
    """Message with a run or its outcome, the code of a call, files of a session or changes to them, or nothing."""

    content: Content


class SessionMessage(_Message):
    """Request to open a session."""

    kind: SessionKind
    files: dict[str, bytes] = {}
    limits: Limits


@dataclass(eq=False)
class HttpSandbox(Sandbox):
    """Base class of backends behind a URL, for one event loop at a time.

    `margin_s` is added to the limits of a request. `hint` is for errors; `max_bytes` bounds a response.
    """

    settings: SandboxSettings
    margin_s: float = 30.0
    hint: ClassVar[str]
    max_bytes: ClassVar[int | None] = None

    @cached_property
    def client(self) -> JsonClient:
        """The HTTP client."""
        return JsonClient("sandbox server", self.settings.token, self.hint, self.max_bytes)

    async def close(self) -> None:
        await self.client.close()

    async def send(self, path: str, content: str, limits: Limits) -> httpx.Response:
        """POST JSON and return the response. Raises WorldError if none arrives in time."""
        return await self.client.send(self.url(path), content, limits.wall_s + self.margin_s)

    def url(self, path: str) -> str:
        """Return the URL of a path of the service."""
        return f"{self.settings.url.rstrip('/')}{path}"


@dataclass(eq=False)
class RemoteSandbox(HttpSandbox):
    """The remote backend. Use and close it on one event loop."""

    name = "remote"
    hint = "Check its log, or start it with `ludus sandbox serve`."
    max_bytes = 256 * 2**20  # of a response with all files of a run

    def __post_init__(self) -> None:
        if not self.settings.url.startswith(("http://", "https://")) or not self.settings.token:
            raise UserError(
                "The remote backend needs a server's URL and token.",
                "Start a server with `ludus sandbox serve`; then set sandbox.url and sandbox.token.",
            )

    async def _run(self, request: RunRequest) -> Outcome:
        message = Payload[RunRequest].model_construct(content=request)
        return (await self.post("/v1/runs", message, Payload[Outcome], request.limits)).content

    async def _open_session(self, kind: SessionKind, files: Mapping[str, bytes], limits: Limits) -> SandboxSession:
        message = SessionMessage.model_construct(kind=kind, files=dict(files), limits=limits)
        created = await self.post("/v1/sessions", message, Payload[str], limits)
        return RemoteSession(self, created.content, limits)

    async def post(self, path: str, message: BaseModel, reply: type[Reply], limits: Limits) -> Reply:
        """POST a message and parse the response. Raises UserError if refused, WorldError on failures."""
        return await self.client.post(self.url(path), message, reply, limits.wall_s + self.margin_s)


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


Text = Annotated[str, BeforeValidator(lambda value: "" if value is None else value)]


class FusionResult(BaseModel):
    """SandboxFusion's result of one command; a negative return code is a signal."""

    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    return_code: int | None = None
    execution_time: float | None = None
    stdout: Text = ""
    stderr: Text = ""


class FusionResponse(BaseModel):
    """SandboxFusion's response to `/run_code`; `SandboxError` is a failure of the service."""

    status: Literal["Success", "Failed", "SandboxError"]
    message: Text = ""
    run_result: FusionResult | None = None


class PistonResult(BaseModel):
    """Piston's result of the stage `run`. Newer releases add `status` (`TO`: timed out) and numbers."""

    stdout: Text = ""
    stderr: Text = ""
    code: int | None = None
    signal: str | None = None
    status: str | None = None
    message: str | None = None
    cpu_time: float | None = None
    wall_time: float | None = None
    memory: int | None = None


class PistonResponse(BaseModel):
    """Piston's response to `/api/v2/execute`."""

    run: PistonResult


@dataclass(eq=False)
class _Service(HttpSandbox):
    """Base class of execution services: one request per run.

    Raises UserError if the service refuses or stdin is not UTF-8, WorldError if the service fails.
    """

    hint = "See docs/use/sandbox.md for the required setup of the service."

    def __post_init__(self) -> None:
        if not self.settings.url.startswith(("http://", "https://")):
            raise UserError(f"The {self.name} backend needs the URL of its service.", "Set sandbox.url.")

    async def _post(self, path: str, request: RunRequest, message: Mapping[str, object], kind: type[Reply]) -> Reply:
        language = "bash" if request.source is None else "python"
        try:
            content = json.dumps({"language": language, "stdin": request.stdin.decode(), **message})
        except UnicodeDecodeError as error:
            raise UserError("Execution services require stdin to be valid UTF-8.") from error
        response = await self.send(path, content, request.limits)
        if response.is_client_error:
            raise UserError(f"{self.name} refused the run: {response.text[:500]}", self.hint)
        if response.is_error:
            raise WorldError(f"{self.name} returned {response.status_code}: {response.text[:500]}")
        try:
            return kind.model_validate_json(response.content)
        except ValidationError as error:
            raise WorldError(f"{self.name} sent an unreadable response: {response.text[:300]}") from error


class FusionSandbox(_Service):
    """SandboxFusion (`POST /run_code`)."""

    name = "sandbox_fusion"

    async def _run(self, request: RunRequest) -> Outcome:
        message = {
            "code": _code(request),
            "files": {path: base64.b64encode(data).decode() for path, data in request.files.items()},
            "run_timeout": request.limits.wall_s,
            "memory_limit_MB": max(1, request.limits.memory_bytes // MIB),
        }
        response = await self._post("/run_code", request, message, FusionResponse)
        result = response.run_result
        if response.status == "SandboxError" or result is None or result.status == "Error":
            raise WorldError(f"{self.name} failed: {response.message[:500] or 'no reason given'}")
        timed_out = result.status == "TimeLimitExceeded"
        return _outcome(request, result, result.return_code, timed_out, result.execution_time or 0.0)


class PistonSandbox(_Service):
    """Piston (`POST /api/v2/execute`); the service needs the packages `python` and `bash`."""

    name = "piston"

    async def _run(self, request: RunRequest) -> Outcome:
        main = {"name": "main.code", "content": _code(request), "encoding": "utf8"}
        # Piston treats base64 files as data and all others as code.
        files = [
            {"name": path, "content": base64.b64encode(data).decode(), "encoding": "base64"}
            for path, data in request.files.items()
        ]
        message = {
            "version": "*",
            "files": [main, *files],
            "run_timeout": ceil(1000 * request.limits.wall_s),
            "run_memory_limit": request.limits.memory_bytes,
        }
        result = (await self._post("/api/v2/execute", request, message, PistonResponse)).run
        if result.status == "XX":
            raise WorldError(f"{self.name} failed: {result.message or 'no reason given'}")
        code, timed_out = result.code, result.status == "TO" or (result.status is None and result.signal == "SIGKILL")
        if result.signal is not None:  # unknown names count as SIGKILL
            code = -int(signal.Signals.__members__.get(result.signal, signal.SIGKILL))
        outcome = _outcome(request, result, code, timed_out, (result.wall_time or 0.0) / 1000)
        return replace(outcome, cpu_s=(result.cpu_time or 0.0) / 1000, peak_memory_bytes=result.memory or 0)


def _outcome(
    request: RunRequest, result: FusionResult | PistonResult, code: int | None, timed_out: bool, wall_s: float
) -> Outcome:
    """Build an outcome and truncate its streams; a negative code is a signal."""
    outputs = [BoundedOutput(request.limits.output_bytes) for _ in range(2)]
    for output, text in zip(outputs, (result.stdout, result.stderr), strict=True):
        output.add(text.encode("utf-8", "surrogatepass"))
    omitted = sum(output.omitted_bytes for output in outputs)
    out, err = [output.take() for output in outputs]
    ended_by = -code if code is not None and code < 0 else None
    return Outcome(
        stdout=out,
        stderr=err,
        exit=code if ended_by is None and not timed_out else None,
        signal=ended_by,
        timed_out=timed_out,
        memory_exceeded=code == 1 and b"MemoryError" in err[-200:],
        truncated=omitted > 0,
        omitted_bytes=omitted,
        wall_s=wall_s,
    )


def _code(request: RunRequest) -> str:
    if request.source is None:
        return shlex.join(request.argv)
    return request.source.decode("utf-8", "replace")
