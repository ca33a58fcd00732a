"""System calls missing from Python's standard library, resource limits, and substitutes of slow standard modules.

`signal` imports `enum`, `contextlib` imports `collections` and `functools`, `json` imports `re`: together they take as
long as the interpreter's start. Programs find them preloaded, except the first program of a zygote.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
else:
    import _signal as signal

__all__ = ["Suppress", "signal"]

NOSUID, NODEV, NOEXEC, REMOUNT, BIND = 2, 4, 8, 32, 4096
_SET_DUMPABLE, _SET_SECCOMP, _SECCOMP_MODE_FILTER = 4, 22, 2


class Suppress:
    """Replacement of `contextlib.suppress`."""

    def __init__(self, *kinds: type[BaseException]) -> None:
        self._kinds = kinds

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> bool:
        return kind is not None and issubclass(kind, self._kinds)


class ResourceLimits:
    """Limits of a run, named as in `ludus.sandbox.base.Limits`."""

    def __init__(self, values: object) -> None:
        if not isinstance(values, dict):
            raise ValueError("limits must be a dict")
        self.wall_s, self.cpu_s = values["wall_s"], values["cpu_s"]
        self.memory_bytes, self.processes = int(values["memory_bytes"]), int(values["processes"])
        self.open_files, self.file_bytes = int(values["open_files"]), int(values["file_bytes"])
        self.disk_bytes, self.disk_files = int(values["disk_bytes"]), int(values["disk_files"])
        self.output_bytes = int(values["output_bytes"])
        self.files_out, self.files_out_bytes = int(values["files_out"]), int(values["files_out_bytes"])


LIBC = ctypes.CDLL(None, use_errno=True)


def check_result(result: int, call: str) -> None:
    """Raise OSError if the result of a C call is -1."""
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Call mount(2). Raises OSError."""
    args = [None if arg is None else arg.encode() for arg in (source, target, kind, options)]
    check_result(LIBC.mount(args[0], args[1], args[2], ctypes.c_ulong(flags), args[3]), f"mount {target}")


def write_text(path: str, text: str) -> None:
    """Write a kernel file. Raises OSError."""
    with open(path, "w") as file:
        file.write(text)


def set_dumpable(value: int) -> None:
    """Set whether processes of the same user may trace this one and read its memory. Raises OSError."""
    check_result(LIBC.prctl(_SET_DUMPABLE, value, 0, 0, 0), "prctl")


def install_seccomp(bpf: bytes) -> None:
    """Install a seccomp filter for this process and its children. Raises OSError."""
    array = ctypes.create_string_buffer(bpf, len(bpf))
    program = struct.pack("@HP", len(bpf) // 8, ctypes.addressof(array))
    check_result(LIBC.prctl(_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0), "seccomp")


def set_rlimits(limits: ResourceLimits, in_session: bool) -> None:
    """Set limits per process: of CPU time only outside of sessions, which check it per call; of processes unless 0."""
    pairs = [
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ]
    if limits.processes:
        pairs.append((resource.RLIMIT_NPROC, limits.processes + 1))
    for kind, value in pairs:
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    if not in_session:
        resource.setrlimit(resource.RLIMIT_CPU, (int(limits.cpu_s) + 1, int(limits.cpu_s) + 2))
