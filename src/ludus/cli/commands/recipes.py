"""List the recipes: what `ludus train`, `sft`, `eval` and `config` take by name."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.table import Table

from ludus.cli.arguments import no_settings
from ludus.cli.ui.terminal import make_console, print_line
from ludus.recipes import list_recipes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None."""


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the table."""
    del args
    no_settings(overrides, "recipes")
    console = make_console()
    table = Table()
    table.add_column("recipe", no_wrap=True)
    table.add_column("what it shows")
    for recipe in list_recipes():
        table.add_row(recipe.name, recipe.title)
    console.print(table)
    print_line(console, "Train one: ludus train NAME     Its settings: ludus config NAME")
    return 0
