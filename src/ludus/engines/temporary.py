"""Temporary folders; leftovers of killed processes are removed when the next folder is created."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

_LOCK = "in-use"


@dataclass(eq=False)
class TemporaryFolder:
    """A new folder in `place` (default: the system's) with a locked file. Folders with the same `prefix` whose lock is
    free are removed first. Raises OSError."""

    prefix: str
    place: Path | None = None
    path: Path = field(init=False)
    _own: tempfile.TemporaryDirectory[str] = field(init=False, repr=False)
    _lock: IO[bytes] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        remove_abandoned(self.prefix, self.place or Path(tempfile.gettempdir()))
        self._own = tempfile.TemporaryDirectory(prefix=self.prefix, dir=self.place, ignore_cleanup_errors=True)
        self.path = Path(self._own.name)
        unlocked = self.path / f"{_LOCK}.new"
        self._lock = unlocked.open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unlocked.rename(self.path / _LOCK)

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        self._own.cleanup()
        self._lock.close()


def remove_abandoned(prefix: str, place: Path) -> None:
    """Remove the folders with a prefix and a free lock, whose process has exited."""
    for folder in place.glob(f"{prefix}*"):
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)
