"""Write a report about one or several runs: one self-contained HTML file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ludus.cli.ui.terminal import make_console, print_line
from ludus.errors import UserError


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
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
        return
    try:
        output.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror}.", "Name another file with --output.") from error
    print_line(make_console(), f"Wrote {output} ({output.stat().st_size / 1e6:.2f} MB).")
