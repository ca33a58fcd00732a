"""Train an agent by reinforcement learning.

RECIPE is the name of a recipe (see `ludus recipes`) or the path of a .toml file. Any setting can be
changed on the command line: --algorithm.group_size 16. The run goes into a new folder under runs/, or into
--run.folder; it holds configuration, metrics, rollouts, evaluations and checkpoints.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from ludus.cli.arguments import check_run, recipe_config, recipe_stem, run_config
from ludus.cli.terminal import silence_libraries
from ludus.config.schema import Config
from ludus.errors import LudusError, UserError

if TYPE_CHECKING:
    from ludus.training.run import RunFolder


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
    if args.resume is not None:
        return resume(resumed_folder(args), overrides)
    start(configured(args, overrides), recipe_stem(args.recipe), args.recipe)
    return 0


def start(config: Config, name: str, recipe: str | None) -> None:
    """Train in a new folder, once everything that can be checked before it is."""
    from ludus.cli import console
    from ludus.training.run import locked, new_run
    from ludus.training.start import prepare

    silence_libraries()
    session = prepare(config)
    folder = new_run(config, name, "rl", recipe)
    with locked(folder), HowToResume(folder):
        console.train(config, folder, session)


def resume(folder: RunFolder, overrides: Sequence[str]) -> int:
    """Go on with a run, unless it is complete."""
    from ludus.cli import console
    from ludus.training.resume import check_kind, check_resume, is_complete
    from ludus.training.run import locked
    from ludus.training.start import prepare

    silence_libraries()
    check_kind(folder, "rl")
    with locked(folder):
        config = run_config(folder, overrides)
        check_resume(folder, config, "rl")
        if is_complete(folder, config, "rl"):
            console.say_complete(folder, config)
            return 0
        session = prepare(config)
        with HowToResume(folder):
            console.train(config, folder, session)
    return 0


def resumed_folder(args: argparse.Namespace) -> RunFolder:
    """The folder of --resume. Raises UserError where it is no run, or more than settings are given."""
    from ludus.training.run import RunFolder

    if args.recipe or args.model or args.from_scratch:
        raise UserError("--resume takes everything from the run folder.", "Leave recipe and model out.")
    folder = RunFolder(args.resume)
    check_run(folder)
    return folder


class HowToResume:
    """Whatever ends the run inside says how it goes on: an error in its hint, an interrupt in its text.

    `what` is the folder of the run, or the command that goes on with it.
    """

    def __init__(self, what: RunFolder | str) -> None:
        from ludus.training.run import resume_command

        self._hint = f"The run goes on with: {what if isinstance(what, str) else resume_command(what)}"

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, LudusError):
            error.hint = f"{error.hint} {self._hint}".strip()
        elif isinstance(error, KeyboardInterrupt):
            error.args = (self._hint,)
        elif error is not None:
            error.add_note(self._hint)


def configured(args: argparse.Namespace, overrides: Sequence[str]) -> Config:
    """The configuration of recipe, shortcuts and overrides."""
    shortcuts = ["--model.path", args.model] if args.model else []
    shortcuts += ["--model.from_scratch", "true"] if args.from_scratch else []
    return recipe_config(args.recipe, shortcuts, overrides)
