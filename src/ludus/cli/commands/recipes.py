"""List the recipes that `ludus train`, `sft`, `eval` and `config` accept by name.

*Starts in* is the time until the first RL step on one quiet core, after the cold start if it does not ship with the
package (an estimate). *Memory* is the peak until step 1 trains. *Learns* is what training has been measured to change.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ludus.cli.arguments import no_settings
from ludus.cli.ui.fitted_table import TableColumn, make_table
from ludus.cli.ui.terminal import make_console, print_text
from ludus.recipes import Recipe, list_recipes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no arguments."""


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the table."""
    no_settings(overrides, "recipes")
    console = make_console()
    columns = ("recipe", TableColumn("description", wrap=True), "starts in", "memory", TableColumn("learns", wrap=True))
    rows = [
        (one.name, one.title.removeprefix(f"{one.name}: "), starts_in(one), memory(one), one.learns)
        for one in list_recipes()
    ]
    console.print(make_table(columns, rows))
    print_text(
        console,
        "Train one: ludus train NAME     In minutes: ludus train NAME --quick     Its settings: ludus config NAME",
    )
    return 0


def starts_in(recipe: Recipe) -> str:
    """Return the time until the first RL step of a recipe, or what it needs."""
    if recipe.starts_s is None:
        return recipe.needs or "not measured"
    return f"{recipe.starts_s} s"


def memory(recipe: Recipe) -> str:
    """Return the peak memory of a recipe."""
    return "" if recipe.memory_mb is None else f"{recipe.memory_mb / 1000:.1f} GB"
