"""The process in which mathematics is compared: math-verify behind limits that no answer gets around.

Reads one JSON line `[gold, answer, cpu_s]` (LaTeX) at a time and writes one line, `1` or `0`; first of all
`ready`. A comparison has `cpu_s` seconds of processor time, after which the kernel ends the process: signals
handled in Python would wait for a computation inside one big integer, and wall-clock time would make a
verdict depend on what else the machine does. Memory is limited as well. What compares is a child of a
process that has imported everything and does nothing else, so that the next child is there at once.
`killed` says that somebody else ended it.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import TextIO

MEMORY_BYTES = 2 << 30
"""Address space of the process."""
FLOAT_DIGITS = 6
"""A decimal answer to an exact truth has to agree to this many digits after the point."""


def serve() -> None:
    """Answer lines until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    logging.disable()
    equal = _comparison()
    equal(r"\frac{1}{2}x^{2}", r"x^{2}/2")  # tables of the parser are made now, not on somebody's time
    replies.write("ready\n")
    while child := os.fork():
        _, status = os.waitpid(child, 0)
        if status == 0:
            return
        replies.write("killed\n" if os.WTERMSIG(status) == signal.SIGKILL else "0\n")
    _answer(equal, replies)
    os._exit(0)


def _answer(equal: Callable[[str, str], bool], replies: TextIO) -> None:
    for line in sys.stdin:
        gold, answer, cpu_s = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        verdict = equal(gold, answer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(f"{int(verdict)}\n")


def _comparison() -> Callable[[str, str], bool]:
    from math_verify import LatexExtractionConfig, parse, verify

    config = [LatexExtractionConfig(boxed_match_priority=-1)]

    def equal(gold: str, answer: str) -> bool:
        try:
            sides = [
                parse(f"${side}$", config, fallback_mode="no_fallback", parsing_timeout=None)
                for side in (gold, answer)
            ]
            return bool(
                all(sides)
                and verify(
                    *sides, float_rounding=FLOAT_DIGITS, allow_set_relation_comp=True, timeout_seconds=None
                )
            )
        except Exception:  # boundary: whatever a foreign parser makes of foreign text, it is not the answer
            return False

    return equal
