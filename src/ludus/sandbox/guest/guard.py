"""The guard: process 1 of a run's namespaces. It starts, watches and ends the programs."""

from __future__ import annotations

import os
import select
import time

from ludus.sandbox.guest.kernel import ResourceBounds
from ludus.sandbox.guest.light import Suppress, signal
from ludus.sandbox.guest.output import BoundedOutput
from ludus.sandbox.guest.program import become_program, finish
from ludus.sandbox.guest.usage import ResourceUsage, reaped_cpu
from ludus.sandbox.guest.wire import Gone, WireLine

TYPE_CHECKING = False
if TYPE_CHECKING:  # `collections.abc` is slow to import
    from collections.abc import Callable

_CHUNK = 65536
_MOST_READS = 64
"""Reads of a pipe after a call's end; more than its capacity."""
_SAMPLE_S = 0.01
_BROKEN = 70


class Guard:
    """Runs one program at a time with its three streams."""

    def __init__(self, line: WireLine, code: bytes, bounds: ResourceBounds) -> None:
        self.line, self.code, self.bounds = line, code, bounds
        self.usage = ResourceUsage()
        self.child = self.pidfd = self.stdin = self.done = self.said = -1
        self.status: int | None = None
        self.feed = memoryview(b"")
        self.outs: dict[int, BoundedOutput] = {}
        self.left_out, self.keep = 0, False
        self.poll = select.poll()

    def start(self, body: Callable[[], int], stdin: bytes, extra: tuple[int, ...] = ()) -> None:
        """Fork a program whose exit code is `body()`. `extra` become its descriptors 3 and up."""
        (in_r, in_w), (out_r, out_w), (err_r, err_w) = os.pipe(), os.pipe(), os.pipe()
        self.child = os.fork()
        if self.child == 0:
            status = _BROKEN
            try:
                become_program(self.bounds, self.code, [in_r, out_w, err_w, *extra])
                status = finish(body())
            except BaseException as error:  # boundary: a fork must never continue as its parent
                os.write(2, f"sandbox: {type(error).__name__}: {error}\n".encode(errors="replace"))
            os._exit(status)
        for fd in (in_r, out_w, err_w, *extra):
            os.close(fd)
        for fd in (out_r, err_r, in_w):
            os.set_blocking(fd, False)
        self.pidfd, self.status, self.stdin = os.pidfd_open(self.child), None, in_w
        self.feed, self.keep = memoryview(stdin), False
        self.outs = {fd: BoundedOutput(self.bounds.output) for fd in (out_r, err_r)}
        self.poll = select.poll()
        for fd in (self.line.sock.fileno(), self.pidfd, out_r, err_r):
            self.poll.register(fd, select.POLLIN)
        if self._feed():
            self.poll.register(in_w, select.POLLOUT)

    def watch(self, spent: float) -> str:
        """Wait until the program 'ended', reported a call as 'done', or exceeded 'time' or 'memory'.

        CPU seconds up to `spent` do not count. Raises Gone if the host has disconnected.
        """
        begin = sampled = time.monotonic()
        while True:
            ended = self._serve(dict(self.poll.poll(_SAMPLE_S * 1000)))
            now = time.monotonic()
            if not ended and now - begin > self.bounds.wall_s:
                ended = "time"
            if not ended and now - sampled >= _SAMPLE_S:
                sampled, ended = now, self.excess(spent)
            if ended:
                return ended

    def _serve(self, ready: dict[int, int]) -> str:
        """Handle what is ready; return "" while the program runs."""
        if self.line.sock.fileno() in ready:
            raise Gone
        for fd in [fd for fd in self.outs if fd in ready]:
            if self._take(fd) == 0:
                self.poll.unregister(fd)
        if self.stdin in ready:
            fd = self.stdin
            self.poll.unregister(fd)
            if self._feed():
                self.poll.register(fd, select.POLLOUT)
        if self.pidfd in ready:
            return "ended"
        return "done" if self.done in ready and self._is_done() else ""

    def _is_done(self) -> bool:
        """Return whether the interpreter reported the end of a call; if it only closed the pipe, wait for its
        exit."""
        said = os.read(self.done, _CHUNK)
        if not said:
            self.poll.unregister(self.done)
            return False
        self.said = said[-1]
        return True

    def tell(self, fd: int, text: bytes, spent: float) -> str:
        """Write `text` to a running interpreter and `watch` it."""
        self.stdin, self.feed, self.keep = fd, memoryview(text), True
        os.set_blocking(fd, False)
        if self._feed():
            self.poll.register(fd, select.POLLOUT)
        return self.watch(spent)

    def _feed(self) -> bool:
        """Write more of the program's input, closing it at the end; return whether data is left."""
        try:
            while self.feed:
                self.feed = self.feed[os.write(self.stdin, self.feed[:_CHUNK]) :]
        except BlockingIOError:
            return True
        except OSError:  # the program closed its input
            self.feed = memoryview(b"")
        if not self.keep:
            os.close(self.stdin)
        self.stdin = -1
        return False

    def _take(self, fd: int) -> int:
        """Read from a stream; return the number of bytes, 0 at its end, -1 if none is available."""
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return -1
        self.outs[fd].add(data)
        return len(data)

    def drain(self) -> list[bytes]:
        """Return the captured output of both streams, emptying the pipes.

        Sets `left_out` to the number of omitted bytes.
        """
        for fd in self.outs:
            for _ in range(_MOST_READS):
                if self._take(fd) <= 0:
                    break
        self.left_out = sum(kept.left_out for kept in self.outs.values())
        return [kept.take() for kept in self.outs.values()]

    def cpu(self) -> float:
        """Return the CPU seconds so far, of running and ended processes."""
        return self.usage.sample(1 << 62)[1] + reaped_cpu()

    def excess(self, spent: float) -> str:
        """Reap orphans and return the exceeded limit, or "". CPU seconds up to `spent` do not count."""
        self.reap(os.WNOHANG)
        memory, cpu = self.usage.sample(self.bounds.memory_bytes)
        if memory > self.bounds.memory_bytes:
            return "memory"
        return "time" if cpu + reaped_cpu() - spent > self.bounds.cpu_s else ""

    def reap(self, flags: int) -> None:
        """Record processes that ended; without WNOHANG wait until none is left."""
        while True:
            try:
                pid, status, used = os.wait4(-1, flags)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.usage.peak = max(self.usage.peak, used.ru_maxrss * 1024)
            if pid == self.child:
                self.status = status

    def end_all(self) -> None:
        """Kill all processes of the namespace except this one, and wait for them."""
        with Suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        self.reap(0)

    def close(self) -> None:
        """Close the ended program's descriptors."""
        for fd in (*self.outs, *(fd for fd in (self.pidfd, self.done) if fd >= 0)):
            os.close(fd)
        self.outs, self.pidfd, self.stdin, self.done = {}, -1, -1, -1
