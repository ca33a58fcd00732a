"""Public execution services as backends: SandboxFusion and Piston.

Isolation depends on the service's setup. Of the limits, only wall time and memory per process are requested; output
beyond `output_bytes` is cut here. Files are not returned, and there are no sessions.
"""

from __future__ import annotations

import base64
import json
import shlex
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ValidationError

from ludus.errors import UserError, WorldError
from ludus.sandbox.base import MIB, Outcome, RunRequest
from ludus.sandbox.guest.streams import BoundedOutput
from ludus.sandbox.remote.client import HttpClient, HttpSandbox, Reply

_SETUP_HINT = "See docs/use/sandbox.md for the required setup of the service."
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

    def __post_init__(self) -> None:
        if not self.settings.url.startswith(("http://", "https://")):
            raise UserError(f"The {self.name} backend needs the URL of its service.", "Set sandbox.url.")
        self.http = HttpClient(self.settings.url, self.settings.token, _SETUP_HINT)

    async def _post(self, path: str, request: RunRequest, message: Mapping[str, object], kind: type[Reply]) -> Reply:
        language = "bash" if request.source is None else "python"
        try:
            content = json.dumps({"language": language, "stdin": request.stdin.decode(), **message})
        except UnicodeDecodeError as error:
            raise UserError("Execution services require stdin to be valid UTF-8.") from error
        response = await self.http.post(path, content, request.limits.wall_s + self.margin_s)
        if response.is_client_error:
            raise UserError(f"{self.name} refused the run: {response.text[:500]}", _SETUP_HINT)
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
    return request.source.encode("utf-8", "replace").decode()
