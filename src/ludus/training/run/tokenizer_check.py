"""Whether the token ids of a run can be those of a model."""

from __future__ import annotations

from ludus.engines.models.loading import load_tokenizer
from ludus.errors import UserError
from ludus.training.run.checkpoint import list_checkpoints
from ludus.training.run.run_dir import RunFolder
from ludus.training.run.session import TrainingSession


def check_tokenizer(run: RunFolder, session: TrainingSession) -> None:
    """Raise UserError where a run sampled the ids of another vocabulary, as far as its checkpoints tell."""
    found = list_checkpoints(run.checkpoints)
    if not found:
        return
    theirs = load_tokenizer(str(found[-1][1]), needs_template=False).get_vocab()
    if theirs != session.tokenizer.get_vocab():
        raise UserError(
            f"The run {run.path} sampled with another vocabulary than this model has.",
            f"Train the model that it sampled with, for example --model {found[-1][1]}.",
        )


def check_vocabulary(largest: int, session: TrainingSession) -> None:
    """Raise UserError where the model does not know the token `largest`."""
    size = session.model.get_input_embeddings().weight.shape[0]
    if largest >= size:
        raise UserError(
            f"The data hold the token {largest}, and the model knows {size} tokens.",
            "Train the model that sampled them.",
        )
