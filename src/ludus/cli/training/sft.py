"""Fine-tune on demonstrations: the world's own, or dialogues from a file (--sft.data FILE).

With --from-scratch a small model and its tokenizer are made on the spot. The run folder holds the
checkpoints; the last one is an ordinary Hugging Face folder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ludus.cli.training.training_command import TrainingStage
from ludus.config.schema import Config

if TYPE_CHECKING:
    from ludus.training.run.run_dir import RunFolder


def ready(config: Config, new: bool) -> Callable[[RunFolder], None]:
    """Load the model, or make it. Raises UserError for dialogues that cannot be used."""
    from ludus.cli.ui import progress
    from ludus.training.sft import make_session

    del new
    session = make_session(config)
    return lambda folder: progress.sft(session, folder)


def say_complete(folder: RunFolder, config: Config) -> None:
    """That nothing is left to fine-tune, and what to type next."""
    from ludus.cli.ui.progress import use_command
    from ludus.cli.ui.terminal import make_console, say
    from ludus.training.run.checkpoint import list_checkpoints
    from ludus.training.run.run_dir import resume_command

    console, steps = make_console(), config.sft.steps
    checkpoint = list_checkpoints(folder.checkpoints)[-1][1]
    say(console, f"The fine-tuning is complete: all its {steps} steps are done.\nCheckpoint: {checkpoint}")
    say(console, f"  continue it:  {resume_command(folder)} --sft.steps {2 * steps}")
    say(console, f"  use it:       {use_command(folder, config, checkpoint)}")


STAGE = TrainingStage(
    kind="sft",
    ready=ready,
    say_complete=say_complete,
    model_help="fine-tune this model",
    scratch_help="make tokenizer and model first",
)
add_arguments, run = STAGE.add_arguments, STAGE.run
