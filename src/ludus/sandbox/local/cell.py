"""A cell: a bubblewrap process with a zygote, and the host's end of the connection to its guards.

A cell runs one guard at a time. Responses are untrusted; only their format is checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import marshal
import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.resources import files
from typing import IO

from ludus.errors import UserError, WorldError
from ludus.sandbox.base import Limits, Outcome
from ludus.sandbox.guest.files import LONGEST
from ludus.sandbox.guest.wire import pack_order, sizes_of, take_apart

START_S, GRACE_S = 20.0, 8.0
_LOOK_S = 0.5
_MODULES = (
    *("light", "wire", "kernel", "usage", "listing", "program", "output", "files", "guard"),
    *("orders", "zygote", "contained"),
)
"""Modules of the guest, in import order."""
INSIDE_ID = 1000
_CHUNK = 1 << 16
_LONGEST_HEADER = 1 << 20
_ESCAPED_BYTES = 12
"""Maximum length of a JSON-escaped character."""

CANNOT_START_HINT = (
    "The namespaces backend needs user namespaces: as root, `sysctl -w user.max_user_namespaces=15000`, "
    "on Ubuntu also `sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`. "
    "docs/use/sandbox.md has the other backends."
)

_BOOT = """
import sys, _socket, marshal
line = _socket.socket(fileno=int(sys.argv[1]))
def some(count):
    parts = b""
    while len(parts) < count:
        parts += line.recv(count - len(parts)) or sys.exit(3)
    return parts
for name, code in marshal.loads(some(int(some(8)))):
    module = sys.modules[name] = type(sys)(name)
    exec(code if not isinstance(code, bytes) else compile(code, name, "exec"), module.__dict__)
sys.modules["ludus.sandbox.guest.zygote"].main(line)
"""


@dataclass(frozen=True)
class CellPlan:
    """Command of a cell and preloaded modules of its zygote.

    `same_python`: the inner interpreter can load the host's bytecode.
    """

    command: tuple[str, ...]
    python: str
    same_python: bool
    paths: tuple[str, ...]
    preload: tuple[str, ...]
    filter: bytes


class GuardGoneError(WorldError):
    """A guard ended without a response."""


@dataclass
class Wire:
    """The host's end of a guard's socket."""

    sock: socket.socket
    _held: bytearray = field(default_factory=bytearray)

    async def send(self, header: Mapping[str, object], blobs: list[bytes]) -> None:
        """Send a frame. Raises WorldError if the guard is gone."""
        try:
            await asyncio.get_running_loop().sock_sendall(self.sock, pack_order(dict(header), blobs))
        except OSError as error:
            raise GuardGoneError(f"The sandbox connection was lost: {error}.") from error

    async def read(self, most: int, longest: int = _LONGEST_HEADER) -> tuple[dict[str, object], list[bytes]]:
        """Read a frame with at most `most` bytes of blobs and `longest` of header. Raises WorldError."""
        text, body = sizes_of(await self._exactly(8))
        if text > longest or body > most:
            raise WorldError(f"The sandbox sent a frame of {text} + {body} bytes, more than its limits allow.")
        try:
            told, sent = await self._exactly(text), await self._exactly(body)
            header, blobs = take_apart(json.loads(told), sent)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise WorldError("The sandbox sent an invalid frame.") from error
        if "error" in header:
            raise WorldError(f"The sandbox failed: {header['error']}.")
        return header, blobs

    def close(self) -> None:
        """Close the socket; the guard then ends its programs and exits."""
        self.sock.close()

    async def _exactly(self, count: int) -> bytes:
        loop = asyncio.get_running_loop()
        while len(self._held) < count:
            try:
                part = await loop.sock_recv(self.sock, _CHUNK)
            except OSError as error:
                raise GuardGoneError(f"The sandbox connection was lost: {error}.") from error
            if not part:
                raise GuardGoneError("The sandbox connection was lost: it was killed, or the machine is out of memory.")
            self._held += part
        taken = bytes(self._held[:count])
        del self._held[:count]
        return taken


@dataclass(eq=False)
class Cell:
    """A running cell. `runs` counts the guards it started."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    errors: IO[bytes]
    pidfd: int
    runs: int = 0
    _ended: bool = False

    @property
    def is_alive(self) -> bool:
        """Whether its processes still run."""
        return self.process.poll() is None

    async def guard(self) -> Wire:
        """Return the next guard, ready for one order. Raises WorldError."""
        try:
            async with asyncio.timeout(START_S):
                await _readable(self.control.fileno())
                _, fds, _, _ = socket.recv_fds(self.control, 1, 1)
                if not fds:
                    raise WorldError(f"A sandbox cell exited. {self._words()}".strip())
                sock = socket.socket(fileno=fds[0])
                sock.setblocking(False)
                wire = Wire(sock)
                await wire.read(most=0)
        except (TimeoutError, OSError) as error:
            raise WorldError(
                f"A sandbox cell failed to start a guard: {type(error).__name__}. {self._words()}"
            ) from error
        self.runs += 1
        return wire

    def prepare(self) -> None:
        """Start the next guard in advance."""
        with contextlib.suppress(OSError):
            self.control.send(b"n")

    async def goes_on(self) -> bool:
        """Return whether the zygote survives a lost guard, after a short wait."""
        if self._ended:
            return False
        try:
            async with asyncio.timeout(_LOOK_S):
                await _readable(self.pidfd)
        except TimeoutError:
            return True
        return False

    async def end(self) -> None:
        """Kill all processes and wait for their end. Idempotent."""
        if self._ended:
            return
        self._ended = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        try:
            async with asyncio.timeout(GRACE_S):
                while self.process.poll() is None:
                    await asyncio.sleep(0.002)
        except TimeoutError:
            self.process.kill()
            self.process.wait()
        self.control.close()
        self.errors.close()
        os.close(self.pidfd)

    def _words(self) -> str:
        self.errors.seek(0)
        return " ".join(self.errors.read(2000).decode("utf-8", "replace").split())


async def start_cell(plan: CellPlan) -> Cell:
    """Start a cell. Raises UserError if this machine does not support it."""
    ours, theirs = socket.socketpair()
    info_r, info_w = os.pipe()
    errors = os.fdopen(os.memfd_create("ludus-errors"), "w+b")
    try:
        process = _spawn(plan, theirs, info_w, errors)
    except OSError as error:
        ours.close()
        os.close(info_r)
        errors.close()
        raise UserError(f"The sandbox cannot be started: {error}.", CANNOT_START_HINT) from error
    finally:
        os.close(info_w)
        theirs.close()
    ours.setblocking(False)
    try:
        pidfd = os.pidfd_open(int(json.loads(await _read_all(info_r))["child-pid"]))
        cell = Cell(process, ours, errors, pidfd)
    except (ValueError, KeyError, ProcessLookupError, TimeoutError):
        process.kill()
        process.wait()
        errors.seek(0)
        words = " ".join(errors.read(2000).decode("utf-8", "replace").split())
        ours.close()
        errors.close()
        raise UserError(f"The sandbox cannot be started: {words or 'no reason given'}.", CANNOT_START_HINT) from None
    header: dict[str, object] = {"uid": INSIDE_ID, "gid": INSIDE_ID}
    header |= {"paths": list(plan.paths), "preload": list(plan.preload)}
    with contextlib.suppress(OSError):  # if it has exited, the first `guard` reports why
        sent = sources(plan.same_python) + pack_order(header, [plan.filter])
        await asyncio.get_running_loop().sock_sendall(ours, sent)
    return cell


def _spawn(plan: CellPlan, theirs: socket.socket, info: int, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start bubblewrap from this thread, with which the cell dies. Raises OSError."""
    notes = {
        "/etc/passwd": _memory_file(f"box:x:{INSIDE_ID}:{INSIDE_ID}::/box:/bin/sh\n"),
        "/etc/group": _memory_file(f"box:x:{INSIDE_ID}:\n"),
    }
    data = [word for place, fd in notes.items() for word in ("--ro-bind-data", str(fd), place)]
    inner = [plan.python, "-S", "-s", "-c", _BOOT, str(theirs.fileno())]
    try:
        return subprocess.Popen(
            [*plan.command, *data, "--remount-ro", "/", "--info-fd", str(info), "--", *inner],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={},
            cwd="/",
            pass_fds=(theirs.fileno(), info, *notes.values()),
            start_new_session=True,
        )
    finally:
        for fd in notes.values():
            os.close(fd)


def _memory_file(text: str) -> int:
    fd = os.memfd_create("ludus")
    os.write(fd, text.encode())
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


async def _readable(fd: int) -> None:
    """Wait until the descriptor is readable."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, _settle, ready)
    try:
        await ready
    finally:
        loop.remove_reader(fd)


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


async def _read_all(fd: int) -> bytes:
    """Read a pipe until it is closed, and close it. Raises TimeoutError."""
    parts: list[bytes] = []
    try:
        async with asyncio.timeout(START_S):
            while True:
                await _readable(fd)
                part = os.read(fd, _CHUNK)
                if not part:
                    return b"".join(parts)
                parts.append(part)
    finally:
        os.close(fd)


@cache
def sources(same_python: bool) -> bytes:
    """Serialize the guest's modules in order, as bytecode if the inner interpreter can load it."""
    parts = []
    for name in ("", *_MODULES):
        path = files("ludus.sandbox.guest") / f"{name or '__init__'}.py"
        text, dotted = path.read_bytes(), f"ludus.sandbox.guest{'.' * bool(name)}{name}"
        parts.append((dotted, compile(text, dotted, "exec") if same_python else text))
    data = marshal.dumps([("ludus", b""), ("ludus.sandbox", b""), *parts])
    return b"%08d" % len(data) + data


def given(limits: Limits, files: Mapping[str, bytes]) -> dict[str, object]:
    """Build the part of an order's header common to runs and sessions."""
    return {"limits": asdict(limits), "names": list(files)}


def most_bytes(limits: Limits) -> int:
    """Return the maximum size of a response's blobs."""
    return 2 * limits.output_bytes + limits.files_out_bytes


def header_bytes(limits: Limits) -> int:
    """Return the maximum size of a response's header, which lists each file and each executable file."""
    return _LONGEST_HEADER + 2 * _ESCAPED_BYTES * LONGEST * limits.files_out


def broken_outcome(why: str) -> Outcome:
    """Return the outcome of a program that broke its guard: failed, with unknown output."""
    return Outcome(stderr=f"[{why}]".encode(errors="replace"), signal=signal.SIGKILL, truncated=True)


def outcome_of(answer: dict[str, object], blobs: list[bytes]) -> Outcome:
    """Convert a response to an outcome. Raises WorldError if malformed."""
    if "broken" in answer:
        return broken_outcome(f"The guard broke: {answer['broken']}.")
    try:
        names = answer["names"]
        if not isinstance(names, list):
            raise TypeError("no list of names")
        stdout, stderr, *contents = blobs
        return Outcome(
            stdout=stdout,
            stderr=stderr,
            exit=None if answer["exit"] is None else int(str(answer["exit"])),
            signal=None if answer["signal"] is None else int(str(answer["signal"])),
            timed_out=answer["timed_out"] is True,
            memory_exceeded=answer["memory_exceeded"] is True,
            truncated=answer["truncated"] is True,
            left_out_bytes=int(str(answer["left_out"])),
            files=dict(zip(map(str, names), contents, strict=True)),
            cpu_s=float(str(answer["cpu_s"])),
            wall_s=float(str(answer["wall_s"])),
            peak_memory_bytes=int(str(answer["peak"])),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise WorldError("The sandbox sent an invalid outcome.") from error
