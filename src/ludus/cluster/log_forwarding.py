"""Log records of other processes, on their way into the one log of a run.

A process keeps what it logs until the next sign of life, which carries it to the trainer; there it goes to
the same loggers, under the time at which it was said, with the name of who said it. Never keeps more than
`MOST`: what is too much is counted. What a process says as it dies goes to its standard error alone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass

MOST = 1000
"""Records that a process keeps."""

log = logging.getLogger("ludus")


@dataclass(frozen=True, slots=True)
class ForwardedRecords:
    """A log record that pickles; `created` in seconds since the epoch, `text` with its traceback."""

    created: float
    level: int
    name: str
    text: str


class LogForwarder(logging.Handler):
    """Keeps what a logger and its children log."""

    def __init__(self) -> None:
        super().__init__()
        self._heard: list[ForwardedRecords] = []
        self._missed = 0
        self._guard = threading.Lock()
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        said = ForwardedRecords(record.created, record.levelno, record.name, self.format(record))
        with self._guard:
            if len(self._heard) < MOST:
                self._heard.append(said)
            else:
                self._missed += 1

    def take(self) -> tuple[ForwardedRecords, ...]:
        """What was heard since the last call."""
        with self._guard:
            heard, missed = self._heard, self._missed
            self._heard, self._missed = [], 0
        if missed:
            heard.append(
                ForwardedRecords(heard[-1].created, logging.WARNING, log.name, f"{missed} more were not kept")
            )
        return tuple(heard)


def listen() -> LogForwarder:
    """Keep what this process logs from now on; it goes to its standard error as well."""
    ear, shown = LogForwarder(), logging.StreamHandler()
    shown.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    log.setLevel(logging.INFO)
    log.addHandler(ear)
    log.addHandler(shown)
    return ear


def repeat(who: str, said: Iterable[ForwardedRecords]) -> None:
    """Log here what another process said."""
    for one in said:
        logger = logging.getLogger(one.name)
        if logger.isEnabledFor(one.level):
            fields = {"name": one.name, "levelno": one.level, "msg": f"{who}: {one.text}"}
            record = logging.makeLogRecord(fields | {"levelname": logging.getLevelName(one.level)})
            record.created, record.msecs = one.created, one.created % 1 * 1000
            logger.handle(record)
