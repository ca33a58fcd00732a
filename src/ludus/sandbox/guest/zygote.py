"""The zygote: process 1 of a cell. It forks a guard on each request of the host."""

from __future__ import annotations

import _socket
import ctypes
import gc
import os
import select
import struct
import sys

from ludus.sandbox.guest.kernel import BIND, NODEV, NOEXEC, NOSUID, checked, ignore_interrupts, libc, mount, write_text
from ludus.sandbox.guest.light import Suppress, signal
from ludus.sandbox.guest.orders import answer
from ludus.sandbox.guest.wire import Gone, WireLine

_NAMESPACES = 0x10000000 | 0x20000000 | 0x20000 | 0x08000000
"""CLONE_NEWUSER, NEWPID, NEWNS, NEWIPC: new for each run. A cell has one run at a time and no network."""
_CLONE = {"x86_64": 56, "aarch64": 220}
_SET_DUMPABLE, _DROP_BOUNDING, _NO_NEW_PRIVILEGES = 4, 24, 38
_DETACH = 2
_PATIENCE_S = 0.05
"""Delay of optimizations that would hold up a waiting first run."""


def main(control: _socket.socket) -> None:
    """Serve the host until it closes the control socket."""
    header, blobs = WireLine(control).read()
    uid, gid = int(str(header["uid"])), int(str(header["gid"]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    libc()
    sys.path.extend(map(str, _words(header["paths"])))
    for step in ("setquit", "setcopyright", "sethelper"):
        __import__("site").__dict__[step]()
    _offer(control, blobs[0], uid, gid)
    select.select([control], [], [], _PATIENCE_S)
    _preload(_words(header["preload"]))
    while control.recv(1):
        _offer(control, blobs[0], uid, gid)


def _words(value: object) -> list[str]:
    return [str(word) for word in value] if isinstance(value, list) else []


def _preload(names: list[str]) -> None:
    """Import modules in advance, so that forked programs share them."""
    for name in names:
        with Suppress(ImportError):
            __import__(name)
    gc.collect()
    gc.disable()
    gc.freeze()


def _offer(control: _socket.socket, code: bytes, uid: int, gid: int) -> None:
    """Fork a guard and send its socket to the host."""
    ours, theirs = _socket.socketpair()
    pid = libc().syscall(_CLONE[os.uname().machine], ctypes.c_ulong(_NAMESPACES | signal.SIGCHLD), 0, 0, 0, 0)
    if pid == 0:
        control.close()
        theirs.close()
        _be_guard(WireLine(ours), code, uid, gid)
        os._exit(0)
    if pid == -1:
        WireLine(ours).send({"error": f"clone: {os.strerror(ctypes.get_errno())}"}, [])
    control.sendmsg([b"g"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("=i", theirs.fileno()))])
    theirs.close()
    ours.close()


def _be_guard(line: WireLine, code: bytes, uid: int, gid: int) -> None:
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ignore_interrupts()
        _furnish(uid, gid)
        line.send({"ready": True}, [])
        answer(line, code)
    except BaseException as error:  # boundary: a fork must never continue as its parent
        with Suppress(Gone):
            line.send({"error": f"{type(error).__name__}: {error}"}, [])


def _furnish(uid: int, gid: int) -> None:
    """Set up the new namespaces: user ids, /proc, and one small writable file system."""
    write_text("/proc/self/setgroups", "deny")
    write_text("/proc/self/uid_map", f"{uid} {uid} 1")
    write_text("/proc/self/gid_map", f"{gid} {gid} 1")
    mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC, "hidepid=2")
    mount("tmpfs", "/store", "tmpfs", NOSUID | NODEV, "size=1m,nr_inodes=64,mode=700")
    for name, place in (("box", "/box"), ("tmp", "/tmp"), ("shm", "/dev/shm")):
        os.mkdir(f"/store/{name}", 0o700)
        mount(f"/store/{name}", place, None, BIND)
    checked(libc().umount2(b"/store", _DETACH), "umount /store")
    checked(libc().prctl(_SET_DUMPABLE, 0, 0, 0, 0), "prctl")
    checked(libc().prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")
    for capability in range(64):
        if libc().prctl(_DROP_BOUNDING, capability, 0, 0, 0) == -1:
            break
