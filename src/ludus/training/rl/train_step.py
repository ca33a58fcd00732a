"""One training step: from training samples to updated weights.

Before the first gradient of a batch: filters and model-based inputs of advantages (KL, values, rejection,
entropy filter, parity check), each only if the algorithm needs it. Independent of environment and engine.
`ComputeDispatch` chooses the compute thread; the ledger is only used on the caller's thread.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from statistics import fmean
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ludus.algorithms.algorithm import Algorithm, Need
from ludus.algorithms.corrections import MismatchByLength, mismatch, mismatch_by_length
from ludus.algorithms.filters import entropy_bound
from ludus.algorithms.kl import FULL_KL_NAMES, KLController
from ludus.algorithms.spec.resolve import algorithm_of
from ludus.algorithms.token_statistics import SELF_CERTAINTY, SUM_PI_SQUARED
from ludus.config.sections.parts.terms import LEARNER_KINDS, UnsupervisedConfig
from ludus.errors import SyncError
from ludus.rollouts.dialogues.exploring import is_off_policy
from ludus.rollouts.ledger import Ledger, RolloutOutcome
from ludus.training.batches.rows import Row, new_actions, pad_table, row_of_trajectory, scored_mask
from ludus.training.collection.exploration import entropy_schedule, temperature_schedule
from ludus.training.collection.filters import age_metrics, mask_over_age
from ludus.training.collection.rollout_collector import overlong_limit
from ludus.training.credit.advantages import (
    Estimates,
    TrainingSample,
    recompute_samples,
    record_outcomes,
    training_rows,
    with_estimates,
)
from ludus.training.learner.learner import Learner, set_temperature
from ludus.training.rl.sample_metrics import CollapseScoring
from ludus.training.run.checkpoint import Adjustments
from ludus.training.run.session import TrainingSession
from ludus.training.value_models.factory import ValueModel, at_actions, estimate_values, train_value_model
from ludus.types import Trajectory

log = logging.getLogger(__name__)

T = TypeVar("T")
ENTROPY_FILTER_OFF = (
    "The entropy filter of gtpo is off: the policy's mean entropy on the first batch is %.3g nats per token, "
    "not below algorithm.options.loss.entropy_bound."
)
REJECTED = "rejected"
"""Mask reason of a trajectory whose ratio to the engine is out of bounds."""
PARITY_ROWS = 8
"""Rows compared before the first step, evenly spread by length."""
PARITY_NATS = 0.05
"""Largest mean log-probability difference between engine and learner at which training starts."""
ENGINE_PARITY_NATS = 1e-3
"""Bound if the engine's log-probabilities replace the learner's."""


class ComputeDispatch(Protocol):
    """Run learner work, possibly on another thread."""

    def __call__(self, work: Callable[[], T]) -> Awaitable[T]: ...


async def run_inline(work: Callable[[], T]) -> T:
    """Run `work` on the caller's thread."""
    return work()


class LearnerThread:
    """Single worker thread with `threads` compute threads, on which the learner runs work serially.

    Work must not touch the event loop's state: the ledger and the episodes in flight. `busy_s` is the total busy time.
    """

    def __init__(self, threads: int) -> None:
        self.busy_s = 0.0
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._executor = ThreadPoolExecutor(1, "ludus-learner", _init_thread, (threads, device))

    async def __call__(self, work: Callable[[], T]) -> T:
        """Run `work` and return its result. Cancellation waits for running work."""
        future = asyncio.get_running_loop().run_in_executor(self._executor, self._timed, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait({future})
            raise

    def close(self) -> None:
        self._executor.shutdown()

    def _timed(self, work: Callable[[], T]) -> T:
        start = time.perf_counter()
        try:
            return work()
        finally:
            self.busy_s += time.perf_counter() - start


def _init_thread(threads: int, device: int | None) -> None:
    """Set the number of compute threads and the GPU of this thread."""
    torch.zeros(1).sum()  # torch applies its global number on first use, so trigger that first
    torch.set_num_threads(threads)
    if device is not None:
        torch.cuda.set_device(device)


async def cancel_and_wait(task: asyncio.Task[list[TrainingSample]] | asyncio.Task[None] | None) -> None:
    """Cancel a task and wait for it, ignoring its errors."""
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@dataclass
class TrainStep:
    """Update the weights from training samples; holds the learner, the value model and the KL controller.

    Tokens older than `max_token_age` versions are masked (None: no bound). During the first `warmup_steps` steps
    only the value model is trained. `initial_entropy` is the policy's mean entropy on the first batch (None before
    it) and decides whether GTPO's entropy filter applies.
    """

    session: TrainingSession
    learner: Learner
    kl_control: KLController
    ledger: Ledger
    value_model: ValueModel | None = None
    max_token_age: int | None = None
    warmup_steps: int = 0
    initial_entropy: float | None = None
    adjustments: Adjustments = field(default_factory=Adjustments)
    collapse: CollapseScoring = field(init=False)
    _checked: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.collapse = CollapseScoring.of(self.session)

    async def run(
        self, step: int, samples: Sequence[TrainingSample], dispatch: ComputeDispatch = run_inline
    ) -> tuple[list[TrainingSample], dict[str, float]]:
        """Record outcomes and train; return the final samples and the metrics."""
        prepared = await dispatch(lambda: self._prepare(step, samples))
        record_outcomes(self.ledger, prepared)
        training, rewards = self.session.config.training, self.session.world.rewards
        masks, transitions = training.mask_observations, training.transitions
        rows = training_rows(prepared, mask_observations=masks, rewards=rewards, transitions=transitions)
        return prepared, await dispatch(lambda: self._train(step, prepared, rows))

    def kl_coef(self, step: int) -> float:
        return self.kl_control.coef(step) * self.adjustments.kl

    def control_kl(self, metrics: Mapping[str, float]) -> str:
        """Update the KL controller with a step's KL; return the reason to pause, or an empty string."""
        kl = metrics.get("policy/kl_reference")
        if kl is None:
            return ""
        reason = self.kl_control.pause_reason(kl)
        self.kl_control = self.kl_control.update(kl, round(metrics["ledger/trained"]))
        return reason

    def _prepare(self, step: int, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        if self.kl_control.is_active:
            self.learner.algorithm = replace(self.learner.algorithm, kl_coef=self.kl_coef(step))
        self._set_schedules(step, samples)
        config = self.session.config
        limit = overlong_limit(config, self.learner.algorithm)
        samples = with_learner_rewards(samples, self.learner, config.rewards.unsupervised, limit)
        if self.learner.algorithm.loss_spec.has(Need.CONFLICT_WEIGHTS):
            self._set_entropy_filter(samples)
        if self.max_token_age is not None:
            samples = mask_over_age(samples, step, self.max_token_age)
        if not self._checked:
            self._checked = check_samples(samples, self.learner, step - 1) is not None
        return filter_and_estimate(samples, self.learner, limit, self.value_model)

    def _set_schedules(self, step: int, samples: Sequence[TrainingSample]) -> None:
        """Set the temperature and the coefficient of the entropy bonus of a step, if they change."""
        config, target = self.session.config, self.learner.algorithm.entropy_target
        if (temperature := temperature_schedule(config)) is not None:
            set_temperature(self.learner, temperature.at(step - 1))
        schedule = entropy_schedule(config)
        if schedule is None and target is None:
            return
        coef = algorithm_of(config).entropy_coef if schedule is None else schedule.at(step - 1)
        if target is not None:
            coef *= max(0.0, 1 - sampled_entropy(samples) / target)
        self.learner.algorithm = replace(self.learner.algorithm, entropy_coef=coef)

    def _set_entropy_filter(self, samples: Sequence[TrainingSample]) -> None:
        """Measure the initial entropy on the first batch; switch GTPO's entropy filter off if it is high."""
        if self.initial_entropy is None and (entropies := compared_entropies(samples, self.learner)):
            self.initial_entropy = float(torch.cat(entropies).mean())
            if with_entropy_filter(self.learner.algorithm, self.initial_entropy) != self.learner.algorithm:
                log.warning(ENTROPY_FILTER_OFF, self.initial_entropy)
        if self.initial_entropy is not None:
            self.learner.algorithm = with_entropy_filter(self.learner.algorithm, self.initial_entropy)

    def _train(self, step: int, samples: Sequence[TrainingSample], rows: Sequence[Row]) -> dict[str, float]:
        metrics = self.collapse.measure(step, samples, self.learner)
        metrics |= {} if self.value_model is None else train_value_model(self.value_model, samples)
        if step > self.warmup_steps:
            self.learner.optimizer.learning_rate_factor = self.adjustments.learning_rate
            metrics |= self.learner.train(rows, seed=step)
            if self.learner.token_values is not None:
                self.learner.token_values.write(step, [sample.record for sample in samples])
        if self.learner.algorithm.correction_spec.has(Need.REJECTION):
            metrics["is/mask_frac"] = rejected_share(samples)
        metrics |= age_metrics(samples, step)
        if self.learner.algorithm.entropy_target is not None or entropy_schedule(self.session.config) is not None:
            metrics["entropy/coef"] = self.learner.algorithm.entropy_coef
        return metrics | ({"kl/coef": self.kl_coef(step)} if self.kl_control.is_active else {})


def sampled_entropy(samples: Sequence[TrainingSample]) -> float:
    """Return the mean of `-logprob` over the on-policy tokens of finished episodes, nats; 0 without any."""
    trajectories = [one.episode.trajectory for one in samples if not one.expert and not one.replayed]
    trajectories = [one for one in trajectories if not is_off_policy(one)]
    values = [value for own in trajectories for segment in own.segments for value in segment.logprobs]
    return -fmean(values) if values else 0.0


def filter_and_estimate(
    samples: Sequence[TrainingSample], learner: Learner, max_length: int, value_model: ValueModel | None = None
) -> list[TrainingSample]:
    """Return the samples with filters and model estimates applied."""
    kept, entropies = list(samples), None
    algorithm = learner.algorithm
    if algorithm.correction_spec.has(Need.REJECTION):
        kept = _reject_samples(kept, learner)
    if algorithm.loss_spec.has(Need.CONFLICT_WEIGHTS):
        entropies = compared_entropies(kept, learner)
        kept = _filter_uncertain(kept, entropies, algorithm)
    # Last, so that batch means cover only the remaining samples.
    needs = (Need.BATCH_STATISTICS, Need.DISTRIBUTIONS)
    estimated = value_model is not None or entropies is not None or _penalises_kl(algorithm)
    if estimated or any(map(algorithm.advantage_spec.has, needs)):
        kept = _add_estimates(kept, learner, value_model, max_length, Estimates(entropies=entropies))
    return kept


def _penalises_kl(algorithm: Algorithm) -> bool:
    return algorithm.kl_coef > 0 and algorithm.kl_placement != "loss"


def check_samples(
    samples: Sequence[TrainingSample], learner: Learner, version: int | None = None
) -> MismatchByLength | None:
    """Run `check_parity` on the trained samples whose tokens are all of `version`, or on all if `version` is None."""
    rows = [
        _sample_row(sample)
        for sample in _trained_samples(samples)
        if not is_off_policy(sample.episode.trajectory)
        if version is None or {v for s in sample.episode.trajectory.segments for v in s.versions} <= {version}
    ]
    return check_parity(rows, learner)


def _trained_samples(samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    return [sample for sample in samples if sample.outcome is RolloutOutcome.TRAINED and not sample.expert]


def check_parity(rows: Sequence[Row], learner: Learner) -> MismatchByLength | None:
    """Return the mismatch of recorded and learner's log-probabilities by position. Raises SyncError."""
    if not rows:
        return None
    ranked = sorted(rows, key=lambda row: len(row.tokens))
    indices = {round(i * (len(ranked) - 1) / (PARITY_ROWS - 1)) for i in range(PARITY_ROWS)}
    chosen = [ranked[index] for index in sorted(indices)]
    old, behavior, mask = _pad_scores(chosen, learner.score(chosen))
    from_engine = learner.settings.old_logprobs == "engine"
    bound = ENGINE_PARITY_NATS if from_engine else PARITY_NATS
    measured = mismatch_by_length(old_logprobs=old, behavior_logprobs=behavior, mask=mask)
    mismatches = [
        f"{bucket.gap_mean:.3g} at positions {label}"
        for label, bucket in zip(measured.labels, measured.buckets, strict=True)
        if not bucket.gap_mean <= bound
    ]
    if mismatches:
        hint = "Check that both use the same weights, temperature and precision. Nothing was trained."
        if from_engine:
            hint = "Set training.learner.old_logprobs = 'recomputed': the engine's are not precise enough."
        difference = f"by {', '.join(mismatches)} nats on average (at most {bound:g})"
        raise SyncError(f"Engine and learner differ in the log-probabilities of sampled tokens {difference}.", hint)
    return measured


def effective_share(trajectories: Sequence[Trajectory], learner: Learner) -> float:
    """Return the effective sample size of trajectories under the learner's policy, over their tokens."""
    rows = [row_of_trajectory(trajectory, 0.0) for trajectory in trajectories]
    old, behavior, mask = _pad_scores(rows, learner.score(rows))
    return mismatch(old_logprobs=old, behavior_logprobs=behavior, mask=mask).effective_share


def _sample_row(sample: TrainingSample) -> Row:
    return row_of_trajectory(sample.episode.trajectory, 0.0)


def _add_estimates(
    samples: list[TrainingSample], learner: Learner, value_model: ValueModel | None, max_length: int, known: Estimates
) -> list[TrainingSample]:
    compared = [sample for sample in samples if sample.advantages is not None]
    rows = [_sample_row(sample) for sample in compared]
    if not rows:
        return samples
    algorithm, estimates = learner.algorithm, known
    if value_model is not None:
        estimates = estimate_values(value_model, compared, rows, learner)._replace(entropies=known.entropies)
    penalised = _penalises_kl(algorithm)
    weighs_tokens = algorithm.advantage_spec.has(Need.DISTRIBUTIONS)
    compared_to_engine = algorithm.advantage_spec.has(Need.BEHAVIOR_RATIO) or weighs_tokens
    sampled_alone = penalised and algorithm.kl not in FULL_KL_NAMES
    old = learner.score(rows, keep=True) if sampled_alone or compared_to_engine else []
    if penalised:
        estimates = estimates._replace(kl=at_actions(learner.penalties(rows, old), rows))
    if compared_to_engine:
        estimates = estimates._replace(old_logprobs=at_actions(old, rows))
    if weighs_tokens:
        sums = [scores.logprobs for scores in learner.score_with(SUM_PI_SQUARED, rows)]
        estimates = estimates._replace(sum_pi_squared=at_actions(sums, rows))
    return with_estimates(samples, algorithm, max_length, estimates)


def _reject_samples(samples: list[TrainingSample], learner: Learner) -> list[TrainingSample]:
    trained = _trained_samples(samples)
    if not trained:
        return samples
    rows = [_sample_row(sample) for sample in trained]
    old, behavior, mask = _pad_scores(rows, learner.score(rows, keep=True))
    inputs, algorithm = {"old_logprobs": old, "behavior_logprobs": behavior, "mask": mask}, learner.algorithm
    keep = algorithm.call(algorithm.correction_spec.function, "correction", inputs).bool()  # [N, L] action tokens
    masked = {
        id(sample): sample.masked(row[inside].tolist())
        for sample, row, inside in zip(trained, keep, mask, strict=True)
        if row.any() and not row[inside].all()
    }
    dropped = {id(sample) for sample, row in zip(trained, keep, strict=True) if not row.any()}
    return [masked.get(id(sample), sample) for sample in _mask_samples(samples, dropped, REJECTED)]


def rejected_share(samples: Sequence[TrainingSample]) -> float:
    """Return the fraction of trainable action tokens that a filter rejected (also `mask_over_age`); 0 without any."""
    trained = _trained_samples(samples)
    rejected = [c for c in samples if c.reason == REJECTED]
    total = sum(c.episode.trajectory.num_action_tokens for c in (*trained, *rejected))
    accepted = sum(c.episode.trajectory.num_action_tokens if c.trains is None else sum(c.trains) for c in trained)
    return (total - accepted) / max(total, 1)


def compared_entropies(samples: Sequence[TrainingSample], learner: Learner) -> list[Tensor]:
    """Return the policy's entropies at the action tokens of samples with advantages, `[n_i]` each."""
    rows = [_sample_row(sample) for sample in samples if sample.advantages is not None]
    return at_actions(learner.entropies(rows), rows) if rows else []


def with_entropy_filter(algorithm: Algorithm, initial: float) -> Algorithm:
    """Return the algorithm, without GTPO's entropy filter if it would remove every sample (arXiv:2508.03772)."""
    if initial < algorithm.number("loss", "entropy_bound"):
        return algorithm
    options = replace(algorithm.options, loss=algorithm.options.loss | {"entropy_bound": math.inf})
    return replace(algorithm, options=options)


def _filter_uncertain(
    samples: list[TrainingSample], entropies: Sequence[Tensor], algorithm: Algorithm
) -> list[TrainingSample]:
    bound = algorithm.number("loss", "entropy_bound")
    compared = [sample for sample in samples if sample.advantages is not None]
    dropped = {
        id(sample)
        for sample, row in zip(compared, entropies, strict=True)
        if sample.outcome is RolloutOutcome.TRAINED
        and not entropy_bound(entropy=row[None], mask=torch.ones_like(row[None]), bound=bound)
    }
    return _mask_samples(samples, dropped, "entropy")


def _mask_samples(samples: list[TrainingSample], dropped: set[int], reason: str) -> list[TrainingSample]:
    return [
        replace(sample, outcome=RolloutOutcome.MASKED, reason=reason) if id(sample) in dropped else sample
        for sample in samples
    ]


def _pad_scores(rows: Sequence[Row], values: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Pad `values`, the engine's log-probabilities and the action mask to `[N, L]` on the CPU."""
    behavior = pad_table([row.behavior for row in rows], torch.float64)
    mask = scored_mask(pad_table([row.sampled for row in rows], torch.bool))
    return pad_table(values, torch.float64), behavior, mask


def with_learner_rewards(
    samples: Sequence[TrainingSample], learner: Learner, settings: UnsupervisedConfig, max_length: int
) -> list[TrainingSample]:
    """Return the samples with the part of `rewards.unsupervised` added to their rewards, and new advantages.

    The part is computed under the weights at the start of the step, by one forward pass. An attempt without a sampled
    token has the lowest value of the batch. Samples of other kinds, failed ones, and those that have the part are
    unchanged.
    """
    kind, found = settings.kind, list(samples)
    if kind not in LEARNER_KINDS:
        return found
    trajectories = [sample.episode.trajectory for sample in found]
    missing = [i for i, one in enumerate(trajectories) if one.failure is None and kind not in one.rewards]
    scored = [i for i in missing if trajectories[i].num_action_tokens]
    if not scored:
        return found
    rows = [row_of_trajectory(trajectories[i], 0.0) for i in scored]
    if kind == SELF_CERTAINTY:
        tokens = [scores.logprobs for scores in learner.score_with(SELF_CERTAINTY, rows)]
    else:
        tokens = [-entropies for entropies in learner.entropies(rows)]
    means = [
        _span_mean(trajectories[i], one, settings) for i, one in zip(scored, at_actions(tokens, rows), strict=True)
    ]
    values = dict.fromkeys(missing, min(means)) | dict(zip(scored, means, strict=True))
    for i, value in values.items():
        one = trajectories[i]
        reward = one.reward + settings.weight * value
        episode = replace(
            found[i].episode, trajectory=replace(one, rewards={**one.rewards, kind: value}, reward=reward)
        )
        found[i] = replace(found[i], episode=episode)
    return recompute_samples(found, learner.algorithm, max_length)


def _span_mean(trajectory: Trajectory, values: Tensor, settings: UnsupervisedConfig) -> float:
    """Return the mean of the values of the action tokens over the span, in float64."""
    lengths = [len(segment.tokens) for segment in new_actions(trajectory) if segment.tokens]
    start = 0 if settings.span == "response" else sum(islice(lengths, len(lengths) - 1))
    return float(values[start:].double().mean())
