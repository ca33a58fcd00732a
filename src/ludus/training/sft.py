"""Supervised fine-tuning on dialogues: the cold start. Only assistant tokens train."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ludus.algorithms.losses import sft as sft_loss
from ludus.chat.render import Renderer, render_dialogue
from ludus.chat.tokenizer import train_tokenizer
from ludus.config.schema import Config
from ludus.config.stages import SftConfig
from ludus.diagnostics.trackers import Tracker
from ludus.engines.loading import build_tiny
from ludus.envs.base import Demonstrates, World
from ludus.envs.registry import build_world
from ludus.errors import LearnerError, UserError
from ludus.rollout.ledger import Ledger
from ludus.tasks.order import permutation
from ludus.training.batch import Row, microbatches, row_of_segments
from ludus.training.checkpoint import (
    TrainerState,
    list_checkpoints,
    load_trainer,
    load_weights,
    prune,
    save_checkpoint,
)
from ludus.training.data import FileDialogue, read_dialogues
from ludus.training.optimiser import Optimiser, OptimiserSettings
from ludus.training.run import RunFolder
from ludus.training.scoring import Scorer
from ludus.training.session import Session, make_renderer, open_session, set_up_compute

if TYPE_CHECKING:
    from ludus.envs.base import Demonstration

log = logging.getLogger("ludus.sft")

OnStep = Callable[[int, dict[str, float]], None]


def make_session(config: Config) -> Session:
    """The session to fine-tune: a given model, or one made on the spot with a tokenizer of its own.

    Raises UserError for a file of dialogues that cannot be used.
    """
    if not config.model.from_scratch:
        return _checked(open_session(config))
    set_up_compute(config)
    world = build_world(config.env, config.rollout, config.sandbox)
    tokenizer = train_tokenizer(_demonstrating(world).texts(), config.model.scratch.vocab_size)
    model = build_tiny(config.model.scratch, tokenizer, config.run.seed)
    return _checked(Session(config, world, model, tokenizer, make_renderer(config.env, tokenizer)))


def check_sft(config: Config, world: World) -> None:
    """Raise UserError for a world that shows nothing, and for a file of dialogues with a fault."""
    if config.sft.dialogues is None or config.model.from_scratch:
        _demonstrating(world)
    if config.sft.dialogues is not None:
        read_dialogues(Path(config.sft.dialogues))


@dataclass(frozen=True)
class FineTuning:
    """A session that is to be fine-tuned from step `done` on; `last` is the checkpoint of that step."""

    session: Session
    folder: RunFolder
    optimiser: Optimiser
    done: int
    last: Path


def open_fine_tuning(session: Session, folder: RunFolder) -> FineTuning:
    """Bring session and optimiser to the newest checkpoint in `folder`, if there is one; writes nothing."""
    settings = session.config.sft
    optimiser = Optimiser(
        session.model,
        OptimiserSettings.of(settings, settings.steps),
        masters=session.config.model.master_weights,
    )
    done, last = _restore(session, optimiser, folder)
    return FineTuning(session, folder, optimiser, done, last)


def run_sft(tuning: FineTuning, trackers: list[Tracker], on_step: OnStep) -> Path:
    """Fine-tune to the last step; gives its checkpoint."""
    session, folder, optimiser, last = tuning.session, tuning.folder, tuning.optimiser, tuning.last
    settings = session.config.sft
    session.model.train()
    rows = islice(batches(session, settings), tuning.done, None)
    scorer = Scorer(session.model, recompute=session.config.model.activation_checkpointing)
    for step in range(tuning.done + 1, settings.steps + 1):
        clock = time.perf_counter()
        metrics = sft_step(scorer, optimiser, next(rows), settings.microbatch_tokens)
        for tracker in trackers:
            tracker.log(step, metrics)
        on_step(step, metrics | {"time/step_s": time.perf_counter() - clock})
        if step % settings.checkpoint_every == 0 or step == settings.steps:
            state = TrainerState(step, optimiser.num_steps, Ledger().state())
            last = save_checkpoint(folder.checkpoints, session.model, session.tokenizer, optimiser, state)
            prune(folder.checkpoints, settings.keep_checkpoints)
    return last


def sft_step(scorer: Scorer, optimiser: Optimiser, rows: list[Row], max_tokens: int) -> dict[str, float]:
    """One optimiser step of `-sum m lp / M` over `rows`. Raises LearnerError where the loss is not finite."""
    parameter = next(scorer.model.parameters())
    tokens = sum(sum(row.trains[1:]) for row in rows)
    total = 0.0
    shared = scorer.shares_prefixes
    for part in microbatches(rows, max_tokens, parameter.device, torch.float32, shared=shared):
        logprobs = scorer.score(part.tokens, part.trains).logprobs
        loss = (sft_loss(logprobs=logprobs, mask=part.trains) / tokens).sum()
        torch.autograd.backward(loss)
        total += float(loss.detach())
    if total != total:
        raise LearnerError("The loss is not a number.", "Lower sft.learning_rate.")
    rate = optimiser.settings.rate(optimiser.num_steps)
    norm = optimiser.step()
    return {
        "loss/total": total,
        "optim/grad_norm": norm,
        "optim/learning_rate": rate,
        "batch/trained_tokens": float(tokens),
        "batch/total_tokens": float(sum(len(row.tokens) for row in rows)),
    }


def _restore(session: Session, optimiser: Optimiser, folder: RunFolder) -> tuple[int, Path]:
    """The step to go on from, and the checkpoint of it; 0 and the empty shelf where there is none."""
    found = list_checkpoints(folder.checkpoints)
    if not found:
        return 0, folder.checkpoints
    step, path = found[-1]
    load_weights(path, session.model)
    load_trainer(path, optimiser)
    log.info("resumed from %s", path)
    return step, path


def batches(session: Session, settings: SftConfig) -> Iterator[list[Row]]:
    """The rows of each step, without end, in an order that depends on the seed alone.

    A file of dialogues is passed over again and again, each time in another order.
    """
    budget = session.config.rollout.max_tokens
    rows = _rows(_dialogues(session, settings), session.renderer, budget)
    while batch := list(islice(rows, settings.batch_size)):
        yield batch


def _rows(dialogues: Iterator[Demonstration], renderer: Renderer, budget: int) -> Iterator[Row]:
    """Rows of the dialogues that fit into the token budget of a trajectory; warns of the first longer one."""
    told = False
    for dialogue in dialogues:
        row = dialogue_row(renderer, dialogue)
        if len(row.tokens) <= budget:
            yield row
        elif not told:
            told = True
            log.warning(
                "A dialogue of %d tokens is left out, and so is each of more than rollout.max_tokens = %d.",
                len(row.tokens),
                budget,
            )


def dialogue_row(renderer: Renderer, dialogue: Demonstration) -> Row:
    """A dialogue as tokens; of one from a file only those assistant messages train that are to."""
    segments = render_dialogue(renderer, dialogue.messages, dialogue.tools)
    if isinstance(dialogue, FileDialogue):
        said = zip(dialogue.messages, dialogue.trains, strict=True)
        trains = [kept for message, kept in said if message["role"] == "assistant"]
        segments = tuple(
            s if s.kind != "action" or trains[s.turn] else replace(s, kind="observation") for s in segments
        )
    return row_of_segments(segments)


def _dialogues(session: Session, settings: SftConfig) -> Iterator[Demonstration]:
    if settings.dialogues is None:
        yield from _demonstrating(session.world).demonstrations(session.config.run.seed + 1)
        return
    dialogues = read_dialogues(Path(settings.dialogues))
    for epoch in itertools.count():
        order = permutation(len(dialogues), f"sft:{session.config.run.seed}", epoch)
        yield from (dialogues[i] for i in order)


def _checked(session: Session) -> Session:
    """The session itself. Raises UserError for a file of dialogues with a fault, or of which none fits."""
    config = session.config
    if config.sft.dialogues is None:
        return session
    dialogues = iter(read_dialogues(Path(config.sft.dialogues)))
    if next(_rows(dialogues, session.renderer, config.rollout.max_tokens), None) is None:
        raise UserError(
            f"No dialogue of {config.sft.dialogues} fits into {config.rollout.max_tokens} tokens.",
            "Raise rollout.max_tokens.",
        )
    return session


def _demonstrating(world: World) -> Demonstrates:
    if not isinstance(world, Demonstrates):
        raise UserError(
            f"The world {world.name!r} has no demonstrations to fine-tune on.",
            "Pass dialogues in a file (sft.dialogues), or start from a model (model.path).",
        )
    return world
