"""The seccomp filter of untrusted programs, as a classic BPF program.

Denied calls return EPERM (or another errno that makes the caller fall back); a call of another architecture kills the
process. The filter is defence in depth: namespaces and missing capabilities already block most of these calls.
"""

from __future__ import annotations

import errno
import platform
import struct

from ludus.errors import UserError

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NR, _ARCH, _ARGS = 0, 4, 16
_X32 = 0x40000000
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEWUSER, NEWPID, NEWNET, NEWNS, NEWIPC, NEWUTS, NEWCGROUP, NEWTIME
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_AF_UNIX = 1
_BUFFER_OPTIONS = (7, 8, 32, 33)
"""SO_SNDBUF, SO_RCVBUF and the variants that exceed the system's limit; local sockets have only this level."""
_SELF = 0  # the caller itself: a process may not change limits of others, such as the supervisor


# From 424 on numbers are equal on all architectures: io_uring, mount API, pidfd_getfd, memfd_secret.
_COMMON = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 440, 442, 443, 447)
_CLONE3 = 435

# Audit number; then the calls with checked arguments: clone, socket, socketpair, setsockopt, ioctl, prlimit64.
_ARCHITECTURES = {"x86_64": (0xC000003E, 56, 41, 53, 54, 16, 302), "aarch64": (0xC00000B7, 220, 198, 199, 208, 29, 261)}
_DENIED = {
    "x86_64": (
        *(101, 310, 311, 312, 298),  # ptrace, process_vm_*, kcmp, perf_event_open
        *(165, 166, 155, 161, 272, 308),  # mount, umount2, pivot_root, chroot, unshare, setns
        *(321, 323, 248, 249, 250, 319),  # bpf, userfaultfd, keyrings, memfd_create
        *(29, 30, 31, 67, 64, 65, 66, 220, 68, 69, 70, 71),  # System V shared memory, semaphores, queues
        *(240, 241, 242, 243, 244, 245),  # POSIX message queues
        *(174, 175, 176, 313, 246, 320, 169, 167, 168),  # modules, kexec, reboot, swap
        *(164, 227, 305, 159, 170, 171, 172, 173, 163, 179),  # clocks, host name, io ports, acct, quota
        *(103, 135, 303, 304, 212, 180, 134, 136, 153, 154),  # syslog, personality, file handles, old ones
        *(300, 279, 256, 237, 238, 278),  # fanotify, page moving, vmsplice
    ),
    "aarch64": (
        *(117, 270, 271, 272, 241),
        *(40, 39, 41, 51, 97, 268),
        *(280, 282, 217, 218, 219, 279),
        *(194, 195, 196, 197, 190, 191, 192, 193, 186, 187, 188, 189),
        *(180, 181, 182, 183, 184, 185),
        *(105, 106, 273, 104, 294, 142, 224, 225),
        *(170, 112, 266, 171, 161, 162, 89, 60),
        *(116, 92, 264, 265, 18, 42, 58),
        *(262, 239, 238, 235, 237, 75),
    ),
}


def seccomp_filter(architecture: str | None = None) -> bytes:
    """Return the filter as an array of `struct sock_filter`. Raises UserError for an unknown architecture."""
    name = architecture or platform.machine()
    if name not in _ARCHITECTURES:
        hint = f"The namespaces backend supports {' and '.join(_ARCHITECTURES)}; use the remote backend."
        raise UserError(f"No seccomp filter is available for {name}.", hint)
    audit, clone, socket, socketpair, setsockopt, ioctl, prlimit64 = _ARCHITECTURES[name]
    code = [
        _instruction(_LOAD, _ARCH),
        _instruction(_EQUAL, audit, 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NR),
    ]
    if name == "x86_64":
        code += [_instruction(_AT_LEAST, _X32, 0, 1), _instruction(_RETURN, _KILL)]
    for number in (*_DENIED[name], *_COMMON):
        code += [_instruction(_EQUAL, number, 0, 1), _deny(errno.EPERM)]
    code += [_instruction(_EQUAL, _CLONE3, 0, 1), _deny(errno.ENOSYS)]
    code += _check_argument(clone, 0, [_instruction(_ANY_BIT, _NEW_NAMESPACES, 0, 1), _deny(errno.EPERM)])
    for number in (socket, socketpair):
        code += _check_argument(number, 0, [_instruction(_EQUAL, _AF_UNIX, 1, 0), _deny(errno.EACCES)])
    for option in _BUFFER_OPTIONS:
        code += _check_argument(setsockopt, 2, [_instruction(_EQUAL, option, 0, 1), _deny(errno.EPERM)])
    code += _check_argument(prlimit64, 0, [_instruction(_EQUAL, _SELF, 1, 0), _deny(errno.EPERM)])
    for request in (_TIOCSTI, _TIOCLINUX):
        code += _check_argument(ioctl, 1, [_instruction(_EQUAL, request, 0, 1), _deny(errno.EPERM)])
    return b"".join([*code, _instruction(_RETURN, _ALLOW)])


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Encode a `struct sock_filter`; jumps count instructions to skip."""
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _deny(number: int) -> bytes:
    return _instruction(_RETURN, _ERRNO | number)


def _check_argument(call: int, index: int, instructions: list[bytes]) -> list[bytes]:
    """Apply `instructions` to the low 32 bits of a call's argument, then reload the call number."""
    load = _instruction(_LOAD, _ARGS + 8 * index)
    return [_instruction(_EQUAL, call, 0, len(instructions) + 2), load, *instructions, _instruction(_LOAD, _NR)]
