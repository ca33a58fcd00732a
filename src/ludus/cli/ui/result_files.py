"""The options --json and --markdown: results of a command as a file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from ludus.cli.ui.fitted_table import FittedTable
from ludus.errors import UserError


def add_result_files(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results as JSON")
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="write the tables as Markdown")


def write_result_files(args: argparse.Namespace, data: object, tables: Iterable[FittedTable]) -> None:
    """Write the files that the options name, replacing existing ones. Raises UserError if one cannot be written."""
    if args.json is not None:
        _write(args.json, json.dumps(data, indent=1) + "\n")
    if args.markdown is not None:
        _write(args.markdown, "\n".join(table.to_markdown() for table in tables))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.", "Name another file.") from error
