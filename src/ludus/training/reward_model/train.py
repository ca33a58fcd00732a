"""Train reward models: a policy's body with a scalar head in place of its output layer.

The examples of a step depend only on seed and step, so a resumed run is bit-identical to an uninterrupted one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from ludus.config.schema import Config
from ludus.evaluation.roc import auc
from ludus.training.batches.rows import batch_of_step, num_steps
from ludus.training.datasets.files import write_records
from ludus.training.reward_model.data import EXAMPLES_FILE, gather_examples, load_examples
from ludus.training.run.checkpoint import Extra, TrainerState, load_part
from ludus.training.run.run_dir import RunFolder
from ludus.training.run.session import TrainingSession
from ludus.training.run.supervised import SupervisedTraining, split_by_tokens
from ludus.training.value_models.reward_model import (
    RewardExample,
    RewardModel,
    head_name,
    losses,
    make_reward_model,
    num_terms,
    reward_step,
)

log = logging.getLogger(__name__)


class RewardTraining(SupervisedTraining):
    """Training of the session's model as a reward model on `examples`, evaluated on those that are held out."""

    def __init__(
        self, session: TrainingSession, folder: RunFolder, examples: Sequence[RewardExample] | None = None
    ) -> None:
        """Load the examples of the folder; otherwise store `examples` (None: gather them)."""
        self.settings = session.config.reward_model
        file = folder.path / EXAMPLES_FILE
        if not file.is_file():
            examples = gather_examples(session) if examples is None else examples
            write_records(file, examples)
            log.info("%d examples written to %s", len(examples), file)
        self.examples = load_examples(file)
        self.model = make_reward_model(session)
        steps = num_steps(self.settings, num_training(self.examples))
        super().__init__(session, folder, self.settings, steps, self.model.states.model)
        self._training = [example for example in self.examples if not example.held_out]
        self._held_out = [example for example in self.examples if example.held_out]

    def restore(self, checkpoint: Path, state: TrainerState) -> None:
        """Restore the weights and the head."""
        super().restore(checkpoint, state)
        self.model.states.load_head(load_part(checkpoint, head_name(self.model.kind)))

    def extra(self) -> Extra:
        """Return the head."""
        head = {name: p.detach() for name, p in self.model.states.head.named_parameters()}
        return Extra({head_name(self.model.kind): head})

    def train_step(self, step: int) -> dict[str, float]:
        """Take one optimizer step; every `evaluate_every` steps and at the end, evaluate on held-out examples."""
        settings = self.settings
        index = batch_of_step(step, len(self._training), settings.batch_size, self.session.config.run.seed)
        batch = [self._training[i] for i in index]
        metrics = reward_step(self.model, self.optimizer, batch, settings.microbatch_tokens)
        if self._held_out and (step % settings.evaluate_every == 0 or step == self.num_steps):
            measured = measure(self.model, self._held_out, settings.microbatch_tokens)
            metrics |= {f"held_out/{name}": value for name, value in measured.items()}
        return metrics


def num_training(examples: Sequence[RewardExample]) -> int:
    """Return the number of examples that are not held out."""
    return sum(not example.held_out for example in examples)


def planned_steps(folder: RunFolder, config: Config) -> int | None:
    """Return the number of optimizer steps of a run; None if its examples are not gathered yet."""
    file = folder.path / EXAMPLES_FILE
    return num_steps(config.reward_model, num_training(load_examples(file))) if file.is_file() else None


@torch.no_grad()
def measure(model: RewardModel, examples: Sequence[RewardExample], max_tokens: int) -> dict[str, float]:
    """Return loss and quality on held-out examples.

    Pairs: `accuracy`, the share whose better side scores higher (ties count half). Otherwise `error`, the mean of
    `|sigmoid(s) - target|`, and `auc` of the positions with a target above 0.5 against the others, if both exist.
    """
    chunks = split_by_tokens(examples, max_tokens)
    loss = sum(float(losses(model, part).sum()) for part in chunks) / num_terms(model.kind, examples)
    sequences = [sequence for part in chunks for example in part for sequence in example.sequences]
    scores = torch.cat([model.logits([a for e in part for a in e.sequences]) for part in chunks])
    if model.kind == "pairwise":
        margin = scores[::2] - scores[1::2]
        right = (margin > 0).double() + (margin == 0).double() / 2
        return {"loss": loss, "accuracy": float(right.mean()), "margin": float(margin.double().mean())}
    targets = torch.tensor([target for sequence in sequences for target in sequence.targets]).to(scores)
    metrics = {"loss": loss, "error": float((torch.sigmoid(scores) - targets).abs().double().mean())}
    area = auc(scores.tolist(), (targets > 0.5).tolist())
    return metrics if area is None else metrics | {"auc": area}
