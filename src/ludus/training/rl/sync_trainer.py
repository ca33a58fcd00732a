"""Synchronous and one-step-off-policy RL loops, and the parts that all trainers share.

Sampling resumes only after the engine's weights are checked. In reproducible mode all output except timings is
bit-identical for the same seed, also across a kill and resume.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from ludus.algorithms.spec.resolve import resolve
from ludus.config.schema import Config
from ludus.diagnostics.alarms import Alarm, find_alarms, send_alarm
from ludus.diagnostics.history import MetricsHistory
from ludus.diagnostics.metrics import configured_metrics, plugin_metrics, rollout_metrics
from ludus.diagnostics.timings import HINTS, StepTimings, append_json, write_episode_times
from ludus.diagnostics.trackers import Tracker
from ludus.engines.base import Engine, Sleepable, drain_stats
from ludus.envs.base import TaskOrder, TaskSequence, World
from ludus.envs.registry import closing
from ludus.errors import ConfigError, LearnerError
from ludus.evaluation.evaluate import (
    Evaluation,
    EvaluationPlan,
    load_evaluation,
    name_in_run,
    plan_during,
    plans,
    plans_before,
    save_evaluation,
)
from ludus.rewards.tool_results import read_necessity
from ludus.rollouts.ledger import RolloutOutcome
from ludus.rollouts.reward_executor import scoring_concurrency
from ludus.rollouts.rollout_files import rollouts_path, times_path, write_rollouts
from ludus.rollouts.scheduler import Episode
from ludus.training.collection.filters import StreakGuard, empty_batch_guard, ess_guard, ess_warning
from ludus.training.collection.prompt_stream import waiting_texts
from ludus.training.collection.rollout_collector import CollectorState, EpisodeReporter, RolloutCollector
from ludus.training.credit.advantages import TrainingSample, equal_groups
from ludus.training.credit.roles import is_demonstrated
from ludus.training.learner.ema_teacher import ema_state
from ludus.training.learner.role_learners import RoleLearners
from ludus.training.rl.sample_metrics import conflict_share, count_untrained, starved_metrics
from ludus.training.rl.train_step import ComputeDispatch, LearnerThread, TrainStep, cancel_and_wait, run_inline
from ludus.training.rl.weight_sync import WeightSync
from ludus.training.run.checkpoint import Extra, TrainerState, prune, save_checkpoint
from ludus.training.run.run_dir import RunFolder, resume_command
from ludus.training.run.session import TrainingSession
from ludus.training.value_models.factory import checkpoint_parts
from ludus.training.value_models.model_refresh import REFRESH_FILE, RewardModelRefresh, model_quality
from ludus.types import Group, grouped

log = logging.getLogger(__name__)

KL_REMEDY = "a larger algorithm.kl_coef, a lower training.learning_rate or another kl_control.guard_factor"

CheckpointFiles = Callable[[], Mapping[str, str]]
"""Build a trainer's own checkpoint files by name; runs on the learner's thread."""


@dataclass(frozen=True)
class Comparison:
    """Evaluations before (None without one) and after training, on one split with one sampling setting."""

    before: Evaluation | None
    after: Evaluation


class Reporter(EpisodeReporter, Protocol):
    """Observer of a run, such as a progress bar."""

    def step(self, step: int, metrics: Mapping[str, float], timings: Mapping[str, float]) -> None: ...

    def alarm(self, text: str) -> None: ...


@dataclass
class EvaluatedTrainer(ABC):
    """Trainer that evaluates before, during and after training. Steps count from 1; 0 is the model before training."""

    session: TrainingSession
    folder: RunFolder
    weight_sync: WeightSync
    trackers: Sequence[Tracker]
    reporter: Reporter

    @property
    def engine(self) -> Engine:
        return self.weight_sync.engine

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """The number of the last step."""

    @abstractmethod
    async def sample_evaluation(self, plan: EvaluationPlan) -> tuple[Evaluation, list[Episode]]:
        """Evaluate the engine's current weights."""

    async def run(self, done: int, train: Callable[[int], Awaitable[None]]) -> list[Comparison]:
        """Evaluate, `train` from step `done` to the last, and evaluate again; existing evaluations are reused."""
        config = self.session.config
        async with closing(self.session.world):
            await self.weight_sync.publish(done)
            for plan in plans_before(config) if done == 0 else ():
                await self._evaluate_once(plan)
            await train(done)
            after = [await self._evaluate_once(plan) for plan in plans(config, self.num_steps)]
        before = [self._stored_evaluation(plan) for plan in plans(config, 0)]
        return [Comparison(b, a) for b, a in zip(before, after, strict=True)]

    async def _evaluate_once(self, plan: EvaluationPlan) -> Evaluation:
        stored = self._stored_evaluation(plan)
        if stored is None:
            return await self.evaluate(plan)
        log.info("evaluation %s already exists, skipping it", plan.name)
        return stored

    def _stored_evaluation(self, plan: EvaluationPlan) -> Evaluation | None:
        path = self.folder.evaluations / f"{plan.name}.json"
        return load_evaluation(path) if path.is_file() else None

    async def evaluate(self, plan: EvaluationPlan) -> Evaluation:
        result, episodes = await self.sample_evaluation(plan)
        save_evaluation(self.folder.evaluations, result, episodes, name_in_run(plan, self.session.config))
        return result

    def write(
        self, step: int, samples: Sequence[TrainingSample], metrics: Mapping[str, float], timings: Mapping[str, float]
    ) -> None:
        if self.session.config.run.save_rollouts:
            records = [sample.record for sample in samples]
            write_rollouts(rollouts_path(self.folder.path, step), records)
            write_episode_times(times_path(self.folder.path, step), records)
        for tracker in self.trackers:
            tracker.log(step, metrics)
        append_json(self.folder.timings, {"step": step, **timings})


@dataclass
class SyncTrainer(EvaluatedTrainer):
    """Parts and steps of an RL run."""

    collector: RolloutCollector
    train_step: TrainStep
    refresh: RewardModelRefresh | None = None
    """Training of the reward models during the run, if configured."""
    history: MetricsHistory = field(default_factory=MetricsHistory)
    """Metrics of the steps so far, for alarms."""
    raised: list[Alarm] = field(default_factory=list, init=False)
    """Alarms of the newest step."""
    reference_digests: Mapping[str, str] = field(default_factory=dict)
    """Digests of the models outside the checkpoint."""
    collector_state: CollectorState = field(init=False)
    """State of the rollout collector right after the current step was sampled."""
    guards: tuple[StreakGuard, ...] = field(init=False)
    untrained_counts: Mapping[str, int] = field(init=False)
    """Groups in a row without a trained token, by task (`count_untrained`)."""
    hints_left: list[Callable[[Mapping[str, float], Config], str]] = field(default_factory=lambda: [*HINTS], init=False)
    """Hints about timings that have not been shown."""

    def __post_init__(self) -> None:
        self.collector_state = self.collector.state
        self.untrained_counts = self.collector_state.algorithm_state.untrained_counts
        self.guards = (empty_batch_guard(self.collector.algorithm), ess_guard(self.session.config))
        for guard in self.guards:
            guard.restore(self.history.rows)
        self.train_step.collapse.restore(self.history.rows)
        self.raised = find_alarms(self.history.rows, self.session.config.run.alarms.actions)

    @property
    def num_steps(self) -> int:
        return self.session.config.training.steps

    async def sample_evaluation(self, plan: EvaluationPlan) -> tuple[Evaluation, list[Episode]]:
        return await self.collector.evaluate(plan)

    async def run(self, done: int, train: Callable[[int], Awaitable[None]]) -> list[Comparison]:
        """Train and evaluate as `EvaluatedTrainer.run`, then cancel unfinished episodes."""

        async def train_and_close(done: int) -> None:
            try:
                await train(done)
            finally:
                await self.collector.close()

        return await super().run(done, train_and_close)

    async def train(self, done: int) -> None:
        """Train from step `done` to the last, sampling and training in turn; raises as `end_step`."""
        await self.weight_sync.publish(done)
        order = task_order(self.session.config, self.session.world)
        for step in range(done + 1, self.num_steps + 1):
            await self.end_step(step, await self.step(step, order))

    async def train_one_step_behind(self, done: int) -> None:
        """Train on each batch while the next one is sampled; sync weights after both.

        Each batch is sampled by one version, one step old, so runs are as reproducible as synchronous ones. The
        learner runs in a separate thread; event loop, ledger and episodes stay in the caller's.
        """
        order = task_order(self.session.config, self.session.world)
        await self.weight_sync.publish(done)
        if done >= self.num_steps:
            return
        thread = LearnerThread(torch.get_num_threads())
        sampling: asyncio.Task[list[TrainingSample]] | None = None
        try:
            samples = await self.collector.sample(done + 1, order)
            for step in range(done + 1, self.num_steps + 1):
                clock = StepTimings(concurrent=True)
                self.collector_state = self.collector.state
                await drain_stats(self.engine)
                if step < self.num_steps:
                    sampling = asyncio.create_task(self.collector.sample(step + 1, order))
                with clock.phase("train"):
                    samples, learned = await self.train_step.run(step, samples, thread)
                with clock.phase("rollout"):
                    following = await sampling if sampling is not None else []
                clock.engine = (await drain_stats(self.engine)).metrics()
                with clock.phase("sync"):
                    learned["sync/probe_gap"] = await self.weight_sync.publish(step)
                await self.end_step(step, await self.report(step, samples, learned, clock))
                samples, sampling = following, None
        finally:
            await cancel_and_wait(sampling)
            thread.close()

    async def step(self, step: int, order: TaskSequence) -> dict[str, float]:
        clock = StepTimings()
        await drain_stats(self.engine)
        with clock.phase("rollout"):
            samples = await self.collector.sample(step, order)
        self.collector_state = self.collector.state
        clock.engine = (await drain_stats(self.engine)).metrics()
        self.reporter.phase(f"step {step}: training", None)
        if self.session.config.engine.sleep and isinstance(self.engine, Sleepable):
            await self.engine.sleep()
        with clock.phase("train"):
            samples, learned = await self.train_step.run(step, samples)
        with clock.phase("sync"):
            learned["sync/probe_gap"] = await self.weight_sync.publish(step)
        return await self.report(step, samples, learned, clock)

    async def report(
        self,
        step: int,
        samples: list[TrainingSample],
        learned: Mapping[str, float],
        clock: StepTimings,
        dispatch: ComputeDispatch = run_inline,
    ) -> dict[str, float]:
        """Close the step's ledger, evaluate every `evaluation.every` steps, and write the results."""
        metrics = self.account(step, samples, learned)
        if (refresh := self.refresh) is not None:
            refresh.add(step, samples)
            with clock.phase("train"):
                metrics |= await dispatch(lambda: refresh.update(step))
        with clock.phase("evaluate"):
            if step % self.session.config.evaluation.every == 0:
                metrics |= (await self.evaluate(plan_during(self.session.config, step))).metrics()
        metrics |= plugin_metrics(self.session.config.run.metrics, [*_metric_groups(samples).values()], metrics)
        trajectories = [sample.episode.trajectory for sample in samples]
        timings = clock.metrics(trajectories, scoring_concurrency(self.session.config))
        if self.collector.judge is not None:
            timings |= self.collector.judge.timings(step)
        await dispatch(lambda: self.write(step, samples, metrics, timings))
        self.history.append(metrics)
        self.raise_alarms(step)
        for find_hint in list(self.hints_left):
            if hint := find_hint(timings, self.session.config):
                self.hints_left.remove(find_hint)
                self.alarm(step, hint)
        self.reporter.step(step, metrics, timings)
        return metrics

    def account(self, step: int, samples: list[TrainingSample], learned: Mapping[str, float]) -> dict[str, float]:
        """Close the ledger of a step and return its metrics. Remove replayed and expert samples from `samples`."""
        collector, extra, success = self.collector, dict(learned), self.session.world.rewards[0].name
        samples[:] = [sample for sample in samples if not sample.replayed]
        zero_variance = equal_groups(samples, collector.algorithm)
        experts = [sample for sample in samples if is_demonstrated(sample.episode)]
        guided = [sample for sample in samples if sample.expert and not is_demonstrated(sample.episode)]
        samples[:] = [sample for sample in samples if not sample.expert]
        if collector.guidance is not None:
            extra |= collector.guidance.metrics(step) | {
                "guidance/trained": float(sum(c.outcome is RolloutOutcome.TRAINED for c in guided))
            }
        if collector.demonstrations is not None and collector.teacher_prompts is None:
            extra["experts/count"] = float(len(experts))
            extra["experts/refused"] = float(collector.demonstrations.num_refused(step))
            extra["experts/trained"] = float(sum(c.outcome is RolloutOutcome.TRAINED for c in experts))
        self.untrained_counts = count_untrained(self.untrained_counts, samples)
        extra |= starved_metrics(self.untrained_counts, samples)
        extra["groups/conflict_tokens"] = conflict_share(samples)
        trained = sum(sample.outcome is RolloutOutcome.TRAINED for sample in samples)
        counts = collector.ledger.close(step, trained=trained)
        by_number = _metric_groups(samples)
        groups, flags = list(by_number.values()), [zero_variance.get(number) for number in by_number]
        metrics = rollout_metrics(groups, success, flags)
        trajectories = [t for group in groups for t in group.trajectories]
        metrics |= configured_metrics(trajectories, self.session.config.run.diagnostics, success)
        if collector.reward_mixer is not None:
            metrics |= collector.reward_mixer.metrics(step, groups) | model_quality(trajectories, success)
        if collector.explorer is not None:
            explored = self.collector_state.algorithm_state.exploration
            metrics |= collector.explorer.metrics(step, groups, explored.solved, len(explored.counts))
        if collector.judge is not None:
            metrics |= collector.judge.metrics(step)
        probe = extra.pop("sync/probe_gap", None)
        metrics |= extra | counts.metrics() | ({} if probe is None else {"sync/probe_gap": probe})
        if collector.algorithm.greso:
            greso = self.collector_state.algorithm_state.greso
            metrics |= {"greso/skipped": float(self.collector_state.skipped)}
            metrics |= {"greso/p_easy": greso.p_easy, "greso/p_hard": greso.p_hard}
        return metrics | dict(self.collector_state.partial) | dict(self.collector_state.curriculum)

    async def end_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        dispatch: ComputeDispatch = run_inline,
        files: CheckpointFiles = dict,
    ) -> None:
        """Write a checkpoint with `files` if due. Raises LearnerError if a guard or an alarm pauses the run."""
        training = self.session.config.training
        pause = self._pause_reason(step, metrics)
        if pause is not None or step % training.checkpoint_every == 0 or step == training.steps:
            state = self.trainer_state(step)
            waiting = waiting_texts(self.collector_state.waiting)
            await dispatch(lambda: self.save(state, waiting | dict(files())))
        if pause is not None:
            if any(one.rule.action == "stop" for one in self.raised):
                raise LearnerError(f"{pause[0]} Run stopped after step {step}.")
            hint = f"Resume with {pause[1]}: {resume_command(self.folder)}"
            raise LearnerError(f"{pause[0]} Run paused after step {step}.", hint)

    def _pause_reason(self, step: int, metrics: Mapping[str, float]) -> tuple[str, str] | None:
        """Return the first reason of the guards to pause, with its remedy. Every guard receives the metrics."""
        if warning := ess_warning(metrics, self.session.config.staleness):
            self.alarm(step, warning)
        reasons = [(self.train_step.control_kl(metrics), KL_REMEDY)]
        reasons += [(guard.update(metrics), guard.remedy) for guard in self.guards]
        doctor = f"ludus doctor {self.folder.path} looks for causes."
        reasons += [
            (f"Alarm {one.name}: {one.text} {doctor}", f"this change, or with --run.alarms.actions.{one.name} warn")
            for one in self.raised
            if one.rule.action in ("pause", "stop")
        ]
        return next((pair for pair in reasons if pair[0]), None)

    def raise_alarms(self, step: int) -> None:
        """Report the alarms that this step raises and the step before it did not."""
        before, settings = {one.name for one in self.raised}, self.session.config.run.alarms
        self.raised = find_alarms(self.history.rows, settings.actions)
        for one in self.raised:
            if one.name not in before:
                self.alarm(step, one.text)
                append_json(self.folder.alarms, one.record(step))
                if settings.webhook:
                    send_alarm(settings.webhook, self.folder.path.name, step, one)
            after = self.train_step.adjustments.after(one.rule.action, step, settings)
            if after != self.train_step.adjustments:
                self.train_step.adjustments = after
                factors = f"learning rate x {after.learning_rate:g}, KL coefficient x {after.kl:g}"
                self.alarm(step, f"{one.name}: {factors} from the next step on.")

    def alarm(self, step: int, text: str) -> None:
        log.warning("step %d: %s", step, text)
        self.reporter.alarm(text)

    def trainer_state(self, step: int) -> TrainerState:
        train_step = self.train_step
        return TrainerState(
            step=step,
            optimizer_steps=train_step.learner.optimizer.num_steps,
            ledger=self.collector.ledger.state(),
            value_model_steps=0 if train_step.value_model is None else train_step.value_model.optimizer.num_steps,
            algorithm_state=replace(
                self.collector_state.algorithm_state,
                initial_entropy=train_step.initial_entropy,
                untrained_counts=self.untrained_counts,
            ).to_json(),
            reward_moments=self.collector_state.moments,
            kl=train_step.kl_control.state,
            adjustments=train_step.adjustments,
            reference_digests=dict(self.reference_digests),
            warmup_steps=train_step.warmup_steps,
            mode=self.session.config.training.mode,
        )

    def save(self, state: TrainerState, files: Mapping[str, str]) -> None:
        session, checkpoints, optimizer = self.session, self.folder.checkpoints, self.train_step.learner.optimizer
        learner = self.train_step.learner
        parts = checkpoint_parts(self.train_step.value_model) | ema_state(learner.scorers)
        if isinstance(learner, RoleLearners):
            parts |= learner.checkpoint_parts()
        if self.refresh is not None:
            parts, files = parts | self.refresh.parts(), {**files, REFRESH_FILE: self.refresh.text()}
        extra = Extra(parts, files, session.role_models)
        save_checkpoint(checkpoints, session.model, session.tokenizer, optimizer, state, extra)
        prune(checkpoints, session.config.training.keep_checkpoints)
        log.info("saved checkpoint of step %d", state.step)


def task_order(config: Config, world: World) -> TaskSequence:
    """Return the task order. Raises ConfigError if one step needs more tasks than there are."""
    tasks, path = world.tasks("train"), config.env.necessity
    if path is not None:
        scores = read_necessity(path)
        tasks = [task for task in tasks if scores.get(task.id, -math.inf) >= config.env.min_necessity]
    chunk = config.training.prompts_per_step * (resolve(config.algorithm).max_resample_rounds + 1)
    if len(tasks) < chunk:
        hint = "Lower training.prompts_per_step or algorithm.max_resample_rounds."
        chosen = "" if path is None else f" of at least env.min_necessity = {config.env.min_necessity:g} in {path}"
        raise ConfigError(f"One step may need {chunk} tasks, but the train split has {len(tasks)}{chosen}.", hint)
    if path is not None:
        return TaskOrder(tasks, config.run.seed, chunk)
    return world.order(config.run.seed, chunk, config.training.steps)


def _metric_groups(samples: Sequence[TrainingSample]) -> dict[int, Group]:
    """Return the episodes grouped for the metrics, by group number, without greedy baselines."""
    groups = grouped((one for one in samples if not one.episode.greedy), lambda one: one.group)
    return {n: Group(own[0].episode.task, tuple(one.episode.trajectory for one in own)) for n, own in groups.items()}
