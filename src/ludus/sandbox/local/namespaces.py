"""The default backend on Linux: bubblewrap namespaces with a pool of warm zygotes.

At most `concurrency` runs execute at once, each in a zygote with new namespaces, processes and files; others wait for a
free slot. Missing requirements raise UserError; weaker isolation is never used instead.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import stat
import sys
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

from ludus.errors import UserError
from ludus.sandbox.base import Limits, Outcome, RunRequest, SandboxSettings
from ludus.sandbox.local.pausable_timeout import paused_in_queue
from ludus.sandbox.local.seccomp import seccomp_filter
from ludus.sandbox.local.supervisor_client import SupervisorSandbox, run_request
from ludus.sandbox.local.zygote import GUEST_ID, PROGRAM_ENVIRONMENT, Zygote, ZygoteSpec, start_zygote

_PRELOAD = """
ast bisect collections contextlib copy dataclasses datetime decimal enum fractions functools heapq inspect io itertools
json linecache math operator random re site statistics string subprocess tempfile textwrap threading time typing
"""
"""Preloaded modules; each program has its own copy of them."""

_INSTALL_HINT = "Install it: on Debian or Ubuntu `apt-get install bubblewrap`, on Fedora `dnf install bubblewrap`."
_FIRST_UID, _NUM_UIDS = 1_900_000_000, 100_000_000
"""If started by root, zygotes run as one of these users, who own no files."""
_RUNS_PER_ZYGOTE = 2000


@dataclass(eq=False)
class NamespacesSandbox(SupervisorSandbox[Zygote]):
    """The namespaces backend. Use and close it on one event loop. `preload` are modules imported in advance."""

    name = "namespaces"
    preload: tuple[str, ...] = tuple(_PRELOAD.split())
    _idle: list[Zygote] = field(default_factory=list, init=False)
    _slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = field(
        default_factory=WeakKeyDictionary, init=False
    )
    _python: str = field(default="", init=False)

    @property
    def concurrency(self) -> int:
        """Maximum number of concurrent runs."""
        return self.settings.concurrency or max(2, os.cpu_count() or 2)

    async def _run(self, request: RunRequest) -> Outcome:
        slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.concurrency))
        with paused_in_queue():
            await slots.acquire()
        try:
            zygote = await self._new_host(request.limits)
            try:
                outcome = await run_request(zygote, request)
            except BaseException:
                await asyncio.shield(self._kill(zygote))
                raise
            if zygote.runs >= _RUNS_PER_ZYGOTE or not zygote.is_alive:
                await self._kill(zygote)
            else:
                self._idle.append(zygote)
            return outcome
        finally:
            slots.release()

    async def warm(self, count: int = 0) -> None:
        """Start zygotes in advance (0: as many as `concurrency`). Raises UserError."""
        self._idle += [await self._start_zygote() for _ in range((count or self.concurrency) - len(self._idle))]

    async def close(self) -> None:
        """Kill all zygotes, including those of sessions."""
        self._idle.clear()
        await super().close()

    async def _new_host(self, _: Limits) -> Zygote:
        while self._idle:
            zygote = self._idle.pop(0)
            if zygote.is_alive:
                return zygote
            await self._kill(zygote)
        return await self._start_zygote()

    async def _start_zygote(self) -> Zygote:
        self._python = self._python or find_python(self.settings.python)
        zygote = await start_zygote(make_zygote_spec(self.settings, self._python, self.preload))
        self._open.add(zygote)
        return zygote


def make_zygote_spec(settings: SandboxSettings, python: str, preload: tuple[str, ...] = ()) -> ZygoteSpec:
    """Build the command of a zygote. Raises UserError if a requirement is missing."""
    if sys.platform != "linux":
        raise UserError(f"The namespaces backend needs Linux; this is {sys.platform}.", "Use docker or remote.")
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise UserError("The namespaces backend needs bubblewrap, but bwrap is not installed.", _INSTALL_HINT)
    seccomp = seccomp_filter()
    binds = _bind_mounts(settings, python)
    args = [*_drop_root(), bwrap]
    args += [f"--unshare-{kind}" for kind in ("user", "pid", "net", "ipc", "uts")]
    args += ["--unshare-cgroup-try", "--uid", str(GUEST_ID), "--gid", str(GUEST_ID), "--hostname", "box"]
    args += ["--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL", "--clearenv"]
    for name, value in (("PATH", "/usr/local/bin:/usr/bin:/bin"), *PROGRAM_ENVIRONMENT.items()):
        args += ["--setenv", name, value]
    args += [arg for folder, target in binds for arg in ("--ro-bind", folder, target)]
    args += _system_mounts()
    args += ["--proc", "/proc", "--tmpfs", "/dev"]
    for device in ("null", "zero", "full", "random", "urandom"):
        args += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        args += ["--symlink", f"/proc/self/fd/{number}", f"/dev/{name}"]
    args += ["--symlink", "/proc/self/fd", "/dev/fd"]
    args += [arg for folder in ("/dev/shm", "/box", "/tmp", "/store") for arg in ("--dir", folder)]
    args += ["--remount-ro", "/dev", "--chdir", "/"]
    same = Path(python).name == f"python{sys.version_info.major}.{sys.version_info.minor}"
    return ZygoteSpec(tuple(args), python, same, settings.paths, preload, seccomp)


def _drop_root() -> list[str]:
    """Return the command prefix that drops root privileges before bubblewrap starts."""
    if os.geteuid() != 0:
        return []
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise UserError(
            "The namespaces backend needs setpriv if run as root.", "Install util-linux, or run as another user."
        )
    uid = str(_FIRST_UID + random.SystemRandom().randrange(_NUM_UIDS))
    return [setpriv, "--reuid", uid, "--regid", uid, "--clear-groups", "--"]


def _bind_mounts(settings: SandboxSettings, python: str) -> list[tuple[str, str]]:
    """Return the readable host folders and their mount points: /usr, the interpreter's, the settings'."""
    folders = [("/usr", "/usr")]
    prefix = str(Path(python).resolve().parent.parent)
    if not Path(prefix).is_relative_to("/usr"):
        folders.append((prefix, prefix))
    for bind in settings.binds:
        folder, _, target = bind.partition(":")
        target = target or folder
        if not Path(folder).is_absolute() or not Path(folder).is_dir() or not Path(target).is_absolute():
            raise UserError(f"{bind!r} is not a folder that a sandbox can mount.", "Use absolute paths of folders.")
        if any(Path(target).is_relative_to(private) for private in ("/box", "/tmp", "/dev", "/proc", "/store")):
            raise UserError(
                f"{bind!r} would be hidden by a folder private to each run.", f"Mount it elsewhere: {folder}:/shown"
            )
        folders.append((folder, target))
    return folders


def _system_mounts() -> list[str]:
    """Return mounts of the host's /bin, /lib and similar, and of the files of /etc that commands need."""
    args: list[str] = []
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        target = Path("/", name)
        if target.is_symlink():
            args += ["--symlink", str(target.readlink()), str(target)]
        elif target.is_dir():
            args += ["--ro-bind", str(target), str(target)]
    for name in ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"):
        args += ["--ro-bind-try", name, name]
    return args


def find_python(path: str) -> str:
    """Return `path` or a default interpreter that the sandbox's user can read. Raises UserError."""
    candidates = [path] if path else [sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"]
    for candidate in candidates:
        real = Path(candidate).resolve()
        if real.is_file() and _is_accessible(real):
            return str(real)
    raise UserError(
        f"No Python interpreter is readable in a sandbox (tried {', '.join(candidates)}).",
        "Install the system's python3, or set one that every user can read.",
    )


def _is_accessible(path: Path) -> bool:
    """Return whether the zygote's user can reach a file; if started by root, it must be world-accessible."""
    if os.geteuid() != 0:
        return os.access(path, os.X_OK)
    return all(part.stat().st_mode & stat.S_IXOTH for part in (path, *path.parents))
