"""Forward log records from workers to the run log.

A worker buffers its records and sends them with the next heartbeat; the trainer logs them with their
original time and the worker's name. At most `MAX_RECORDS` records are buffered; further ones are only counted. The
last records of a dying process reach only its standard error.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass

MAX_RECORDS = 1000
"""Maximum number of buffered records."""

log = logging.getLogger("ludus")


@dataclass(frozen=True, slots=True)
class ForwardedRecords:
    """Picklable log record; `created` in seconds since the epoch, `text` with its traceback."""

    created: float
    level: int
    name: str
    text: str


class LogForwarder(logging.Handler):
    """Buffer the records of a logger and its children."""

    def __init__(self) -> None:
        super().__init__()
        self._records: list[ForwardedRecords] = []
        self._dropped = 0
        self._guard = threading.Lock()
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        forwarded = ForwardedRecords(record.created, record.levelno, record.name, self.format(record))
        with self._guard:
            if len(self._records) < MAX_RECORDS:
                self._records.append(forwarded)
            else:
                self._dropped += 1

    def take(self) -> tuple[ForwardedRecords, ...]:
        with self._guard:
            records, dropped = self._records, self._dropped
            self._records, self._dropped = [], 0
        if dropped:
            text = f"{dropped} more were dropped"
            records.append(ForwardedRecords(records[-1].created, logging.WARNING, log.name, text))
        return tuple(records)


def start_forwarding() -> LogForwarder:
    """Start buffering this process's log records; they also go to its standard error."""
    forwarder, shown = LogForwarder(), logging.StreamHandler()
    shown.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    log.setLevel(logging.INFO)
    log.addHandler(forwarder)
    log.addHandler(shown)
    return forwarder


def log_records(who: str, records: Iterable[ForwardedRecords]) -> None:
    """Log another process's records here."""
    for record in records:
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.level):
            fields = {"name": record.name, "levelno": record.level, "levelname": logging.getLevelName(record.level)}
            fields |= {"msg": f"{who}: {record.text}", "created": record.created, "msecs": record.created % 1 * 1000}
            logger.handle(logging.makeLogRecord(fields))
