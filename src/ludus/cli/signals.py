"""SIGINT handling of a run: the first Ctrl-C stops the run, the second one ends the process immediately.

A thread watches SIGINT in addition to Python's handler, which stops the run as soon as Python code executes. It prints
a message to standard error for each interrupt, and logs the first. The second interrupt ends the process even during a
long computation. Outside the `with` block nothing is watched.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

INTERRUPTED = 130
"""Exit code after an interrupt."""
_DUPLICATE_S = 0.3
"""An interrupt within this time after the first is a duplicate, sent by both the terminal and the parent process."""
_STANDARD_ERROR = 2
_SHOW_CURSOR = "\x1b[?25h"
_BARS = 3
"""Maximum number of progress bars; their next frame moves the cursor up by as many lines and overwrites them."""

log = logging.getLogger(__name__)


@contextmanager
def handle_interrupts(hint: str) -> Iterator[None]:
    """Announce the first interrupt in the block, and end the process on the second, printing `hint`.

    Does nothing outside the main thread, since only that receives signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    thread = threading.Thread(target=_watch, args=(read_end, hint), name="interrupts", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(write_end)
        thread.join()


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """End the process on an interrupt in the block, with one line: for imports, before anything is written.

    Does nothing outside the main thread, or if interrupts are handled or ignored already.
    """
    default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not default or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(number: int, frame: FrameType | None) -> None:
    _write_line("Interrupted.")
    os._exit(INTERRUPTED)


def _watch(read_end: int, hint: str) -> None:
    """Read signal numbers from the pipe until it is closed."""
    first_s = None
    while numbers := os.read(read_end, 1):
        if numbers[0] != signal.SIGINT:
            continue
        if first_s is None:
            first_s = time.monotonic()
            _write_line("Interrupted: stopping the run. Press Ctrl-C again to end it immediately.")
            log.warning("interrupted: stopping the run")
        elif time.monotonic() - first_s > _DUPLICATE_S:
            _write_line(f"Ended immediately. {hint}")
            os._exit(INTERRUPTED)
    os.close(read_end)


def _write_line(text: str) -> None:
    """Write a line to standard error without locks, below a progress bar."""
    before, after = (_SHOW_CURSOR, "\n" * _BARS) if os.isatty(_STANDARD_ERROR) else ("", "")
    with suppress(OSError):  # standard error may be closed
        os.write(_STANDARD_ERROR, f"{before}\n{text}\n{after}".encode())
