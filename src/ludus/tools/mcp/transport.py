"""Transports to MCP servers through a `MessageFilter`: standard streams of a program, and HTTP.

They replace those of the package `mcp`, which buffer lines and bodies of unbounded length.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Final, cast

import anyio

from ludus.tools.mcp.messages import MessageFilter
from ludus.untrusted.replies import PLAIN

if TYPE_CHECKING:
    import httpx2
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
    from mcp.client._transport import TransportStreams
    from mcp.shared.message import SessionMessage

_CHUNK_BYTES: Final = 2**16
_EXIT_TIMEOUT_S: Final = 2.0
"""Time for a program to exit after its input is closed, and again after SIGTERM (s)."""
_POLL_S: Final = 0.01
_LAUNCH_SCRIPT: Final = """setpriv --pdeathsig KILL true 2>/dev/null && exec setpriv --pdeathsig KILL "$@"
exec "$@"
"""
"""Shell script that executes the server. If util-linux is installed, the kernel kills the server when this
process exits, even if the server hangs and does not read its closed input."""


@dataclass(frozen=True, slots=True)
class ServerProgram:
    """Server program on standard streams. `errors` is the file for its stderr."""

    command: Sequence[str]
    env: Mapping[str, str]
    cwd: str | None
    errors: IO[str]


@asynccontextmanager
async def program_transport(program: ServerProgram, filters: MessageFilter) -> AsyncIterator[TransportStreams]:
    """Start the program; on exit, close its input and stop it with its descendants."""
    from mcp.client.stdio import get_default_environment
    from mcp.shared.message import SessionMessage

    process = await asyncio.create_subprocess_exec(
        *("/bin/sh", "-c", _LAUNCH_SCRIPT, "sh", *program.command),
        env=get_default_environment() | dict(program.env),
        cwd=program.cwd,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=program.errors,
        start_new_session=True,
    )
    answers, reader = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    writer, requests = anyio.create_memory_object_stream[SessionMessage](0)
    async with anyio.create_task_group() as group:
        group.start_soon(_read, process, filters, answers)
        group.start_soon(_write, process, requests)
        try:
            yield reader, writer
        finally:
            with anyio.CancelScope(shield=True):
                reader.close()
                writer.close()
                await _stop(process)
            group.cancel_scope.cancel()


async def _read(
    child: asyncio.subprocess.Process, filters: MessageFilter, sink: MemoryObjectSendStream[SessionMessage | Exception]
) -> None:
    """Forward the program's messages; if the receiver is closed, drain the output so that the program can exit."""
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter

    parts = _stdout_chunks(child)
    async with sink:
        async for line in filters.lines(parts):
            try:
                message = SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
            except ValueError as error:
                taken: SessionMessage | Exception = error
            else:
                taken = message
            try:
                await sink.send(taken)
            except (anyio.ClosedResourceError, anyio.BrokenResourceError):
                break
    async for _ in parts:
        pass


async def _stdout_chunks(process: asyncio.subprocess.Process) -> AsyncIterator[bytes]:
    assert process.stdout is not None
    while part := await process.stdout.read(_CHUNK_BYTES):
        yield part


async def _write(process: asyncio.subprocess.Process, requests: MemoryObjectReceiveStream[SessionMessage]) -> None:
    assert process.stdin is not None
    with suppress(OSError):  # its output also ends, which the session detects
        async with requests:
            async for request in requests:
                line = request.message.model_dump_json(by_alias=True, exclude_unset=True)
                process.stdin.write(f"{line}\n".encode())
                await process.stdin.drain()
    process.stdin.close()


async def _stop(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    for number in (signal.SIGTERM, signal.SIGKILL):
        if await _has_ended(process):
            break
        _kill_group(process, number)
    _kill_group(process, signal.SIGKILL)
    await _has_ended(process)


async def _has_ended(process: asyncio.subprocess.Process) -> bool:
    """Return whether the process exits in time. `Process.wait` would also wait for children that hold its stdout."""
    for _ in range(round(_EXIT_TIMEOUT_S / _POLL_S)):
        if process.returncode is not None:
            return True
        await asyncio.sleep(_POLL_S)
    return False


def _kill_group(process: asyncio.subprocess.Process, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def filtered_client(headers: Mapping[str, str], filters: MessageFilter) -> httpx2.AsyncClient:
    """Create an HTTP client whose responses pass the filter."""
    import httpx2
    from mcp.shared._httpx_utils import create_mcp_http_client

    class Filtered(httpx2.AsyncByteStream):
        """Response body after filtering."""

        def __init__(self, response: httpx2.Response) -> None:
            self.inner = cast(httpx2.AsyncByteStream, response.stream)
            self.kind = response.headers.get("Content-Type", "").lower()
            self.call = _request_id(response.request.content) if response.is_success else None

        async def __aiter__(self) -> AsyncIterator[bytes]:
            read = None
            if self.kind.startswith("text/event-stream"):
                read = filters.events
            elif self.kind.startswith("application/json"):
                read = filters.body
            if read is not None:
                async for part in read(aiter(self.inner), self.call):
                    yield part

        async def aclose(self) -> None:
            await self.inner.aclose()

    async def take(response: httpx2.Response) -> None:
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise httpx2.DecodingError("the response is compressed, which the request did not accept")
        response.stream = Filtered(response)

    client = create_mcp_http_client(headers={**headers, **PLAIN})
    client.event_hooks = {"response": [take]}
    return client


def _request_id(request: bytes) -> bytes | None:
    number = json.loads(request).get("id") if request else None
    return None if number is None else json.dumps(number).encode()
