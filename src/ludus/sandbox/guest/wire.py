"""Frames between host and guard, used on both sides.

Orders have `marshal` headers, which a guard reads without importing a module; responses have JSON headers,
since the host must not trust them.
"""

from __future__ import annotations

import marshal
import struct

from ludus.sandbox.guest.light import as_json


def pack_order(header: dict[str, object], blobs: list[bytes]) -> bytes:
    """Build a frame for a guard: two lengths, the header, the concatenated blobs."""
    return _frame(marshal.dumps({**header, "sizes": _sizes(blobs)}, 2), blobs)


def pack_answer(header: dict[str, object], blobs: list[bytes]) -> bytes:
    """Build a frame for the host, with a JSON header."""
    return _frame(as_json({**header, "sizes": _sizes(blobs)}).encode(), blobs)


def _sizes(blobs: list[bytes]) -> list[int]:
    return [len(blob) for blob in blobs]


def _frame(text: bytes, blobs: list[bytes]) -> bytes:
    return b"".join([struct.pack(">II", len(text), sum(map(len, blobs))), text, *blobs])


def sizes_of(head: bytes) -> tuple[int, int]:
    """Return the lengths of header and blobs from a frame's first 8 bytes."""
    text, body = struct.unpack(">II", head)
    return text, body


def take_apart(header: object, body: bytes) -> tuple[dict[str, object], list[bytes]]:
    """Split a frame into header and blobs. Raises ValueError if inconsistent."""
    sizes = header.pop("sizes", None) if isinstance(header, dict) else None
    fits = isinstance(sizes, list) and sum(sizes) == len(body) and all(size >= 0 for size in sizes)
    if not fits or not isinstance(header, dict) or not isinstance(sizes, list):
        raise ValueError("a frame's sizes do not fit")
    blobs, begin = [], 0
    for size in sizes:
        blobs.append(body[begin : begin + size])
        begin += size
    return header, blobs


class Gone(Exception):
    """The host has disconnected."""


TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` is slow to import, and a cell starts with this module
    from typing import Protocol

    class Ends(Protocol):
        """The socket methods that a line needs."""

        def fileno(self) -> int:
            """Return a descriptor that becomes readable on data or disconnect."""
            ...

        def recv(self, count: int, /) -> bytes:
            """Receive some bytes; b"" at the end."""
            ...

        def sendall(self, data: bytes, /) -> None:
            """Send all bytes. Raises OSError."""
            ...


class WireLine:
    """The guard's end of the connection to the host."""

    def __init__(self, sock: Ends) -> None:
        self.sock = sock

    def read(self) -> tuple[dict[str, object], list[bytes]]:
        """Read the next frame. Raises Gone."""
        text, body = sizes_of(self._exactly(8))
        return take_apart(marshal.loads(self._exactly(text)), self._exactly(body))

    def send(self, header: dict[str, object], blobs: list[bytes]) -> None:
        """Send a frame. Raises Gone."""
        try:
            self.sock.sendall(pack_answer(header, blobs))
        except OSError as error:
            raise Gone from error

    def _exactly(self, count: int) -> bytes:
        parts = []
        while count:
            part = self.sock.recv(min(count, 1 << 20))
            if not part:
                raise Gone
            parts.append(part)
            count -= len(part)
        return b"".join(parts)
