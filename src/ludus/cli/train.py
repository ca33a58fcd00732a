"""Train an agent by reinforcement learning.

RECIPE is the name of a recipe (see `ludus recipes`) or the path of a .toml file. Any setting can be
changed on the command line: --algorithm.group_size 16. The run goes into a new folder under runs/, or into
--run.folder; it holds configuration, metrics, rollouts, evaluations and checkpoints.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ludus.cli.arguments import recipe_config, recipe_stem, run_config
from ludus.cli.terminal import silence_libraries
from ludus.config.schema import Config
from ludus.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments; settings follow as --section.key value."""
    parser.add_argument("recipe", nargs="?", help="a recipe's name, or a .toml file")
    parser.add_argument("--model", metavar="PATH_OR_NAME", help="train this model instead of the cold start")
    parser.add_argument(
        "--from-scratch", action="store_true", help="make tokenizer, model and cold start first"
    )
    parser.add_argument("--resume", metavar="RUN", type=Path, help="go on with the run in this folder")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Start or resume a run."""
    from ludus.cli import console
    from ludus.training.run import RunFolder, locked, new_run, save_config
    from ludus.training.start import prepare

    silence_libraries()
    if args.resume is not None:
        if args.recipe or args.model or args.from_scratch:
            raise UserError("--resume takes everything from the run folder.", "Leave recipe and model out.")
        folder = RunFolder(args.resume)
        config = run_config(folder, overrides)
        session = prepare(config)
    else:
        config = configured(args, overrides)
        session = prepare(config)
        folder = new_run(config, recipe_stem(args.recipe))
    with locked(folder):
        save_config(folder, config)
        console.train(config, folder, session)
    return 0


def configured(args: argparse.Namespace, overrides: Sequence[str]) -> Config:
    """The configuration of recipe, shortcuts and overrides."""
    shortcuts = ["--model.path", args.model] if args.model else []
    shortcuts += ["--model.from_scratch", "true"] if args.from_scratch else []
    return recipe_config(args.recipe, shortcuts, overrides)
