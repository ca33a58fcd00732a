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
    columns = ("recipe", TableColumn("description", wrap=True), "start", "memory", TableColumn("learns", wrap=True))
    rows = []
    for one in list_recipes():
        needs = f"needs {one.needs}" if one.needs else "not measured"
        start = needs if one.starts_s is None else f"after {one.starts_s} s"
        memory = "" if one.memory_mb is None else f"{one.memory_mb / 1000:.1f} GB"
        rows.append((one.name, one.title.removeprefix(f"{one.name}: "), start, memory, one.learns))
    console.print(make_table(columns, rows))
    print_text(console, "Train: ludus train NAME     In minutes: --quick     Settings: ludus config NAME")
