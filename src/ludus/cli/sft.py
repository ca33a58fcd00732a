"""Fine-tune on demonstrations: the world's own, or dialogues from a file (--sft.dialogues FILE).

With --from-scratch a small model and its tokenizer are made on the spot. The run folder holds the
checkpoints; the last one is an ordinary Hugging Face folder.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ludus.cli.arguments import recipe_stem, run_config
from ludus.cli.terminal import silence_libraries
from ludus.cli.train import HowToResume, configured, resumed_folder
from ludus.config.schema import Config

if TYPE_CHECKING:
    from ludus.training.run import RunFolder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments; settings follow as --section.key value."""
    parser.add_argument("recipe", nargs="?", help="a recipe's name, or a .toml file")
    parser.add_argument("--model", metavar="PATH_OR_NAME", help="fine-tune this model")
    parser.add_argument("--from-scratch", action="store_true", help="make tokenizer and model first")
    parser.add_argument("--resume", metavar="RUN", type=Path, help="go on with the run in this folder")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Start or resume a fine-tuning run."""
    if args.resume is not None:
        return resume(resumed_folder(args), overrides)
    start(configured(args, overrides), f"{recipe_stem(args.recipe)}-sft", args.recipe)
    return 0


def start(config: Config, name: str, recipe: str | None) -> None:
    """Fine-tune in a new folder, once everything that can be checked before it is."""
    from ludus.cli import console
    from ludus.training.run import locked, new_run
    from ludus.training.sft import make_session

    silence_libraries()
    session = make_session(config)
    folder = new_run(config, name, "sft", recipe)
    with locked(folder), HowToResume(folder):
        console.sft(session, folder)


def resume(folder: RunFolder, overrides: Sequence[str]) -> int:
    """Go on with a fine-tuning run, unless it is complete."""
    from ludus.cli import console
    from ludus.training.resume import check_kind, check_resume, is_complete
    from ludus.training.run import locked
    from ludus.training.sft import make_session

    silence_libraries()
    check_kind(folder, "sft")
    with locked(folder):
        config = run_config(folder, overrides)
        check_resume(folder, config, "sft")
        if is_complete(folder, config, "sft"):
            console.say_complete_sft(folder, config)
            return 0
        session = make_session(config)
        with HowToResume(folder):
            console.sft(session, folder)
    return 0
