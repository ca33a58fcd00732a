"""The user's own Python files of a run (world, tools, rewards, algorithm, trackers): copied and hashed at its start.

Modules that such a file imports are not copied.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import TypedDict

from ludus.config.schema import Config
from ludus.errors import UserError
from ludus.plugins import is_file_reference

FOLDER = "files"
"""Folder of the copies in a run folder."""


class OwnFile(TypedDict):
    """A file in the manifest of a run: the setting that names it, the digest of its content, and its copy's path."""

    setting: str
    sha256: str
    copy: str


def own_files(config: Config) -> dict[str, str]:
    """Return the Python files that a configuration names, each with the first setting that names it."""
    found: dict[str, str] = {}
    for key, text in _texts(config.model_dump(), ""):
        if is_file_reference(text):
            found.setdefault(text.partition(":")[0], key)
    return found


def copy_files(config: Config, folder: Path) -> dict[str, OwnFile]:
    """Copy the files of a configuration into `folder` and return their manifest by path."""
    manifest: dict[str, OwnFile] = {}
    existing = [(path, setting) for path, setting in own_files(config).items() if Path(path).is_file()]
    for number, (path, setting) in enumerate(existing, start=1):
        copy = f"{FOLDER}/{number}-{Path(path).name}"
        (folder / FOLDER).mkdir(exist_ok=True)
        shutil.copyfile(path, folder / copy)
        manifest[path] = OwnFile(setting=setting, sha256=_digest(folder / copy), copy=copy)
    return manifest


def changed_files(folder: Path, manifest: Mapping[str, OwnFile], config: Config) -> list[str]:
    """Return a warning for each file that has changed since the run began, among those that `config` still names.

    Raises UserError if the file belongs to the world (`env`), which a resumed run must keep.
    """
    warnings, named = [], own_files(config)
    for path, file in manifest.items():
        is_missing = not Path(path).is_file()
        if path not in named or (not is_missing and _digest(path) == file["sha256"]):
            continue
        where, change = f"{path} ({file['setting']})", "does not exist any more"
        if not is_missing:
            change = f"has changed since the run began: {_first_change(folder, path, file)}"
        if is_missing or file["setting"].startswith("env."):
            raise UserError(
                f"{where} {change}.",
                f"Restore it from {folder / file['copy']}, or start a new run from a checkpoint with --model.",
            )
        warnings.append(f"{where} {change}. The run continues with the new file.")
    return warnings


def _first_change(folder: Path, path: str, file: OwnFile) -> str:
    """Describe the first changed line, and the number of changed lines."""
    copy = folder / file["copy"]
    old = copy.read_text("utf-8", "replace").splitlines() if copy.is_file() else []
    new = Path(path).read_text("utf-8", "replace").splitlines()
    for number, (before, after) in enumerate(zip_longest(old, new, fillvalue=""), start=1):
        if before != after:
            return f"line {number} is {after.strip()!r}, and was {before.strip()!r}"
    return "only line ends differ"


def _digest(path: str | Path) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _texts(value: object, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner, key)
    elif isinstance(value, str):
        yield key, value
