"""The seccomp filter of untrusted programs, as a classic BPF program.

Denied calls return EPERM (or another errno that makes the caller fall back); a call of another architecture kills the
process. The filter is defence in depth: namespaces and missing capabilities already block most of these calls.
`system_calls.json` has the numbers of the calls by architecture, null if it lacks the call, and audit numbers.
"""

from __future__ import annotations

import errno
import json
import platform
import struct
from functools import cache
from importlib.resources import files

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


@cache
def seccomp_filter(architecture: str | None = None) -> bytes:
    """Return the filter as an array of `struct sock_filter`. Raises UserError for an unknown architecture."""
    table = json.loads((files("ludus.sandbox.local") / "system_calls.json").read_text("utf-8"))
    architectures, name = list(table["architectures"]), architecture or platform.machine()
    if name not in architectures:
        hint = f"The namespaces backend supports {' and '.join(architectures)}; use the remote backend."
        raise UserError(f"No seccomp filter is available for {name}.", hint)
    column = architectures.index(name)
    denied = [numbers[column] for numbers in table["denied"].values() if numbers[column] is not None]
    checked = {call: numbers[column] for call, numbers in table["checked"].items()}
    code = [
        _instruction(_LOAD, _ARCH),
        _instruction(_EQUAL, table["architectures"][name], 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NR),
    ]
    if name == "x86_64":
        code += [_instruction(_AT_LEAST, _X32, 0, 1), _instruction(_RETURN, _KILL)]
    for number in denied:
        code += [_instruction(_EQUAL, number, 0, 1), _deny(errno.EPERM)]
    code += [_instruction(_EQUAL, checked["clone3"], 0, 1), _deny(errno.ENOSYS)]
    code += _check_argument(checked["clone"], 0, [_instruction(_ANY_BIT, _NEW_NAMESPACES, 0, 1), _deny(errno.EPERM)])
    for call in ("socket", "socketpair"):
        code += _check_argument(checked[call], 0, [_instruction(_EQUAL, _AF_UNIX, 1, 0), _deny(errno.EACCES)])
    for option in _BUFFER_OPTIONS:
        code += _check_argument(checked["setsockopt"], 2, [_instruction(_EQUAL, option, 0, 1), _deny(errno.EPERM)])
    code += _check_argument(checked["prlimit64"], 0, [_instruction(_EQUAL, _SELF, 1, 0), _deny(errno.EPERM)])
    for request in (_TIOCSTI, _TIOCLINUX):
        code += _check_argument(checked["ioctl"], 1, [_instruction(_EQUAL, request, 0, 1), _deny(errno.EPERM)])
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
