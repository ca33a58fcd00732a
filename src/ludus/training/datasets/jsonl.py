"""What a run makes once and trains on, in its folder: gzip'd JSON lines, one record a line."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ludus.errors import StorageError
from ludus.rollout.rollout_files import write_lines

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")


def write_records(path: Path, records: Iterable[DataclassInstance]) -> None:
    """Write all at once or not at all; equal records make equal bytes. Raises StorageError."""
    write_lines(path, (json.dumps(asdict(r), allow_nan=False, separators=(",", ":")) for r in records))


def load_records(path: Path, parse: Callable[[bytes], T]) -> list[T]:
    """Read what `write_records` wrote; `parse` makes a record of a line. Raises StorageError otherwise."""
    try:
        with gzip.open(path, "rb") as lines:
            return [parse(line) for line in lines]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{path} cannot be read: {error}.", "Start a new run.") from error
