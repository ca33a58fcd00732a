"""The supervisor: process 1 of a run's namespaces. It starts, monitors and kills the programs."""

from __future__ import annotations

import os
import select
import time

from ludus.sandbox.guest.procfs import ResourceUsage, reaped_cpu_s
from ludus.sandbox.guest.program import become_program, shut_down
from ludus.sandbox.guest.streams import ProcessStreams
from ludus.sandbox.guest.syscalls import ResourceLimits, Suppress, signal
from ludus.sandbox.guest.wire import Connection, Disconnected

TYPE_CHECKING = False
if TYPE_CHECKING:  # `collections.abc` is slow to import
    from collections.abc import Callable

_SAMPLE_S = 0.01
_START_FAILED = 70


class Supervisor:
    """Runs one program at a time with its three streams."""

    streams: ProcessStreams

    def __init__(self, connection: Connection, seccomp: bytes, limits: ResourceLimits) -> None:
        self.connection, self.seccomp, self.limits = connection, seccomp, limits
        self.usage = ResourceUsage()
        self.child = self.pidfd = self.done_fd = self.call_status = -1
        self.wait_status: int | None = None

    def start(self, body: Callable[[], int], stdin: bytes, extra: tuple[int, ...] = ()) -> None:
        """Fork a program whose exit code is `body()`. `extra` become its descriptors 3 and up."""
        self.streams = streams = ProcessStreams(self.limits.output_bytes)
        self.child = os.fork()
        if self.child == 0:
            status = _START_FAILED
            try:
                become_program(self.limits, self.seccomp, [*streams.child_fds, *extra])
                status = shut_down(body())
            except BaseException as error:  # boundary: a fork must never continue as its parent
                os.write(2, f"sandbox: {type(error).__name__}: {error}\n".encode(errors="replace"))
            os._exit(status)
        for fd in extra:
            os.close(fd)
        self.pidfd, self.wait_status = os.pidfd_open(self.child), None
        for fd in (self.connection.source, self.pidfd):
            streams.poll.register(fd, select.POLLIN)
        streams.start(stdin)

    def watch(self, cpu_before_s: float) -> str:
        """Wait for the program and return 'ended', 'done' (end of a call), or the exceeded limit, 'time' or 'memory'.

        CPU seconds up to `cpu_before_s` do not count. Raises Disconnected.
        """
        begin = sampled = time.monotonic()
        while True:
            event = self._handle(dict(self.streams.poll.poll(_SAMPLE_S * 1000)))
            now = time.monotonic()
            if not event and now - begin > self.limits.wall_s:
                event = "time"
            if not event and now - sampled >= _SAMPLE_S:
                sampled, event = now, self.exceeded(cpu_before_s)
            if event:
                return event

    def _handle(self, ready: dict[int, int]) -> str:
        """Handle the ready descriptors; return "" while the program runs."""
        if self.connection.source in ready:
            raise Disconnected
        self.streams.transfer(ready)
        if self.pidfd in ready:
            return "ended"
        return "done" if self.done_fd in ready and self._is_done() else ""

    def _is_done(self) -> bool:
        """Return whether the interpreter reported the end of a call; if it closed the pipe, wait for its exit."""
        statuses = os.read(self.done_fd, 65536)
        if not statuses:
            self.streams.poll.unregister(self.done_fd)
            return False
        self.call_status = statuses[-1]
        return True

    def exceeded(self, cpu_before_s: float) -> str:
        """Reap orphans and return the exceeded limit ('time' or 'memory') or "". See `watch`."""
        self.reap(os.WNOHANG)
        memory, cpu_s = self.usage.sample(self.limits.memory_bytes)
        if memory > self.limits.memory_bytes:
            return "memory"
        return "time" if cpu_s + reaped_cpu_s() - cpu_before_s > self.limits.cpu_s else ""

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
                self.wait_status = status

    def kill_all(self) -> None:
        """Kill all processes of the namespace except this one, and wait for them."""
        with Suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        self.reap(0)

    def close(self) -> None:
        """Close the ended program's descriptors."""
        self.streams.close()
        for fd in (self.pidfd, self.done_fd):
            if fd >= 0:
                os.close(fd)
        self.pidfd = self.done_fd = -1
