"""Train a reward model on attempts (--reward_model.kind): pairwise, pointwise or process.

`pairwise` learns which of two attempts is better (Bradley-Terry), `pointwise` whether an attempt succeeded,
`process` a value for every turn (AgentPRM). It learns from the rollouts of a run (--run RUN), as the token
ids that were sampled, or from a file (--reward_model.data FILE, see docs/use/data.md). The model is that of
the recipe, or --model, with one number in place of its output layer. Use it: --rewards.model FOLDER.
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

    from ludus.training.reward_model.train import RewardTraining
    from ludus.training.run.run_dir import RunFolder


def ready(config: Config, new: bool) -> Callable[[RunFolder], None]:
    """Load the model and, in a new run, gather the examples: what can be wrong with them is found here."""
    from ludus.training.reward_model.data import gather_examples
    from ludus.training.reward_model.train import open_training
    from ludus.training.rl.validate import check_trackers
    from ludus.training.run.session import open_session
    from ludus.training.value_models.reward_model import make_reward_model

    if not new:
        session = open_session(config)
        return lambda folder: train(open_training(session, folder, None))
    if config.model.from_scratch:
        raise UserError(
            "A reward model is made of a trained model, and model.from_scratch makes a new one.",
            "Run `ludus sft` first, and give its checkpoint with --model.",
        )
    check_trackers(config)
    session = open_session(config)
    examples = gather_examples(session)
    make_reward_model(session)
    return lambda folder: train(open_training(session, folder, examples))


def say_complete(folder: RunFolder, config: Config) -> None:
    """That nothing is left to train, and how the reward model is used."""
    from ludus.cli.ui.terminal import make_console, say
    from ludus.training.run.checkpoint import list_checkpoints

    del config
    last = list_checkpoints(folder.checkpoints)[-1][1]
    say(make_console(), f"The training of the reward model is complete.\n{use_words(last)}")


def train(training: RewardTraining) -> None:
    """Train under a progress bar, then say where the reward model is."""
    from ludus.cli.ui.terminal import make_console, say
    from ludus.training.reward_model.train import num_training
    from ludus.training.run.run_dir import save_config

    folder, config, console = training.folder, training.session.config, make_console()
    learned = num_training(training.examples)
    aside = len(training.examples) - learned
    counts = f"{learned} examples to learn from, {aside} held out, {training.steps} steps"
    say(console, f"Run folder: {folder.path}\n{counts}")
    save_config(folder, config)
    say(console, use_words(with_bar(training, console)))


def use_words(checkpoint: Path) -> str:
    """Where the reward model is, and how it is used."""
    return f"Reward model: {checkpoint}\nUse it: ludus train RECIPE --rewards.model {checkpoint}"


def with_bar(training: RewardTraining, console: Console) -> Path:
    """Run the loop; the bar shows the numbers that matter."""
    from ludus.cli.ui.terminal import bars
    from ludus.training.reward_model.train import run_reward_model
    from ludus.training.rl.build import make_trackers

    with bars(console) as progress:
        task = progress.add_task("reward model", total=training.steps, completed=training.done, numbers="")
        known: dict[str, float] = {}

        def on_step(step: int, metrics: Mapping[str, float]) -> None:
            known.update(metrics)
            named = [(name, known.get(f"held_out/{name}")) for name in ("accuracy", "auc")]
            words = [f"held-out {name} {value:.2f}" for name, value in named if value is not None]
            words = [f"loss {metrics['loss/total']:.3f}", *words]
            progress.update(task, completed=step, numbers="  ".join(words))

        trackers = make_trackers(training.session.config, training.folder, training.done)
        try:
            return run_reward_model(training, trackers, on_step)
        finally:
            for tracker in trackers:
                tracker.close()


STAGE = TrainingStage(
    kind="reward-model",
    ready=ready,
    say_complete=say_complete,
    model_help="make the reward model of this model",
    run_help="learn from this run's rollouts",
    run_setting="reward_model.run",
)
add_arguments, run = STAGE.add_arguments, STAGE.run
