"""RPC between a process and its child: pickled records over a socket."""

from __future__ import annotations

import pickle
import socket
import struct
from dataclasses import dataclass, replace

from ludus.cluster.protocol import Message, Spec, WorkerResponse, failed
from ludus.errors import UserError

_LENGTH = struct.Struct("!Q")
LENGTH_BYTES = _LENGTH.size
_CARRIED = "All data of episodes and rewards must survive pickling and unpickling."
_ASKED = "Tasks and their truth must survive pickling and unpickling."


@dataclass(frozen=True, slots=True)
class RpcHello:
    """First frame sent to a child: its role."""

    spec: Spec


@dataclass(frozen=True, slots=True)
class RpcCall:
    """Request with the sender's id; the response has the same id."""

    number: int
    message: Message


@dataclass(frozen=True, slots=True)
class UnreadableMessage:
    """Request that cannot be unpickled here; `error` is returned to the caller."""

    number: int
    error: UserError


@dataclass(frozen=True, slots=True)
class RpcCancel:
    """Cancel a request."""

    number: int


@dataclass(frozen=True, slots=True)
class RpcReply:
    """Response to a request."""

    number: int
    answer: WorkerResponse


Frame = RpcHello | RpcCall | UnreadableMessage | RpcCancel | RpcReply


@dataclass(frozen=True, slots=True)
class _SealedCall:
    """Encoded request, whose id can be read even if its message cannot."""

    number: int
    message: bytes

    def opened(self) -> RpcCall | UnreadableMessage:
        try:
            return RpcCall(self.number, pickle.loads(self.message))
        except Exception as error:  # boundary: user types may raise anything
            return UnreadableMessage(self.number, unread_there(f"{type(error).__name__}: {error}"))


@dataclass(frozen=True, slots=True)
class _Sealed:
    """Encoded response, whose id can be read even if its value cannot."""

    number: int
    answer: bytes

    def opened(self) -> RpcReply:
        try:
            return RpcReply(self.number, pickle.loads(self.answer))
        except Exception as error:  # boundary: user types may raise anything
            words = f"A response of another process cannot be unpickled: {type(error).__name__}: {error}."
            return RpcReply(self.number, failed(UserError(words, _CARRIED)))


def unread_there(why: str) -> UserError:
    """Return the error for a request that the receiver cannot unpickle."""
    return UserError(f"A request cannot be unpickled by the receiving process: {why}.", _ASKED)


def pack(frame: Frame) -> bytes:
    """Encode a frame with its length prefix. A response that cannot be pickled is sent as an error."""
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
    except Exception as error:  # boundary: user types may raise anything
        return _Sealed(reply.number, pickle.dumps(_unsent(reply.answer, error)))


def _unsent(answer: WorkerResponse, error: Exception) -> WorkerResponse:
    words = f"A {type(answer.value).__name__} cannot be sent from another process: {error}."
    return replace(failed(UserError(words, _CARRIED)), said=answer.said)


def length_of(head: bytes) -> int:
    """Return the number of bytes that follow."""
    (length,) = _LENGTH.unpack(head)
    return int(length)


def unpack(body: bytes) -> Frame:
    """Decode a frame without its length. Unreadable content is replaced by an error."""
    frame: Frame | _Sealed | _SealedCall = pickle.loads(body)
    return frame.opened() if isinstance(frame, _Sealed | _SealedCall) else frame


def read_frame(line: socket.socket) -> Frame | None:
    """Return the next frame, or None if the connection is closed."""
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
