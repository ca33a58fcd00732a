"""Bounded capture of a stream: head and tail, with a note on the omitted bytes in between."""

from __future__ import annotations

_NOTE_BYTES = 64


class BoundedOutput:
    """Keeps at most `bound` bytes of a stream, including the note; two thirds from its head.

    If `bound` is too small for a note, only the head is kept. `left_out` counts the omitted bytes.
    """

    def __init__(self, bound: int) -> None:
        self._head, self._tail = bytearray(), bytearray()
        self._tail_bytes = bound // 3 if bound >= 4 * _NOTE_BYTES else 0
        self._note_bytes = _NOTE_BYTES if self._tail_bytes else 0
        self._bound, self._past = bound, 0

    def add(self, data: bytes) -> None:
        """Append bytes of the stream."""
        room = self._bound - len(self._head)
        self._head += data[:room]
        rest = data[room:]
        self._past += len(rest)
        self._tail += rest[len(rest) - min(len(rest), self._tail_bytes) :]
        if len(self._tail) > 2 * self._tail_bytes:
            del self._tail[: len(self._tail) - self._tail_bytes]

    @property
    def left_out(self) -> int:
        """Number of bytes not kept."""
        if not self._past or not self._tail_bytes:
            return self._past
        return self._bound + self._past - self._head_bytes - self._tail_bytes

    @property
    def _head_bytes(self) -> int:
        return self._bound - self._tail_bytes - self._note_bytes

    def take(self) -> bytes:
        """Return what was kept, and reset."""
        kept = bytes(self._head)
        if self._past and self._tail_bytes:
            note = f"\n[{self.left_out} bytes left out]\n".encode()
            end = (kept + self._tail)[-self._tail_bytes :]
            kept = kept[: self._head_bytes] + note + end
        self._head.clear()
        self._tail.clear()
        self._past = 0
        return kept
