"""The training loop of SFT, preference training and reward models: steps, metrics, checkpoints and resumption.

The batch of a step depends only on seed and step, so a resumed run is bit-identical to an uninterrupted one.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from torch import nn

from ludus.config.sections.rewards import RewardModelConfig
from ludus.config.sections.stages import PreferenceConfig, SftConfig
from ludus.diagnostics.trackers import Tracker
from ludus.rollouts.ledger import Ledger
from ludus.training.learner.optimizer import Optimizer, OptimizerSettings
from ludus.training.run.checkpoint import Extra, TrainerState, load_trainer, load_weights, prune, save_checkpoint
from ludus.training.run.run_dir import RunFolder, list_checkpoints
from ludus.training.run.session import TrainingSession

log = logging.getLogger(__name__)

OnStep = Callable[[int, Mapping[str, float]], None]
"""Called after each step with its number and metrics, `time/step_s` included."""


class SupervisedTraining(ABC):
    """Training of a session's model, from step `done` (that of the checkpoint `last`) to step `num_steps`."""

    def __init__(
        self,
        session: TrainingSession,
        folder: RunFolder,
        settings: SftConfig | PreferenceConfig | RewardModelConfig,
        num_steps: int,
        trained: nn.Module | None = None,
    ) -> None:
        """Restore the newest checkpoint in `folder`, if any. `trained` defaults to the session's model."""
        self.session, self.folder, self.num_steps = session, folder, num_steps
        self._every, self._keep = settings.checkpoint_every, settings.keep_checkpoints
        model, masters = trained or session.model, session.config.model.master_weights
        self.optimizer = Optimizer(model, OptimizerSettings.from_config(settings, num_steps), master_weights=masters)
        self.done, self.last = 0, folder.checkpoints
        if found := list_checkpoints(folder.checkpoints):
            self.done, self.last = found[-1]
            self.restore(self.last, load_trainer(self.last, self.optimizer))
            log.info("resumed from %s", self.last)

    @abstractmethod
    def train_step(self, step: int) -> dict[str, float]:
        """Take one optimizer step; return its metrics."""

    def restore(self, checkpoint: Path, state: TrainerState) -> None:
        """Restore all state except the optimizer's."""
        load_weights(checkpoint, self.session.model)

    def algorithm_state(self) -> str:
        return ""

    def extra(self) -> Extra:
        return Extra()

    def run(self, trackers: Sequence[Tracker], on_step: OnStep) -> Path:
        """Train to the last step; return its checkpoint."""
        for step in range(self.done + 1, self.num_steps + 1):
            clock = time.perf_counter()
            metrics = self.train_step(step)
            for tracker in trackers:
                tracker.log(step, metrics)
            on_step(step, metrics | {"time/step_s": time.perf_counter() - clock})
            if step % self._every == 0 or step == self.num_steps:
                self._save(step)
        return self.last

    def _save(self, step: int) -> None:
        checkpoints, session = self.folder.checkpoints, self.session
        state = TrainerState(step, self.optimizer.num_steps, Ledger().state(), algorithm_state=self.algorithm_state())
        self.last = save_checkpoint(checkpoints, session.model, session.tokenizer, self.optimizer, state, self.extra())
        prune(checkpoints, self._keep)


def step_metrics(optimizer: Optimizer) -> dict[str, float]:
    """Take an optimizer step; return the gradient norm before clipping and the learning rate."""
    rate = optimizer.settings.learning_rate_at(optimizer.num_steps)
    return {"optim/grad_norm": optimizer.step(), "optim/learning_rate": rate}


class _Sized(Protocol):
    @property
    def num_tokens(self) -> int: ...


T = TypeVar("T", bound=_Sized)


def split_by_tokens(examples: Sequence[T], max_tokens: int) -> list[list[T]]:
    """Split the examples in order into microbatches of at most `max_tokens` tokens or one example."""
    parts: list[list[T]] = []
    size = 0
    for example in examples:
        if not parts or size + example.num_tokens > max_tokens:
            parts.append([])
            size = 0
        parts[-1].append(example)
        size += example.num_tokens
    return parts
