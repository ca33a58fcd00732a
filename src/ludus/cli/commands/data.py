"""Check files of dialogues, preference pairs or rollouts, or write one as a dataset's folder.

A FILE holds JSON lines (also .gz), or is a folder that Hugging Face datasets wrote; docs/use/data.md has the
formats. `check` says what is wrong line by line, the first 20 of each file; then the exit code is 2.
`convert FILE FOLDER` writes what is read of a file as a new folder for `datasets.load_from_disk`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ludus.cli.arguments import no_settings
from ludus.errors import UserError

if TYPE_CHECKING:
    from ludus.training.datasets.files import FileReport

SHOWN = 20
"""Problems of one file that are said; the rest is counted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument("action", choices=("check", "convert"), help="what to do with the files")
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path, help="JSON lines, or a dataset's folder")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Do it. Raises UserError where something is wrong with any of the files."""
    no_settings(overrides, "data")
    return convert(args.files) if args.action == "convert" else check(args.files)


def convert(paths: Sequence[Path]) -> int:
    """Write the records of the first path as a dataset at the second."""
    from ludus.cli.ui.terminal import make_console, say
    from ludus.training.datasets.files import read_records, row_of, write_rows

    if len(paths) != 2:
        raise UserError("`ludus data convert` takes a file and the folder to write.", "Name these two.")
    file, folder = paths
    records = read_records(file)
    write_rows(folder, [row_of(record) for record in records])
    say(make_console(), f"{folder}: {counted(len(records), 'record')} of {file}")
    return 0


def check(paths: Sequence[Path]) -> int:
    """Print a report of each file."""
    from ludus.cli.ui.terminal import make_console, say
    from ludus.training.datasets.files import check_file

    console = make_console()
    wrong = []
    for path in paths:
        try:
            report = check_file(path)
        except UserError as error:
            say(console, str(error))
            wrong.append(path)
            continue
        for line in report_lines(report):
            say(console, line)
        if report.problems:
            wrong.append(path)
    if wrong:
        raise UserError(
            f"{', '.join(map(str, wrong))} cannot be trained on as it is.", "docs/use/data.md has the formats."
        )
    return 0


def report_lines(report: FileReport) -> list[str]:
    """What a file holds and what is wrong with it, a sentence a line."""
    records, faults = counted(report.num_records, report.kind or "record"), len(report.problems)
    lines = [f"{report.path}: {records}, {counted(faults, 'problem')}"]
    lines += [f"  line {problem.line}: {problem.text}." for problem in report.problems[:SHOWN]]
    if len(report.problems) > SHOWN:
        lines.append(f"  ... and {len(report.problems) - SHOWN:,} more.")
    return lines


def counted(num: int, noun: str) -> str:
    """How many there are of what."""
    return f"{num:,} {noun}{'' if num == 1 else 's'}"
