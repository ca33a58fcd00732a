"""Score saved rollouts again under another reward configuration, or find rewards of turns in them.

    ludus rewards replay runs/search-1 --config other.toml      all training steps
    ludus rewards replay runs/search-1 --rewards.combination gated --step 10
    ludus rewards replay runs/search-1 --config other.toml --evaluations
    ludus rewards calibrate runs/search-1                      rewards of turns, for --rewards.turns

The section `rewards` of FILE takes the place of the run's, and so does its section `env` where it has one;
its other sections are not read. Settings on the command line go on top. Nothing is written. Evaluations never
go through the section `rewards`: with them only the world's own rewards can change.

`calibrate` compares what happened in the turns of the saved attempts with their success. What tells the two
apart gets a reward, positive or negative; the turns of an attempt together stay below the outcome.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ludus.cli.arguments import check_run
from ludus.cli.show import files_of, print_replay
from ludus.config.load import config_from_toml, load_config
from ludus.config.schema import Config
from ludus.config.toml import to_toml
from ludus.errors import ConfigError, UserError

if TYPE_CHECKING:
    from ludus.training.run import RunFolder

SHOWN = 10
"""Rollouts that are printed without --episodes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument("action", choices=("replay", "calibrate"), help="what to do")
    parser.add_argument("run", metavar="RUN", type=Path, help="a run folder")
    parser.add_argument("--config", metavar="FILE", type=Path, help="another reward configuration (TOML)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="only rollouts of this training step")
    which.add_argument("--evaluation", metavar="NAME", help="rollouts of this evaluation instead")
    which.add_argument("--evaluations", action="store_true", help="rollouts of all evaluations instead")
    parser.add_argument(
        "--threshold", type=float, default=0.1, help="calibrate: correlations up to this count as none"
    )
    parser.add_argument(
        "--episodes", metavar="N", type=int, default=SHOWN, help="changes to print, largest first"
    )


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print what changes."""
    from ludus.cli.rescore import rescore
    from ludus.training.run import RunFolder

    if args.episodes < 0:
        raise UserError(f"--episodes is {args.episodes}.", "Give 0 or more.")
    if args.action == "calibrate":
        if args.config is not None or overrides:
            raise UserError("`ludus rewards calibrate` takes no settings.", "It reads those of the run.")
        return print_calibration(args)
    if args.config is None and not overrides:
        raise UserError(
            "There is nothing to compare with.",
            "Give --config FILE or a setting, such as --rewards.combination gated.",
        )
    folder = RunFolder(args.run)
    check_run(folder)
    saved = load_config(folder.config)
    config = other_config(saved, args.config, overrides)
    replay = rescore(saved, config, chosen_files(args, folder), lambda _: True)
    print_replay(replay, args.episodes, by_place=True)
    return 0


def print_calibration(args: argparse.Namespace) -> int:
    """Print the events of turns, what they say of success, and the settings that reward them."""
    from rich.table import Table

    from ludus.cli.terminal import make_console, say
    from ludus.envs.registry import build_world
    from ludus.rewards.base import success
    from ludus.rollout.store import read_rollouts
    from ludus.training.combine import parts_of
    from ludus.training.reward_terms import calibrate
    from ludus.training.run import RunFolder

    folder = RunFolder(args.run)
    check_run(folder)
    config = load_config(folder.config)
    parts = parts_of(config, build_world(config.env, config.rollout, config.sandbox))
    saved = [r.trajectory for file in chosen_files(args, folder) for r in read_rollouts(file)]
    attempts = [(one, success(parts, one)) for one in saved if one.failure is None]
    if not attempts:
        raise UserError("The run has no attempt that came to an end.", "Look at it with `ludus show`.")
    weights = [config.rewards.weights.get(p.name, p.weight) for p in parts if p.outcome]
    found = calibrate(attempts, config.rollout.max_turns, min(w for w in weights if w > 0), args.threshold)
    table = Table("event", "turns", "in successes", "in failures", "correlation", "reward")
    columns = (found.found.in_success, found.found.in_failure, found.found.correlation, found.found.reward)
    for (event, count), *row in zip(found.counts.items(), *(c.tolist() for c in columns), strict=True):
        won, lost, correlation, reward = row
        table.add_row(event, str(count), f"{won:.0%}", f"{lost:.0%}", f"{correlation:+.2f}", f"{reward:+.4f}")
    console = make_console()
    console.print(table)
    num = sum(won for _, won in attempts)
    say(console, f"{num} of {len(attempts)} attempts succeeded. Rewards are {found.scale:.3g} correlations.")
    for event, reward in found.rewards.items():
        say(console, f"--rewards.turns.{event} {reward:.4g}")
    if not found.rewards:
        say(console, "No event tells success from failure.")
    return 0


def other_config(saved: Config, file: Path | None, overrides: Sequence[str]) -> Config:
    """The run's configuration with the sections `rewards` and, where it has one, `env` of a file.

    Raises ConfigError for a file with neither and for settings that are wrong.
    """
    if file is not None:
        given = load_config(file)
        found = {name for name in ("rewards", "env") if name in given.model_fields_set}
        if not found:
            raise ConfigError(
                f"{file} has no section rewards and no section env.", "Write [rewards] into it."
            )
        sections = {"rewards": given.rewards} | ({"env": given.env} if "env" in found else {})
        saved = saved.model_copy(update=sections)
    return config_from_toml(to_toml(saved), "the run, the file and the command line", overrides)


def chosen_files(args: argparse.Namespace, folder: RunFolder) -> list[Path]:
    """The files to read, oldest first. Raises UserError where there are none."""
    if not args.evaluations:
        files = files_of(folder, args.step, args.evaluation)
    else:
        files = sorted(folder.evaluations.glob("*.jsonl.gz"))
    if not files:
        raise UserError("The run has no saved rollouts of this kind.", "run.save_rollouts may be off.")
    return files
