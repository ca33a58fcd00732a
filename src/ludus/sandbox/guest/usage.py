"""What the processes of a namespace use together."""

from __future__ import annotations

import os
import resource

from ludus.sandbox.guest.light import Suppress

_HIDDEN_EVERY = 5


class Usage:
    """What all processes of the namespace use, but this one. `peak` is the most bytes of memory seen."""

    def __init__(self) -> None:
        self.peak = self.hidden = self.samples = 0
        self.tick = os.sysconf("SC_CLK_TCK")
        self.page = os.sysconf("SC_PAGE_SIZE")

    def sample(self, bound: int) -> tuple[int, float]:
        """Bytes of memory and CPU seconds of those alive.

        Resident pages count in each process that has them; only where that passes the bound are those that
        several share divided among them. Shared memory without a file counts as a whole, resident or not.
        """
        memory, ticks, pids = 0, 0, [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        for pid in pids:
            with Suppress(OSError, ValueError):
                memory += int(_text(f"/proc/{pid}/statm").split()[1]) * self.page
                times = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()[11:15]
                ticks += sum(map(int, times))
        if self.samples % _HIDDEN_EVERY == 0:
            self.hidden = _shared_memory(pids)
        self.samples += 1
        memory += self.hidden
        if memory > bound:
            memory = sum(map(_proportional, pids)) + self.hidden
        self.peak = max(self.peak, memory)
        return memory, ticks / self.tick


def _shared_memory(pids: list[str]) -> int:
    """Bytes of shared memory that is in no file system: its pages outlive their place in a page table."""
    sizes: dict[str, int] = {}
    for pid in pids:
        with Suppress(OSError, ValueError), open(f"/proc/{pid}/maps") as lines:
            for line in lines:
                if "/dev/zero" in line:
                    begin, _, end = line.partition(" ")[0].partition("-")
                    inode = line.split()[4]
                    sizes[inode] = max(sizes.get(inode, 0), int(end, 16) - int(begin, 16))
    return sum(sizes.values())


def _text(path: str) -> str:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 4096).decode("ascii", "replace")
    finally:
        os.close(fd)


def _proportional(pid: str) -> int:
    """A process's memory, shared pages divided among those who share them, without that of no file."""
    values = {"Pss:": 0, "Pss_Shmem:": 0}
    with Suppress(OSError, ValueError):
        for line in _text(f"/proc/{pid}/smaps_rollup").splitlines():
            name, _, rest = line.partition(" ")
            if name in values:
                values[name] = int(rest.split()[0]) * 1024
    return values["Pss:"] - values["Pss_Shmem:"]


def reaped_cpu() -> float:
    """CPU seconds of all that has ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
