"""Ctrl-C while a run trains: the first stops it, the second ends the process at once.

Takes the interrupts of this process (SIGINT) beside Python, which stops the run as soon as it can.
Gives a sentence on standard error for each, and the first one a line in the log. Waits for nothing: a second
interrupt ends the process also where it is deep in a computation. Never stops a run by itself, and never acts
outside the `with`.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from contextlib import suppress
from types import TracebackType

INTERRUPTED = 130
"""The exit code of what an interrupt ended."""
_SAME_PRESS_S = 0.3
"""An interrupt so soon after the first is the same one, sent by the terminal and by whoever started Ludus."""
_STANDARD_ERROR = 2
_SHOW_CURSOR = "\x1b[?25h"

log = logging.getLogger("ludus")


class WatchedInterrupts:
    """While it is entered, the first interrupt is announced, and the second ends the process.

    `hint` is what the second one says besides. In a thread other than the main one it does nothing, as
    interrupts reach the main thread alone.
    """

    def __init__(self, hint: str) -> None:
        self._hint = hint
        self._write_end = self._before = -1
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, args=(read_end,), name="interrupts", daemon=True)
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        signal.set_wakeup_fd(self._before)
        os.close(self._write_end)
        self._thread.join()

    def _watch(self, read_end: int) -> None:
        """Read the number of each signal that comes, until nobody writes any more."""
        first_s = None
        while numbers := os.read(read_end, 1):
            if numbers[0] != signal.SIGINT:
                continue
            if first_s is None:
                first_s = time.monotonic()
                _say("Interrupted: the run stops. Another Ctrl-C ends it at once.")
                log.warning("interrupted: the run stops")
            elif time.monotonic() - first_s > _SAME_PRESS_S:
                _say(f"Ended at once. {self._hint}")
                os._exit(INTERRUPTED)
        os.close(read_end)


def _say(text: str) -> None:
    """A line on standard error that waits for no lock, below what a progress bar draws."""
    cursor = _SHOW_CURSOR if os.isatty(_STANDARD_ERROR) else ""
    with suppress(OSError):  # nobody reads it any more
        os.write(_STANDARD_ERROR, f"{cursor}\n{text}\n".encode())
