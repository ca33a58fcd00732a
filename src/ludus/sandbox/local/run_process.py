"""A host child process with bounded time and output, for backends without a guard."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ludus.sandbox.guest.output import BoundedOutput

_CHUNK = 1 << 16
_LOOK_S = 0.02
_MOST_READS = 64
"""Reads of a pipe after the child's end; more than its capacity."""


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """Result of a child: `status` as in `os.wait4`, memory in bytes."""

    stdout: bytes
    stderr: bytes
    status: int
    timed_out: bool
    left_out_bytes: int
    cpu_s: float
    wall_s: float
    peak_memory_bytes: int


@dataclass
class ProcessRun:
    """One child in its own process group; `most_bytes` are kept of each output stream."""

    argv: Sequence[str]
    folder: str
    environment: Mapping[str, str]
    wall_s: float
    most_bytes: int
    _stopped: bool = field(default=False, init=False)

    async def run(self, stdin: bytes, stop: Callable[[], None] = lambda: None) -> ProcessResult:
        """Run in a thread; `stop` is also called if the run is ended early. Raises OSError."""
        task = asyncio.ensure_future(asyncio.to_thread(self._run, stdin, stop))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._stopped = True
            await asyncio.wait([task])
            raise

    def _run(self, stdin: bytes, stop: Callable[[], None]) -> ProcessResult:
        begin, timed_out, own_peak, peak = time.monotonic(), False, peak_memory("self"), 0
        child = subprocess.Popen(
            self.argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self.folder,
            env=dict(self.environment),
            start_new_session=True,
        )
        pidfd, streams = os.pidfd_open(child.pid), _Streams(child, stdin, self.most_bytes)
        try:
            while not streams.serve(pidfd) and not self._stopped and not timed_out:
                timed_out = time.monotonic() - begin > self.wall_s
                peak = max(peak, peak_memory(str(child.pid)))
        finally:
            if timed_out or self._stopped:
                stop()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            _, status, used = os.wait4(child.pid, 0)
            child.returncode = status
            os.close(pidfd)
        stdout, stderr = streams.finish()
        wall_s, cpu_s = time.monotonic() - begin, used.ru_utime + used.ru_stime
        told = used.ru_maxrss * 1024
        if told > own_peak:  # otherwise it may be this process's peak, inherited before exec
            peak = told
        return ProcessResult(stdout, stderr, status, timed_out, streams.left_out, cpu_s, wall_s, peak)


def peak_memory(process: str) -> int:
    """Return a process's peak memory in bytes since exec, or 0 if unavailable."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text("utf-8", "replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


class _Streams:
    """The three pipes of a child; never blocks beyond the child's life."""

    def __init__(self, child: subprocess.Popen[bytes], stdin: bytes, most: int) -> None:
        assert child.stdin
        assert child.stdout
        assert child.stderr
        self._pipes = (child.stdout, child.stderr, child.stdin)
        self._in = child.stdin.fileno()
        self._feed, self.left_out = memoryview(stdin), 0
        self._kept = {pipe.fileno(): BoundedOutput(most) for pipe in self._pipes[:2]}
        self._poll = select.poll()
        for pipe in self._pipes:
            os.set_blocking(pipe.fileno(), False)
            self._poll.register(pipe.fileno(), select.POLLOUT if pipe is child.stdin else select.POLLIN)

    def serve(self, pidfd: int) -> bool:
        """Transfer available data; return whether the child has ended."""
        self._poll.register(pidfd, select.POLLIN)
        ready = [fd for fd, _ in self._poll.poll(_LOOK_S * 1000)]
        for fd in self._kept:
            if fd in ready and self._take(fd) == 0:
                self._poll.unregister(fd)
        if self._in in ready and not self._give():
            self._poll.unregister(self._in)
            with contextlib.suppress(BrokenPipeError):
                self._pipes[2].close()
        return pidfd in ready

    def finish(self) -> list[bytes]:
        """Read what is left in the pipes, close them and return both outputs."""
        for fd in self._kept:
            for _ in range(_MOST_READS):
                if self._take(fd) <= 0:
                    break
        self.left_out = sum(kept.left_out for kept in self._kept.values())
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        return [kept.take() for kept in self._kept.values()]

    def _take(self, fd: int) -> int:
        """Read from a stream; return the number of bytes, 0 at its end, -1 if none is available."""
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return -1
        self._kept[fd].add(data)
        return len(data)

    def _give(self) -> bool:
        """Write more of stdin; return whether data is left."""
        try:
            self._feed = self._feed[os.write(self._in, self._feed[:_CHUNK]) :]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return bool(self._feed)
