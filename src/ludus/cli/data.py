"""Check files of dialogues, preference pairs or rollouts before anything is trained on them.

A FILE holds JSON lines (also .gz), or is a folder that Hugging Face datasets wrote; docs/data.md has the
formats. What is wrong is said line by line, the first 20 of each file; then the exit code is 2.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ludus.cli.arguments import no_settings
from ludus.errors import UserError

if TYPE_CHECKING:
    from ludus.training.data import FileReport

SHOWN = 20
"""Problems of one file that are said; the rest is counted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument("action", choices=("check",), help="what to do with the files")
    parser.add_argument(
        "files", metavar="FILE", nargs="+", type=Path, help="JSON lines, or a dataset's folder"
    )


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print a report of each file; the exit code is 2 where something is wrong with any of them."""
    from ludus.cli.terminal import make_console, say
    from ludus.training.data import check_file

    no_settings(overrides, "data")
    console = make_console()
    wrong = []
    for path in args.files:
        report = check_file(path)
        for line in report_lines(report):
            say(console, line)
        if report.problems:
            wrong.append(path)
    if wrong:
        raise UserError(
            f"{', '.join(map(str, wrong))} cannot be trained on as it is.",
            "docs/data.md has the formats.",
        )
    return 0


def report_lines(report: FileReport) -> list[str]:
    """What a file holds and what is wrong with it, a sentence a line."""
    name = f"{report.kind or 'record'}{'' if report.num_records == 1 else 's'}"
    faults = f"{len(report.problems):,} problem{'' if len(report.problems) == 1 else 's'}"
    lines = [f"{report.path}: {report.num_records:,} {name}, {faults}"]
    lines += [f"  line {problem.line}: {problem.text}." for problem in report.problems[:SHOWN]]
    if len(report.problems) > SHOWN:
        lines.append(f"  ... and {len(report.problems) - SHOWN:,} more.")
    return lines
