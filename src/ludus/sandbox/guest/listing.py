"""List the processes of a namespace from /proc."""

from __future__ import annotations

import os

from ludus.sandbox.guest.light import Suppress

_LONGEST, _MOST = 4096, 128 * 1024
"""Maximum bytes of one text of a process, and of all texts together."""


class ListedFile:
    """The processes of the namespace except process 1. `cut` is set if the size limit was exceeded."""

    def __init__(self) -> None:
        self.found: list[dict[str, object]] = []
        self.cut = False
        room = _MOST
        for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"):
            with Suppress(OSError, ValueError, IndexError):  # the process has ended
                program, folder = _link(f"/proc/{pid}/exe"), _link(f"/proc/{pid}/cwd")
                argv, environment = _bytes(f"/proc/{pid}/cmdline"), _bytes(f"/proc/{pid}/environ")
                room -= len(program) + len(folder) + len(argv) + len(environment)
                if room < 0:
                    self.cut = True
                    return
                self.found.append(_told(pid, program, folder, argv, environment))


def _told(pid: int, program: str, folder: str, argv: bytes, environment: bytes) -> dict[str, object]:
    begin, _, rest = _bytes(f"/proc/{pid}/stat").decode("utf-8", "replace").rpartition(")")
    fields = rest.split()
    return {
        "pid": pid,
        "parent": int(fields[1]),
        "started": int(fields[19]),
        "state": fields[0],
        "title": begin.partition("(")[2],
        "program": program,
        "folder": folder,
        "argv": _words(argv),
        "environment": _words(environment),
    }


def _words(text: bytes) -> list[str]:
    return [word.decode("utf-8", "replace") for word in text.removesuffix(b"\0").split(b"\0")] if text else []


def _link(path: str) -> str:
    """Return a link's target, or "" for a zombie process."""
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _bytes(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, _LONGEST)
    finally:
        os.close(fd)
