"""Train on pairs of a better and a worse trajectory: DPO, SimPO, KTO, BCO and others (--preference.loss).

The pairs come from the rollouts of a run (--run RUN), the best against the worst attempt at a task or step by step
(--preference.pairs), as sampled token ids; or from a file (--preference.data FILE, see docs/use/data.md); or from
attempts of the model itself, --preference.samples at each of --preference.tasks tasks. The model is that of the
recipe, or --model; its initial weights are the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ludus.cli.training.training_command import TrainingStage, reject_from_scratch
from ludus.cli.ui.terminal import bars, make_console, print_line
from ludus.config.schema import Config
from ludus.training.run.run_dir import RunFolder, list_checkpoints, save_config

if TYPE_CHECKING:
    from ludus.training.preference.train import PreferenceTraining


def prepare(config: Config, new: bool) -> Callable[[RunFolder], None]:
    """Load the model and, for a new run, gather the pairs. Raises UserError for unusable pairs."""
    from ludus.cli.ui.progress import EpisodeBar
    from ludus.training.preference.sources import gather_pairs
    from ludus.training.preference.train import PreferenceTraining
    from ludus.training.rl.validate import check_trackers
    from ludus.training.run.session import open_session

    if new:
        reject_from_scratch(config, "Preference training needs a model that can already act")
        check_trackers(config)
    session = open_session(config)
    if not new:
        return lambda folder: train(PreferenceTraining(session, folder))
    with bars(make_console()) as progress:
        gathered = gather_pairs(session, EpisodeBar(progress))
    return lambda folder: train(PreferenceTraining(session, folder, gathered))


def print_done(folder: RunFolder, config: Config) -> None:
    """Print that the training is complete, and the command that uses the checkpoint."""
    from ludus.cli.ui.progress import print_checkpoint

    print_line(make_console(), "The preference training is complete.")
    print_checkpoint(make_console(), folder, config, list_checkpoints(folder.checkpoints)[-1][1])


def train(training: PreferenceTraining) -> None:
    """Train with a progress bar, then print the checkpoint."""
    from ludus.cli.ui.progress import print_checkpoint, step_bar

    folder, config, console = training.folder, training.session.config, make_console()
    print_line(console, f"Run folder: {folder.path}\n{len(training.pairs)} pairs, {training.num_steps} steps")
    save_config(folder, config)
    with step_bar(console, "preferences", folder, config, (training.done, training.num_steps)) as (show, trackers):

        def on_step(step: int, metrics: Mapping[str, float]) -> None:
            show(step, f"loss {metrics['loss/total']:.3f}  accuracy {metrics['preference/accuracy']:.0%}")

        checkpoint = training.run(trackers, on_step)
    print_checkpoint(console, folder, config, checkpoint)


STAGE = TrainingStage(
    kind="preference",
    prepare=prepare,
    print_done=print_done,
    model_help="train this model",
    run_help="use pairs of this run's rollouts",
    run_setting="preference.run",
)
add_arguments, run = STAGE.add_arguments, STAGE.run
