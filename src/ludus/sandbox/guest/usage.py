"""What the processes of a namespace use together."""

from __future__ import annotations

import contextlib
import os
import resource


class Usage:
    """What all processes of the namespace use, but this one."""

    def __init__(self) -> None:
        self.peak = 0
        self.tick = os.sysconf("SC_CLK_TCK")
        self.page = os.sysconf("SC_PAGE_SIZE")

    def sample(self, bound: int) -> tuple[int, float]:
        """Bytes of memory of their own and CPU seconds, of those alive. Shared pages are looked at closely
        only where the bound seems to be passed."""
        memory, ticks, pids = 0, 0, [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        for pid in pids:
            with contextlib.suppress(OSError, ValueError):
                fields = _text(f"/proc/{pid}/statm").split()
                memory += (int(fields[1]) - int(fields[2])) * self.page
                times = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()[11:15]
                ticks += sum(map(int, times))
        if memory > bound:
            memory = sum(map(_proportional, pids))
        self.peak = max(self.peak, memory)
        return memory, ticks / self.tick


def _text(path: str) -> str:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 4096).decode("ascii", "replace")
    finally:
        os.close(fd)


def _proportional(pid: str) -> int:
    """A process's memory, shared pages divided among those who share them."""
    with contextlib.suppress(OSError, ValueError):
        for line in _text(f"/proc/{pid}/smaps_rollup").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def reaped_cpu() -> float:
    """CPU seconds of all that has ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
