"""Resource usage and list of the processes of a namespace, from /proc."""

from __future__ import annotations

import _socket
import os
import resource

from ludus.sandbox.guest.syscalls import Suppress

_SLOW_SAMPLE_EVERY = 5
_UNCOUNTED_SOCKETS = 64  # more sockets than ordinary programs open; up to this number their buffers are not counted
_FIELD_BYTES, _LIST_BYTES = 4096, 128 * 1024
"""Maximum bytes of one text of a listed process, and of all texts together."""


class ResourceUsage:
    """Usage of all processes in the namespace except this one. `peak` is the maximum memory in bytes."""

    def __init__(self) -> None:
        self.peak = self.samples = 0
        self._unmapped = 0
        self._ticks_per_s = os.sysconf("SC_CLK_TCK")

    def sample(self, memory_limit: int) -> tuple[int, float]:
        """Return memory in bytes and CPU seconds of the running processes.

        Resident pages count for each process that maps them; only if that exceeds `memory_limit`, shared pages are
        divided among their processes. Page tables, anonymous shared memory (resident or not) and, above
        `_UNCOUNTED_SOCKETS`, maximum socket buffers count too.
        """
        memory, tables, ticks, paths = 0, 0, 0, []
        for pid in _pids():
            with Suppress(OSError, ValueError):
                times = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()[11:15]
                ticks += sum(map(int, times))
                path, status = _memory_status(f"/proc/{pid}")
                paths.append(path)
                memory += _status_bytes(status, "VmRSS")
                tables += _status_bytes(status, "VmPTE")
        if self.samples % _SLOW_SAMPLE_EVERY == 0:
            self._unmapped = _shared_memory(paths) + _socket_memory()
        self.samples += 1
        memory += tables + self._unmapped
        if memory > memory_limit:
            memory = sum(map(_proportional_memory, paths)) + tables + self._unmapped
        self.peak = max(self.peak, memory)
        return memory, ticks / self._ticks_per_s


def _pids() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]


def _bytes(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read(_FIELD_BYTES)


def _text(path: str) -> str:
    return _bytes(path).decode("ascii", "replace")


def _memory_status(path: str) -> tuple[str, str]:
    """Return the /proc path that reports a process's memory (a thread's if the main thread ended), and its status."""
    status = _text(f"{path}/status")
    if "\nVmRSS:" not in status:
        for thread in os.listdir(f"{path}/task"):
            with Suppress(OSError):
                thread_status = _text(f"{path}/task/{thread}/status")
                if "\nVmRSS:" in thread_status:
                    return f"{path}/task/{thread}", thread_status
    return path, status


def _status_bytes(status: str, name: str) -> int:
    """Return a field of a status in bytes, or 0. The first line is skipped: the process sets its text."""
    value = status.partition(f"\n{name}:")[2].split(None, 1)
    return int(value[0]) * 1024 if value else 0


def _socket_memory() -> int:
    """Return an upper bound of socket memory, which /proc does not report: a message may double a full buffer."""
    with Suppress(OSError, ValueError, IndexError):
        count = int(_text("/proc/net/sockstat").split(None, 3)[2]) - _UNCOUNTED_SOCKETS
        if count > 0:
            sock = _socket.socket(_socket.AF_UNIX)
            buffer = sock.getsockopt(_socket.SOL_SOCKET, _socket.SO_SNDBUF)
            sock.close()
            return count * 2 * buffer
    return 0


def _shared_memory(paths: list[str]) -> int:
    """Return the bytes of anonymous shared memory, whose pages outlive their page table entries."""
    sizes: dict[str, int] = {}
    for path in paths:
        with Suppress(OSError, ValueError), open(f"{path}/maps") as lines:
            for line in lines:
                if "/dev/zero" in line:
                    begin, _, end = line.partition(" ")[0].partition("-")
                    inode = line.split()[4]
                    sizes[inode] = max(sizes.get(inode, 0), int(end, 16) - int(begin, 16))
    return sum(sizes.values())


def _proportional_memory(path: str) -> int:
    """Return a process's memory with shared pages divided, excluding anonymous shared memory."""
    with Suppress(OSError, ValueError):
        rollup = _text(f"{path}/smaps_rollup")
        return _status_bytes(rollup, "Pss") - _status_bytes(rollup, "Pss_Shmem")
    return 0


def reaped_cpu_s() -> float:
    """Return the CPU seconds of all reaped processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def peak_memory(process: str) -> int:
    """Return a process's peak resident memory in bytes since exec, or 0 if unavailable."""
    with Suppress(OSError):
        return _status_bytes(_text(f"/proc/{process}/status"), "VmHWM")
    return 0


def list_processes() -> tuple[list[dict[str, object]], bool]:
    """Return all processes except process 1, and whether the size limit cut the list."""
    found: list[dict[str, object]] = []
    left = _LIST_BYTES
    for pid in sorted(map(int, _pids())):
        with Suppress(OSError, ValueError, IndexError):  # the process has ended
            exe, cwd = _link(f"/proc/{pid}/exe"), _link(f"/proc/{pid}/cwd")
            argv, environ = _bytes(f"/proc/{pid}/cmdline"), _bytes(f"/proc/{pid}/environ")
            left -= len(exe) + len(cwd) + len(argv) + len(environ)
            if left < 0:
                return found, True
            begin, _, rest = _bytes(f"/proc/{pid}/stat").decode("utf-8", "replace").rpartition(")")
            fields = rest.split()
            numbers = {"pid": pid, "parent": int(fields[1]), "started": int(fields[19]), "state": fields[0]}
            texts = {"title": begin.partition("(")[2], "program": exe, "folder": cwd, "argv": _strings(argv)}
            environment = dict(word.partition("=")[::2] for word in _strings(environ))
            found.append({**numbers, **texts, "environment": environment})
    return found, False


def _strings(text: bytes) -> list[str]:
    return [word.decode("utf-8", "replace") for word in text.removesuffix(b"\0").split(b"\0")] if text else []


def _link(path: str) -> str:
    """Return a link's target, or "" for a zombie process."""
    try:
        return os.readlink(path.encode()).decode("utf-8", "replace")
    except OSError:
        return ""
