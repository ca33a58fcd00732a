"""Train reward models: a policy's body with a scalar head in place of its output layer.

The examples of a step depend on seed and step alone, so a resumed run repeats the uninterrupted one bit for bit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ludus.config.schema import Config
from ludus.diagnostics.trackers import Tracker
from ludus.errors import LearnerError
from ludus.rollout.ledger import Ledger
from ludus.training.batches.rows import batch_of_step, num_steps
from ludus.training.datasets.files import write_records
from ludus.training.learner.optimizer import Optimizer, OptimizerSettings
from ludus.training.reward_model.data import EXAMPLES_FILE, gather_examples, load_examples
from ludus.training.run.checkpoint import (
    Extra,
    TrainerState,
    list_checkpoints,
    load_part,
    load_trainer,
    load_weights,
    prune,
    save_checkpoint,
)
from ludus.training.run.run_dir import RunFolder
from ludus.training.run.session import TrainingSession
from ludus.training.value_models.reward_model import (
    Kind,
    RewardExample,
    RewardModel,
    head_name,
    make_reward_model,
    parts,
)

log = logging.getLogger("ludus.reward_model")

OnStep = Callable[[int, Mapping[str, float]], None]


@dataclass(frozen=True)
class RewardTraining:
    """Session to train as a reward model from step `done`; `last` is the checkpoint of that step."""

    session: TrainingSession
    folder: RunFolder
    model: RewardModel
    optimizer: Optimizer
    examples: Sequence[RewardExample]
    steps: int
    done: int
    last: Path


def open_training(
    session: TrainingSession, folder: RunFolder, examples: Sequence[RewardExample] | None
) -> RewardTraining:
    """Restore model and optimizer from the newest checkpoint in `folder`, if any.

    `examples` None: those in the folder, otherwise the configured ones.
    """
    settings = session.config.reward_model
    file = folder.path / EXAMPLES_FILE
    if file.is_file():
        examples = load_examples(file)
    else:
        examples = gather_examples(session) if examples is None else examples
        write_records(file, examples)
        log.info("%d examples written to %s", len(examples), file)
    model = make_reward_model(session)
    steps = num_steps(settings, num_training(examples))
    optimizer = Optimizer(model.states.model, OptimizerSettings.from_config(settings, steps))
    done, last = 0, folder.checkpoints
    if found := list_checkpoints(folder.checkpoints):
        done, last = found[-1]
        load_weights(last, session.model)
        model.states.load_head(load_part(last, head_name(model.kind)))
        load_trainer(last, optimizer)
        log.info("resumed from %s", last)
    return RewardTraining(session, folder, model, optimizer, examples, steps, done, last)


def num_training(examples: Sequence[RewardExample]) -> int:
    """Return the number of examples that are not held out."""
    return sum(not example.held_out for example in examples)


def planned_steps(folder: RunFolder, config: Config) -> int | None:
    """Return the number of optimizer steps of a run; None if its examples are not gathered yet."""
    file = folder.path / EXAMPLES_FILE
    return num_steps(config.reward_model, num_training(load_examples(file))) if file.is_file() else None


def run_reward_model(training: RewardTraining, trackers: Sequence[Tracker], on_step: OnStep) -> Path:
    """Train to the last step; return its checkpoint."""
    session, last = training.session, training.last
    settings = session.config.reward_model
    learned = [example for example in training.examples if not example.held_out]
    aside = [example for example in training.examples if example.held_out]
    for step in range(training.done + 1, training.steps + 1):
        clock = time.perf_counter()
        places = batch_of_step(step, len(learned), settings.batch_size, session.config.run.seed)
        batch = [learned[i] for i in places]
        metrics = reward_step(training.model, training.optimizer, batch, settings.microbatch_tokens)
        if aside and (step % settings.evaluate_every == 0 or step == training.steps):
            measured = measure(training.model, aside, settings.microbatch_tokens)
            metrics |= {f"held_out/{name}": value for name, value in measured.items()}
        for tracker in trackers:
            tracker.log(step, metrics)
        on_step(step, metrics | {"time/step_s": time.perf_counter() - clock})
        if step % settings.checkpoint_every == 0 or step == training.steps:
            last = _save(training, step)
            prune(training.folder.checkpoints, settings.keep_checkpoints)
    return last


def _save(training: RewardTraining, step: int) -> Path:
    session, model = training.session, training.model
    state = TrainerState(step, training.optimizer.num_steps, Ledger().state())
    head = {name: p.detach() for name, p in model.states.head.named_parameters()}
    return save_checkpoint(
        training.folder.checkpoints,
        session.model,
        session.tokenizer,
        training.optimizer,
        state,
        Extra({head_name(model.kind): head}),
    )


def reward_step(
    model: RewardModel, optimizer: Optimizer, batch: Sequence[RewardExample], max_tokens: int
) -> dict[str, float]:
    """Take one optimizer step on the mean loss. Raises LearnerError if the loss is not finite."""
    total = 0.0
    for part in parts(batch, max_tokens):
        loss = losses(model, part).sum() / num_terms(model.kind, batch)
        if not torch.isfinite(loss):
            raise LearnerError(f"The loss is {float(loss.detach())}.", "Lower reward_model.learning_rate.")
        torch.autograd.backward(loss)
        total += float(loss.detach())
    rate = optimizer.settings.learning_rate_at(optimizer.num_steps)
    norm = optimizer.step()
    return {
        "loss/total": total,
        "optim/grad_norm": norm,
        "optim/learning_rate": rate,
        "batch/examples": float(len(batch)),
        "batch/scores": float(sum(len(arm.at) for example in batch for arm in example.arms)),
        "batch/total_tokens": float(sum(len(arm.tokens) for example in batch for arm in example.arms)),
    }


def num_terms(kind: Kind, examples: Sequence[RewardExample]) -> int:
    """Return the number of losses of a batch: one per pair, otherwise one per scored position."""
    if kind == "pairwise":
        return len(examples)
    return sum(len(arm.at) for example in examples for arm in example.arms)


def losses(model: RewardModel, examples: Sequence[RewardExample]) -> Tensor:
    """Return the loss of each pair (`-log sigmoid(s_chosen - s_rejected)`, Bradley-Terry) or of each position.

    The latter is the binary cross-entropy of `sigmoid(s)` and the target, which may lie between 0 and 1.
    """
    arms = [arm for example in examples for arm in example.arms]
    scores = torch.cat(model.scores(arms))
    if model.kind == "pairwise":
        return -torch.nn.functional.logsigmoid(scores[::2] - scores[1::2])
    targets = torch.tensor([target for arm in arms for target in arm.targets]).to(scores)
    return torch.nn.functional.binary_cross_entropy_with_logits(scores, targets, reduction="none")


@torch.no_grad()
def measure(model: RewardModel, examples: Sequence[RewardExample], max_tokens: int) -> dict[str, float]:
    """Return loss and quality on held-out examples.

    Pairs: `accuracy`, the share whose better side scores higher (ties count half). Otherwise `error`, the mean of
    `|sigmoid(s) - target|`, and `auc` of the positions with a target above 0.5 against the others, if both exist.
    """
    chunks = parts(examples, max_tokens)
    loss = sum(float(losses(model, part).sum()) for part in chunks) / num_terms(model.kind, examples)
    arms = [arm for part in chunks for example in part for arm in example.arms]
    scores = torch.cat([torch.cat(model.scores([a for e in part for a in e.arms])) for part in chunks])
    if model.kind == "pairwise":
        margin = scores[::2] - scores[1::2]
        right = (margin > 0).double() + (margin == 0).double() / 2
        return {"loss": loss, "accuracy": float(right.mean()), "margin": float(margin.double().mean())}
    targets = torch.tensor([target for arm in arms for target in arm.targets]).to(scores)
    found = {"loss": loss, "error": float((torch.sigmoid(scores) - targets).abs().double().mean())}
    area = auc(scores, targets > 0.5)
    return found if area is None else found | {"auc": area}


def auc(scores: Tensor, positive: Tensor) -> float | None:
    """Return the probability that a positive scores above a negative, `[N]` scores; None without both."""
    high, low = scores[positive].double(), scores[~positive].double()
    if not high.numel() or not low.numel():
        return None
    ordered = low.sort().values
    below, up_to = (torch.searchsorted(ordered, high, right=right).double() for right in (False, True))
    return float((below + up_to).mean()) / (2 * len(low))
