"""The manifest of a checkpoint, which is read without torch: size and SHA-256 of each file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from ludus.errors import StorageError

MANIFEST = "manifest.json"
"""File name in a checkpoint's trainer folder."""


def write_manifest(folder: Path) -> None:
    """Write the manifest of all files in a checkpoint."""
    entries = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _digest(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    (folder / "trainer" / MANIFEST).write_text(json.dumps({"files": entries}, indent=1) + "\n", "utf-8")


def check_manifest(folder: Path) -> None:
    """Raise StorageError, with file and hint, if a checkpoint differs from its manifest."""
    path = folder / "trainer" / MANIFEST
    try:
        files = json.loads(path.read_text("utf-8"))["files"]
        expected = {str(name): (int(file["bytes"]), str(file["sha256"])) for name, file in files.items()}
    except FileNotFoundError:
        raise damaged(folder, f"trainer/{MANIFEST} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(folder, f"trainer/{MANIFEST} cannot be read ({type(error).__name__})") from error
    for name, (size, digest) in expected.items():
        file = folder / name
        if not file.is_file():
            raise damaged(folder, f"{name} is missing")
        if file.stat().st_size != size:
            raise damaged(folder, f"{name} has {file.stat().st_size} bytes instead of {size}")
        if _digest(file) != digest:
            raise damaged(folder, f"{name} has changed since it was written")


def damaged(folder: Path, what: str) -> StorageError:
    """Return the error for a damaged checkpoint."""
    previous = sorted(path.name for path in folder.parent.glob("step-*") if path.name < folder.name)
    remedy = f"resume from {previous[-1]}" if previous else "restart the run from its first step"
    return StorageError(
        f"The checkpoint {folder} is damaged: {what}.", f"Remove that folder, and --resume will {remedy}."
    )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
