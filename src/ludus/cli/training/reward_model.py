"""Train a reward model on rollouts (--reward_model.kind): pairwise, pointwise or process.

`pairwise` predicts which of two attempts is better (Bradley-Terry), `pointwise` whether an attempt succeeded,
`process` a value for every turn (AgentPRM). The data are the rollouts of a run (--run RUN), as sampled token ids, or a
file (--reward_model.data FILE, see docs/use/data.md). The model is that of the recipe, or --model, with a scalar head
in place of its output layer. Use the result with --rewards.model FOLDER.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ludus.cli.training.training_command import TrainingStage, reject_from_scratch
from ludus.cli.ui.terminal import make_console, print_line
from ludus.config.schema import Config
from ludus.training.run.run_dir import RunFolder, list_checkpoints, save_config

if TYPE_CHECKING:
    from ludus.training.reward_model.train import RewardTraining


def prepare(config: Config, new: bool) -> Callable[[RunFolder], None]:
    """Load the model and, for a new run, gather the examples. Raises UserError for unusable examples."""
    from ludus.training.reward_model.data import gather_examples
    from ludus.training.reward_model.train import RewardTraining
    from ludus.training.rl.validate import check_trackers
    from ludus.training.run.session import open_session
    from ludus.training.value_models.reward_model import make_reward_model

    if new:
        reject_from_scratch(config, "A reward model starts from a trained model")
        check_trackers(config)
    session = open_session(config)
    if not new:
        return lambda folder: train(RewardTraining(session, folder))
    examples = gather_examples(session)
    make_reward_model(session)
    return lambda folder: train(RewardTraining(session, folder, examples))


def print_done(folder: RunFolder, config: Config) -> None:
    """Print a completion message and the command that uses the reward model."""
    print_line(make_console(), "The reward model is complete.")
    _print_use(list_checkpoints(folder.checkpoints)[-1][1])


def _print_use(checkpoint: Path) -> None:
    text = f"Reward model: {checkpoint}\nUse it: ludus train RECIPE --rewards.model {checkpoint}"
    print_line(make_console(), text)


def train(training: RewardTraining) -> None:
    """Train with a progress bar, then print the path of the reward model."""
    from ludus.cli.ui.progress import step_bar
    from ludus.training.reward_model.train import num_training

    folder, config, console = training.folder, training.session.config, make_console()
    num = num_training(training.examples)
    counts = f"{num} training examples, {len(training.examples) - num} held out, {training.num_steps} steps"
    print_line(console, f"Run folder: {folder.path}\n{counts}")
    save_config(folder, config)
    latest: dict[str, float] = {}
    with step_bar(console, "reward model", folder, config, (training.done, training.num_steps)) as (show, trackers):

        def on_step(step: int, metrics: Mapping[str, float]) -> None:
            latest.update(metrics)
            named = [(name, latest.get(f"held_out/{name}")) for name in ("accuracy", "auc")]
            held_out = [f"held-out {name} {value:.2f}" for name, value in named if value is not None]
            show(step, "  ".join([f"loss {metrics['loss/total']:.3f}", *held_out]))

        checkpoint = training.run(trackers, on_step)
    _print_use(checkpoint)


STAGE = TrainingStage(
    kind="reward-model",
    prepare=prepare,
    print_done=print_done,
    model_help="start from this model",
    run_help="train on this run's rollouts",
    run_setting="reward_model.run",
)
add_arguments, run = STAGE.add_arguments, STAGE.run
