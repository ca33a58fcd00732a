"""The tasks as data: packages with their pinned sources and tests, and bugs with what they break.

Two files of JSON lines in one folder, `packages.jsonl` and `tasks.jsonl`. They hold no source of a package
but the few words that a bug replaces.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files as package_files
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from ludus.errors import ConfigError
from ludus.tools.lines import json_lines
from ludus.worlds.swe.mutations import Edit

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Package:
    """A package from the registry. `archive` and `sha256` are those of its source distribution.

    `tests` counts, for each test file and each test function in it, the cases that pass without a bug; tests
    that fail, change from run to run or are slow are not in it.
    """

    name: str
    version: str
    archive: str
    sha256: str
    split: str
    summary: str
    tests: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class Bug:
    """One task: an edit of a file of a package, the tests that it breaks, and the issue's text.

    `files` are the test files whose other tests go on passing. `level` is 1 where a broken test calls the
    function that has the bug by name, 3 where that function is private, else 2.
    """

    id: str
    package: str
    path: str
    edit: Edit
    broken: tuple[str, ...]
    files: tuple[str, ...]
    level: int
    style: str
    issue: str


@dataclass(frozen=True)
class Catalogue:
    """All packages and all bugs."""

    packages: Mapping[str, Package]
    bugs: tuple[Bug, ...]


def shipped_folder() -> Path:
    """Where the tasks that ship with Ludus lie."""
    return Path(str(package_files("ludus.worlds.swe") / "data"))


@cache
def load_catalogue(folder: Path) -> Catalogue:
    """The catalogue of a folder. Raises ConfigError for a file that is missing or cannot be read."""
    packages = _lines(folder / "packages.jsonl", Package)
    return Catalogue({one.name: one for one in packages}, tuple(_lines(folder / "tasks.jsonl", Bug)))


def save_catalogue(folder: Path, packages: Iterable[Package], bugs: Iterable[Bug]) -> None:
    """Write a catalogue."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "packages.jsonl", [dataclasses.asdict(one) for one in packages])
    _write(folder / "tasks.jsonl", [dataclasses.asdict(one) for one in bugs])


def _write(path: Path, rows: list[dict[str, object]]) -> None:
    lines = [json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows]
    path.write_text("".join(lines), "utf-8")


def _lines(path: Path, kind: type[T]) -> list[T]:
    reader = TypeAdapter(kind)
    try:
        lines = json_lines(path.read_text("utf-8"))
        return [reader.validate_json(line) for line in lines if line.strip()]
    except (OSError, ValidationError) as error:
        raise ConfigError(
            f"The catalogue of the world swe cannot be read: {error}.",
            "env.settings.catalogue names a folder with packages.jsonl and tasks.jsonl.",
        ) from error
