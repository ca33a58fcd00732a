"""The guard as process 1 of a container: orders from stdin, responses to stdout."""

from __future__ import annotations

import os
import sys

from ludus.sandbox.guest.kernel import checked, ignore_interrupts, libc
from ludus.sandbox.guest.orders import answer
from ludus.sandbox.guest.wire import Gone, WireLine

_SET_DUMPABLE = 4


class Pipes:
    """Two descriptors used as the guard's socket."""

    def __init__(self, source: int, sink: int) -> None:
        self._source, self._sink = source, sink

    def fileno(self) -> int:
        """Return the descriptor of orders, which also shows a disconnect of the host."""
        return self._source

    def recv(self, count: int) -> bytes:
        """Read some bytes; b"" at the end."""
        return os.read(self._source, count)

    def sendall(self, data: bytes) -> None:
        """Write all bytes. Raises OSError."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._sink, view) :]


def main() -> None:
    """Serve one run or one session. The engine has set the size of the box."""
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open("/dev/null", os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    sys.path[:] = [place for place in sys.path if place]  # the box is the working folder
    line = WireLine(Pipes(source, sink))
    ignore_interrupts()
    try:
        checked(libc().prctl(_SET_DUMPABLE, 0, 0, 0, 0), "prctl")
        _, (code,) = line.read()
        line.send({"ready": True}, [])
    except Gone:
        return
    except Exception as error:  # boundary: report to the host why there is no guard
        line.send({"error": f"{type(error).__name__}: {error}"}, [])
        return
    answer(line, code, contained=True)
