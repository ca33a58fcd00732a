"""Rejection-sampling fine-tuning: sample, keep the successful rollouts, fine-tune on them, repeat.

RECIPE is a recipe name or the path of a .toml file. Each of --rft.rounds rounds samples --rft.tasks_per_round tasks
--rft.samples times, keeps the distinct rollouts that succeeded, fine-tunes on their sampled token ids, evaluates and
saves a checkpoint. `ludus show` and `ludus eval` read the run folder as for `ludus train`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ludus.cli.training.training_command import TrainingStage, print_run_done, reject_from_scratch
from ludus.cli.ui.terminal import bars, make_console, print_line
from ludus.config.schema import Config
from ludus.training.run.run_dir import RunFolder

if TYPE_CHECKING:
    from ludus.training.run.session import TrainingSession


def prepare(config: Config, new: bool) -> Callable[[RunFolder], None]:
    """Check the configuration and load the model. Raises UserError and its subclasses."""
    from ludus.training.rft import check_rft
    from ludus.training.rl.validate import check_rollouts
    from ludus.training.run.session import open_session

    reject_from_scratch(config, "Rejection sampling needs a model that solves some tasks")
    session = open_session(config)
    check_rft(config, session.world)
    check_rollouts(config, session.world)
    return lambda folder: train(session, folder)


def train(session: TrainingSession, folder: RunFolder) -> None:
    """Train with progress bars, then print the results."""
    from ludus.cli.ui.progress import ProgressReporter, print_results
    from ludus.training.resume import steps_done
    from ludus.training.rft import run_rft

    console = make_console()
    print_line(console, f"Run folder: {folder.path}")
    with bars(console) as progress:
        reporter = ProgressReporter(progress, session.config.rft.rounds, steps_done(folder))
        comparisons = run_rft(session, folder, reporter)
    print_results(console, folder, session.config, comparisons)


STAGE = TrainingStage(
    kind="rft", prepare=prepare, print_done=print_run_done, model_help="train this model instead of the cold start"
)
add_arguments, run = STAGE.add_arguments, STAGE.run
