"""Check that a run's token ids match a model's vocabulary."""

from __future__ import annotations

from ludus.engines.models.loading import load_tokenizer
from ludus.errors import UserError
from ludus.training.run.checkpoint import list_checkpoints
from ludus.training.run.run_dir import RunFolder
from ludus.training.run.session import TrainingSession


def check_tokenizer(run: RunFolder, session: TrainingSession) -> None:
    """Raise UserError if a run sampled with another vocabulary, as far as its checkpoints show."""
    found = list_checkpoints(run.checkpoints)
    if not found:
        return
    theirs = load_tokenizer(str(found[-1][1]), needs_template=False).get_vocab()
    if theirs != session.tokenizer.get_vocab():
        raise UserError(
            f"The run {run.path} sampled with a different vocabulary from this model's.",
            f"Train the model that sampled it, for example --model {found[-1][1]}.",
        )


def check_vocabulary(largest: int, session: TrainingSession) -> None:
    """Raise UserError if the token `largest` is outside the model's vocabulary."""
    size = session.model.get_input_embeddings().weight.shape[0]
    if largest >= size:
        raise UserError(
            f"The data contain the token {largest}, but the model has {size} tokens.",
            "Train the model that sampled them.",
        )
