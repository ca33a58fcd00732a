"""What the processes of a namespace use together."""

from __future__ import annotations

import _socket
import os
import resource

from ludus.sandbox.guest.light import Suppress

_HIDDEN_EVERY = 5
_FREE_SOCKETS = 64
"""More than ordinary programs have; what these hold does not count."""


class ResourceUsage:
    """What all processes of the namespace use, but this one. `peak` is the most bytes of memory seen."""

    def __init__(self) -> None:
        self.peak = self.hidden = self.samples = 0
        self.tick = os.sysconf("SC_CLK_TCK")

    def sample(self, bound: int) -> tuple[int, float]:
        """Bytes of memory and CPU seconds of those alive.

        Resident pages count in each process that has them; only where that passes the bound are those that
        several share divided among them. Page tables count too, as do shared memory without a file, resident
        or not, and sockets, if they are many, with all that they may hold.
        """
        memory, tables, ticks, places = 0, 0, 0, []
        for pid in [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]:
            with Suppress(OSError, ValueError):
                times = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()[11:15]
                ticks += sum(map(int, times))
                place, status = _memory_of(pid)
                places.append(place)
                memory += _bytes(status, "VmRSS")
                tables += _bytes(status, "VmPTE")
        if self.samples % _HIDDEN_EVERY == 0:
            self.hidden = _shared_memory(places) + _socket_memory()
        self.samples += 1
        memory += tables + self.hidden
        if memory > bound:
            memory = sum(map(_proportional, places)) + tables + self.hidden
        self.peak = max(self.peak, memory)
        return memory, ticks / self.tick


def _memory_of(pid: str) -> tuple[str, str]:
    """Where in /proc a process's memory is told, and its status there.

    It is told by each thread. A first thread that has ended tells nothing, though others go on.
    """
    place = f"/proc/{pid}"
    status = _text(f"{place}/status")
    if "\nVmRSS:" not in status:
        for thread in os.listdir(f"{place}/task"):
            with Suppress(OSError):
                told = _text(f"{place}/task/{thread}/status")
                if "\nVmRSS:" in told:
                    return f"{place}/task/{thread}", told
    return place, status


def _bytes(status: str, name: str) -> int:
    """A line of a status, or 0. The first line is a name of the process's own choice, on one line."""
    found = status.partition(f"\n{name}:")[2].split(None, 1)
    return int(found[0]) * 1024 if found else 0


def _socket_memory() -> int:
    """The most that sockets may hold, those too that have no descriptor any more: the kernel counts no bytes.

    Each takes messages as long as its buffer is not full, the last of them as large as the buffer at most.
    """
    with Suppress(OSError, ValueError, IndexError):
        many = int(_text("/proc/net/sockstat").split(None, 3)[2]) - _FREE_SOCKETS
        if many > 0:
            one = _socket.socket(_socket.AF_UNIX)
            buffer = one.getsockopt(_socket.SOL_SOCKET, _socket.SO_SNDBUF)
            one.close()
            return many * 2 * buffer
    return 0


def _shared_memory(places: list[str]) -> int:
    """Bytes of shared memory that is in no file system: its pages outlive their place in a page table."""
    sizes: dict[str, int] = {}
    for place in places:
        with Suppress(OSError, ValueError), open(f"{place}/maps") as lines:
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


def _proportional(place: str) -> int:
    """A process's memory, shared pages divided among those who share them, without that of no file."""
    values = {"Pss:": 0, "Pss_Shmem:": 0}
    with Suppress(OSError, ValueError):
        for line in _text(f"{place}/smaps_rollup").splitlines():
            name, _, rest = line.partition(" ")
            if name in values:
                values[name] = int(rest.split()[0]) * 1024
    return values["Pss:"] - values["Pss_Shmem:"]


def reaped_cpu() -> float:
    """CPU seconds of all that has ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
