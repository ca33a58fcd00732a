"""The guard: process 1 of a run's namespaces. It starts programs, watches them and ends them all."""

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
if TYPE_CHECKING:  # collections take time to import
    from collections.abc import Callable

_CHUNK = 65536
_MOST_READS = 64
"""Of a pipe when a call is over: more than it can hold."""
_SAMPLE_S = 0.01
_BROKEN = 70


class Guard:
    """One program at a time, with its three streams."""

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
        """Fork the program, whose exit code `body` gives. `extra` become its descriptors 3 and on."""
        (in_r, in_w), (out_r, out_w), (err_r, err_w) = os.pipe(), os.pipe(), os.pipe()
        self.child = os.fork()
        if self.child == 0:
            status = _BROKEN
            try:
                become_program(self.bounds, self.code, [in_r, out_w, err_w, *extra])
                status = finish(body())
            except BaseException as error:  # boundary: a fork must never go on as its parent
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
        """Wait until the program 'ended', said that a call is 'done', or passed its 'time' or 'memory'.

        CPU seconds up to `spent` do not count. Raises Gone where the host does not wait any more.
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
        """Do what can be done without waiting; empty while the program goes on."""
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
        """Whether the interpreter said so; where it only closed its end, its own end will tell."""
        said = os.read(self.done, _CHUNK)
        if not said:
            self.poll.unregister(self.done)
            return False
        self.said = said[-1]
        return True

    def tell(self, fd: int, text: bytes, spent: float) -> str:
        """Write `text` for a running interpreter and `watch` it."""
        self.stdin, self.feed, self.keep = fd, memoryview(text), True
        os.set_blocking(fd, False)
        if self._feed():
            self.poll.register(fd, select.POLLOUT)
        return self.watch(spent)

    def _feed(self) -> bool:
        """Write more of what the program is to read, and close at the end; whether there is more."""
        try:
            while self.feed:
                self.feed = self.feed[os.write(self.stdin, self.feed[:_CHUNK]) :]
        except BlockingIOError:
            return True
        except OSError:  # it reads no more
            self.feed = memoryview(b"")
        if not self.keep:
            os.close(self.stdin)
        self.stdin = -1
        return False

    def _take(self, fd: int) -> int:
        """Read some of a stream: how many bytes, 0 at its end, -1 where it has none now."""
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return -1
        self.outs[fd].add(data)
        return len(data)

    def drain(self) -> list[bytes]:
        """What is kept of the two streams, with what lies in the pipes now; they are empty then.

        `left_out` is how many bytes are not.
        """
        for fd in self.outs:
            for _ in range(_MOST_READS):
                if self._take(fd) <= 0:
                    break
        self.left_out = sum(kept.left_out for kept in self.outs.values())
        return [kept.take() for kept in self.outs.values()]

    def cpu(self) -> float:
        """CPU seconds so far, of the living and the dead."""
        return self.usage.sample(1 << 62)[1] + reaped_cpu()

    def excess(self, spent: float) -> str:
        """Reap orphans; which bound is passed, if any. CPU seconds up to `spent` do not count."""
        self.reap(os.WNOHANG)
        memory, cpu = self.usage.sample(self.bounds.memory_bytes)
        if memory > self.bounds.memory_bytes:
            return "memory"
        return "time" if cpu + reaped_cpu() - spent > self.bounds.cpu_s else ""

    def reap(self, flags: int) -> None:
        """Take note of processes that ended; without WNOHANG until none is left."""
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
        """Kill every process of the namespace but this one, and wait for them."""
        with Suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        self.reap(0)

    def close(self) -> None:
        """Close the ended program's descriptors."""
        for fd in (*self.outs, *(fd for fd in (self.pidfd, self.done) if fd >= 0)):
            os.close(fd)
        self.outs, self.pidfd, self.stdin, self.done = {}, -1, -1, -1
