"""`ludus COMMAND`: the table of commands, and error reporting.

An error that the user can fix is printed in one sentence, and the exit code is that of the failed part (2: input).
Only bugs of Ludus print a traceback. Only the chosen command is imported, and torch only when it runs.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import inspect
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ludus import __version__
from ludus.cli.arguments import no_settings, split_settings
from ludus.cli.signals import INTERRUPTED, exit_on_interrupt
from ludus.cli.ui.help_text import HelpFormatter, wrapped
from ludus.config.settings import is_section, list_settings, nearest, suggestion
from ludus.errors import LudusError, UserError, did_you_mean, nearest_names
from ludus.plugins import plugin_line


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand; `target` has `add_arguments(parser)` and `run(args, overrides)`, which returns the exit code."""

    name: str
    target: str
    summary: str
    example_arguments: str

    def load(self) -> Any:  # noqa: ANN401 (a module or an object)
        """Import the command."""
        module, _, name = self.target.partition(":")
        found = importlib.import_module(f"ludus.cli.{module}")
        return vars(found)[name] if name else found

    @property
    def example(self) -> str:
        """Example command line."""
        return f"ludus {self.name} {self.example_arguments}".rstrip()


WITHOUT_SETTINGS = (
    *("algorithms", "behavior", "cluster", "compare", "contamination", "data", "export", "plan", "recipes", "report"),
    *("sandbox", "show", "view"),
)
COMMANDS = (
    Command("train", "training.stages:RL", "train an agent by reinforcement learning", "search"),
    Command("sft", "training.stages:SFT", "fine-tune on demonstrations", "search --from-scratch"),
    Command(
        "preference",
        "training.stages:PREFERENCE",
        "train on pairs: DPO, SimPO, KTO, BCO and others",
        "search --run runs/search-1",
    ),
    Command("reward-model", "training.stages:REWARD_MODEL", "train a reward model", "search --run runs/search-1"),
    Command("rft", "training.stages:RFT", "rejection-sampling fine-tuning", "search --rft.rounds 2"),
    Command("pipeline", "training.pipeline", "train in stages", "examples/pipeline.toml"),
    Command("data", "commands.data", "check or convert data files", "check dialogues.jsonl"),
    Command("eval", "evaluate.eval", "evaluate on held-out tasks", "--run runs/search-1"),
    Command("probe", "evaluate.probe", "probe how a model behaves", "scaling --run runs/search-1"),
    Command("compare", "evaluate.compare", "compare two evaluations, task by task", "runs/a runs/b"),
    Command("behavior", "results.behavior", "show how the tasks of a run were solved", "runs/search-1"),
    Command("contamination", "results.contamination", "find evaluation tasks in training data", "runs/search-1"),
    Command("report", "results.report", "write an HTML report about runs", "runs/search-1"),
    Command("view", "results.view", "look at a run in the browser", "runs/search-1"),
    Command("chat", "serving.chat", "chat with a checkpoint", "runs/search-1"),
    Command("serve", "serving.serve", "serve a checkpoint over HTTP", "runs/search-1"),
    Command("cluster", "serving.cluster", "add engines to a run, or remove them", "list runs/search-1"),
    Command("sandbox", "serving.sandbox", "check a sandbox, or serve one over HTTP", "check"),
    Command("show", "results.show", "show a run: curves, transcripts, evaluations", "runs/search-1"),
    Command("export", "results.export", "export rollouts to other tools", "runs/search-1 --inspect logs"),
    Command("plan", "commands.plan", "predict step time, idle shares and staleness", "runs/search-1 --engines 1 8 64"),
    Command("rewards", "results.rewards", "score saved rollouts again", "replay runs/search-1 --config other.toml"),
    Command("env", "commands.env", "show or check an environment", "check search"),
    Command("recipes", "commands.recipes", "list the recipes", ""),
    Command("algorithms", "commands.algorithms", "list the algorithms", ""),
    Command("doctor", "commands.doctor", "check this machine and the installation", ""),
    Command("config", "commands.config", "print a resolved configuration", "search"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    log = logging.getLogger("ludus")
    if not log.handlers:
        log.addHandler(logging.NullHandler())
    atexit.unregister(_skip_final_gc)  # registered once per process
    atexit.register(_skip_final_gc)
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
    names = [command.name for command in COMMANDS]
    chosen = next((word for word in words if not word.startswith("-")), "")
    if chosen and chosen not in names:
        near = nearest_names(chosen, names, cutoff=0.5)
        guess = f"Did you mean {' or '.join(f'`ludus {name}`' for name in near)}? " if near else ""
        raise UserError(f"Unknown command {chosen!r}.", f"{guess}Commands: {', '.join(names)}.")
    options: list[str] = []
    for command in COMMANDS:
        if command.name == chosen:
            options = _add_command(subparsers, command)
        else:
            subparsers.add_parser(command.name, help=command.summary)
    if not argv:
        parser.print_help()
        return 0
    args, unknown = parser.parse_known_args(words)
    _check_options(unknown, options, chosen)
    command = next(command for command in COMMANDS if command.name == args.command)
    if args.command in WITHOUT_SETTINGS:
        no_settings([*settings, *unknown], args.command)
    code: int | None = command.load().run(args, [*settings, *unknown])
    return code or 0


def _check_options(unknown: Sequence[str], options: Sequence[str], command: str) -> None:
    """Raise UserError with a suggestion for an option that the command does not have."""
    for word in unknown:
        name = word.partition("=")[0]
        key = name[2:].replace("-", "_")
        if not name.startswith("--") or not key or "." in key or is_section(key):
            continue
        same = [setting.key for setting in list_settings() if setting.key.endswith(f".{key}")]
        hint = did_you_mean(name.replace("_", "-"), options, cutoff=0.8)
        if same:
            hint += f"As a setting, write --{' or --'.join(same)}."
        elif not hint and nearest(key):
            hint = f"Of the settings {suggestion(key)}."
        raise UserError(f"`ludus {command}` has no option {name}.", hint.strip() or f"See `ludus {command} --help`.")


def _add_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser], command: Command) -> list[str]:
    """Add the chosen command with its arguments and documentation; return the names of its options."""
    with exit_on_interrupt():
        found = command.load()
    parser = subparsers.add_parser(
        command.name,
        help=command.summary,
        description=inspect.getdoc(found),
        epilog=f"example: {command.example}",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    found.add_arguments(parser)
    return re.findall(r"--[a-z][a-z-]*", parser.format_usage())
