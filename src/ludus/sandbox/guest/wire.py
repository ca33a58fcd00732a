"""Frames between host and supervisor, used on both sides.

Requests have `marshal` headers, which a supervisor reads without importing a module; responses have JSON headers, since
the host must not trust them.
"""

from __future__ import annotations

import marshal
import os
import struct
from _json import encode_basestring_ascii


def as_json(value: object) -> str:
    """Encode numbers, strings, lists and dicts as ASCII JSON. Raises TypeError for other types."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return encode_basestring_ascii(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(map(as_json, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{as_json(str(key))}: {as_json(one)}' for key, one in value.items())}}}"
    raise TypeError(f"{type(value).__name__} is not JSON serializable")


def pack_request(header: dict[str, object], blobs: list[bytes]) -> bytes:
    """Build a frame for a supervisor: two lengths, the header, the concatenated blobs."""
    return _frame(marshal.dumps({**header, "sizes": [len(blob) for blob in blobs]}, 2), blobs)


def pack_response(header: dict[str, object], blobs: list[bytes]) -> bytes:
    """Build a frame for the host, with a JSON header."""
    return _frame(as_json({**header, "sizes": [len(blob) for blob in blobs]}).encode(), blobs)


def _frame(header: bytes, blobs: list[bytes]) -> bytes:
    return b"".join([struct.pack(">II", len(header), sum(map(len, blobs))), header, *blobs])


def frame_sizes(prefix: bytes) -> tuple[int, int]:
    """Return the lengths of header and blobs from a frame's first 8 bytes."""
    return struct.unpack(">II", prefix)


def unpack_frame(header: object, body: bytes) -> tuple[dict[str, object], list[bytes]]:
    """Split a frame into header and blobs. Raises ValueError if inconsistent."""
    sizes = header.pop("sizes", None) if isinstance(header, dict) else None
    fits = isinstance(sizes, list) and sum(sizes) == len(body) and all(size >= 0 for size in sizes)
    if not fits or not isinstance(header, dict) or not isinstance(sizes, list):
        raise ValueError("the sizes of a frame are inconsistent")
    blobs, begin = [], 0
    for size in sizes:
        blobs.append(body[begin : begin + size])
        begin += size
    return header, blobs


def string_list(value: object) -> list[str]:
    """Return a list of a header as strings. Raises ValueError for other types."""
    if not isinstance(value, list):
        raise ValueError("a list was expected")
    return list(map(str, value))


class Disconnected(Exception):
    """The other end has disconnected."""


def receive_exactly(fd: int, count: int) -> bytes:
    """Read `count` bytes from a descriptor. Raises Disconnected at its end."""
    parts = []
    while count:
        part = os.read(fd, min(count, 1 << 20))
        if not part:
            raise Disconnected
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


class Connection:
    """The supervisor's end of the connection to the host: two descriptors, which may be the same socket."""

    def __init__(self, source: int, sink: int) -> None:
        self.source, self._sink = source, sink

    def receive(self) -> tuple[dict[str, object], list[bytes]]:
        header, body = frame_sizes(receive_exactly(self.source, 8))
        return unpack_frame(marshal.loads(receive_exactly(self.source, header)), receive_exactly(self.source, body))

    def send(self, header: dict[str, object], blobs: list[bytes]) -> None:
        data = memoryview(pack_response(header, blobs))
        try:
            while data:
                data = data[os.write(self._sink, data) :]
        except OSError as error:
            raise Disconnected from error
