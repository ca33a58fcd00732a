"""The default backend on Linux: bubblewrap namespaces with a pool of warm zygotes.

At most `concurrency` runs execute at once, each in a zygote with new namespaces, processes and files; others wait for a
free slot, while the timeouts of their calls pause. A zygote is a bubblewrap sandbox whose process 1 forks supervisors,
one at a time. Missing requirements raise UserError; weaker isolation is never used instead.
"""

from __future__ import annotations

import asyncio
import json
import marshal
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import IO
from weakref import WeakKeyDictionary

from ludus.errors import UserError, WorldError
from ludus.sandbox.base import Limits, Outcome, RunRequest, SandboxSettings
from ludus.sandbox.guest.wire import pack_request
from ludus.sandbox.local.seccomp import seccomp_filter
from ludus.sandbox.local.supervisor_client import (
    CHUNK,
    GRACE_S,
    SupervisorHost,
    SupervisorSandbox,
    SupervisorSocket,
    run_request,
)

_PRELOAD = """
ast bisect collections contextlib copy dataclasses datetime decimal enum fractions functools heapq inspect io itertools
json linecache math operator random re site statistics string subprocess tempfile textwrap threading time typing
"""
"""Preloaded modules; each program has its own copy of them."""

_INSTALL_HINT = "Install it: on Debian or Ubuntu `apt-get install bubblewrap`, on Fedora `dnf install bubblewrap`."
_FIRST_UID, _NUM_UIDS = 1_900_000_000, 100_000_000
"""If started by root, zygotes run as one of these users, who own no files."""
_RUNS_PER_ZYGOTE = 2000
_START_S = 20.0
_SURVIVAL_S = 0.5
_MODULES = ("wire", "syscalls", "procfs", "streams", "program", "files", "init")
"""Modules of the guest, in import order."""
GUEST_ID = 1000  # user and group id in the sandbox
# Environment of programs, beside PATH
PROGRAM_ENVIRONMENT = {"HOME": "/box", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}

_CANNOT_START_HINT = (
    "The namespaces backend needs user namespaces: as root, `sysctl -w user.max_user_namespaces=15000`, "
    "on Ubuntu also `sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`; in a container, the options in the "
    "first lines of the Dockerfile of Ludus. "
    "docs/use/sandbox.md has the other backends."
)

_BOOTSTRAP = """
import marshal, os, sys
def receive(count):
    data = b""
    while len(data) < count:
        data += os.read(FD, count - len(data)) or sys.exit(3)
    return data
for name, code in marshal.loads(receive(int(receive(8)))):
    module = sys.modules[name] = type(sys)(name)
    exec(code if not isinstance(code, bytes) else compile(code, name, "exec"), module.__dict__)
sys.modules["ludus.sandbox.guest.init"].ENTRY(FD)
"""


LoopSlots = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]


@dataclass(eq=False)
class PausableTimeout:
    """A timeout that can be paused. If several tasks share it, it pauses while any of them waits."""

    timeout: asyncio.Timeout
    paused_s: float = 0.0
    """Total seconds paused."""
    _num_pauses: int = 0
    _paused_at: float = 0.0
    _deadline: float | None = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        time = asyncio.get_running_loop().time
        if not self._num_pauses:
            self._paused_at, self._deadline = time(), self.timeout.when()
            self._reschedule(None)
        self._num_pauses += 1
        try:
            yield
        finally:
            self._num_pauses -= 1
            if not self._num_pauses:
                paused_s = time() - self._paused_at
                self.paused_s += paused_s
                self._reschedule(None if self._deadline is None else self._deadline + paused_s)

    def _reschedule(self, when: float | None) -> None:
        with suppress(RuntimeError):  # this task outlives the expired timeout
            self.timeout.reschedule(when)


CALL_TIMEOUTS: ContextVar[tuple[PausableTimeout, ...]] = ContextVar("ludus-call-timeouts", default=())
"""Timeouts of the current call of a tool or environment, for `paused_in_queue`."""


@contextmanager
def paused_in_queue() -> Iterator[None]:
    """Pause the timeouts of the current call within the block."""
    with ExitStack() as stack:
        for timeout in CALL_TIMEOUTS.get():
            stack.enter_context(timeout.paused())
        yield


def bootstrap(entry: str, fd: int) -> str:
    """Return a program that receives `guest_modules` on a descriptor and calls a function of `guest.init`."""
    return _BOOTSTRAP.replace("ENTRY", entry).replace("FD", str(fd))


@cache
def guest_modules(as_bytecode: bool) -> bytes:
    """Serialize the guest's modules in import order, as bytecode if the inner interpreter can load it."""
    modules = []
    for name in ("", *_MODULES):
        path = files("ludus.sandbox.guest") / f"{name or '__init__'}.py"
        text, dotted = path.read_bytes(), f"ludus.sandbox.guest{'.' * bool(name)}{name}"
        modules.append((dotted, compile(text, dotted, "exec") if as_bytecode else text))
    data = marshal.dumps([("ludus", b""), ("ludus.sandbox", b""), *modules])
    return b"%08d" % len(data) + data


@dataclass(eq=False)
class Zygote(SupervisorHost):
    """A running zygote. `runs` counts the supervisors it started."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    errors: IO[bytes]
    pidfd: int
    runs: int = 0
    _killed: bool = False

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    async def start_supervisor(self) -> SupervisorSocket:
        try:
            async with asyncio.timeout(_START_S):
                await _readable(self.control.fileno())
                _, fds, _, _ = socket.recv_fds(self.control, 1, 1)
                if not fds:
                    raise self._failure("A sandbox zygote exited.")
                sock = socket.socket(fileno=fds[0])
                sock.setblocking(False)
                supervisor = SupervisorSocket(sock)
                await supervisor.receive(max_body=0)
        except (TimeoutError, OSError) as error:
            raise self._failure(f"A sandbox zygote failed to start a supervisor: {type(error).__name__}.") from error
        self.runs += 1
        return supervisor

    def _failure(self, text: str) -> WorldError:
        reason = read_errors(self.errors)
        return WorldError(f"{text} {reason}".strip(), _CANNOT_START_HINT if reason.startswith("bwrap:") else "")

    def prefork(self) -> None:
        with suppress(OSError):
            self.control.send(b"n")

    async def survives(self) -> bool:
        if self._killed:
            return False
        try:
            async with asyncio.timeout(_SURVIVAL_S):
                await _readable(self.pidfd)
        except TimeoutError:
            return True
        return False

    async def kill(self) -> None:
        if self._killed:
            return
        self._killed = True
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        if await wait_exit(self.process, GRACE_S) is None:
            self.process.kill()
            self.process.wait()
        self.control.close()
        self.errors.close()
        os.close(self.pidfd)


async def wait_exit(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """Return the exit code of a process, or None if it still runs after `timeout_s`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while process.poll() is None:
                await asyncio.sleep(0.002)
    return process.poll()


def open_errors() -> IO[bytes]:
    """Open a file in memory for a process's stderr."""
    return os.fdopen(os.memfd_create("ludus-errors"), "w+b")


def read_errors(errors: IO[bytes]) -> str:
    """Return the beginning of a process's stderr in one line."""
    errors.seek(0)
    return " ".join(errors.read(2000).decode("utf-8", "replace").split())


async def start_zygote(settings: SandboxSettings, preload: tuple[str, ...]) -> Zygote:
    """Start a zygote. Raises UserError if this machine does not support it."""
    python = find_python(settings.python)
    command, seccomp = zygote_command(settings, python), seccomp_filter()
    ours, theirs = socket.socketpair()
    info_r, info_w = os.pipe()
    errors = open_errors()
    try:
        process = _spawn(command, python, theirs, info_w, errors)
    except OSError as error:
        ours.close()
        os.close(info_r)
        errors.close()
        raise UserError(f"The sandbox cannot be started: {error}.", _CANNOT_START_HINT) from error
    finally:
        os.close(info_w)
        theirs.close()
    ours.setblocking(False)
    try:
        zygote = Zygote(process, ours, errors, os.pidfd_open(int(json.loads(await _read_pipe(info_r))["child-pid"])))
    except (ValueError, KeyError, ProcessLookupError, TimeoutError):
        process.kill()
        process.wait()
        reason = read_errors(errors) or "bubblewrap printed no reason"
        ours.close()
        errors.close()
        raise UserError(f"The sandbox cannot be started: {reason.rstrip('.')}.", _CANNOT_START_HINT) from None
    with suppress(OSError):  # if it has exited, the first `start_supervisor` reports why
        same_python = Path(python).name == f"python{sys.version_info.major}.{sys.version_info.minor}"
        request = pack_request({"paths": list(settings.paths), "preload": list(preload)}, [seccomp])
        await asyncio.get_running_loop().sock_sendall(ours, guest_modules(as_bytecode=same_python) + request)
    return zygote


def _spawn(
    command: list[str], python: str, theirs: socket.socket, info: int, errors: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start bubblewrap; the zygote is killed when this thread exits. Raises OSError."""
    etc = {
        "/etc/passwd": _memory_file(f"box:x:{GUEST_ID}:{GUEST_ID}::/box:/bin/sh\n"),
        "/etc/group": _memory_file(f"box:x:{GUEST_ID}:\n"),
    }
    data = [arg for path, fd in etc.items() for arg in ("--ro-bind-data", str(fd), path)]
    inner = [python, "-S", "-s", "-c", bootstrap("run_zygote", theirs.fileno())]
    try:
        command = [*command, *data, "--remount-ro", "/", "--info-fd", str(info), "--", *inner]
        fds, null = (theirs.fileno(), info, *etc.values()), subprocess.DEVNULL
        return subprocess.Popen(
            command, stdin=null, stdout=null, stderr=errors, env={}, cwd="/", pass_fds=fds, start_new_session=True
        )
    finally:
        for fd in etc.values():
            os.close(fd)


def _memory_file(text: str) -> int:
    fd = os.memfd_create("ludus")
    os.write(fd, text.encode())
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)


async def _read_pipe(fd: int) -> bytes:
    parts: list[bytes] = []
    try:
        async with asyncio.timeout(_START_S):
            while True:
                await _readable(fd)
                part = os.read(fd, CHUNK)
                if not part:
                    return b"".join(parts)
                parts.append(part)
    finally:
        os.close(fd)


@dataclass(eq=False)
class NamespacesSandbox(SupervisorSandbox[Zygote]):
    """The namespaces backend. Use and close it on one event loop. `preload` are modules imported in advance."""

    name = "namespaces"
    preload: tuple[str, ...] = tuple(_PRELOAD.split())
    _idle: list[Zygote] = field(default_factory=list, init=False)
    _slots: LoopSlots = field(default_factory=WeakKeyDictionary, init=False)

    @property
    def concurrency(self) -> int:
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
        self._idle += [await self._start_zygote() for _ in range((count or self.concurrency) - len(self._idle))]

    async def close(self) -> None:
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
        zygote = await start_zygote(self.settings, self.preload)
        self._open.add(zygote)
        return zygote


def zygote_command(settings: SandboxSettings, python: str) -> list[str]:
    """Return the bubblewrap command of a zygote without the program. Raises UserError if a requirement is missing."""
    if sys.platform != "linux":
        raise UserError(f"The namespaces backend needs Linux; this is {sys.platform}.", "Use docker or remote.")
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise UserError("The namespaces backend needs bubblewrap, but bwrap is not installed.", _INSTALL_HINT)
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
    return [*args, "--remount-ro", "/dev", "--chdir", "/"]


def _drop_root() -> list[str]:
    if os.geteuid() != 0:
        return []
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        hint = "Install util-linux, or run as another user."
        raise UserError("The namespaces backend needs setpriv if run as root.", hint)
    uid = str(_FIRST_UID + random.SystemRandom().randrange(_NUM_UIDS))
    return [setpriv, "--reuid", uid, "--regid", uid, "--clear-groups", "--"]


def _bind_mounts(settings: SandboxSettings, python: str) -> list[tuple[str, str]]:
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
            hint = f"Mount it elsewhere: {folder}:/shown"
            raise UserError(f"{bind!r} would be hidden by a folder private to each run.", hint)
        folders.append((folder, target))
    return folders


def _system_mounts() -> list[str]:
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
    hint = "Install the system's python3, or set one that every user can read."
    raise UserError(f"No Python interpreter is readable in a sandbox (tried {', '.join(candidates)}).", hint)


def _is_accessible(path: Path) -> bool:
    if os.geteuid() == 0:  # the zygote's user is another one
        return all(part.stat().st_mode & stat.S_IXOTH for part in (path, *path.parents))
    return os.access(path, os.X_OK)
