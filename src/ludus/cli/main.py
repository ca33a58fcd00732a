"""`ludus COMMAND`: the table of commands, and the one place where errors become sentences.

What a user can mend prints one clear sentence and exits with the code of the part that failed (2: input);
nothing prints a traceback but a fault of Ludus itself.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ludus import __version__
from ludus.errors import LudusError


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand: `module` defines `add_arguments(parser)` and `run(args, overrides) -> int`."""

    name: str
    module: str
    summary: str
    example: str


COMMANDS = (
    Command("train", "train", "train an agent by reinforcement learning", "ludus train search"),
    Command("sft", "sft", "fine-tune on demonstrations", "ludus sft search --model.from_scratch"),
    Command("eval", "evaluate", "measure held-out success", "ludus eval search --run runs/search-1"),
    Command("compare", "compare", "compare two evaluations, task by task", "ludus compare runs/a runs/b"),
    Command("chat", "chat", "talk to a checkpoint with its tools", "ludus chat runs/search-1"),
    Command("show", "show", "read a run: curves, transcripts, rewards", "ludus show runs/search-1"),
    Command("recipes", "recipes", "list the recipes", "ludus recipes"),
    Command("config", "config", "print a resolved configuration", "ludus config search"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; gives the exit code."""
    logging.getLogger("ludus").propagate = False
    logging.getLogger("ludus").addHandler(logging.NullHandler())
    try:
        return _dispatch(list(sys.argv[1:] if argv is None else argv))
    except LudusError as error:
        _print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        print("\nInterrupted. A training run goes on with `ludus train --resume FOLDER`.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 141


def _print_error(error: LudusError) -> None:
    logging.getLogger("ludus").error("%s failed: %s", error.part, error)
    print(f"ludus: {error}", file=sys.stderr)


def _dispatch(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="ludus",
        description="Train tool-using LLM agents by reinforcement learning.",
        epilog="Each command has --help with an example. Begin with: ludus train search",
    )
    parser.add_argument("--version", action="version", version=f"ludus {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    modules = {}
    for command in COMMANDS:
        module = importlib.import_module(f"ludus.cli.{command.module}")
        sub = subparsers.add_parser(
            command.name,
            help=command.summary,
            description=module.__doc__,
            epilog=f"example: {command.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(sub)
        modules[command.name] = module
    args, overrides = parser.parse_known_args(argv)
    code: int = modules[args.command].run(args, overrides)
    return code
