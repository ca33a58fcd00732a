"""Fine-tune on demonstrations: the world's own, or dialogues from a file (--sft.dialogues FILE).

With --from-scratch a small model and its tokenizer are made on the spot. The run folder holds the
checkpoints; the last one is an ordinary Hugging Face folder.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ludus.cli.arguments import recipe_stem, run_config
from ludus.cli.terminal import silence_libraries
from ludus.cli.train import configured
from ludus.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments; settings follow as --section.key value."""
    parser.add_argument("recipe", nargs="?", help="a recipe's name, or a .toml file")
    parser.add_argument("--model", metavar="PATH_OR_NAME", help="fine-tune this model")
    parser.add_argument("--from-scratch", action="store_true", help="make tokenizer and model first")
    parser.add_argument("--resume", metavar="RUN", type=Path, help="go on with the run in this folder")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Start or resume a fine-tuning run."""
    from ludus.cli import console
    from ludus.training.run import RunFolder, locked, new_run, save_config
    from ludus.training.sft import make_session

    silence_libraries()
    if args.resume is not None:
        if args.recipe or args.model or args.from_scratch:
            raise UserError("--resume takes everything from the run folder.", "Leave recipe and model out.")
        folder = RunFolder(args.resume)
        config = run_config(folder, overrides)
        session = make_session(config)
    else:
        config = configured(args, overrides)
        session = make_session(config)
        folder = new_run(config, f"{recipe_stem(args.recipe)}-sft")
    with locked(folder):
        save_config(folder, config)
        console.sft(session, folder)
    return 0
