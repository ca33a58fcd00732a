"""Public execution services behind the protocol: SandboxFusion and Piston.

A service isolates as it was set up to; of the limits only the clock and the memory of a process are asked of
it, and output beyond `output_bytes` is cut here. No files come back, and there are no sessions.
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
_SERVICES = "docs/sandbox.md says what such a service must be set up to do."
Answer = TypeVar("Answer", bound=BaseModel)
Text = Annotated[str, BeforeValidator(lambda value: "" if value is None else value)]


class FusionResult(BaseModel):
    """What SandboxFusion says of one command; a negative return code is a signal."""

    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    return_code: int | None = None
    execution_time: float | None = None
    stdout: Text = ""
    stderr: Text = ""


class FusionAnswer(BaseModel):
    """SandboxFusion's answer to `/run_code`; `SandboxError` is its own failure."""

    status: Literal["Success", "Failed", "SandboxError"]
    message: Text = ""
    run_result: FusionResult | None = None


class PistonRun(BaseModel):
    """What Piston says of the stage `run`. Newer releases add `status` (`TO` is the clock) and numbers."""

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
    """Piston's answer to `/api/v2/execute`."""

    run: PistonRun


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """`url` is the service's; `token`, where it is not empty, goes as a bearer token; `margin_s` is added to
    the limits of each run."""

    url: str
    token: str = ""
    margin_s: float = _MARGIN_S


@dataclass(frozen=True, slots=True)
class _Ended:
    """How a run ended at a service; a negative code is a signal."""

    stdout: str
    stderr: str
    code: int | None
    late: bool
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_memory_bytes: int = 0

    def outcome(self, limits: Limits) -> Outcome:
        """As an outcome, with streams cut as everywhere."""
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
    """What the services share: one question a run."""

    settings: ServiceSettings
    _asker: HttpClient = field(init=False)

    def __post_init__(self) -> None:
        if not self.settings.url.startswith(("http://", "https://")):
            raise UserError(f"The {self.name} backend needs the address of its service.", "Set sandbox.url.")
        self._asker = HttpClient(self.settings.url, self.settings.token, _SERVICES)

    @property
    @abstractmethod
    def name(self) -> str:
        """The backend's name."""

    @abstractmethod
    async def _ask(self, order: RunOrder) -> Outcome:
        """Run it there."""

    async def run(
        self,
        program: str | Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        limits: Limits | None = None,
    ) -> Outcome:
        """One run at the service; its outcome has no files. Raises UserError for what the service refuses
        and for stdin that is no UTF-8, WorldError where the service fails."""
        return await self._ask(make_order(program, files, stdin, limits))

    async def close(self) -> None:
        """Close the connections."""
        await self._asker.close()

    async def _post(self, path: str, asked: Mapping[str, object], limits: Limits) -> httpx.Response:
        """The answer. Raises UserError for a refusal, with the service's words."""
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
        """The backend's name."""
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
            raise WorldError(f"{self.name} failed: {answer.message[:500] or 'it gives no reason'}")
        late = done.status == "TimeLimitExceeded"
        ended = _Ended(done.stdout, done.stderr, done.return_code, late, wall_s=done.execution_time or 0.0)
        return ended.outcome(order.limits)


@dataclass(eq=False)
class PistonSandbox(_Service):
    """Piston (`POST /api/v2/execute`); the service needs the packages `python` and `bash`."""

    @property
    def name(self) -> str:
        """The backend's name."""
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
            raise WorldError(f"{self.name} failed: {done.message or 'it gives no reason'}")
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
    """Language and code: a command is a line for bash."""
    if order.source is None:
        return "bash", shlex.join(order.argv)
    return "python", order.source.encode("utf-8", "replace").decode()


def _text(data: bytes) -> str:
    """Bytes as the services take them. Raises UserError."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserError("Execution services take stdin as text; this one is no UTF-8.") from error


def _encoded(data: bytes) -> dict[str, str]:
    """A file for Piston, which takes files in base64 for data and all others for code."""
    return {"content": base64.b64encode(data).decode(), "encoding": "base64"}


def _number(name: str) -> int:
    """A signal by its name; one that this machine does not know counts as SIGKILL."""
    return int(signal.Signals.__members__.get(name, signal.SIGKILL))


def _parsed(kind: type[Answer], response: httpx.Response, name: str) -> Answer:
    """The answer in its form. Raises WorldError."""
    try:
        return kind.model_validate_json(response.content)
    except ValidationError as error:
        raise WorldError(f"{name} answered what cannot be read: {response.text[:300]}") from error
