"""Read tasks from JSON lines and from tables (`data_files`); errors name the file and the line."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, TypeVar

from pydantic import TypeAdapter, ValidationError

from ludus.envs.data_files import is_table, read_table, read_text
from ludus.errors import ConfigError, UserError
from ludus.rewards.extract import NotJson, read_json
from ludus.tools.fetch import json_lines
from ludus.types import JSON, Task

_LOG: Final = logging.getLogger(__name__)
SPLITS: Final = ("train", "validation", "test")
Record = Mapping[str, JSON]
"""One line of a file."""
Row = TypeVar("Row")


class RecordError(Exception):
    """The record is not a valid task; the message completes "line 3 is not a task: ..."."""


def read_lines(path: Path, hint: str = "Check env.settings.data.") -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank with their numbers from 1; the name of a compressed file ends in `.gz`.

    The rows of a table become lines of JSON without the keys whose value is None. Raises UserError if the file cannot
    be read.
    """
    if is_table(path):
        for number, row in read_table(path):
            yield number, json.dumps({key: value for key, value in row.items() if value is not None}, default=str)
        return
    lines = json_lines(read_text(path, hint))
    yield from ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def parse_record(text: str, parse: Callable[[str], JSON] = read_json) -> dict[str, JSON]:
    """Return the JSON object in a line. Raises RecordError."""
    try:
        record = parse(text)
    except (NotJson, ValueError, RecursionError) as error:
        raise RecordError(f"it is not JSON ({error})") from None
    if not isinstance(record, dict):
        raise RecordError("it is not a JSON object")
    return record


def read_rows(path: Path, row_type: type[Row], hint: str) -> Iterator[Row]:
    """Yield the lines of a file as instances of a dataclass or a pydantic model.

    Raises UserError with `hint` if the file cannot be read, and ConfigError, naming the line, if a line is invalid.
    """
    adapter = TypeAdapter(row_type)
    for number, line in read_lines(path, hint):
        try:
            yield adapter.validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the line"
            raise ConfigError(f"{path}, line {number}: {where}: {first['msg'].lower()}.", hint) from error


def load_tasks(
    path: Path,
    read: Callable[[Record, int], Task | None],
    hint: str,
    *,
    parse: Callable[[str], JSON] = read_json,
    identity: Callable[[Task], str] = lambda task: f"id {task.id!r}",
) -> dict[str, tuple[Task, ...]]:
    """Return the tasks of a file by split, which is their tag `split`.

    `read` converts a record and its line number to a task, or to None to skip it, or raises RecordError. No two tasks
    may share their `identity`, such as "id 'x'". Raises UserError, with the line and `hint`, for an invalid record, an
    unknown split, or a file without tasks.
    """
    tasks: dict[str, list[Task]] = {split: [] for split in SPLITS}
    seen: dict[str, int] = {}
    skipped = 0
    for number, line in read_lines(path):
        try:
            task = read(parse_record(line, parse), number)
            if task is None:
                skipped += 1
                continue
            name, split = identity(task), task.tags["split"]
            if name in seen:
                raise RecordError(f"its {name} is that of line {seen[name]}")
            if split not in SPLITS:
                raise RecordError(f'"split" is {split!r}, not one of {", ".join(SPLITS)}')
        except RecordError as error:
            raise UserError(f"{path}, line {number}, is not a task: {error}.", hint) from None
        seen[name] = number
        tasks[split].append(task)
    if skipped:
        _LOG.warning("%s: %d rows without a usable answer or with an attached file are skipped.", path, skipped)
    if not seen:
        raise UserError(f"{path} contains no tasks.", hint)
    return {split: tuple(found) for split, found in tasks.items()}


def text_field(record: Record, key: str) -> str:
    """Return a text of a record. Raises RecordError if it is missing or has another type."""
    value = record.get(key)
    if not isinstance(value, str):
        raise RecordError(f'"{key}" is not a text')
    return value


def split_by_hash(text: str) -> str:
    """Return the split of a task from a hash of its text: 8 : 1 : 1."""
    share = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[0] / 256
    return "train" if share < 0.8 else "validation" if share < 0.9 else "test"
