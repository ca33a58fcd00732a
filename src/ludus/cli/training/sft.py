"""Fine-tune on demonstrations: the world's own, or dialogues from a file (--sft.data FILE).

With --from-scratch a small model and its tokenizer are created first. The run folder contains the checkpoints; each is
an ordinary Hugging Face folder.
"""

from __future__ import annotations

from collections.abc import Callable

from ludus.cli.training.training_command import TrainingStage
from ludus.cli.ui.terminal import make_console, print_line
from ludus.config.schema import Config
from ludus.training.run.run_dir import RunFolder, list_checkpoints, resume_command


def prepare(config: Config, new: bool) -> Callable[[RunFolder], None]:
    """Load or create the model. Raises UserError for unusable dialogues."""
    from ludus.cli.ui import progress
    from ludus.training.sft import make_session

    session = make_session(config)
    return lambda folder: progress.sft(session, folder)


def print_done(folder: RunFolder, config: Config) -> None:
    """Print that the fine-tuning is complete, and the next commands."""
    from ludus.cli.ui.progress import use_command

    console, steps, checkpoint = make_console(), config.sft.steps, list_checkpoints(folder.checkpoints)[-1][1]
    print_line(console, f"The fine-tuning is complete: all {steps} steps are done.\nCheckpoint: {checkpoint}")
    print_line(console, f"  continue it:  {resume_command(folder)} --sft.steps {2 * steps}")
    print_line(console, f"  use it:       {use_command(folder, config, checkpoint)}")


STAGE = TrainingStage(
    kind="sft",
    prepare=prepare,
    print_done=print_done,
    model_help="fine-tune this model",
    scratch_help="create tokenizer and model first",
)
add_arguments, run = STAGE.add_arguments, STAGE.run
