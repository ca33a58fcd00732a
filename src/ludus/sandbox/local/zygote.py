"""A zygote: a bubblewrap sandbox whose process 1 forks supervisors, one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import marshal
import os
import signal
import socket
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import IO

from ludus.errors import UserError, WorldError
from ludus.sandbox.guest.wire import pack_request
from ludus.sandbox.local.supervisor_client import CHUNK, GRACE_S, SupervisorHost, SupervisorSocket

_START_S = 20.0
_SURVIVAL_S = 0.5
_MODULES = ("wire", "syscalls", "procfs", "streams", "program", "files", "supervisor", "commands", "init")
"""Modules of the guest, in import order."""
GUEST_ID = 1000
"""User and group id in the sandbox."""
PROGRAM_ENVIRONMENT = {"HOME": "/box", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
"""The environment of programs, beside PATH."""
_CANNOT_START_HINT = (
    "The namespaces backend needs user namespaces: as root, `sysctl -w user.max_user_namespaces=15000`, "
    "on Ubuntu also `sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`. "
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


@dataclass(frozen=True)
class ZygoteSpec:
    """Command of a zygote, module path and preloaded modules, seccomp filter.

    `same_python`: the inner interpreter can load the host's bytecode.
    """

    command: tuple[str, ...]
    python: str
    same_python: bool
    paths: tuple[str, ...]
    preload: tuple[str, ...]
    seccomp: bytes


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
        """Whether the zygote's process is still running."""
        return self.process.poll() is None

    async def start_supervisor(self) -> SupervisorSocket:
        """Return the next supervisor, ready for one request. Raises WorldError."""
        try:
            async with asyncio.timeout(_START_S):
                await _readable(self.control.fileno())
                _, fds, _, _ = socket.recv_fds(self.control, 1, 1)
                if not fds:
                    raise WorldError(f"A sandbox zygote exited. {read_errors(self.errors)}".strip())
                sock = socket.socket(fileno=fds[0])
                sock.setblocking(False)
                supervisor = SupervisorSocket(sock)
                await supervisor.receive(max_body=0)
        except (TimeoutError, OSError) as error:
            raise WorldError(
                f"A sandbox zygote failed to start a supervisor: {type(error).__name__}. {read_errors(self.errors)}"
            ) from error
        self.runs += 1
        return supervisor

    def prefork(self) -> None:
        """Start the next supervisor in advance."""
        with contextlib.suppress(OSError):
            self.control.send(b"n")

    async def survives(self) -> bool:
        """Return whether the zygote survives a lost supervisor, after a short wait."""
        if self._killed:
            return False
        try:
            async with asyncio.timeout(_SURVIVAL_S):
                await _readable(self.pidfd)
        except TimeoutError:
            return True
        return False

    async def kill(self) -> None:
        """Kill all processes and wait for them. Idempotent."""
        if self._killed:
            return
        self._killed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        if await wait_exit(self.process, GRACE_S) is None:
            self.process.kill()
            self.process.wait()
        self.control.close()
        self.errors.close()
        os.close(self.pidfd)


async def wait_exit(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """Return the exit code of a process, or None if it still runs after `timeout_s`."""
    with contextlib.suppress(TimeoutError):
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


async def start_zygote(spec: ZygoteSpec) -> Zygote:
    """Start a zygote. Raises UserError if this machine does not support it."""
    ours, theirs = socket.socketpair()
    info_r, info_w = os.pipe()
    errors = open_errors()
    try:
        process = _spawn(spec, theirs, info_w, errors)
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
        raise UserError(f"The sandbox cannot be started: {reason}.", _CANNOT_START_HINT) from None
    header: dict[str, object] = {"uid": GUEST_ID, "gid": GUEST_ID}
    header |= {"paths": list(spec.paths), "preload": list(spec.preload)}
    with contextlib.suppress(OSError):  # if it has exited, the first `start_supervisor` reports why
        data = guest_modules(spec.same_python) + pack_request(header, [spec.seccomp])
        await asyncio.get_running_loop().sock_sendall(ours, data)
    return zygote


def _spawn(spec: ZygoteSpec, theirs: socket.socket, info: int, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start bubblewrap; the zygote is killed when this thread exits. Raises OSError."""
    etc = {
        "/etc/passwd": _memory_file(f"box:x:{GUEST_ID}:{GUEST_ID}::/box:/bin/sh\n"),
        "/etc/group": _memory_file(f"box:x:{GUEST_ID}:\n"),
    }
    data = [arg for path, fd in etc.items() for arg in ("--ro-bind-data", str(fd), path)]
    inner = [spec.python, "-S", "-s", "-c", bootstrap("run_zygote", theirs.fileno())]
    try:
        return subprocess.Popen(
            [*spec.command, *data, "--remount-ro", "/", "--info-fd", str(info), "--", *inner],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={},
            cwd="/",
            pass_fds=(theirs.fileno(), info, *etc.values()),
            start_new_session=True,
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
    """Read a pipe until it is closed, and close it. Raises TimeoutError."""
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
