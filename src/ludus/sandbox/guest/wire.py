"""Frames between the host and a guard. Used on both sides.

An order's header is data of `marshal`, which a guard reads without a further module; an answer's is JSON, for
the host believes nothing of it.
"""

from __future__ import annotations

import marshal
import struct

from ludus.sandbox.guest.light import as_json


def pack_order(header: dict[str, object], blobs: list[bytes]) -> bytes:
    """A frame for a guard: two lengths, the header, the blobs one after the other."""
    return _frame(marshal.dumps({**header, "sizes": _sizes(blobs)}, 2), blobs)


def pack_answer(header: dict[str, object], blobs: list[bytes]) -> bytes:
    """A frame for the host, its header as JSON."""
    return _frame(as_json({**header, "sizes": _sizes(blobs)}).encode(), blobs)


def _sizes(blobs: list[bytes]) -> list[int]:
    return [len(blob) for blob in blobs]


def _frame(text: bytes, blobs: list[bytes]) -> bytes:
    return b"".join([struct.pack(">II", len(text), sum(map(len, blobs))), text, *blobs])


def sizes_of(head: bytes) -> tuple[int, int]:
    """How long a frame's header and blobs are, from its first 8 bytes."""
    text, body = struct.unpack(">II", head)
    return text, body


def take_apart(header: object, body: bytes) -> tuple[dict[str, object], list[bytes]]:
    """The header and the blobs of a frame. Raises ValueError for what does not fit together."""
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
    """The host closed its end: nobody waits for an answer."""


TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` takes time to import, and a cell starts with this module
    from typing import Protocol

    class Ends(Protocol):
        """What a line needs of a socket."""

        def fileno(self) -> int:
            """The descriptor that is readable once there is something, or once the host goes."""
            ...

        def recv(self, count: int, /) -> bytes:
            """Some bytes; none at the end."""
            ...

        def sendall(self, data: bytes, /) -> None:
            """Write all. Raises OSError."""
            ...


class WireLine:
    """The guard's end of what connects it to the host."""

    def __init__(self, sock: Ends) -> None:
        self.sock = sock

    def read(self) -> tuple[dict[str, object], list[bytes]]:
        """The next frame. Raises Gone."""
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
