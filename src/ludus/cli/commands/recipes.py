"""List the recipes that `ludus train`, `sft`, `eval` and `config` accept by name."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ludus.cli.arguments import no_settings
from ludus.cli.ui.fitted_table import TableColumn, make_table
from ludus.cli.ui.terminal import make_console, print_text
from ludus.recipes import list_recipes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no arguments."""


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the table."""
    no_settings(overrides, "recipes")
    console = make_console()
    console.print(
        make_table(
            ("recipe", TableColumn("description", wrap=True)),
            ((recipe.name, recipe.title) for recipe in list_recipes()),
        )
    )
    print_text(console, "Train one: ludus train NAME     Its settings: ludus config NAME")
    return 0
