"""Rejection-sampling fine-tuning: sample, keep what solved its task, train on it, and again.

RECIPE is the name of a recipe or the path of a .toml file. Each of --rft.rounds rounds plays
--rft.tasks_per_round tasks --rft.samples times, keeps the attempts that succeeded (each once), fine-tunes on
the token ids that were sampled, evaluates and saves. The run folder is read like that of `ludus train`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ludus.cli.arguments import recipe_config, recipe_stem, run_config
from ludus.cli.terminal import silence_libraries
from ludus.cli.train import HowToResume, resumed_folder
from ludus.config.schema import Config
from ludus.errors import UserError

if TYPE_CHECKING:
    from ludus.training.run import RunFolder
    from ludus.training.session import Session


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments; settings follow as --section.key value."""
    parser.add_argument("recipe", nargs="?", help="a recipe's name, or a .toml file")
    parser.add_argument("--model", metavar="PATH_OR_NAME", help="train this model instead of the cold start")
    parser.add_argument("--resume", metavar="RUN", type=Path, help="go on with the run in this folder")
    parser.set_defaults(from_scratch=False)


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Start or resume a run."""
    if args.resume is not None:
        return resume(resumed_folder(args), overrides)
    shortcuts = ["--model.path", args.model, "--model.from_scratch", "false"] if args.model else []
    config = recipe_config(args.recipe, shortcuts, overrides)
    start(config, f"{recipe_stem(args.recipe)}-rft", args.recipe)
    return 0


def start(config: Config, name: str, recipe: str | None) -> None:
    """Train in a new folder, once everything that can be checked before it is."""
    from ludus.training.run import locked, new_run

    session = ready(config)
    folder = new_run(config, name, "rft", recipe)
    with locked(folder), HowToResume(folder):
        train(session, folder)


def resume(folder: RunFolder, overrides: Sequence[str]) -> int:
    """Go on with a run, unless it is complete."""
    from ludus.cli.console import print_commands
    from ludus.cli.terminal import make_console, say
    from ludus.training.resume import check_kind, check_resume, is_complete
    from ludus.training.run import locked

    check_kind(folder, "rft")
    with locked(folder):
        config = run_config(folder, overrides)
        check_resume(folder, config, "rft")
        if is_complete(folder, config, "rft"):
            console = make_console()
            say(console, f"The run is complete: all its {config.rft.rounds} rounds are done and evaluated.")
            print_commands(console, folder, config)
            return 0
        session = ready(config)
        with HowToResume(folder):
            train(session, folder)
    return 0


def ready(config: Config) -> Session:
    """A checked configuration with its model loaded. Raises UserError and its children."""
    from ludus.training.rft import check_rft
    from ludus.training.session import open_session

    silence_libraries()
    if config.model.from_scratch:
        raise UserError(
            "Rejection sampling needs a model that solves something, and model.from_scratch makes a new one.",
            "Run `ludus sft` first, and give its checkpoint with --model.",
        )
    session = open_session(config)
    check_rft(config, session.world)
    return session


def train(session: Session, folder: RunFolder) -> None:
    """Train with progress bars, then print what came of it."""
    from ludus.cli.console import ProgressReporter, comparison_table, print_commands, print_examples
    from ludus.cli.terminal import bars, make_console, say
    from ludus.training.resume import steps_done
    from ludus.training.rft import run_rft

    console = make_console()
    say(console, f"Run folder: {folder.path}")
    with bars(console) as progress:
        reporter = ProgressReporter(progress, session.config.rft.rounds, steps_done(folder))
        comparisons = run_rft(session, folder, reporter)
    console.print(comparison_table(comparisons))
    print_examples(console, folder, comparisons)
    print_commands(console, folder, session.config)
