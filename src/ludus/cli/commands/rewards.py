"""Score saved rollouts again under another reward configuration, or find rewards of turns in them.

    ludus rewards replay runs/search-1 --config other.toml      all training steps
    ludus rewards replay runs/search-1 --rewards.aggregation gated --step 10
    ludus rewards replay runs/search-1 --config other.toml --evaluations
    ludus rewards calibrate runs/search-1                      rewards of turns, for --rewards.turns

The section `rewards` of FILE takes the place of the run's, and so does its section `env` where it has one;
its other sections are not read. Settings on the command line go on top. Nothing is written. Evaluations never
go through the section `rewards`: with them only the world's own rewards can change.

`calibrate` compares what happened in the turns of the saved attempts with their success. What tells the two
apart gets a reward, positive or negative; the turns of an attempt together stay below the outcome. A reward
that the advantage would turn against its sign is removed, and the others are measured again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ludus.cli.arguments import check_run
from ludus.cli.commands.show import files_of, print_replay
from ludus.config.load import config_from_toml, load_config
from ludus.config.schema import Config
from ludus.config.toml import to_toml
from ludus.errors import ConfigError, UserError

if TYPE_CHECKING:
    from ludus.training.run.run_dir import RunFolder

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
    parser.add_argument("--threshold", type=float, default=0.1, help="calibrate: correlations up to this count as none")
    parser.add_argument("--episodes", metavar="N", type=int, default=SHOWN, help="changes to print, largest first")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print what changes."""
    from ludus.cli.rescore import rescore
    from ludus.training.run.run_dir import RunFolder

    if args.episodes < 0:
        raise UserError(f"--episodes is {args.episodes}.", "Give 0 or more.")
    if args.action == "calibrate":
        if args.config is not None or overrides:
            raise UserError("`ludus rewards calibrate` takes no settings.", "It reads those of the run.")
        from ludus.cli.commands.calibrate import print_calibration
        from ludus.cli.ui.terminal import make_console

        folder = RunFolder(args.run)
        check_run(folder)
        saved, files = load_config(folder.config), chosen_files(args, folder)
        print_calibration(make_console(), saved, files, args.threshold)
        return 0
    if args.config is None and not overrides:
        raise UserError(
            "There is nothing to compare with.", "Give --config FILE or a setting, such as --rewards.aggregation gated."
        )
    folder = RunFolder(args.run)
    check_run(folder)
    saved = load_config(folder.config)
    config = other_config(saved, args.config, overrides)
    replay = rescore(saved, config, chosen_files(args, folder), lambda _: True)
    print_replay(replay, args.episodes, by_place=True)
    return 0


def other_config(saved: Config, file: Path | None, overrides: Sequence[str]) -> Config:
    """The run's configuration with the sections `rewards` and, where it has one, `env` of a file.

    Raises ConfigError for a file with neither and for settings that are wrong.
    """
    if file is not None:
        given = load_config(file)
        found = {name for name in ("rewards", "env") if name in given.model_fields_set}
        if not found:
            raise ConfigError(f"{file} has no section rewards and no section env.", "Write [rewards] into it.")
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
