"""Pickled records over a socket between a process and its child."""

from __future__ import annotations

import pickle
import socket
import struct
from dataclasses import dataclass, replace

from ludus.cluster.messages import Answer, Message, Spec, failed
from ludus.errors import UserError

_LENGTH = struct.Struct("!Q")
LENGTH_BYTES = _LENGTH.size


@dataclass(frozen=True, slots=True)
class Hello:
    """The first frame to a child: what it is for."""

    spec: Spec


@dataclass(frozen=True, slots=True)
class Call:
    """A message under the sender's number; the answer comes back under the same."""

    number: int
    message: Message


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for the answer any more."""

    number: int


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a call."""

    number: int
    answer: Answer


Frame = Hello | Call | Cancel | Reply


def pack(frame: Frame) -> bytes:
    """A frame as bytes, its length first. An answer that does not pickle goes as the error that says so."""
    try:
        body = pickle.dumps(frame)
    except Exception as error:  # boundary: foreign types, which may raise anything
        if not isinstance(frame, Reply):
            raise
        body = pickle.dumps(Reply(frame.number, _unsent(frame.answer, error)))
    return _LENGTH.pack(len(body)) + body


def _unsent(answer: Answer, error: Exception) -> Answer:
    words = f"A {type(answer.value).__name__} cannot be sent from another process: {error}."
    hint = "What an episode and its rewards carry must pickle."
    return replace(failed(UserError(words, hint)), said=answer.said)


def length_of(head: bytes) -> int:
    """How many bytes follow."""
    (length,) = _LENGTH.unpack(head)
    return int(length)


def unpack(body: bytes) -> Frame:
    """The frame in what follows its length."""
    frame: Frame = pickle.loads(body)
    return frame


def read_frame(line: socket.socket) -> Frame | None:
    """The next frame; None where the other end is gone."""
    head = _read(line, LENGTH_BYTES)
    body = None if head is None else _read(line, length_of(head))
    return None if body is None else unpack(body)


def _read(line: socket.socket, count: int) -> bytes | None:
    found = bytearray()
    while len(found) < count:
        try:
            piece = line.recv(min(count - len(found), 1 << 20))
        except OSError:
            return None
        if not piece:
            return None
        found += piece
    return bytes(found)
