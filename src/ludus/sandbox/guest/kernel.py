"""System calls missing from Python's standard library, and the kernel's limits per process."""

from __future__ import annotations

import ctypes
import os
import resource
import struct

from ludus.sandbox.guest.light import signal

NOSUID, NODEV, NOEXEC, REMOUNT, BIND = 2, 4, 8, 32, 4096
_SET_SECCOMP, _FILTER = 22, 2


class ResourceBounds:
    """Limits of a run, named as in `ludus.sandbox.base.Limits`."""

    def __init__(self, given: object) -> None:
        if not isinstance(given, dict):
            raise ValueError("limits were expected")
        self.wall_s, self.cpu_s = given["wall_s"], given["cpu_s"]
        self.memory_bytes, self.processes = int(given["memory_bytes"]), int(given["processes"])
        self.open_files, self.file_bytes = int(given["open_files"]), int(given["file_bytes"])
        self.disk_bytes, self.disk_files = int(given["disk_bytes"]), int(given["disk_files"])
        self.output = int(given["output_bytes"])
        self.files_out, self.files_out_bytes = int(given["files_out"]), int(given["files_out_bytes"])


_opened: list[ctypes.CDLL] = []


def libc() -> ctypes.CDLL:
    """Return the C library."""
    if not _opened:
        _opened.append(ctypes.CDLL(None, use_errno=True))
    return _opened[0]


def checked(result: int, what: str) -> int:
    """Return a C call's result. Raises OSError if it is -1."""
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Call mount(2). Raises OSError."""
    words = [None if word is None else word.encode() for word in (source, target, kind, options)]
    checked(libc().mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]), f"mount {target}")


def write_text(path: str, text: str) -> None:
    """Write a kernel file. Raises OSError."""
    with open(path, "w") as file:
        file.write(text)


def drop_capabilities() -> None:
    """Drop all capabilities. Raises OSError."""
    header, nothing = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    checked(libc().capset(header, nothing), "capset")


def install_filter(code: bytes) -> None:
    """Install a seccomp filter for this process and its children. Raises OSError."""
    array = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(array))
    checked(libc().prctl(_SET_SECCOMP, _FILTER, program, 0, 0), "seccomp")


def ignore_interrupts() -> None:
    """Ignore SIGINT in process 1.

    The kernel drops signals that process 1 has no handler for, and Python installs one only for SIGINT.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def set_limits(bounds: ResourceBounds, in_session: bool) -> None:
    """Set the kernel's limits per process. A session's CPU time is checked per call instead.

    Processes are not limited if `bounds.processes` is 0.
    """
    cpu = int(bounds.cpu_s) + 1
    pairs = [
        (resource.RLIMIT_AS, bounds.memory_bytes),
        (resource.RLIMIT_NOFILE, bounds.open_files),
        (resource.RLIMIT_FSIZE, bounds.file_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ]
    if bounds.processes:
        pairs.append((resource.RLIMIT_NPROC, bounds.processes + 1))
    for kind, value in pairs:
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    if not in_session:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
