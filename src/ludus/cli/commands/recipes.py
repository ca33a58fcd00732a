"""List the recipes that `ludus train`, `sft`, `eval` and `config` accept by name."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ludus.cli.ui.fitted_table import TableColumn, make_table
from ludus.cli.ui.terminal import make_console, print_text
from ludus.recipes import list_recipes


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Print the table."""
    console = make_console()
    columns = ("recipe", TableColumn("description", wrap=True), "starts in", "memory", TableColumn("learns", wrap=True))
    rows = []
    for one in list_recipes():
        starts_in = f"{one.starts_s} s" if one.starts_s is not None else one.needs or "not measured"
        memory = "" if one.memory_mb is None else f"{one.memory_mb / 1000:.1f} GB"
        rows.append((one.name, one.title.removeprefix(f"{one.name}: "), starts_in, memory, one.learns))
    console.print(make_table(columns, rows))
    print_text(console, "Train: ludus train NAME     In minutes: --quick     Settings: ludus config NAME")
