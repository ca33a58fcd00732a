"""Write a report about one or several runs: one self-contained HTML file.

    ludus report runs/search-1                            writes runs/search-1/report.html
    ludus report runs/a runs/b --output compared.html     curves in one chart, and a paired comparison
    ludus report runs/search-1 --markdown                 the summary as Markdown on standard output

Runs that differ only in their seed are shown as their mean with a 95 % interval. A run may still be training.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ludus.cli.ui.terminal import make_console, print_line
from ludus.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="a run folder")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the file to write (RUN/report.html)")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--markdown", action="store_true", help="a Markdown summary, without --output on stdout")
    kinds.add_argument("--json", action="store_true", help="the summary as JSON, without --output on stdout")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Write the report."""
    from ludus.report.data import read_runs, to_json, to_markdown
    from ludus.report.page import render

    is_page = not (args.markdown or args.json)
    output = args.output or (args.runs[0] / "report.html" if is_page else None)
    if output is not None and output.is_dir():
        raise UserError(f"{output} is a folder.", "Name a file with --output.")
    runs = read_runs(args.runs)
    text = render(runs) if is_page else to_markdown(runs) if args.markdown else to_json(runs)
    if output is None:
        sys.stdout.write(text)
        return 0
    try:
        output.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror}.", "Name another file with --output.") from error
    print_line(make_console(), f"Wrote {output} ({output.stat().st_size / 1e6:.2f} MB).")
    return 0
