"""Rejection-sampling fine-tuning: sample, keep what solved its task, train on it, and again.

RECIPE is the name of a recipe or the path of a .toml file. Each of --rft.rounds rounds plays
--rft.tasks_per_round tasks --rft.samples times, keeps the attempts that succeeded (each once), fine-tunes on
the token ids that were sampled, evaluates and saves. The run folder is read like that of `ludus train`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ludus.cli.training.training_command import TrainingStage
from ludus.config.schema import Config
from ludus.errors import UserError

if TYPE_CHECKING:
    from ludus.training.run.run_dir import RunFolder
    from ludus.training.run.session import TrainingSession


def ready(config: Config, new: bool) -> Callable[[RunFolder], None]:
    """Check a configuration and load its model. Raises UserError and its children."""
    from ludus.training.rft import check_rft
    from ludus.training.rl.validate import check_rollouts
    from ludus.training.run.session import open_session

    del new
    if config.model.from_scratch:
        raise UserError(
            "Rejection sampling needs a model that solves something, and model.from_scratch makes a new one.",
            "Run `ludus sft` first, and give its checkpoint with --model.",
        )
    session = open_session(config)
    check_rft(config, session.world)
    check_rollouts(config, session.world)
    return lambda folder: train(session, folder)


def say_complete(folder: RunFolder, config: Config) -> None:
    """That nothing is left to sample or to evaluate, and what to type next."""
    from ludus.cli.ui.progress import print_commands
    from ludus.cli.ui.terminal import make_console, say

    console = make_console()
    say(console, f"The run is complete: all its {config.rft.rounds} rounds are done and evaluated.")
    print_commands(console, folder, config)


def train(session: TrainingSession, folder: RunFolder) -> None:
    """Train with progress bars, then print what came of it."""
    from ludus.cli.ui.progress import ProgressReporter, comparison_table, print_commands, print_examples
    from ludus.cli.ui.terminal import bars, make_console, say
    from ludus.training.resume import steps_done
    from ludus.training.rft import run_rft

    console = make_console()
    say(console, f"Run folder: {folder.path}")
    with bars(console) as progress:
        reporter = ProgressReporter(progress, session.config.rft.rounds, steps_done(folder))
        comparisons = run_rft(session, folder, reporter)
    console.print(comparison_table(comparisons))
    print_examples(console, folder, comparisons)
    print_commands(console, folder, session.config)


STAGE = TrainingStage(
    kind="rft", ready=ready, say_complete=say_complete, model_help="train this model instead of the cold start"
)
add_arguments, run = STAGE.add_arguments, STAGE.run
