"""Train on pairs of a better and a worse trajectory: DPO, SimPO, KTO, BCO and others (--preference.loss).

The pairs come from the rollouts of a run (--run RUN), the best attempt at a task against the worst or step by
step (--preference.pairs), as the token ids that were sampled; or from a file (--preference.data FILE, see
docs/use/data.md); or from attempts of the model itself, --preference.samples at each of --preference.tasks
tasks. The model is that of the recipe, or --model; what it is before the first step is the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ludus.cli.training.training_command import TrainingStage
from ludus.config.schema import Config
from ludus.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from ludus.training.preference.train import PreferenceTraining
    from ludus.training.run.run_dir import RunFolder


def ready(config: Config, new: bool) -> Callable[[RunFolder], None]:
    """Load the model and, in a new run, gather the pairs: what can be wrong with them is found here."""
    from ludus.cli.ui.progress import EpisodeBar
    from ludus.cli.ui.terminal import bars, make_console
    from ludus.training.preference.sources import gather_pairs
    from ludus.training.preference.train import open_training
    from ludus.training.rl.validate import check_trackers
    from ludus.training.run.session import open_session

    if not new:
        session = open_session(config)
        return lambda folder: train(open_training(session, folder, None))
    if config.model.from_scratch:
        raise UserError(
            "Preference training needs a model that can already act, and model.from_scratch makes one.",
            "Run `ludus sft` first, and give its checkpoint with --model.",
        )
    check_trackers(config)
    session = open_session(config)
    with bars(make_console()) as progress:
        gathered = gather_pairs(session, EpisodeBar(progress))
    return lambda folder: train(open_training(session, folder, gathered))


def say_complete(folder: RunFolder, config: Config) -> None:
    """That nothing is left to train, and how the checkpoint is used."""
    from ludus.cli.ui.progress import use_command
    from ludus.cli.ui.terminal import make_console, say
    from ludus.training.run.checkpoint import list_checkpoints

    console, last = make_console(), list_checkpoints(folder.checkpoints)[-1][1]
    say(console, f"The training on preferences is complete.\nCheckpoint: {last}")
    say(console, f"Use it: {use_command(folder, config, last)}")


def train(training: PreferenceTraining) -> None:
    """Train under a progress bar, then say where the checkpoint is."""
    from ludus.cli.ui.progress import use_command
    from ludus.cli.ui.terminal import make_console, say
    from ludus.training.run.run_dir import save_config

    folder, config, console = training.folder, training.session.config, make_console()
    say(console, f"Run folder: {folder.path}\n{len(training.pairs)} pairs, {training.steps} steps")
    save_config(folder, config)
    checkpoint = with_bar(training, console)
    say(console, f"Checkpoint: {checkpoint}\nUse it: {use_command(folder, config, checkpoint)}")


def with_bar(training: PreferenceTraining, console: Console) -> Path:
    """Run the loop; the bar shows the numbers that matter."""
    from ludus.cli.ui.terminal import bars
    from ludus.training.preference.train import run_preference
    from ludus.training.rl.build import make_trackers

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


STAGE = TrainingStage(
    kind="preference",
    ready=ready,
    say_complete=say_complete,
    model_help="train this model",
    run_help="make the pairs of this run's rollouts",
    run_setting="preference.run",
)
add_arguments, run = STAGE.add_arguments, STAGE.run
