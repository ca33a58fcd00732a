"""Check files of dialogues, texts, preference pairs or rollouts, or convert one to a dataset folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ludus.cli.ui.terminal import make_console, print_line, print_text
from ludus.errors import UserError
from ludus.training.datasets.files import FileReport, check_file, read_records, row_of, write_rows

MAX_SHOWN = 20
"""Maximum number of problems printed per file."""


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Check or convert. Raises UserError if a file has problems."""
    console, wrong = make_console(), []
    if args.action == "convert":
        if len(args.files) != 2:
            raise UserError("`ludus data convert` needs a file and a new folder.", "Name both.")
        file, folder = args.files
        records = read_records(file)
        write_rows(folder, [row_of(record) for record in records])
        print_line(console, f"{folder}: {_counted(len(records), 'record')} of {file}")
        return
    for path in args.files:
        try:
            report = check_file(path)
            lines, unusable = _report_lines(report), bool(report.problems)
        except UserError as error:
            lines, unusable = [str(error)], True
        print_text(console, "\n".join(lines))
        wrong += [path] * unusable
    if wrong:
        text = f"{', '.join(map(str, wrong))} cannot be used for training."
        raise UserError(text, "docs/use/data.md describes the formats.")


def _report_lines(report: FileReport) -> list[str]:
    records, faults = _counted(report.num_records, report.kind or "record"), len(report.problems)
    lines = [f"{report.path}: {records}, {_counted(faults, 'problem')}"]
    lines += [f"  line {problem.line}: {problem.text}." for problem in report.problems[:MAX_SHOWN]]
    if len(report.problems) > MAX_SHOWN:
        lines.append(f"  ... and {len(report.problems) - MAX_SHOWN:,} more.")
    return lines


def _counted(num: int, noun: str) -> str:
    return f"{num:,} {noun}{'' if num == 1 else 's'}"
