"""Frames between the host and a guard. Used on both sides."""

from __future__ import annotations

import json
import struct


def pack(header: dict[str, object], blobs: list[bytes]) -> bytes:
    """A frame of the wire: two lengths, the header as JSON, the blobs one after the other."""
    text = json.dumps({**header, "sizes": [len(blob) for blob in blobs]}).encode()
    return b"".join([struct.pack(">II", len(text), sum(map(len, blobs))), text, *blobs])


def sizes_of(head: bytes) -> tuple[int, int]:
    """How long a frame's header and blobs are, from its first 8 bytes."""
    text, body = struct.unpack(">II", head)
    return text, body


def unpack(text: bytes, body: bytes) -> tuple[dict[str, object], list[bytes]]:
    """The header and the blobs of a frame. Raises ValueError for what does not fit together."""
    header = json.loads(text)
    sizes = header.pop("sizes")
    if sum(sizes) != len(body) or any(size < 0 for size in sizes):
        raise ValueError("a frame's sizes do not fit")
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    return header, [body[end - size : end] for end, size in zip(ends, sizes, strict=True)]


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


class Line:
    """The guard's end of what connects it to the host."""

    def __init__(self, sock: Ends) -> None:
        self.sock = sock

    def read(self) -> tuple[dict[str, object], list[bytes]]:
        """The next frame. Raises Gone."""
        text, body = sizes_of(self._exactly(8))
        return unpack(self._exactly(text), self._exactly(body))

    def send(self, header: dict[str, object], blobs: list[bytes]) -> None:
        """Send a frame. Raises Gone."""
        try:
            self.sock.sendall(pack(header, blobs))
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
