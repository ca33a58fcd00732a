"""Transports to MCP servers through a `MessageFilter`: standard streams of a program, and HTTP.

They replace those of the package `mcp`, which buffer and parse messages of any size on its event loop. Here long
messages are parsed in a limited process (`call_bounded`), results are converted to text, and output schemas, whose
patterns the package would match on its loop, are dropped. An unacceptable message is replaced by a JSON-RPC error
response to its call.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Final, cast

import anyio

from ludus.types import JSON
from ludus.untrusted.json_client import PLAIN
from ludus.untrusted.worker import LimitExceeded, call_bounded, close_pipes, kill_group

if TYPE_CHECKING:
    import httpx2
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
    from mcp.client._transport import TransportStreams
    from mcp.shared.message import SessionMessage

MAX_BYTES: Final = 8 * 2**20  # default maximum number of bytes of one message
MAX_VALUES: Final = 65_536
"""Maximum number of values of a reduced message; the package validates each on its event loop."""
MAX_ITEMS: Final = 1_024  # maximum number of content items of a result, and of tools per page
_SHORT: Final = 2**16  # maximum number of bytes of a message that is parsed in this process
_ENDS: Final = 512  # bytes at either end of a message searched for its id if it is not parsed
_INTERNAL_ERROR: Final = -32603
_ID: Final = rb'"id"\s*:\s*(\d{1,18}|"[^"\\]{1,64}")'
_FIRST_ID: Final = re.compile(rb'\A\s*\{(?:\s*"jsonrpc"\s*:\s*"2\.0"\s*,)?\s*' + _ID)
_LAST_ID: Final = re.compile(_ID + rb'\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*\Z')
_LINE: Final = re.compile(rb"\r\n|\n|\r")
_BLANK: Final = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_CHUNK_BYTES: Final = 2**16
_EXIT_TIMEOUT_S: Final = 2.0  # time for a program to exit after its input is closed, and again after SIGTERM (s)
_POLL_S: Final = 0.01
_LAUNCH_SCRIPT: Final = """setpriv --pdeathsig KILL true 2>/dev/null && exec setpriv --pdeathsig KILL "$@"
exec "$@"
"""
"""Shell script that executes the server. If util-linux is installed, the kernel kills the server when this
process exits, even if the server hangs and does not read its closed input."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MessageFilter:
    """Filter between a server and the `mcp` package."""

    max_bytes: int = MAX_BYTES

    async def message(self, raw: bytes, call: bytes | None = None) -> bytes | None:
        """Return the reduced message, or None if refused and not a response to a call; `call` is its JSON id."""
        if len(raw) > self.max_bytes:
            return self.oversized_error(raw, raw, call)
        try:
            return reduce_message(raw) if len(raw) <= _SHORT else await call_bounded(reduce_message, raw)
        except LimitExceeded:
            return _error_response("its answer takes too much time or memory to be read", raw, raw, call)
        except (ValueError, RecursionError) as error:
            return _error_response(f"its answer cannot be read: {error}"[:300], raw, raw, call)

    def oversized_error(self, head: bytes, tail: bytes, call: bytes | None = None) -> bytes | None:
        """Return the error response for an oversized message, given its two ends."""
        return _error_response(f"its answer has more than {self.max_bytes} bytes", head, tail, call)

    async def lines(self, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the messages of a line stream. Only the ends of an oversized line are buffered."""
        line, head = bytearray(), b""
        async for part in parts:
            *whole, rest = part.split(b"\n")
            for piece in whole:
                line += piece
                filtered = self.oversized_error(head, bytes(line)) if head else await self.message(bytes(line))
                line, head = bytearray(), b""
                if filtered is not None:
                    yield filtered
            line += rest
            if len(line) > self.max_bytes:
                head = head or bytes(line[:_ENDS])
            if head:
                del line[:-_ENDS]

    async def body(self, parts: AsyncIterator[bytes], call: bytes | None) -> AsyncIterator[bytes]:
        """Yield the single message of a body; stop reading if it is too long."""
        buffer = bytearray()
        async for part in parts:
            buffer += part
            if len(buffer) > self.max_bytes:
                break
        yield await self.message(bytes(buffer), call) or b""

    async def events(self, parts: AsyncIterator[bytes], call: bytes | None) -> AsyncIterator[bytes]:
        """Yield server-sent events with reduced messages. The stream ends at an oversized event."""
        buffer, searched = bytearray(), 0
        async for part in parts:
            buffer += part
            while found := _BLANK.search(buffer, max(0, searched - 3)):
                event, searched = bytes(buffer[: found.start()]), 0
                del buffer[: found.end()]
                yield await self._event(event, call)
            searched = len(buffer)
            if searched > 2 * self.max_bytes:  # includes the fields around a message
                refused = self.oversized_error(b"", b"", call)
                yield b"" if refused is None else b"data: " + refused + b"\n\n"
                return
        if buffer:
            yield await self._event(bytes(buffer), call)

    async def _event(self, event: bytes, call: bytes | None) -> bytes:
        lines = _LINE.split(event)
        data = b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))
        others = b"".join(line + b"\n" for line in lines if not line.startswith(b"data:"))
        if not data:
            return event + b"\n\n"
        message = await self.message(data, call)
        return b"" if message is None else others + b"data: " + message + b"\n\n"


def _error_response(why: str, head: bytes, tail: bytes, call: bytes | None) -> bytes | None:
    """Return the error response to the call; None, with a warning, if the call is unknown."""
    if call is None and (found := _FIRST_ID.search(head[:_ENDS]) or _LAST_ID.search(tail[-_ENDS:])):
        call = found.group(1)
    if call is None:
        log.warning("Dropped a message of an MCP server: %s.", why)
        return None
    error = json.dumps({"code": _INTERNAL_ERROR, "message": f"the tool failed: {why}"})
    return b'{"jsonrpc": "2.0", "id": ' + call + b', "error": ' + error.encode() + b"}"


def reduce_message(raw: bytes) -> bytes:
    """Return the message reduced to one line. Raises ValueError or RecursionError if invalid."""
    message: JSON = json.loads(raw)
    if not isinstance(message, dict):
        raise ValueError("it is not a JSON object")
    result = message.get("result")
    if isinstance(result, dict):
        message["result"] = _reduced_result(result)
    if _num_values(message) > MAX_VALUES:
        raise ValueError(f"it has more than {MAX_VALUES} values")
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _reduced_result(result: dict[str, JSON]) -> dict[str, JSON]:
    content, tools = result.get("content"), result.get("tools")
    if isinstance(content, list):
        structured = result.pop("structuredContent", None)
        if not content and structured is not None:
            content = [{"type": "text", "text": json.dumps(structured, ensure_ascii=False)}]
        result["content"] = _checked_items(_joined_texts(content))
    if isinstance(tools, list):
        for tool in _checked_items(tools):
            if isinstance(tool, dict):
                tool.pop("outputSchema", None)
    return result


def _joined_texts(content: list[JSON]) -> list[JSON]:
    merged: list[JSON] = []
    texts: list[str] = []
    for block in [*content, None]:
        text = block.get("text") if isinstance(block, dict) and block.get("type") == "text" else None
        if isinstance(text, str):
            texts.append(text)
            continue
        if texts:
            merged.append({"type": "text", "text": "\n".join(filter(None, texts))})
            texts = []
        merged.append(block)
    return merged[:-1]


def _checked_items(items: list[JSON]) -> list[JSON]:
    if len(items) > MAX_ITEMS:
        raise ValueError(f"it has more than {MAX_ITEMS} pieces")
    return items


def _num_values(value: JSON) -> int:
    """Count the nested values, including `value` itself; stop above the maximum of a message."""
    num, pending = 0, [value]
    while pending and num <= MAX_VALUES:
        one = pending.pop()
        num += 1
        if isinstance(one, dict):
            pending += one.values()
        elif isinstance(one, list):
            pending += one
    return num


@asynccontextmanager
async def program_transport(
    command: Sequence[str],
    env: Mapping[str, str],
    cwd: str | None,
    errors: IO[str],
    filters: MessageFilter,
    ended: asyncio.Event,
) -> AsyncIterator[TransportStreams]:
    """Start a program with a file for its stderr; on exit, close its input and stop it with its descendants.

    `ended` is set before the session receives the end of the stream.
    """
    from mcp.shared.message import SessionMessage

    launch, pipe = ("/bin/sh", "-c", _LAUNCH_SCRIPT, "sh", *command), asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *launch, env=env, cwd=cwd, stdin=pipe, stdout=pipe, stderr=errors, start_new_session=True
    )
    answers, reader = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    writer, requests = anyio.create_memory_object_stream[SessionMessage](0)
    async with anyio.create_task_group() as group:
        group.start_soon(_read, process, filters, answers, ended)
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
    child: asyncio.subprocess.Process,
    filters: MessageFilter,
    sink: MemoryObjectSendStream[SessionMessage | Exception],
    ended: asyncio.Event,
) -> None:
    """Forward the program's messages; if the receiver is closed, drain the output so that the program can exit."""
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter

    async def chunks(stdout: asyncio.StreamReader) -> AsyncIterator[bytes]:
        while part := await stdout.read(_CHUNK_BYTES):
            yield part

    assert child.stdout is not None
    parts = chunks(child.stdout)
    with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
        async for line in filters.lines(parts):
            taken: SessionMessage | Exception
            try:
                taken = SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
            except ValueError as error:
                taken = error
            await sink.send(taken)
    ended.set()
    sink.close()
    async for _ in parts:
        pass


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
        kill_group(process.pid, number)
    kill_group(process.pid)
    await _has_ended(process)
    close_pipes(process)


async def _has_ended(process: asyncio.subprocess.Process) -> bool:
    """Return whether the process exits in time. `Process.wait` would also wait for children that hold its stdout."""
    for _ in range(round(_EXIT_TIMEOUT_S / _POLL_S)):
        if process.returncode is not None:
            return True
        await asyncio.sleep(_POLL_S)
    return False


def filtered_client(headers: Mapping[str, str], filters: MessageFilter) -> httpx2.AsyncClient:
    """Create an HTTP client whose responses pass the filter."""
    import httpx2
    from mcp.shared._httpx_utils import create_mcp_http_client

    class Filtered(httpx2.AsyncByteStream):
        """Response body after filtering."""

        def __init__(self, response: httpx2.Response) -> None:
            self.inner = cast(httpx2.AsyncByteStream, response.stream)
            self.kind = response.headers.get("Content-Type", "").lower()
            request = response.request.content if response.is_success else b""
            number = json.loads(request).get("id") if request else None
            self.call = None if number is None else json.dumps(number).encode()

        async def __aiter__(self) -> AsyncIterator[bytes]:
            for kind, read in (("text/event-stream", filters.events), ("application/json", filters.body)):
                if self.kind.startswith(kind):
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
