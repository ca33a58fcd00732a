"""Supervised fine-tuning on dialogues (cold start), of which assistant tokens train, and on texts, of which all do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import torch
from torch import Tensor

from ludus.algorithms.losses.likelihood import sft as sft_loss
from ludus.chat.render import Renderer
from ludus.chat.tokenizer import train_tokenizer
from ludus.config.schema import Config
from ludus.config.sections.stages import SftConfig
from ludus.engines.models.loading import build_tiny
from ludus.envs.base import Demonstration, World
from ludus.envs.registry import build_world
from ludus.errors import LearnerError, UserError
from ludus.training.batches.rows import Row, microbatches, row_of_segments
from ludus.training.datasets.files import FileText
from ludus.training.datasets.sources import (
    MAX_SKIPPED,
    check_sources,
    dialogue_segments,
    dialogues,
    require_demonstrations,
    text_segments,
)
from ludus.training.datasets.token_limits import check_dialogues
from ludus.training.learner.logprobs import LogprobScorer
from ludus.training.learner.optimizer import Optimizer
from ludus.training.run.run_dir import RunFolder
from ludus.training.run.session import TrainingSession, make_renderer, open_session, set_up_compute
from ludus.training.run.supervised import SupervisedTraining, step_metrics


def make_session(config: Config) -> TrainingSession:
    """Open the fine-tuning session: the configured model, or a new one with its own tokenizer.

    Raises UserError for an invalid file of dialogues.
    """
    if not config.model.from_scratch:
        return _validated(open_session(config))
    set_up_compute(config)
    world = build_world(config.env, config.rollout, config.sandbox)
    tokenizer = train_tokenizer(require_demonstrations(world).texts(), config.model.init.vocab_size)
    model = build_tiny(config.model.init, tokenizer, config.run.seed)
    return _validated(TrainingSession(config, world, model, tokenizer, make_renderer(config.env, tokenizer)))


def check_sft(config: Config, world: World) -> None:
    """Raise UserError for a world without demonstrations, and for an invalid source of dialogues."""
    if config.model.from_scratch:
        require_demonstrations(world)
    check_sources(config, world)


class SftTraining(SupervisedTraining):
    """Fine-tuning on the configured dialogues."""

    def __init__(self, session: TrainingSession, folder: RunFolder) -> None:
        """Restore the newest checkpoint in `folder`, if any; writes nothing."""
        self.settings = session.config.sft
        super().__init__(session, folder, self.settings, self.settings.steps)
        session.model.train()
        self._batches = islice(batches(session, self.settings), self.done, None)
        self._scorer = LogprobScorer(session.model, recompute=session.config.model.activation_checkpointing)

    def train_step(self, step: int) -> dict[str, float]:
        """Take one optimizer step on the next batch of dialogues."""
        rows, left_out = next(self._batches)
        metrics = sft_step(self._scorer, self.optimizer, rows, self.settings.microbatch_tokens)
        return metrics | {"batch/left_out": float(left_out)}


def sft_step(
    scorer: LogprobScorer, optimizer: Optimizer, rows: list[Row], max_tokens: int, *, weighted: bool = False
) -> dict[str, float]:
    """Take one optimizer step on `-sum m lp / M`. Raises LearnerError if the loss is not finite.

    `weighted`: the terms are multiplied by the advantages of the rows.
    """
    parameter = next(scorer.model.parameters())
    tokens = sum(sum(row.trains[1:]) for row in rows)
    total, by_class = 0.0, ClassLosses()
    shared = scorer.shares_prefixes
    for part in microbatches(rows, max_tokens, parameter.device, torch.float32, shared=shared):
        logprobs = scorer.score(part.tokens, part.trains).logprobs
        losses = sft_loss(logprobs=logprobs, mask=part.trains)
        if weighted:
            losses = losses * part.advantages
        loss = (losses / tokens).sum()
        torch.autograd.backward(loss)
        by_class.add([rows[i].data_class for i in part.index], losses.detach(), part.trains)
        total += float(loss.detach())
    if total != total:
        raise LearnerError("The loss is not a number.", "Lower sft.learning_rate.")
    return {
        "loss/total": total,
        **step_metrics(optimizer),
        "batch/trained_tokens": float(tokens),
        "batch/total_tokens": float(sum(len(row.tokens) for row in rows)),
        **by_class.metrics(),
    }


@dataclass
class ClassLosses:
    """Dialogues, trained tokens and summed losses of a step, by data class."""

    sums: dict[str, list[float]] = field(default_factory=dict)

    def add(self, classes: Sequence[str], losses: Tensor, trains: Tensor) -> None:
        """Add rows: `losses` and `trains` are `[B, L]`, one class per row (or none)."""
        each = zip(classes, losses.sum(1).tolist(), trains[:, 1:].sum(1).tolist(), strict=True)
        for name, loss, tokens in each:
            if name:
                sums = self.sums.setdefault(name, [0.0, 0.0, 0.0])
                self.sums[name] = [sums[0] + 1, sums[1] + tokens, sums[2] + loss]

    def metrics(self) -> dict[str, float]:
        """Return each class's share of dialogues and its loss in nats per trained token."""
        num = sum(count for count, _, _ in self.sums.values())
        shares = {f"data/{name}/share": sums[0] / num for name, sums in self.sums.items()}
        losses = {f"data/{name}/loss": sums[2] / max(sums[1], 1) for name, sums in self.sums.items()}
        return dict(sorted((shares | losses).items()))


def batches(session: TrainingSession, settings: SftConfig) -> Iterator[tuple[list[Row], int]]:
    """Yield the rows of each step, and the dialogues skipped before them, in an order that depends on the seed alone.

    A file is reshuffled in each epoch. Dialogues longer than `rollout.max_seq_len` are skipped, and longer texts are
    split. Raises UserError if too many dialogues are skipped in a row.
    """
    rows: list[Row] = []
    skipped = streak = 0
    budget = session.config.rollout.max_seq_len
    for dialogue, data_class in dialogues(session.config, session.world):
        row = replace(dialogue_row(session.renderer, dialogue), data_class=data_class)
        parts = text_rows(row, budget) if isinstance(dialogue, FileText) else [row]
        if len(parts[0].tokens) > budget:
            skipped, streak = skipped + 1, streak + 1
            if streak == MAX_SKIPPED:
                raise UserError(
                    f"{streak:,} dialogues in a row are longer than rollout.max_seq_len ({budget}).",
                    f"Raise it: the last one takes {len(row.tokens)} tokens.",
                )
            continue
        streak = 0
        for part in parts:
            rows.append(part)
            if len(rows) == settings.batch_size:
                yield rows, skipped
                rows, skipped = [], 0


def text_rows(row: Row, budget: int) -> list[Row]:
    """Split the row of a text into rows of at most `budget` tokens; a single last token is dropped."""
    starts = [start for start in range(0, len(row.tokens), budget) if len(row.tokens) - start > 1]
    parts = [row_of_segments(text_segments(row.tokens[start : start + budget])) for start in starts]
    return [replace(part, data_class=row.data_class) for part in parts]


def dialogue_row(renderer: Renderer, dialogue: Demonstration) -> Row:
    """Return a dialogue as a row; only marked messages are trained. Raises UserError if there are none."""
    segments = dialogue_segments(renderer, dialogue)
    marked = zip(dialogue.messages, dialogue.trains, strict=True)
    trains = [trained for message, trained in marked if message["role"] == "assistant"]
    if not any(trains):
        raise UserError(
            f"A demonstration has no trained message; the last: {dialogue.messages[-1]['content'][:80]!r}.",
            'Remove "train": false from one of its messages.',
        )
    return row_of_segments(
        tuple(s if s.kind != "action" or trains[s.turn] else replace(s, kind="observation") for s in segments)
    )


def _validated(session: TrainingSession) -> TrainingSession:
    """Return the session. Raises UserError if the source is invalid or no dialogue fits."""
    check_sources(session.config, session.world)
    check_dialogues(session)
    return session
