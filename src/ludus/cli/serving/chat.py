"""Talk to a checkpoint with its tools, and see what it thinks, calls and is told.

RUN_OR_MODEL is a run folder (its newest checkpoint, in the run's own world), a model folder or a model's
name; for a model, --world names the recipe or world it acts in. Settings follow as --section.key value, for
example --rollout.max_turns 10. Type a question; follow-up questions go on with the same dialogue.

    /new    begin a new dialogue
    /quit   end (as an empty line does)
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ludus.cli.arguments import model_settings, policy_config
from ludus.config.load import load_config
from ludus.config.schema import Config
from ludus.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from ludus.cli.serving.chat_repl import ChatRepl
    from ludus.envs.base import World
    from ludus.training.run.run_dir import RunFolder

STYLES = {
    "thinking": "dim italic",
    "call": "bold cyan",
    "malformed call": "red",
    "tool": "yellow",
    "answer": "bold green",
    "text": "cyan",
    "end": "magenta",
}
DEFAULT_WORLD = "search"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments; settings follow as --section.key value."""
    parser.add_argument("target", metavar="RUN_OR_MODEL", help="a run folder, a model folder or a model's name")
    parser.add_argument(
        "--world", metavar="RECIPE", help=f"a recipe, or a world's .py file (of a model: {DEFAULT_WORLD})"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Talk until the input ends."""
    from ludus.cli.serving.chat_repl import ChatRepl
    from ludus.cli.ui.load_run import open_weights
    from ludus.cli.ui.terminal import make_console, say

    if not 0 <= args.temperature < float("inf"):
        raise UserError(f"--temperature is {args.temperature:g}.", "Give 0 (greedy) or a number above it.")
    folder, config = target_config(args.target, args.world, overrides)
    console = make_console()
    with asyncio.Runner() as runner:
        opened = runner.run(open_weights(config, folder))
        try:
            where = f"step {opened.step} of {args.target}" if folder else args.target
            say(console, f"{where}, in the world {opened.session.world.name}. /new begins anew, /quit ends.")
            talk(ChatRepl(opened, args.temperature), console, runner)
        finally:
            runner.run(opened.engine.close())
            runner.run(_give_back(opened.session.world))
    return 0


async def _give_back(world: World) -> None:
    from ludus.envs.registry import closing

    async with closing(world):
        return


def target_config(target: str, world: str | None, overrides: Sequence[str]) -> tuple[RunFolder | None, Config]:
    """The run that `target` is, if it is one, and the configuration. Raises UserError for a missing path."""
    from ludus.training.run.run_dir import RunFolder

    path = Path(target)
    if (path / "config.toml").is_file():
        chosen = ["--env.name", world] if world else []
        return RunFolder(path), policy_config(RunFolder(path), [*chosen, *overrides])
    if not path.exists() and _is_path(target):
        raise UserError(f"There is no run and no model at {target}.", "Check the path.")
    name = world or DEFAULT_WORLD
    model = model_settings(target, name)
    if name.endswith(".py"):
        return None, load_config(None, ["--env.name", name, *model, *overrides])
    return None, load_config(name, [*model, *overrides])


def _is_path(target: str) -> bool:
    """Whether this can only be meant as a path: a model's name is NAME or OWNER/NAME."""
    owner, slash, name = target.partition("/")
    return target.startswith((".", "/", "~")) or "/" in name or (bool(slash) and Path(owner).is_dir())


def talk(dialogue: ChatRepl, console: Console, runner: asyncio.Runner) -> None:
    """Questions and answers until an empty line, /quit or the end of the input."""
    from ludus.cli.serving.chat_repl import ReplyPart
    from ludus.cli.ui.terminal import say

    def show(part: ReplyPart) -> None:
        say(console, f"[{part.kind}] {part.text}", STYLES[part.kind])

    echo = not sys.stdin.isatty()
    for question in iter(reader(), ""):
        if question == "/quit":
            return
        if question == "/new":
            dialogue.restart()
            say(console, "A new dialogue.", STYLES["end"])
            continue
        if dialogue.is_new:
            console.rule("new dialogue")
        if echo:
            say(console, f"[you] {question}")
        runner.run(dialogue.ask(question, show))


def reader() -> Callable[[], str]:
    """What reads the next line, stripped; empty at the end of the input."""
    if sys.stdin.isatty():
        return _typed
    return lambda: sys.stdin.readline().strip()


def _typed() -> str:
    try:
        return input("you> ").strip()
    except EOFError:
        return ""
