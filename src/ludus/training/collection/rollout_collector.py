"""Collect rollouts: sample groups of episodes for tasks and compute the training samples of a step."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from statistics import fmean
from typing import Protocol

from ludus.algorithms.algorithm import Algorithm, Need
from ludus.config.schema import Config
from ludus.config.sections.rollout import RolloutConfig
from ludus.engines.base import Engine
from ludus.envs.base import TaskSequence
from ludus.errors import WorldError
from ludus.evaluation.evaluate import Evaluation, EvaluationPlan, evaluate
from ludus.rollouts.dialogues.exploring import MemberSampling
from ludus.rollouts.group_queue import StreamedGroup
from ludus.rollouts.ledger import Ledger, RolloutKey, RolloutOutcome
from ludus.rollouts.partial import PartialRollouts
from ludus.rollouts.reward_executor import RewardFault
from ludus.rollouts.scheduler import CANCELLED, Attempt, Episode, FailureBudget, RolloutRequest, SamplingPlan, Scheduler
from ludus.training.collection.curriculum import Curriculum
from ludus.training.collection.demonstrations import Demonstrations
from ludus.training.collection.exploration import Explorer
from ludus.training.collection.filters import (
    AlgorithmState,
    choose_tasks,
    filter_low_variance,
    record_greso_visits,
    with_role_baselines,
)
from ludus.training.collection.guidance import Guidance, TeacherPrompts
from ludus.training.collection.opponents import OpponentPool, updated_results
from ludus.training.collection.rewards.judging import GroupJudge
from ludus.training.collection.rewards.reward_mixing import RewardMixer, add_extra_parts
from ludus.training.collection.rewards.unsupervised_rewards import VOTE, split_votes
from ludus.training.collection.task_notes import TaskNotes
from ludus.training.credit.advantages import (
    TrainingSample,
    assign_credit,
    failed_status,
    recompute_samples,
    with_estimates,
)
from ludus.training.credit.roles import is_expert
from ludus.training.run.session import TrainingSession, session_scheduler
from ludus.types import Task

log = logging.getLogger(__name__)
_SHORT_BATCH = (
    "Step %d trains on %d of %d groups: all %d algorithm.max_resample_rounds were used. "
    "Logged once per run; see groups/zero_variance for every step."
)


class EpisodeReporter(Protocol):
    """Observer of running episodes."""

    def phase(self, name: str, total: int | None, engine: Engine | None = None) -> None: ...

    def episode(self, episode: Episode) -> None: ...


class RemoteSampler(Protocol):
    """Worker processes that run episodes."""

    def attempts(self, plan: SamplingPlan) -> Attempt: ...

    def engine(self) -> Engine: ...


@dataclass(frozen=True, slots=True)
class CollectorState:
    """State of a collector: algorithm state, skipped tasks, reward moments, partial rollouts, curriculum metrics."""

    algorithm_state: AlgorithmState
    skipped: int
    moments: str
    waiting: tuple[StreamedGroup, ...] = ()
    partial: Mapping[str, float] = field(default_factory=dict)
    curriculum: Mapping[str, float] = field(default_factory=dict)


def credit_voted(
    groups: Sequence[Sequence[Episode]], algorithm: Algorithm, limit: int, first_group: int
) -> list[TrainingSample]:
    """Return the samples of the groups. Attempts beyond the group size only vote and have the outcome `dropped`."""
    split = [split_votes(group, algorithm.group_size) for group in groups]
    if not any(own for _, own in split):
        return assign_credit(groups, algorithm, limit, first_group)
    samples = assign_credit([members for members, _ in split], algorithm, limit, first_group)
    votes = ((one, number) for number, (_, own) in enumerate(split, start=first_group) for one in own)
    return samples + [TrainingSample(one, *failed_status(one, VOTE), number) for one, number in votes]


@dataclass
class RolloutCollector:
    """Run tasks with `engine` and assign credit. `ledger` is the run's."""

    session: TrainingSession
    engine: Engine
    algorithm: Algorithm
    reporter: EpisodeReporter
    ledger: Ledger
    algorithm_state: AlgorithmState = field(default_factory=AlgorithmState)
    reward_mixer: RewardMixer | None = None
    demonstrations: Demonstrations | None = None
    remote: RemoteSampler | None = None
    opponents: OpponentPool | None = None
    notes: TaskNotes | None = None
    curriculum: Curriculum | None = None
    explorer: Explorer | None = None
    judge: GroupJudge | None = None
    guidance: Guidance | None = None
    teacher_prompts: TeacherPrompts | None = None
    partial: PartialRollouts | None = field(default=None, init=False)
    """Unfinished episodes, if a step has a budget."""
    skipped: int = field(default=0, init=False)
    """Number of tasks that GRESO skipped for the current step."""
    curriculum_metrics: Mapping[str, float] = field(default_factory=dict, init=False)
    """Metrics of the curriculum after the newest batch."""
    _with_parts: set[RolloutKey] = field(default_factory=set, init=False)
    """Keys of episodes that have the extra reward parts but no credit yet."""
    _warned_short: bool = field(default=False, init=False)

    @cached_property
    def scheduler(self) -> Scheduler:
        """Scheduler of training episodes; streamed episodes do not run in lockstep."""
        config, rollout = self.session.config, self.session.config.rollout
        if config.training.streams:
            rollout = rollout.model_copy(update={"reproducible": False})
        plan = SamplingPlan("train", rollout.temperature, config.run.seed, branches=True)
        return replace(self._make_scheduler(rollout, plan, self.ledger), opponents=self.opponents)

    @property
    def state(self) -> CollectorState:
        moments = "" if self.reward_mixer is None else self.reward_mixer.state
        waiting, partial = ((), {}) if self.partial is None else (self.partial.waiting(), self.partial.metrics())
        state = self.algorithm_state
        return CollectorState(state, self.skipped, moments, waiting, partial, self.curriculum_metrics)

    @property
    def chooses_tasks(self) -> bool:
        """Whether the tasks of a step depend on the state, instead of the position in the order alone."""
        return self.algorithm.greso or self.curriculum is not None

    def start(self, waiting: Sequence[StreamedGroup] = ()) -> None:
        """Build the scheduler, enable step budgets if configured, and continue the `waiting` episodes."""
        config, scheduler = self.session.config, self.scheduler
        if not (config.rollout.partial.is_set or waiting):
            return
        if (max_open := self.session.world.episodes_at_once) is not None:
            scheduler = scheduler.capped(max_open // 2)
        self.partial = PartialRollouts(scheduler, max_waits_of(config), waiting, self.reporter.episode)

    async def close(self) -> None:
        if self.partial is not None:
            await self.partial.close()
        if self.judge is not None:
            await self.judge.close()

    def add_untrained_tasks(self, tasks: Iterable[str]) -> None:
        """Add tasks of past steps whose groups were not trained, so that later steps sample them."""
        state = self.algorithm_state
        self.algorithm_state = replace(state, untrained_tasks=(*state.untrained_tasks, *tasks))

    async def sample(self, step: int, order: TaskSequence) -> list[TrainingSample]:
        """Roll out groups until enough are trainable or all resampling rounds are used."""
        num_tasks = self.session.config.training.prompts_per_step
        rounds = self.algorithm.max_resample_rounds + 1
        samples, rolled_out = list[TrainingSample](), list[Episode]()
        self.skipped, first_group = 0, 0
        if self.partial is not None:
            self.partial.begin_step(step, last=step == self.session.config.training.steps)
        if self.opponents is not None:
            await self.opponents.begin_step(step, self.algorithm_state.opponents)
        for number in range(rounds):
            wanted = num_tasks - num_training_groups(samples)
            if self.chooses_tasks:
                taken = {c.episode.task.id for c in samples} | self.ledger.trained_ahead(step)
                tasks = self.choose_tasks(step, order, wanted, taken)
            else:
                tasks = order.take(((step - 1) * rounds + number) * num_tasks, wanted)
                tasks = self._replace_trained(step, tasks, order)
            groups = await self.roll_out(step, tasks)
            rolled_out += chain(*groups)
            first_group = max(first_group, number * num_tasks)
            samples += await self.make_samples(step, groups, first_group)
            first_group += len(groups)
            if num_training_groups(samples) >= num_tasks or (self.partial is not None and self.partial.is_spent):
                break
        else:
            if (num := num_training_groups(samples)) < num_tasks and rounds > 1 and not self._warned_short:
                self._warned_short = True
                log.warning(_SHORT_BATCH, *(step, num, num_tasks, rounds - 1))
        if self.opponents is not None:
            results = updated_results(self.algorithm_state.opponents, rolled_out)
            self.algorithm_state = replace(self.algorithm_state, opponents=results)
        if self.notes is not None:
            self.notes.add(step, rolled_out)
        return self.apply_batch_filters(self.normalize_batch(samples), step)

    def _replace_trained(self, step: int, tasks: Sequence[Task], order: TaskSequence) -> Sequence[Task]:
        """Replace tasks with trained groups by `untrained_tasks`, or else by the first ones outside the step."""
        trained_ahead = self.ledger.trained_ahead(step)
        chosen = [task for task in tasks if task.id not in trained_ahead]
        taken = trained_ahead | {task.id for task in tasks}
        known = {task.id: task for task in order.tasks}
        untrained_tasks = [known[name] for name in self.algorithm_state.untrained_tasks if name in known]
        for _ in range(len(tasks) - len(chosen)):
            one = next((task for task in (*untrained_tasks, *order.tasks) if task.id not in taken), None)
            if one is None:
                break
            chosen.append(one)
            taken.add(one.id)
            if one in untrained_tasks:
                untrained_tasks.remove(one)
                remaining = tuple(task.id for task in untrained_tasks)
                self.algorithm_state = replace(self.algorithm_state, untrained_tasks=remaining)
        return chosen

    def choose_tasks(self, step: int, order: TaskSequence, wanted: int, taken: set[str]) -> Sequence[Task]:
        seed, state = self.session.config.run.seed, self.algorithm_state
        if self.curriculum is not None:
            chosen = self.curriculum.choose(order, wanted, state, taken, step)
        else:
            chosen = choose_tasks(order, wanted, state, taken, seed=seed, step=step)
        self.algorithm_state = chosen.state
        self.skipped += chosen.skipped
        return chosen.tasks

    async def roll_out(self, step: int, tasks: Sequence[Task]) -> list[list[Episode]]:
        """Return a group of episodes per task, the greedy baseline (if any) last."""
        if self.partial is not None:
            groups = [self.requests(step, task) for task in tasks]
            total = self.partial.num_unfinished + sum(map(len, groups))
            self.reporter.phase(f"step {step}: episodes", total, self.engine)
            return await self.partial.run(groups)
        requests = [request for task in tasks for request in self.requests(step, task)]
        self.reporter.phase(f"step {step}: episodes", len(requests), self.engine)
        episodes = await self.scheduler.run(requests, self.reporter.episode)
        return [episodes[i : i + self.group_size] for i in range(0, len(episodes), self.group_size)]

    @property
    def num_attempts(self) -> int:
        """Number of sampled attempts per task, including those that only vote."""
        votes = 0 if self.reward_mixer is None else self.reward_mixer.settings.unsupervised.votes
        return max(self.algorithm.group_size, votes)

    @property
    def group_size(self) -> int:
        return self.num_attempts + self.algorithm.advantage_spec.has(Need.GREEDY_ROLLOUT)

    @property
    def overlong_limit(self) -> int:
        return overlong_limit(self.session.config, self.algorithm)

    def requests(self, step: int, task: Task, spare: int = 0) -> list[RolloutRequest]:
        """Return the rollout requests of a group with `spare` extra ones; a greedy one is last."""
        members = self.num_attempts + spare
        notes = {} if self.notes is None else self.notes.of(task.id)
        keys = [RolloutKey(step, task.id, i) for i in range(self.group_size + spare)]
        limits = {} if self.curriculum is None else self.curriculum.limits(self.algorithm_state.curriculum)
        plan = None
        if self.explorer is not None:
            exploration, plan = self.explorer.plan(self.algorithm_state.exploration, step, task)
            self.algorithm_state = replace(self.algorithm_state, exploration=exploration)
        return [
            RolloutRequest(
                *(key, task, key.sample >= members, notes, limits),
                MemberSampling() if plan is None or key.sample >= members else plan.member(key.sample),
            )
            for key in keys
        ]

    def _make_scheduler(self, rollout: RolloutConfig, plan: SamplingPlan, ledger: Ledger) -> Scheduler:
        """Return a scheduler in this process or on remote workers, which do not run in lockstep."""
        local = session_scheduler(self.session, self.engine, plan, ledger, rollout)
        return local if self.remote is None else replace(local, lockstep=None, remote=self.remote.attempts(plan))

    async def make_samples(
        self, step: int, groups: Sequence[Sequence[Episode]], first_group: int = 0
    ) -> list[TrainingSample]:
        """Return the training samples of the groups, experts included, numbered from `first_group`."""
        if self.guidance is not None:
            requests = self.guidance.requests(step, groups)
            self.reporter.phase(f"step {step}: attempts with hints", len(requests), self.engine)
            groups = self.guidance.join(step, groups, await self.guidance.run(requests, self.scheduler))
        if self.demonstrations is not None and self.algorithm.loss_spec.has(Need.DEMONSTRATIONS):
            groups = await self.demonstrations.join(step, groups)
        if self.reward_mixer is not None:
            groups = await self._add_extra_parts(groups)
            if self.judge is not None:
                groups = await self.judge.add_parts(step, groups)
                if self.judge.was_slow(step):
                    self.ledger.note_clock_limit(step)
            groups = self.reward_mixer.combine(step, groups, self.algorithm_state.curriculum.stage)
        if self.explorer is not None:
            exploration, groups = self.explorer.assign_rewards(self.algorithm_state.exploration, groups)
            self.algorithm_state = replace(self.algorithm_state, exploration=exploration)
        samples = credit_voted(groups, self.algorithm, self.overlong_limit, first_group)
        samples = samples if self.explorer is None else self.explorer.drop_failures(samples)
        return samples if self.teacher_prompts is None else self.teacher_prompts.add(samples)

    async def _add_extra_parts(self, groups: Sequence[Sequence[Episode]]) -> Sequence[Sequence[Episode]]:
        """Add the missing extra reward parts. Raises WorldError above `rollout.max_failure_rate`."""
        errors = list[WorldError]()

        async def complete(episode: Episode) -> Episode:
            if episode.key in self._with_parts and not is_expert(episode):
                return episode
            return await self._with_extra_parts(episode, errors.append)

        completed = await asyncio.gather(*(asyncio.gather(*map(complete, group)) for group in groups))
        max_failed = self.session.config.rollout.max_failure_rate * sum(map(len, groups))
        if len(errors) > max_failed + 1e-9:
            raise errors[0]
        self._with_parts.difference_update(episode.key for episode in chain(*groups))
        return completed

    async def add_extra_parts(self, episode: Episode, budget: FailureBudget) -> Episode:
        """Add the extra reward parts to a streamed episode; failures count towards `budget`."""
        errors = list[WorldError]()
        if episode.trajectory.failure is not None:
            return episode
        try:
            scored = await self._with_extra_parts(episode, errors.append)
        except asyncio.CancelledError:
            self.ledger.finish(episode.key, RolloutOutcome.DROPPED, CANCELLED)
            raise
        for error in errors:
            budget.add(error, self.session.config.rollout.max_failure_rate)
        if not errors:
            self._with_parts.add(scored.key)
        return scored

    async def _with_extra_parts(self, episode: Episode, on_error: Callable[[WorldError], None]) -> Episode:
        """Return the episode with the extra reward parts; a failure is recorded in the ledger."""
        if self.reward_mixer is None or not self.reward_mixer.adds:
            return episode
        scored = await add_extra_parts(self.session.scoring, self.session.world, episode, on_error)
        failure = scored.trajectory.failure
        if failure is not None and episode.trajectory.failure is None and not is_expert(scored):
            self.ledger.finish(scored.key, RolloutOutcome.FAILED, failure.part)
            if failure.part == RewardFault.part:  # timed out, or its process has exited
                self.ledger.note_clock_limit(scored.key.step)
        return scored

    def normalize_batch(self, samples: list[TrainingSample]) -> list[TrainingSample]:
        """Normalize the rewards over the batch if the settings require it."""
        if self.reward_mixer is None:
            return samples
        episodes = self.reward_mixer.normalize_batch([sample.episode for sample in samples])
        if not self.reward_mixer.normalizes_batch:
            return samples
        updated = [replace(c, episode=one) for c, one in zip(samples, episodes, strict=True)]
        return recompute_samples(updated, self.algorithm, self.overlong_limit)

    def apply_batch_filters(self, samples: list[TrainingSample], step: int) -> list[TrainingSample]:
        """Apply the filters and state updates that need all groups of a step."""
        if self.curriculum is not None:
            before = self.algorithm_state.curriculum
            after, self.curriculum_metrics = self.curriculum.record(before, samples, step)
            self.algorithm_state = replace(self.algorithm_state, curriculum=after)
        if self.algorithm.greso:
            success = self.session.world.rewards[0].name
            epoch = len(self.session.world.tasks("train"))
            self.algorithm_state = record_greso_visits(self.algorithm_state, samples, success, self.algorithm, epoch)
        if self.algorithm.advantage_spec.has(Need.ROLE_BASELINES):
            samples, averages = with_role_baselines(samples, self.session.world.name, self.algorithm_state.averages)
            self.algorithm_state = replace(self.algorithm_state, averages=averages)
        return filter_batch(samples, self.algorithm, self.overlong_limit)

    def set_role_average(self, role: str, rewards: Sequence[float]) -> None:
        """Set the running average of a role (`rae`) to the mean of some rewards, if there are any."""
        if rewards and self.algorithm.advantage_spec.has(Need.ROLE_BASELINES):
            averages = self.algorithm_state.averages
            means = {**averages.means, (self.session.world.name, role): fmean(rewards)}
            self.algorithm_state = replace(self.algorithm_state, averages=replace(averages, means=means))

    def replay_samples(self, samples: list[TrainingSample]) -> list[TrainingSample]:
        """Return replayed samples as a separate batch, without updating any state."""
        if samples and self.algorithm.advantage_spec.has(Need.ROLE_BASELINES):
            samples, _ = with_role_baselines(samples, self.session.world.name, self.algorithm_state.averages)
        return filter_batch(samples, self.algorithm, self.overlong_limit)

    async def evaluate(self, plan: EvaluationPlan) -> tuple[Evaluation, list[Episode]]:
        session, sampling = self.session, SamplingPlan("evaluate", plan.temperature, plan.seed)
        scheduler = self._make_scheduler(session.config.rollout, sampling, Ledger())
        if self.partial is not None and (max_open := session.world.episodes_at_once) is not None:
            scheduler = scheduler.capped(max_open - self.partial.num_open)
        tasks = session.world.tasks(plan.split)
        name = f"step {plan.step}: evaluation, {plan.split}"
        self.reporter.phase(name, plan.episodes_of(tasks), self.engine)
        return await evaluate(scheduler, tasks, plan, self.reporter.episode)


def filter_batch(samples: Sequence[TrainingSample], algorithm: Algorithm, max_length: int) -> list[TrainingSample]:
    """Return the samples after the variance filter, with advantages recomputed over the remaining groups."""
    if algorithm.filters_groups:
        samples = filter_low_variance(samples, algorithm)
    return with_estimates(samples, algorithm, max_length)


def max_waits_of(config: Config) -> int:
    """Return the number of extra steps that `staleness.max_staleness` allows an episode."""
    return config.staleness.max_staleness - (config.training.mode == "one_step")


def overlong_limit(config: Config, algorithm: Algorithm) -> int:
    """Return the longest episode for soft overlong punishment, in tokens of `algorithm.overlong_measure`."""
    rollout = config.rollout
    if algorithm.overlong_length is not None:
        return algorithm.overlong_length
    if algorithm.overlong_measure == "sequence":
        return rollout.max_seq_len
    return min(rollout.max_seq_len, rollout.max_turns * rollout.max_tokens_per_turn)


def num_training_groups(samples: Sequence[TrainingSample]) -> int:
    """Return the number of groups with at least one trained sample."""
    return len({c.group for c in samples if c.outcome is RolloutOutcome.TRAINED})
