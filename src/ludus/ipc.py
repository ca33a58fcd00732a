"""Length-prefixed messages between a process and its children, over a socket or a pipe.

All children of Ludus use this framing, mostly with pickled content, so both ends must trust each other. Programs
in a sandbox are not trusted and send JSON (`ludus.sandbox.guest.wire`).
"""

from __future__ import annotations

import json
import struct
import sys
from typing import IO

LENGTH = struct.Struct("!Q")  # prefix of a frame: the number of bytes that follow


def python_command(function: str, *arguments: str) -> list[str]:
    """Return the command that calls `module:function` with these strings, under this process's `sys.path`."""
    module, _, name = function.partition(":")
    program = f"import json,sys;sys.path[:]=json.loads(sys.argv[1]);from {module} import {name};{name}(*sys.argv[2:])"
    return [sys.executable, "-c", program, json.dumps(sys.path), *arguments]


def frame(body: bytes) -> bytes:
    """Return a message with its length prefix."""
    return LENGTH.pack(len(body)) + body


def read_frame(stream: IO[bytes]) -> bytes | None:
    """Return the next message, or None if the stream ends before its last byte."""
    try:
        head = stream.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack(head)
        body = stream.read(length)
    except ConnectionError:
        return None
    return body if len(body) == length else None


def with_number(number: int, body: bytes = b"") -> bytes:
    """Return a message that starts with the number of its request."""
    return LENGTH.pack(number) + body


def split_number(body: bytes) -> tuple[int, bytes]:
    """Return the number and the content of a message of `with_number`."""
    return LENGTH.unpack_from(body)[0], body[LENGTH.size :]
