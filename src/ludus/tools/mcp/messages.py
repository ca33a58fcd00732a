"""Filter messages of MCP servers before the `mcp` package parses them: limit and reduce them.

The package parses messages of any size on its event loop. Here long messages are parsed in a limited process
(`call_bounded`), results are converted to text, and output schemas, whose patterns the package would match on
its loop, are dropped. An unacceptable message is replaced by a JSON-RPC error response to its call.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from ludus.types import JSON
from ludus.untrusted.worker import LimitExceeded, call_bounded

MAX_BYTES: Final = 8 * 2**20
"""Default maximum number of bytes of one message."""
MAX_VALUES: Final = 65_536
"""Maximum number of values of a reduced message; the package validates each on its event loop."""
MAX_ITEMS: Final = 1_024
"""Maximum number of content items of a result, and of tools per page."""
_SHORT: Final = 2**16
"""Maximum number of bytes of a message that is parsed in this process."""
_ENDS: Final = 512
"""Bytes at either end of a message searched for its id if it is not parsed."""
_INTERNAL_ERROR: Final = -32603
_ID: Final = rb'"id"\s*:\s*(\d{1,18}|"[^"\\]{1,64}")'
_FIRST_ID: Final = re.compile(rb'\A\s*\{(?:\s*"jsonrpc"\s*:\s*"2\.0"\s*,)?\s*' + _ID)
_LAST_ID: Final = re.compile(_ID + rb'\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*\Z')
_LINE: Final = re.compile(rb"\r\n|\n|\r")
_BLANK: Final = re.compile(rb"\r\n\r\n|\n\n|\r\r")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MessageFilter:
    """Filter between a server and the `mcp` package."""

    max_bytes: int = MAX_BYTES

    async def message(self, raw: bytes, call: bytes | None = None) -> bytes | None:
        """Return the reduced message; None if it is unacceptable and not a response to a call.

        `call` is the JSON id of its call, if known.
        """
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
        _log.warning("Dropped a message of an MCP server: %s.", why)
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
