"""Train on pairs of a better and a worse trajectory: DPO, SimPO, IPO or KTO (--preference.loss).

The pairs come from the rollouts of a run (--run RUN), the best attempt at a task against the worst, as the
token ids that were sampled; or from a file (--preference.data FILE, see docs/data.md). The model is that of
the recipe, or --model; what it is before the first step is the reference.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ludus.cli.arguments import recipe_config, recipe_stem, run_config
from ludus.cli.terminal import silence_libraries
from ludus.cli.train import HowToResume, resumed_folder
from ludus.config.schema import Config
from ludus.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from ludus.training.preference import PreferenceTraining
    from ludus.training.run import RunFolder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments; settings follow as --section.key value."""
    parser.add_argument("recipe", nargs="?", help="a recipe's name, or a .toml file")
    parser.add_argument("--run", metavar="RUN", help="make the pairs of this run's rollouts")
    parser.add_argument("--model", metavar="PATH_OR_NAME", help="train this model")
    parser.add_argument("--resume", metavar="RUN", type=Path, help="go on with the run in this folder")
    parser.set_defaults(from_scratch=False)


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Start or resume a run of preference training."""
    if args.resume is not None:
        if args.run is not None:
            raise UserError("--resume takes everything from the run folder.", "Leave --run out.")
        return resume(resumed_folder(args), overrides)
    shortcuts = ["--model.path", args.model, "--model.from_scratch", "false"] if args.model else []
    shortcuts += ["--preference.run", args.run] if args.run else []
    config = recipe_config(args.recipe, shortcuts, overrides)
    start(config, f"{recipe_stem(args.recipe)}-preference", args.recipe)
    return 0


def start(config: Config, name: str, recipe: str | None) -> None:
    """Train in a new folder. Everything that can be wrong with the pairs is found before it is made."""
    from ludus.training.preference import gather_pairs, open_training
    from ludus.training.run import locked, new_run
    from ludus.training.session import open_session
    from ludus.training.start import check_trackers

    silence_libraries()
    if config.model.from_scratch:
        raise UserError(
            "Preference training needs a model that can already act, and model.from_scratch makes one.",
            "Run `ludus sft` first, and give its checkpoint with --model.",
        )
    check_trackers(config)
    session = open_session(config)
    pairs = gather_pairs(session)
    folder = new_run(config, name, "preference", recipe)
    with locked(folder), HowToResume(folder):
        train(open_training(session, folder, pairs))


def resume(folder: RunFolder, overrides: Sequence[str]) -> int:
    """Go on with a run of preference training, unless it is complete."""
    from ludus.cli.console import use_command
    from ludus.cli.terminal import make_console, say
    from ludus.training.checkpoint import list_checkpoints
    from ludus.training.preference import open_training
    from ludus.training.resume import check_kind, check_resume, is_complete
    from ludus.training.run import locked
    from ludus.training.session import open_session

    silence_libraries()
    check_kind(folder, "preference")
    with locked(folder):
        config = run_config(folder, overrides)
        check_resume(folder, config, "preference")
        if is_complete(folder, config, "preference"):
            last = list_checkpoints(folder.checkpoints)[-1][1]
            say(make_console(), f"The training on preferences is complete.\nCheckpoint: {last}")
            say(make_console(), f"Use it: {use_command(folder, config, last)}")
            return 0
        session = open_session(config)
        with HowToResume(folder):
            train(open_training(session, folder, None))
    return 0


def train(training: PreferenceTraining) -> None:
    """Train under a progress bar, then say where the checkpoint is."""
    from ludus.cli.console import use_command
    from ludus.cli.terminal import make_console, say
    from ludus.training.run import save_config

    folder, config, console = training.folder, training.session.config, make_console()
    say(console, f"Run folder: {folder.path}\n{len(training.pairs)} pairs, {training.steps} steps")
    save_config(folder, config)
    checkpoint = with_bar(training, console)
    say(console, f"Checkpoint: {checkpoint}\nUse it: {use_command(folder, config, checkpoint)}")


def with_bar(training: PreferenceTraining, console: Console) -> Path:
    """Run the loop; the bar shows the numbers that matter."""
    from ludus.cli.terminal import bars
    from ludus.training.preference import run_preference
    from ludus.training.start import make_trackers

    with bars(console) as progress:
        task = progress.add_task("preferences", total=training.steps, completed=training.done, numbers="")

        def on_step(step: int, metrics: Mapping[str, float]) -> None:
            numbers = f"loss {metrics['loss/total']:.3f}  accuracy {metrics['preference/accuracy']:.0%}"
            progress.update(task, completed=step, numbers=numbers)

        trackers = make_trackers(training.session.config, training.folder, training.done)
        try:
            return run_preference(training, trackers, on_step)
        finally:
            for tracker in trackers:
                tracker.close()
