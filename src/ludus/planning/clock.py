"""An event loop whose clock jumps: unchanged asyncio code runs through hours in seconds.

Nothing in a simulation waits for the outside, so that the loop need never wait: where nothing is ready, its
clock goes to the next thing that is due. What happens, and in which order, is decided by the code and its
seeds alone. Code on this loop may wait by asyncio only; threads, sockets and processes would never answer.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, TypeVar

from ludus.errors import LudusError

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

T = TypeVar("T")


class _Jump(selectors.BaseSelector):
    """A selector without files: to wait is to put the clock on."""

    def __init__(self) -> None:
        self.now = 0.0
        self._keys: dict[FileDescriptorLike, selectors.SelectorKey] = {}

    def register(self, fileobj: FileDescriptorLike, events: int, data: object = None) -> selectors.SelectorKey:
        """Taken, and never ready: the loop registers the pipe that wakes it from other threads."""
        key = selectors.SelectorKey(fileobj, 0, events, data)
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: FileDescriptorLike) -> selectors.SelectorKey:
        """Taken back."""
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Let `timeout` seconds pass at once. Raises LudusError where all wait for nothing."""
        if timeout is None:
            raise LudusError("The simulation stands still: everything waits, and nothing is due.")
        self.now += timeout
        return []

    def get_map(self) -> Mapping[FileDescriptorLike, selectors.SelectorKey]:
        """What is registered."""
        return self._keys


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop on virtual time, which begins at 0 s."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """Seconds of virtual time."""
        return self._jump.now


def run_virtual(main: Coroutine[object, None, T]) -> tuple[T, float]:
    """Run to the end; gives the result and the virtual seconds that it took. Raises what `main` raises."""
    loop = VirtualLoop()
    try:
        result = loop.run_until_complete(main)
        return result, loop.time()
    finally:
        _cancel_all(loop)
        loop.close()


def _cancel_all(loop: VirtualLoop) -> None:
    """Tasks that are left over after an error end before their loop does."""
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
