"""One training step: from training samples to updated weights.

Independent of environment and engine. `ComputeDispatch` chooses the compute thread; the ledger is only used
on the caller's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import torch

from ludus.algorithms.kl_controller import KlControl
from ludus.algorithms.parts import Need
from ludus.rollout.ledger import Ledger
from ludus.training.batches.rows import Row
from ludus.training.collection.rollout_collector import overlong_limit
from ludus.training.collection.staleness import age_metrics, mask_over_age, on_policy
from ludus.training.credit.advantages import TrainingSample, settle, training_rows
from ludus.training.learner.learner import Learner
from ludus.training.rl.advantage_inputs import compared_entropies, refine, rejected_share, with_entropy_filter
from ludus.training.run.session import TrainingSession
from ludus.training.value_models.factory import Judge, train_judge

log = logging.getLogger("ludus.learning")

T = TypeVar("T")
ENTROPY_FILTER_OFF = (
    "The entropy filter of gtpo is off: the policy's mean entropy on the first batch is %.3g nats per token, "
    "not below algorithm.options.loss.entropy_bound."
)


class ComputeDispatch(Protocol):
    """Run learner work, possibly on another thread."""

    def __call__(self, work: Callable[[], T]) -> Awaitable[T]:
        """Run `work` and wait for its result."""
        ...


async def here(work: Callable[[], T]) -> T:
    """Run `work` on the caller's thread."""
    return work()


@dataclass
class TrainStep:
    """Update the weights from training samples; holds the learner, the value model and the KL controller.

    Tokens older than `bound` versions are masked (None: no bound). During the first `warmup` steps only the
    judge is trained. `initial_entropy` is the policy's mean entropy on the first batch (None before it) and
    decides whether GTPO's entropy filter applies.
    """

    session: TrainingSession
    learner: Learner
    kl: KlControl
    ledger: Ledger
    judge: Judge | None = None
    bound: int | None = None
    warmup: int = 0
    initial_entropy: float | None = None
    _checked: bool = field(default=False, init=False)

    async def learn(
        self, step: int, credits: Sequence[TrainingSample], work: ComputeDispatch = here
    ) -> tuple[list[TrainingSample], dict[str, float]]:
        """Record outcomes and train; return the final samples and the metrics."""
        found = await work(lambda: self._prepare(step, credits))
        settle(self.ledger, found)
        rows = training_rows(
            found,
            mask_observations=self.session.config.training.mask_observations,
            rewards=self.session.world.rewards,
            transitions=self.session.config.training.transitions,
        )
        return found, await work(lambda: self._train(step, found, rows))

    def control_kl(self, metrics: Mapping[str, float]) -> str:
        """Update the KL controller with a step's KL; return the reason to pause, or an empty string."""
        kl = metrics.get("policy/kl_reference")
        if kl is None:
            return ""
        verdict = self.kl.verdict(kl)
        self.kl = self.kl.update(kl, round(metrics["ledger/trained"]))
        return verdict

    def _prepare(self, step: int, credits: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Return the samples after masking and refinement."""
        if self.kl.acts:
            self.learner.algorithm = replace(self.learner.algorithm, kl_coef=self.kl.coef(step))
        if self.learner.algorithm.loss_spec.has(Need.CONFLICT_WEIGHTS):
            self._set_entropy_filter(credits)
        if self.bound is not None:
            credits = mask_over_age(credits, step, self.bound)
        limit = overlong_limit(self.session.config, self.learner.algorithm)
        check = not self._checked and bool(on_policy(credits, step))
        self._checked = self._checked or check
        return refine(credits, self.learner, limit, self.judge, check=check, version=step - 1)

    def _set_entropy_filter(self, credits: Sequence[TrainingSample]) -> None:
        """Measure the initial entropy on the first batch; switch GTPO's entropy filter off if it is high."""
        if self.initial_entropy is None and (found := compared_entropies(credits, self.learner)):
            self.initial_entropy = float(torch.cat(found).mean())
            if with_entropy_filter(self.learner.algorithm, self.initial_entropy) != self.learner.algorithm:
                log.warning(ENTROPY_FILTER_OFF, self.initial_entropy)
        if self.initial_entropy is not None:
            self.learner.algorithm = with_entropy_filter(self.learner.algorithm, self.initial_entropy)

    def _train(self, step: int, credits: Sequence[TrainingSample], rows: Sequence[Row]) -> dict[str, float]:
        metrics = {} if self.judge is None else train_judge(self.judge, credits)
        if step > self.warmup:
            metrics |= self.learner.train(rows, seed=step)
        if self.learner.algorithm.correction_spec.has(Need.REJECTION):
            metrics["is/mask_frac"] = rejected_share(credits)
        metrics |= age_metrics(credits, step)
        return metrics | ({"kl/coef": self.kl.coef(step)} if self.kl.acts else {})
