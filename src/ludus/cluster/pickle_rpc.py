"""Pickled records over a socket between a process and its child."""

from __future__ import annotations

import pickle
import socket
import struct
from dataclasses import dataclass, replace

from ludus.cluster.protocol import Message, Spec, WorkerResponse, failed
from ludus.errors import UserError

_LENGTH = struct.Struct("!Q")
LENGTH_BYTES = _LENGTH.size
_CARRIED = "What an episode and its rewards carry must pickle, and be read again from what it pickles to."
_ASKED = "Tasks, their truth included, must pickle, and be read again from what they pickle to."


@dataclass(frozen=True, slots=True)
class RpcHello:
    """The first frame to a child: what it is for."""

    spec: Spec


@dataclass(frozen=True, slots=True)
class RpcCall:
    """A message under the sender's number; the answer comes back under the same."""

    number: int
    message: Message


@dataclass(frozen=True, slots=True)
class UnreadableMessage:
    """A call whose message cannot be read here; `error` says so to whoever waits for the answer."""

    number: int
    error: UserError


@dataclass(frozen=True, slots=True)
class RpcCancel:
    """Nobody waits for the answer any more."""

    number: int


@dataclass(frozen=True, slots=True)
class RpcReply:
    """The answer to a call."""

    number: int
    answer: WorkerResponse


Frame = RpcHello | RpcCall | UnreadableMessage | RpcCancel | RpcReply


@dataclass(frozen=True, slots=True)
class _SealedCall:
    """A call on its way: its number can be read where its message cannot."""

    number: int
    message: bytes

    def opened(self) -> RpcCall | UnreadableMessage:
        try:
            return RpcCall(self.number, pickle.loads(self.message))
        except Exception as error:  # boundary: foreign types, which may raise anything
            return UnreadableMessage(self.number, unread_there(f"{type(error).__name__}: {error}"))


@dataclass(frozen=True, slots=True)
class _Sealed:
    """A reply on its way: its number can be read where its answer cannot."""

    number: int
    answer: bytes

    def opened(self) -> RpcReply:
        try:
            return RpcReply(self.number, pickle.loads(self.answer))
        except Exception as error:  # boundary: foreign types, which may raise anything
            words = f"What another process answered cannot be read: {type(error).__name__}: {error}."
            return RpcReply(self.number, failed(UserError(words, _CARRIED)))


def unread_there(why: str) -> UserError:
    """A message that cannot be read where it was sent to."""
    return UserError(f"What another process was asked cannot be read there: {why}.", _ASKED)


def pack(frame: Frame) -> bytes:
    """A frame as bytes, its length first. An answer that does not pickle goes as the error that says so."""
    sealed: Frame | _Sealed | _SealedCall = frame
    match frame:
        case RpcReply():
            sealed = _sealed(frame)
        case RpcCall(number, message):
            sealed = _SealedCall(number, pickle.dumps(message))
    body = pickle.dumps(sealed)
    return _LENGTH.pack(len(body)) + body


def _sealed(reply: RpcReply) -> _Sealed:
    try:
        return _Sealed(reply.number, pickle.dumps(reply.answer))
    except Exception as error:  # boundary: foreign types, which may raise anything
        return _Sealed(reply.number, pickle.dumps(_unsent(reply.answer, error)))


def _unsent(answer: WorkerResponse, error: Exception) -> WorkerResponse:
    words = f"A {type(answer.value).__name__} cannot be sent from another process: {error}."
    return replace(failed(UserError(words, _CARRIED)), said=answer.said)


def length_of(head: bytes) -> int:
    """How many bytes follow."""
    (length,) = _LENGTH.unpack(head)
    return int(length)


def unpack(body: bytes) -> Frame:
    """The frame in what follows its length. What cannot be read in it is the error that says so."""
    frame: Frame | _Sealed | _SealedCall = pickle.loads(body)
    return frame.opened() if isinstance(frame, _Sealed | _SealedCall) else frame


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
