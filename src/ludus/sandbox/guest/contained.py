"""The guard as process 1 of a container: one order over stdin, its answer over stdout."""

from __future__ import annotations

import os

from ludus.sandbox.guest.kernel import checked, ignore_interrupts, libc
from ludus.sandbox.guest.orders import run_once
from ludus.sandbox.guest.wire import Gone, Line

_SET_DUMPABLE = 4


class Pipes:
    """Two descriptors as the guard's socket."""

    def __init__(self, source: int, sink: int) -> None:
        self._source, self._sink = source, sink
        self._quiet = os.pipe()

    def fileno(self) -> int:
        """A descriptor on which nothing ever happens: the end of stdin is not the host's end."""
        return self._quiet[0]

    def recv(self, count: int) -> bytes:
        """Some bytes; none at the end."""
        return os.read(self._source, count)

    def sendall(self, data: bytes) -> None:
        """Write all. Raises OSError."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._sink, view) :]


def main() -> None:
    """Serve the one order. The engine sized the box already."""
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open("/dev/null", os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    line = Line(Pipes(source, sink))
    ignore_interrupts()
    try:
        checked(libc().prctl(_SET_DUMPABLE, 0, 0, 0, 0), "prctl")
        header, blobs = line.read()
        limits = header["limits"]
        if isinstance(
            limits, dict
        ):  # the kernel counts a user's processes in all containers; the engine bounds them
            limits["processes"] = 0
        run_once(line, blobs[0], header, blobs[1:], sized=True)
    except Gone:
        return
    except Exception as error:  # boundary: the host must hear why there is no outcome
        line.send({"error": f"{type(error).__name__}: {error}"}, [])
