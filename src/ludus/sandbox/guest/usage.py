"""Resource usage of all processes in a namespace."""

from __future__ import annotations

import _socket
import os
import resource

from ludus.sandbox.guest.light import Suppress

_HIDDEN_EVERY = 5
_FREE_SOCKETS = 64
"""More sockets than ordinary programs open; up to this number their buffers are not counted."""


class ResourceUsage:
    """Usage of all processes in the namespace except this one. `peak` is the maximum memory in bytes."""

    def __init__(self) -> None:
        self.peak = self.hidden = self.samples = 0
        self.tick = os.sysconf("SC_CLK_TCK")

    def sample(self, bound: int) -> tuple[int, float]:
        """Return memory in bytes and CPU seconds of the running processes.

        Resident pages count for each process that maps them; only if that exceeds `bound`, shared pages are
        divided among their processes. Page tables, anonymous shared memory (resident or not) and, above
        `_FREE_SOCKETS`, maximum socket buffers count too.
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
    """Return the /proc path that reports a process's memory, and its status there.

    A thread's path is used if the main thread has ended, which then reports nothing.
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
    """Return a field of a status in bytes, or 0. The first line is a name that the process chooses."""
    found = status.partition(f"\n{name}:")[2].split(None, 1)
    return int(found[0]) * 1024 if found else 0


def _socket_memory() -> int:
    """Return the maximum memory of sockets, including unreferenced ones: the kernel reports no byte counts.

    A socket accepts messages until its buffer is full; the last may be as large as the buffer.
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
    """Return the bytes of anonymous shared memory, whose pages outlive their page table entries."""
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
    """Return a process's memory with shared pages divided, excluding anonymous shared memory."""
    values = {"Pss:": 0, "Pss_Shmem:": 0}
    with Suppress(OSError, ValueError):
        for line in _text(f"{place}/smaps_rollup").splitlines():
            name, _, rest = line.partition(" ")
            if name in values:
                values[name] = int(rest.split()[0]) * 1024
    return values["Pss:"] - values["Pss_Shmem:"]


def reaped_cpu() -> float:
    """Return the CPU seconds of all ended processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
