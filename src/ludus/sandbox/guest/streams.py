"""The standard streams of a child process: bounded capture of its output, non-blocking transfer of its input."""

from __future__ import annotations

import os
import select

TYPE_CHECKING = False
if TYPE_CHECKING:  # `collections.abc` is slow to import
    from collections.abc import Container

_CHUNK = 65536
_DRAIN_READS = 64  # reads of a pipe after a call's end; more than its capacity
_NOTE_BYTES = 64


class BoundedOutput:
    """At most `max_bytes` of a stream: two thirds from its head, a note, and its tail; or its head if that is more."""

    def __init__(self, max_bytes: int) -> None:
        self._head, self._tail = bytearray(), bytearray()
        self._tail_bytes = max_bytes // 3 if max_bytes >= 4 * _NOTE_BYTES else 0
        self._head_bytes = max_bytes - self._tail_bytes - (_NOTE_BYTES if self._tail_bytes else 0)
        self._max_bytes, self._excess = max_bytes, 0

    def add(self, data: bytes) -> None:
        remaining = self._max_bytes - len(self._head)
        self._head += data[:remaining]
        rest = data[remaining:]
        self._excess += len(rest)
        self._tail += rest[len(rest) - min(len(rest), self._tail_bytes) :]
        if len(self._tail) > 2 * self._tail_bytes:
            del self._tail[: len(self._tail) - self._tail_bytes]

    @property
    def omitted_bytes(self) -> int:
        if not self._excess or not self._tail_bytes:
            return self._excess
        return self._max_bytes + self._excess - self._head_bytes - self._tail_bytes

    def take(self) -> bytes:
        kept = bytes(self._head)
        if self._excess and self._tail_bytes:
            note = f"\n[{self.omitted_bytes} bytes left out]\n".encode()
            end = (kept + self._tail)[-self._tail_bytes :]
            kept = kept[: self._head_bytes] + note + end
        self._head.clear()
        self._tail.clear()
        self._excess = 0
        return kept


class ProcessStreams:
    """Pipes to a child's streams; `child_fds` are its ends. `poll` watches ours, and others that are registered."""

    def __init__(self, max_bytes: int) -> None:
        (child_in, self._input), (stdout, child_out), (stderr, child_err) = os.pipe(), os.pipe(), os.pipe()
        self.child_fds = [child_in, child_out, child_err]
        self.outputs = {fd: BoundedOutput(max_bytes) for fd in (stdout, stderr)}
        self.omitted_bytes = 0
        self.poll = select.poll()
        self._pending, self._keep_open = memoryview(b""), False

    def start(self, stdin: bytes) -> None:
        """Close the child's ends, which the child has inherited, and begin to transfer."""
        self._close_child_fds()
        for fd in self.outputs:
            os.set_blocking(fd, False)
            self.poll.register(fd, select.POLLIN)
        self.feed(self._input, stdin, keep_open=False)

    def feed(self, fd: int, data: bytes, keep_open: bool) -> None:
        """Write `data` to a descriptor as fast as the child reads it; then close it unless `keep_open`."""
        os.set_blocking(fd, False)
        self._input, self._pending, self._keep_open = fd, memoryview(data), keep_open
        if self._write():
            self.poll.register(fd, select.POLLOUT)

    def transfer(self, ready: Container[int]) -> None:
        for fd in [fd for fd in self.outputs if fd in ready]:
            if self._read(fd) == 0:
                self.poll.unregister(fd)
        fd = self._input
        if fd in ready:
            self.poll.unregister(fd)
            if self._write():
                self.poll.register(fd, select.POLLOUT)

    def drain(self) -> list[bytes]:
        """Return the captured output of both streams, emptying the pipes. Sets `omitted_bytes`."""
        for fd in self.outputs:
            for _ in range(_DRAIN_READS):
                if self._read(fd) <= 0:
                    break
        self.omitted_bytes = sum(output.omitted_bytes for output in self.outputs.values())
        return [output.take() for output in self.outputs.values()]

    def close(self) -> None:
        self._close_child_fds()
        for fd in self.outputs:
            os.close(fd)
        if self._input >= 0 and not self._keep_open:
            os.close(self._input)
        self.outputs, self._input = {}, -1

    def _close_child_fds(self) -> None:
        for fd in self.child_fds:
            os.close(fd)
        self.child_fds = []

    def _read(self, fd: int) -> int:
        """Read from a stream; return the number of bytes, 0 at its end, -1 if none is available."""
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return -1
        self.outputs[fd].add(data)
        return len(data)

    def _write(self) -> bool:
        """Write more input, closing it at the end; return whether data is left."""
        try:
            while self._pending:
                self._pending = self._pending[os.write(self._input, self._pending[:_CHUNK]) :]
        except BlockingIOError:
            return True
        except OSError:  # the program closed its input
            self._pending = memoryview(b"")
        if not self._keep_open:
            os.close(self._input)
        self._input = -1
        return False
