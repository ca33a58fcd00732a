"""Process 1 of a sandbox: the zygote of the namespaces backend, or the supervisor of a container."""

from __future__ import annotations

import _socket
import ctypes
import gc
import os
import select
import struct
import sys

from ludus.sandbox.guest.supervisor import serve_request
from ludus.sandbox.guest.syscalls import (
    BIND,
    LIBC,
    NODEV,
    NOEXEC,
    NOSUID,
    Suppress,
    check_result,
    ignore_sigint,
    mount,
    set_dumpable,
    signal,
    write_text,
)
from ludus.sandbox.guest.wire import Connection, Disconnected, string_list

_NAMESPACES = 0x10000000 | 0x20000000 | 0x20000 | 0x08000000
"""CLONE_NEWUSER, NEWPID, NEWNS, NEWIPC: new for each run. A zygote serves one run at a time without network."""
_CLONE = {"x86_64": 56, "aarch64": 220}
_DROP_BOUNDING, _NO_NEW_PRIVILEGES = 24, 38
_MNT_DETACH = 2
_PRELOAD_DELAY_S = 0.05  # delay of the preloading, so that it does not delay a first run that is already requested


def run_zygote(fd: int) -> None:
    """Serve the host until it closes the control socket `fd`."""
    control = _socket.socket(fileno=fd)
    header, (seccomp,) = Connection(fd, fd).receive()
    uid, gid = int(str(header["uid"])), int(str(header["gid"]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    sys.path.extend(string_list(header["paths"]))
    for step in ("setquit", "setcopyright", "sethelper"):
        __import__("site").__dict__[step]()
    _fork_supervisor(control, seccomp, uid, gid)
    select.select([control], [], [], _PRELOAD_DELAY_S)
    for name in string_list(header["preload"]):  # imported in advance, so that forked programs share them
        with Suppress(ImportError):
            __import__(name)
    gc.collect()
    gc.disable()
    gc.freeze()
    while control.recv(1):
        _fork_supervisor(control, seccomp, uid, gid)


def _fork_supervisor(control: _socket.socket, seccomp: bytes, uid: int, gid: int) -> None:
    """Fork a supervisor into new namespaces and send its socket to the host."""
    ours, theirs = _socket.socketpair()
    connection = Connection(ours.fileno(), ours.fileno())
    pid = LIBC.syscall(_CLONE[os.uname().machine], ctypes.c_ulong(_NAMESPACES | signal.SIGCHLD), 0, 0, 0, 0)
    if pid == 0:
        control.close()
        theirs.close()
        _run_supervisor(connection, seccomp, uid, gid)
        os._exit(0)
    if pid == -1:
        connection.send({"error": f"clone: {os.strerror(ctypes.get_errno())}"}, [])
    control.sendmsg([b"g"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("=i", theirs.fileno()))])
    theirs.close()
    ours.close()


def _run_supervisor(connection: Connection, seccomp: bytes, uid: int, gid: int) -> None:
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ignore_sigint()
        _set_up_namespaces(uid, gid)
        connection.send({"ready": True}, [])
        serve_request(connection, seccomp)
    except BaseException as error:  # boundary: a fork must never continue as its parent
        with Suppress(Disconnected):
            connection.send({"error": f"{type(error).__name__}: {error}"}, [])


def _set_up_namespaces(uid: int, gid: int) -> None:
    """Map the user, mount /proc and one small writable file system, and give up privileges."""
    write_text("/proc/self/setgroups", "deny")
    write_text("/proc/self/uid_map", f"{uid} {uid} 1")
    write_text("/proc/self/gid_map", f"{gid} {gid} 1")
    mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC, "hidepid=2")
    mount("tmpfs", "/store", "tmpfs", NOSUID | NODEV, "size=1m,nr_inodes=64,mode=700")
    for name, target in (("box", "/box"), ("tmp", "/tmp"), ("shm", "/dev/shm")):
        os.mkdir(f"/store/{name}", 0o700)
        mount(f"/store/{name}", target, None, BIND)
    check_result(LIBC.umount2(b"/store", _MNT_DETACH), "umount /store")
    set_dumpable(0)
    check_result(LIBC.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")
    for capability in range(64):
        if LIBC.prctl(_DROP_BOUNDING, capability, 0, 0, 0) == -1:
            break


def run_container(fd: int) -> None:
    """Serve one run or one session; `fd` is stdin. The container engine limits the size of /box."""
    source, sink = os.dup(fd), os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, fd)
    os.dup2(null, 1)
    sys.path[:] = [path for path in sys.path if path]  # the box is the working folder
    connection = Connection(source, sink)
    ignore_sigint()
    try:
        set_dumpable(0)
        _, (seccomp,) = connection.receive()
        connection.send({"ready": True}, [])
    except Disconnected:
        return
    except Exception as error:  # boundary: report the failure to the host
        connection.send({"error": f"{type(error).__name__}: {error}"}, [])
        return
    serve_request(connection, seccomp, in_container=True)
