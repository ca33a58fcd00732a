"""`ludus COMMAND`: parsing and error reporting.

An error that the user can fix is printed in one sentence, and the exit code is that of the failed part (2: input).
Only bugs of Ludus print a traceback. Only the chosen command is imported, and torch only when it runs.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Sequence

from ludus import __version__
from ludus.cli.arguments import no_settings, split_settings
from ludus.cli.command import list_commands
from ludus.cli.signals import INTERRUPTED
from ludus.cli.ui.help_text import HelpFormatter, wrapped
from ludus.config.environment import set_default_variables
from ludus.config.settings import is_section, list_settings, nearest, suggestion
from ludus.errors import LudusError, UserError, did_you_mean, nearest_names
from ludus.plugins import plugin_line


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    log = logging.getLogger("ludus")
    if not log.handlers:
        log.addHandler(logging.NullHandler())
    atexit.unregister(_skip_final_gc)  # registered once per process
    atexit.register(_skip_final_gc)
    set_default_variables({"THP_MEM_ALLOC_ENABLE": "1"})  # huge pages for large tensors; torch reads it on import
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except LudusError as error:
        _print_error(error)
        return error.exit_code
    except BrokenPipeError:  # the reader closed the pipe; avoid an error at interpreter exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:  # boundary: plug-ins; any other error is a bug of Ludus and is raised again
        line = plugin_line(error)
        if not line:
            raise
        log.exception("a plug-in failed")
        notes = " ".join(vars(error).get("__notes__", ()))
        _print_error(UserError(f"The plug-in {line}: {type(error).__name__}: {error}.", notes))
        return UserError.exit_code
    except KeyboardInterrupt as interrupt:  # an interrupted run names its resume command
        print(f"\nInterrupted. {interrupt}".rstrip(), file=sys.stderr)
        return INTERRUPTED


def _skip_final_gc() -> None:
    """Skip garbage collection at interpreter exit, which takes seconds, and ignore interrupts during it."""
    gc.freeze()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _print_error(error: LudusError) -> None:
    logging.getLogger("ludus").error("%s failed: %s", error.part, error)
    print(wrapped(f"ludus: {error}", sys.stderr), file=sys.stderr)


def _dispatch(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="ludus",
        description="Train tool-using LLM agents by reinforcement learning.",
        formatter_class=HelpFormatter,
        epilog="Each command has --help with an example. Start with: ludus train search",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ludus {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    words, settings = split_settings(argv)
    commands = list_commands()
    chosen = next((word for word in words if not word.startswith("-")), "")
    if chosen and chosen not in commands:
        near = nearest_names(chosen, commands, cutoff=0.5)
        guess = f"Did you mean {' or '.join(f'`ludus {name}`' for name in near)}? " if near else ""
        raise UserError(f"Unknown command {chosen!r}.", f"{guess}Commands: {', '.join(commands)}.")
    usage = ""
    for command in commands.values():
        own = subparsers.add_parser(
            command.name,
            help=command.summary,
            description=command.description,
            epilog=f"example: {command.example}",
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )
        if command.name == chosen:
            command.add_arguments(own)
            usage = own.format_usage()
    if not argv:
        parser.print_help()
        return 0
    args, unknown = parser.parse_known_args(words)
    _check_options(unknown, re.findall(r"--[a-z][a-z-]*", usage), chosen)
    command = commands[args.command]
    if not command.settings:
        no_settings([*settings, *unknown], command.name)
    return command.run(args, [*settings, *unknown])


def _check_options(unknown: Sequence[str], options: Sequence[str], command: str) -> None:
    """Raise UserError with a suggestion for an option that the command does not have."""
    for word in unknown:
        name = word.partition("=")[0]
        key = name[2:].replace("-", "_")
        if not name.startswith("--") or not key or "." in key or is_section(key):
            continue
        own = f"{'training' if command == 'train' else command.replace('-', '_')}."
        same = [setting.key for setting in list_settings() if setting.key.endswith(f".{key}")]
        same = sorted(same, key=lambda one: (one.count("."), not one.startswith(own)))[:3]
        hint = did_you_mean(name.replace("_", "-"), options, cutoff=0.8)
        if same:
            hint += f"As a setting, write --{' or --'.join(same)}."
        elif not hint and nearest(key):
            hint = f"Of the settings {suggestion(key)}."
        raise UserError(f"`ludus {command}` has no option {name}.", hint.strip() or f"See `ludus {command} --help`.")
