"""Manifest of a checkpoint: size and SHA-256 of each file, verified on resume."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from ludus.errors import StorageError

MANIFEST = "manifest.json"
"""File name in a checkpoint's trainer folder."""


def write_manifest(folder: Path) -> None:
    """Write the manifest of all files in a checkpoint."""
    found = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _digest(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    (folder / "trainer" / MANIFEST).write_text(json.dumps({"files": found}, indent=1) + "\n", "utf-8")


def check_manifest(folder: Path) -> None:
    """Raise StorageError, with file and remedy, if a checkpoint differs from its manifest.

    A missing manifest is accepted for checkpoints of earlier versions only.
    """
    path = folder / "trainer" / MANIFEST
    try:
        files = json.loads(path.read_text("utf-8"))["files"]
        due = {str(name): (int(file["bytes"]), str(file["sha256"])) for name, file in files.items()}
    except FileNotFoundError:
        if _had_manifest(folder):
            raise broken(folder, f"trainer/{MANIFEST} is missing") from None
        return
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise broken(folder, f"trainer/{MANIFEST} cannot be read ({type(error).__name__})") from error
    for name, (size, digest) in due.items():
        file = folder / name
        if not file.is_file():
            raise broken(folder, f"{name} is missing")
        if file.stat().st_size != size:
            raise broken(folder, f"{name} has {file.stat().st_size} bytes instead of {size}")
        if _digest(file) != digest:
            raise broken(folder, f"{name} has changed since it was written")


def broken(folder: Path, what: str) -> StorageError:
    """Return the error for a damaged checkpoint."""
    earlier = sorted(path.name for path in folder.parent.glob("step-*") if path.name < folder.name)
    then = f"resume from {earlier[-1]}" if earlier else "restart the run from its first step"
    return StorageError(
        f"The checkpoint {folder} is damaged: {what}.", f"Remove that folder, and --resume will {then}."
    )


def _had_manifest(folder: Path) -> bool:
    """Return whether the trainer state is from a version that writes manifests."""
    try:
        state = json.loads((folder / "trainer" / "state.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return True
    return not isinstance(state, dict) or "mode" in state or "step" not in state


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
