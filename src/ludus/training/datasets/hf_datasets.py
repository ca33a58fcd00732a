"""Local folders of Hugging Face `datasets`: their rows, and rows written as one.

The package comes with the extra `datasets`, and is imported where a folder is read or written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ludus.errors import StorageError, UserError


def read_rows(path: Path) -> Iterator[object]:
    """The rows of a folder that `Dataset.save_to_disk` wrote; of several splits the one called train.

    Raises UserError for another folder, and where the package is missing.
    """
    try:
        from datasets import DatasetDict, load_from_disk
    except ImportError as error:
        raise UserError(
            f"{path} is a folder, and reading a dataset needs the package datasets.",
            "Install it: pip install 'ludus[datasets]', or give a file of JSON lines.",
        ) from error
    try:
        found = load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is not a dataset: {str(error).splitlines()[0]}.",
            "Give a folder that Dataset.save_to_disk wrote, or a file of JSON lines.",
        ) from error
    if isinstance(found, DatasetDict):
        if "train" not in found:
            raise UserError(f"{path} has no split train, but {', '.join(found)}.", "Give one split's folder.")
        found = found["train"]
    yield from found


def write_rows(path: Path, rows: Sequence[dict[str, object]]) -> None:
    """Write rows that have the same keys as a new folder, which `Dataset.load_from_disk` reads.

    Raises UserError where `path` is there already or the package is missing, StorageError where the disk
    refuses.
    """
    if path.exists():
        raise UserError(f"{path} is there already.", "Choose another folder.")
    try:
        from datasets import Dataset
    except ImportError as error:
        raise UserError(
            "Writing a dataset needs the package datasets.", "Install it: pip install 'ludus[datasets]'."
        ) from error
    try:
        Dataset.from_list(list(rows)).save_to_disk(str(path))
    except OSError as error:
        raise StorageError(f"{path} could not be written: {error}.", "Remove what is there of it.") from error
