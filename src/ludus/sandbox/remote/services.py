"""Public execution services as backends: SandboxFusion and Piston.

Isolation depends on the service's setup. Of the limits, only the clock and the memory per process are
requested; output beyond `output_bytes` is cut here. Files are not returned, and there are no sessions.
"""

from __future__ import annotations

import base64
import json
import shlex
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Annotated, Literal, TypeVar

import httpx
from pydantic import BaseModel, BeforeValidator, ValidationError

from ludus.errors import UserError, WorldError
from ludus.sandbox.base import MIB, Limits, Outcome, RunOrder, RunsOnly, make_order
from ludus.sandbox.guest.output import BoundedOutput
from ludus.sandbox.remote.client_session import HttpClient

_MARGIN_S = 30.0
_SERVICES = "See docs/use/sandbox.md for the required setup of the service."
Answer = TypeVar("Answer", bound=BaseModel)
Text = Annotated[str, BeforeValidator(lambda value: "" if value is None else value)]


class FusionResult(BaseModel):
    """SandboxFusion's result of one command; a negative return code is a signal."""

    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    return_code: int | None = None
    execution_time: float | None = None
    stdout: Text = ""
    stderr: Text = ""


class FusionAnswer(BaseModel):
    """SandboxFusion's response to `/run_code`; `SandboxError` is a failure of the service."""

    status: Literal["Success", "Failed", "SandboxError"]
    message: Text = ""
    run_result: FusionResult | None = None


class PistonRun(BaseModel):
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


class PistonAnswer(BaseModel):
    """Piston's response to `/api/v2/execute`."""

    run: PistonRun


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """`url` of the service; `token`, if set, is sent as a bearer token; `margin_s` is added to the limits of
    each run."""

    url: str
    token: str = ""
    margin_s: float = _MARGIN_S


@dataclass(frozen=True, slots=True)
class _Ended:
    """Result of a run at a service; a negative code is a signal."""

    stdout: str
    stderr: str
    code: int | None
    late: bool
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_memory_bytes: int = 0

    def outcome(self, limits: Limits) -> Outcome:
        """Convert to an `Outcome` with truncated streams."""
        streams, left_out = [], 0
        for text in (self.stdout, self.stderr):
            kept = BoundedOutput(limits.output_bytes)
            kept.add(text.encode("utf-8", "surrogatepass"))
            left_out += kept.left_out
            streams.append(kept.take())
        ended_by = -self.code if self.code is not None and self.code < 0 else None
        return Outcome(
            stdout=streams[0],
            stderr=streams[1],
            exit=self.code if ended_by is None and not self.late else None,
            signal=ended_by,
            timed_out=self.late,
            memory_exceeded=self.code == 1 and b"MemoryError" in streams[1][-200:],
            truncated=left_out > 0,
            left_out_bytes=left_out,
            wall_s=self.wall_s,
            cpu_s=self.cpu_s,
            peak_memory_bytes=self.peak_memory_bytes,
        )


@dataclass(eq=False)
class _Service(RunsOnly, ABC):
    """Common part of the services: one request per run."""

    settings: ServiceSettings
    _asker: HttpClient = field(init=False)

    def __post_init__(self) -> None:
        if not self.settings.url.startswith(("http://", "https://")):
            raise UserError(f"The {self.name} backend needs the URL of its service.", "Set sandbox.url.")
        self._asker = HttpClient(self.settings.url, self.settings.token, _SERVICES)

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the backend."""

    @abstractmethod
    async def _ask(self, order: RunOrder) -> Outcome:
        """Run at the service."""

    async def run(
        self,
        program: str | Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        limits: Limits | None = None,
    ) -> Outcome:
        """Run at the service; the outcome has no files. Raises UserError if the service refuses or stdin is
        not UTF-8, WorldError if the service fails."""
        return await self._ask(make_order(program, files, stdin, limits))

    async def close(self) -> None:
        """Close the connections."""
        await self._asker.close()

    async def _post(self, path: str, asked: Mapping[str, object], limits: Limits) -> httpx.Response:
        """POST and return the response. Raises UserError with the service's message if it refuses."""
        within_s = limits.wall_s + self.settings.margin_s
        response = await self._asker.post(path, json.dumps(asked), within_s)
        if response.is_client_error:
            raise UserError(f"{self.name} refused the run: {response.text[:500]}", _SERVICES)
        if response.is_error:
            raise WorldError(f"{self.name} answered {response.status_code}: {response.text[:500]}")
        return response


@dataclass(eq=False)
class FusionSandbox(_Service):
    """SandboxFusion (`POST /run_code`)."""

    @property
    def name(self) -> str:
        """Name of the backend."""
        return "sandbox_fusion"

    async def _ask(self, order: RunOrder) -> Outcome:
        language, code = _code_of(order)
        asked = {
            "language": language,
            "code": code,
            "stdin": _text(order.stdin),
            "files": {path: base64.b64encode(data).decode() for path, data in order.files.items()},
            "run_timeout": order.limits.wall_s,
            "memory_limit_MB": max(1, order.limits.memory_bytes // MIB),
        }
        response = await self._post("/run_code", asked, order.limits)
        answer = _parsed(FusionAnswer, response, self.name)
        done = answer.run_result
        if answer.status == "SandboxError" or done is None or done.status == "Error":
            raise WorldError(f"{self.name} failed: {answer.message[:500] or 'no reason given'}")
        late = done.status == "TimeLimitExceeded"
        ended = _Ended(done.stdout, done.stderr, done.return_code, late, wall_s=done.execution_time or 0.0)
        return ended.outcome(order.limits)


@dataclass(eq=False)
class PistonSandbox(_Service):
    """Piston (`POST /api/v2/execute`); the service needs the packages `python` and `bash`."""

    @property
    def name(self) -> str:
        """Name of the backend."""
        return "piston"

    async def _ask(self, order: RunOrder) -> Outcome:
        language, code = _code_of(order)
        main = {"name": "main.code", "content": code, "encoding": "utf8"}
        asked = {
            "language": language,
            "version": "*",
            "files": [main, *({"name": path, **_encoded(data)} for path, data in order.files.items())],
            "stdin": _text(order.stdin),
            "run_timeout": ceil(1000 * order.limits.wall_s),
            "run_memory_limit": order.limits.memory_bytes,
        }
        response = await self._post("/api/v2/execute", asked, order.limits)
        done = _parsed(PistonAnswer, response, self.name).run
        if done.status == "XX":
            raise WorldError(f"{self.name} failed: {done.message or 'no reason given'}")
        ended_by = None if done.signal is None else _number(done.signal)
        ended = _Ended(
            done.stdout,
            done.stderr,
            code=done.code if ended_by is None else -ended_by,
            late=done.status == "TO" or (done.status is None and done.signal == "SIGKILL"),
            wall_s=(done.wall_time or 0.0) / 1000,
            cpu_s=(done.cpu_time or 0.0) / 1000,
            peak_memory_bytes=done.memory or 0,
        )
        return ended.outcome(order.limits)


def _code_of(order: RunOrder) -> tuple[str, str]:
    """Return language and code; a command becomes a bash line."""
    if order.source is None:
        return "bash", shlex.join(order.argv)
    return "python", order.source.encode("utf-8", "replace").decode()


def _text(data: bytes) -> str:
    """Decode bytes for the services. Raises UserError."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserError("Execution services require stdin to be valid UTF-8.") from error


def _encoded(data: bytes) -> dict[str, str]:
    """Encode a file for Piston, which treats base64 files as data and all others as code."""
    return {"content": base64.b64encode(data).decode(), "encoding": "base64"}


def _number(name: str) -> int:
    """Return a signal by name; unknown names count as SIGKILL."""
    return int(signal.Signals.__members__.get(name, signal.SIGKILL))


def _parsed(kind: type[Answer], response: httpx.Response, name: str) -> Answer:
    """Parse the response. Raises WorldError."""
    try:
        return kind.model_validate_json(response.content)
    except ValidationError as error:
        raise WorldError(f"{name} sent an unreadable response: {response.text[:300]}") from error
