"""Read tasks from JSON lines and from tables; errors name the file and the line.

Tables and lists are CSV, TSV, Parquet, lists in JSON, folders, which may contain JSON lines, and names of Hugging Face
datasets. `.gz` files of text are decompressed. Parquet needs pyarrow; names and folders written by
`Dataset.save_to_disk` need datasets (extra `datasets`).
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import importlib
import io
import json
import logging
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Final, TypeVar

from pydantic import TypeAdapter, ValidationError

from ludus.errors import ConfigError, UserError
from ludus.rewards.extract import NotJson, read_json
from ludus.tools.fetch import json_lines
from ludus.types import JSON, Task

log = logging.getLogger(__name__)
SPLITS: Final = ("train", "validation", "test")
Record = Mapping[str, JSON]  # one line of a file
Row = TypeVar("Row")
_SUFFIXES: Final = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".ndjson")
_HUB_NAME: Final = re.compile(r"(?P<name>[\w-][\w.-]*/[\w.-]+)(?::(?P<config>[\w.-]+))?")
_SPLIT: Final = re.compile(
    r"(?<![a-z])(?:(?P<train>train)|(?P<validation>valid(?:ation)?|val|dev)|(?P<test>test))(?![a-z])"
)
_MAX_CELL: Final = 2**31 - 1

Rows = Iterator[tuple[int, object]]  # rows with their numbers from 1: the line of a text file


def is_table(path: Path) -> bool:
    """Return whether `read_table` reads the path; otherwise it is a file of JSON lines, or missing."""
    name = path.name.removesuffix(".gz")
    if path.is_dir() or _hub_name(path) or name.endswith((".csv", ".tsv", ".parquet")):
        return True
    return name.endswith(".json") and path.is_file() and _text(path).startswith("[")


def read_table(path: Path, split: str = "") -> Iterator[tuple[int, dict[str, object]]]:
    """Yield the rows with their lines; rows of several files or splits are numbered through.

    Rows of a named split get it as `split` unless they have one. `split` selects one if the source has several. Raises
    UserError if the source cannot be read or has splits without the selected one.
    """
    named = _hub_name(path)
    parts = _folder_parts(path) if path.is_dir() else _hub_parts(path, named) if named else {"": [_file_rows(path)]}
    splits = {name: split_of(name) for name in parts}
    if split and len(parts) > 1:
        parts = {name: rows for name, rows in parts.items() if splits[name] == split}
        if not parts:
            raise UserError(f"{path} has no split {split}, but {', '.join(splits)}.", "Give the file of one split.")
    number, several = 0, sum(map(len, parts.values())) > 1
    for name, sources in parts.items():
        added = {"split": splits[name]} if splits[name] else {}
        for rows in sources:
            for line, row in rows:
                number += 1
                if not isinstance(row, Mapping):
                    raise UserError(
                        f"{path}, line {line}, is not an object.", "Each row is an object with named fields."
                    )
                yield number if several else line, {**added, **row}


def split_of(name: str) -> str:
    """Return the split that a file or split name refers to: train, validation, test, or empty."""
    found = _SPLIT.search(name.lower())
    return found.lastgroup or "" if found else ""


def _hub_name(path: Path) -> re.Match[str] | None:
    found = _HUB_NAME.fullmatch(str(path))
    return None if path.exists() or path.name.removesuffix(".gz").endswith(_SUFFIXES) else found


def _package(name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        hint = "Install it: pip install 'ludus[datasets]', or use a file of JSON lines."
        raise UserError(f"{what} needs the package {name}.", hint) from error


def _folder_parts(path: Path) -> dict[str, list[Rows]]:
    """Return the rows of a folder by split: a saved dataset, or data files in it or in its folder `data`."""
    if {one.name for one in path.iterdir()} & {"state.json", "dataset_dict.json"}:
        package = _package("datasets", f"{path} is a saved dataset, and reading it")
        try:
            found = package.load_from_disk(str(path))
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {str(error).splitlines()[0]}.", "Save it again.") from error
        return _dataset_parts(found)
    parts: dict[str, list[Rows]] = {}
    for file in sorted([*path.glob("*"), *path.glob("data/*")]):
        if file.name.removesuffix(".gz").endswith(_SUFFIXES) and not file.name.startswith((".", "dataset_info")):
            parts.setdefault(split_of(file.name), []).append(_file_rows(file))
    if not parts:
        raise UserError(
            f"{path} is not a dataset: it has neither data files ({', '.join(_SUFFIXES)}) nor a saved dataset.",
            "Pass a file, or a folder written by Dataset.save_to_disk.",
        )
    return parts


def _hub_parts(path: Path, named: re.Match[str]) -> dict[str, list[Rows]]:
    package = _package("datasets", f"{path} is not a file; reading the Hugging Face dataset of that name")
    try:
        return _dataset_parts(package.load_dataset(named["name"], named["config"]))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is not a file, and the Hugging Face dataset of that name cannot be loaded: "
            f"{(str(error).splitlines() or ['no reason given'])[0]}.",
            "Check the name; NAME:CONFIG selects a configuration.",
        ) from error


def _dataset_parts(dataset: Iterable[object]) -> dict[str, list[Rows]]:
    splits: Mapping[str, Iterable[object]] = dataset if isinstance(dataset, dict) else {"": dataset}
    return {name: [enumerate(rows, start=1)] for name, rows in splits.items()}


def read_text(path: Path, hint: str, encoding: str = "utf-8") -> str:
    """Return the text of a file, decompressed if its name ends in `.gz`. Raises UserError."""
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode(encoding)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}.", hint) from error


def _text(path: Path) -> str:
    """Return the text of a file, without a byte order mark and leading blanks. Raises UserError."""
    return read_text(path, "Check the path.", "utf-8-sig").lstrip(" \r\n\t")


def _file_rows(path: Path) -> Rows:
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        parquet = _package("pyarrow.parquet", f"{path} is a Parquet file, and reading it")
        try:
            batches = parquet.ParquetFile(path).iter_batches()
            yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {str(error).splitlines()[0]}.", "Check the file.") from error
    elif name.endswith((".csv", ".tsv")):
        yield from _csv_rows(path, "\t" if name.endswith(".tsv") else ",")
    else:
        text, line = _text(path), 0
        try:
            if name.endswith(".json") and text.startswith("["):
                yield from enumerate(json.loads(text), start=1)
                return
            for line, data in enumerate(text.split("\n"), start=1):
                if data.strip():
                    yield line, json.loads(data)
        except (ValueError, RecursionError) as error:
            where = f"{path}, line {line}," if line else str(path)
            raise UserError(f"{where} is not valid JSON: {error}.", "Correct the file.") from error


def _csv_rows(path: Path, delimiter: str) -> Rows:
    csv.field_size_limit(_MAX_CELL)
    reader = csv.DictReader(io.StringIO(_text(path), newline=""), delimiter=delimiter, strict=True)
    try:
        for row in reader:
            if None in row:
                hint = "Quote cells that contain the delimiter; the first row has the names of the columns."
                raise UserError(f"{path}, line {reader.line_num}, has more cells than the first row.", hint)
            yield reader.line_num, row
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}, is not valid CSV: {error}.", "Correct the file.") from error


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
        log.warning("%s: %d rows without a usable answer or with an attached file are skipped.", path, skipped)
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
