"""The default backend on Linux: bubblewrap namespaces with a pool of warm cells.

At most `concurrency` runs execute at once, each in a cell with new namespaces, processes and files; others
wait for a free cell. There is no fallback to a weaker isolation: missing requirements raise UserError.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

from ludus.errors import UserError
from ludus.sandbox.base import (
    Limits,
    Outcome,
    RunOrder,
    SandboxSession,
    SessionKind,
    checked_files,
    make_order,
    room_in_memory,
)
from ludus.sandbox.local.cell import INSIDE_ID, Cell, CellPlan, start_cell
from ludus.sandbox.local.guard_session import GuardSession, run_order
from ludus.sandbox.local.pausable_timeout import waiting
from ludus.sandbox.local.seccomp import system_call_filter

PRELOAD = (
    *("ast", "bisect", "collections", "contextlib", "copy", "dataclasses", "datetime", "decimal", "enum"),
    *(
        "fractions",
        "functools",
        "heapq",
        "inspect",
        "io",
        "itertools",
        "json",
        "linecache",
        "math",
        "operator",
        "random",
    ),
    *("re", "site", "statistics", "string", "subprocess", "tempfile", "textwrap", "threading", "time", "typing"),
)
"""Preloaded modules; each program has its own copy of them."""

_INSTALL = "Install it: on Debian or Ubuntu `apt-get install bubblewrap`, on Fedora `dnf install bubblewrap`."
_FIRST_UID, _NUM_UIDS = 1_900_000_000, 100_000_000
"""If started by root, cells run as one of these users, who own no files."""
_RUNS_PER_CELL = 2000


@dataclass(frozen=True, slots=True)
class NamespaceSettings:
    """`concurrency` is the maximum of concurrent runs (0: one per CPU, at least 2), `sessions` that of open
    sessions (0: as many as fit in half of the memory).

    `python` is the interpreter inside (empty: this one, else the system's). `binds` are host folders that
    programs may read, at the same path or, as `folder:place`, at another. `paths` are added to `sys.path`;
    `preload` are modules imported in advance.
    """

    concurrency: int = 0
    sessions: int = 0
    python: str = ""
    binds: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    preload: tuple[str, ...] = PRELOAD


@dataclass(eq=False)
class NamespacesSandbox:
    """The namespaces backend. Use and close it on one event loop."""

    settings: NamespaceSettings = field(default_factory=NamespaceSettings)
    name: str = field(default="namespaces", init=False)
    _idle: list[Cell] = field(default_factory=list, init=False)
    _open: set[Cell] = field(default_factory=set, init=False)
    _places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = field(
        default_factory=WeakKeyDictionary, init=False
    )
    _python: str = field(default="", init=False)

    @property
    def concurrency(self) -> int:
        """Maximum number of concurrent runs."""
        return self.settings.concurrency or max(2, os.cpu_count() or 2)

    @property
    def most_sessions(self) -> int:
        """Maximum number of open sessions."""
        return self.settings.sessions or room_in_memory()

    async def run(
        self,
        program: str | Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        limits: Limits | None = None,
    ) -> Outcome:
        """Run once from a clean state. Raises UserError and WorldError as in the protocol."""
        order = make_order(program, files, stdin, limits)
        loop = asyncio.get_running_loop()
        places = self._places.setdefault(loop, asyncio.Semaphore(self.concurrency))
        with waiting():
            await places.acquire()
        try:
            return await self._run(order)
        finally:
            places.release()

    async def _run(self, order: RunOrder) -> Outcome:
        cell = await self._take()
        try:
            outcome = await run_order(cell, order)
        except BaseException:
            await asyncio.shield(self._end(cell))
            raise
        if cell.runs >= _RUNS_PER_CELL or not cell.is_alive:
            await self._end(cell)
        else:
            self._idle.append(cell)
        return outcome

    async def session(
        self, kind: SessionKind = "python", *, files: Mapping[str, bytes] | None = None, limits: Limits | None = None
    ) -> SandboxSession:
        """Open a session in a separate cell. Raises UserError and WorldError."""
        given = checked_files(files or {})
        cell = await self._take()
        try:
            return await GuardSession.start(cell, kind, given, limits or Limits(), self._end)
        except BaseException:
            await asyncio.shield(self._end(cell))
            raise

    async def warm(self, count: int = 0) -> None:
        """Start cells in advance (0: as many as may run at once). Raises UserError."""
        cells = [await self._start() for _ in range((count or self.concurrency) - len(self._idle))]
        self._idle += cells

    async def close(self) -> None:
        """End all cells, including those of sessions."""
        self._idle.clear()
        await asyncio.gather(*(self._end(cell) for cell in list(self._open)))

    async def _take(self) -> Cell:
        """Return an idle cell, or a new one."""
        while self._idle:
            cell = self._idle.pop(0)
            if cell.is_alive:
                return cell
            await self._end(cell)
        return await self._start()

    async def _start(self) -> Cell:
        self._python = self._python or find_python(self.settings.python)
        cell = await start_cell(make_plan(self.settings, self._python))
        self._open.add(cell)
        return cell

    async def _end(self, cell: Cell) -> None:
        self._open.discard(cell)
        await cell.end()


def make_plan(settings: NamespaceSettings, python: str) -> CellPlan:
    """Build the command of a cell. Raises UserError if a requirement is missing."""
    if sys.platform != "linux":
        raise UserError(f"The namespaces backend needs Linux; this is {sys.platform}.", "Use docker or remote.")
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise UserError("The namespaces backend needs bubblewrap, but bwrap is not installed.", _INSTALL)
    code = system_call_filter()
    binds = _folders(settings, python)
    words = [*_other_user(), bwrap]
    words += [f"--unshare-{kind}" for kind in ("user", "pid", "net", "ipc", "uts")]
    words += ["--unshare-cgroup-try", "--uid", str(INSIDE_ID), "--gid", str(INSIDE_ID), "--hostname", "box"]
    words += ["--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL", "--clearenv"]
    for name, value in (("PATH", "/usr/local/bin:/usr/bin:/bin"), ("HOME", "/box"), ("LANG", "C.UTF-8")):
        words += ["--setenv", name, value]
    words += ["--setenv", "PYTHONHASHSEED", "0", "--setenv", "PYTHONDONTWRITEBYTECODE", "1"]
    words += [word for folder, place in binds for word in ("--ro-bind", folder, place)]
    words += _loose_ends()
    words += ["--proc", "/proc", "--tmpfs", "/dev"]
    for device in ("null", "zero", "full", "random", "urandom"):
        words += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        words += ["--symlink", f"/proc/self/fd/{number}", f"/dev/{name}"]
    words += ["--symlink", "/proc/self/fd", "/dev/fd"]
    words += [word for folder in ("/dev/shm", "/box", "/tmp", "/store") for word in ("--dir", folder)]
    words += ["--remount-ro", "/dev", "--chdir", "/"]
    same = Path(python).name == f"python{sys.version_info.major}.{sys.version_info.minor}"
    return CellPlan(tuple(words), python, same, settings.paths, settings.preload, code)


def _other_user() -> list[str]:
    """Return the command prefix that drops root before anything is started."""
    if os.geteuid() != 0:
        return []
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise UserError(
            "The namespaces backend needs setpriv if run as root.", "Install util-linux, or run as another user."
        )
    uid = str(_FIRST_UID + random.SystemRandom().randrange(_NUM_UIDS))
    return [setpriv, "--reuid", uid, "--regid", uid, "--clear-groups", "--"]


def _folders(settings: NamespaceSettings, python: str) -> list[tuple[str, str]]:
    """Return the readable host folders and their mount points: /usr, the interpreter's, the settings'."""
    folders = [("/usr", "/usr")]
    prefix = str(Path(python).resolve().parent.parent)
    if not Path(prefix).is_relative_to("/usr"):
        folders.append((prefix, prefix))
    for bind in settings.binds:
        folder, _, place = bind.partition(":")
        place = place or folder
        if not Path(folder).is_absolute() or not Path(folder).is_dir() or not Path(place).is_absolute():
            raise UserError(f"{bind!r} is not a folder that a sandbox can mount.", "Use absolute paths of folders.")
        if any(Path(place).is_relative_to(own) for own in ("/box", "/tmp", "/dev", "/proc", "/store")):
            raise UserError(
                f"{bind!r} would be hidden by a folder private to each run.", f"Mount it elsewhere: {folder}:/shown"
            )
        folders.append((folder, place))
    return folders


def _loose_ends() -> list[str]:
    """Return mounts of /bin and the like, as on the host, and of a few files of /etc that commands need."""
    words: list[str] = []
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        place = Path("/", name)
        if place.is_symlink():
            words += ["--symlink", str(place.readlink()), str(place)]
        elif place.is_dir():
            words += ["--ro-bind", str(place), str(place)]
    for name in ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"):
        words += ["--ro-bind-try", name, name]
    return words


def find_python(wanted: str) -> str:
    """Return an interpreter that the sandbox's user can read. Raises UserError."""
    candidates = [wanted] if wanted else [sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"]
    for candidate in candidates:
        real = Path(candidate).resolve()
        if real.is_file() and _is_open(real):
            return str(real)
    raise UserError(
        f"No Python interpreter is readable in a sandbox (tried {', '.join(candidates)}).",
        "Install the system's python3, or set one that every user can read.",
    )


def _is_open(path: Path) -> bool:
    """Return whether the cell's user can reach a file; if started by root, it must be world-accessible."""
    if os.geteuid() != 0:
        return os.access(path, os.X_OK)
    return all(part.stat().st_mode & stat.S_IXOTH for part in (path, *path.parents))
