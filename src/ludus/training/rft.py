"""Rejection-sampling fine-tuning (RFT): rounds of sampling, filtering by success, and fine-tuning.

Each round samples tasks as RL does, keeps successful attempts (each action sequence once,
`algorithms.filters.rft`), fine-tunes on the sampled ids, sends the weights to the engine, evaluates and
saves. Every attempt is in the ledger. An interrupted round is repeated, with identical results.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from ludus.algorithms.filters import rft as keep_solved
from ludus.config.schema import Config
from ludus.diagnostics.metrics import rollout_metrics
from ludus.diagnostics.timings import StepTimings
from ludus.engines.base import drain_stats
from ludus.envs.base import World
from ludus.errors import ConfigError
from ludus.evaluation.evaluate import Evaluation, EvaluationPlan, check_evaluation, evaluate, plan_during
from ludus.rewards.base import success
from ludus.rollouts.ledger import Ledger, RolloutKey, RolloutOutcome
from ludus.rollouts.reward_executor import scoring_concurrency
from ludus.rollouts.scheduler import Episode, RolloutRequest, SamplingPlan
from ludus.training.batches.rows import row_of_trajectory
from ludus.training.collection.demonstrations import relabelled
from ludus.training.credit.advantages import TrainingSample, record_outcomes
from ludus.training.learner.logprobs import LogprobScorer
from ludus.training.learner.optimizer import Optimizer, OptimizerSettings
from ludus.training.rl.build import closing_parts, make_trackers, probe_tokens, remove_later_steps
from ludus.training.rl.sync_trainer import Comparison, EvaluatedTrainer, Reporter
from ludus.training.rl.weight_sync import WeightSync
from ludus.training.run.checkpoint import TrainerState, load_weights, prune, read_state, save_checkpoint
from ludus.training.run.preflight import check_plugins
from ludus.training.run.run_dir import RunFolder, list_checkpoints, save_config
from ludus.training.run.session import TrainingSession, make_engine, session_scheduler
from ludus.training.sft import sft_step
from ludus.types import Group

log = logging.getLogger(__name__)

HINDSIGHT = "hindsight"
"""Reason of the outcome of relabelled attempts, which are not rollouts of the ledger."""


def check_rft(config: Config, world: World) -> None:
    """Validate the settings before anything is written. Raises UserError."""
    check_plugins(config)
    check_evaluation(config, world)
    if config.rft.hindsight and not world.implements("achieved"):
        raise ConfigError(
            f"rft.hindsight would have no effect: the world {world.name} does not tell what an attempt achieved.",
            "puzzles and guess do; define World.achieved for others.",
        )
    num = len(world.tasks("train"))
    if num < config.rft.tasks_per_round:
        raise ConfigError(
            f"A round needs {config.rft.tasks_per_round} tasks, but the train split has {num}.",
            f"Set --rft.tasks_per_round to at most {num}.",
        )
    world.order(config.run.seed, config.rft.tasks_per_round, config.rft.rounds)


@dataclass
class RftTrainer(EvaluatedTrainer):
    """Parts and rounds of a run; a step is a round."""

    ledger: Ledger = field(default_factory=Ledger)

    @property
    def num_steps(self) -> int:
        """The number of rounds."""
        return self.session.config.rft.rounds

    async def train(self, done: int) -> None:
        """Run the rounds that follow round `done`."""
        for number in range(done + 1, self.num_steps + 1):
            await self.round(number)

    async def round(self, number: int) -> dict[str, float]:
        """Run one round: sample, filter, train, publish, evaluate, save."""
        clock = StepTimings()
        await drain_stats(self.engine)
        with clock.phase("rollout"):
            groups = await self.sample(number)
        clock.engine = (await drain_stats(self.engine)).metrics()
        samples = select_samples(groups, self.session)
        record_outcomes(self.ledger, samples)
        extra: list[TrainingSample] = []
        if self.session.config.rft.hindsight:
            again = await relabelled(self.session, [episode for group in groups for episode in group])
            extra = [TrainingSample(episode, RolloutOutcome.TRAINED, HINDSIGHT) for episode in again]
        self.reporter.phase(f"round {number}: training", None)
        with clock.phase("train"):
            optimizer, learned = self.learn(number, [*samples, *extra])
        with clock.phase("sync"):
            gap = await self.weight_sync.publish(number)
        counts = self.ledger.close(number, trained=sum(c.outcome is RolloutOutcome.TRAINED for c in samples))
        trajectories = [Group(group[0].task, tuple(e.trajectory for e in group)) for group in groups]
        metrics = rollout_metrics(trajectories, self.session.world.rewards[0].name)
        metrics |= learned | counts.metrics() | {"sync/probe_gap": gap}
        with clock.phase("evaluate"):
            metrics |= (await self.evaluate(plan_during(self.session.config, number))).metrics()
        self.record(number, [*samples, *extra], metrics, clock)
        self.save(number, optimizer)
        return metrics

    async def sample(self, number: int) -> list[list[Episode]]:
        """Sample one group of attempts per task of the round."""
        config = self.session.config
        world, settings = self.session.world, config.rft
        order = world.order(config.run.seed, settings.tasks_per_round, settings.rounds)
        tasks = order.take((number - 1) * settings.tasks_per_round, settings.tasks_per_round)
        sampling = SamplingPlan("rft", config.rollout.temperature, config.run.seed)
        scheduler = session_scheduler(self.session, self.engine, sampling, self.ledger)
        size = settings.samples
        requests = [RolloutRequest(RolloutKey(number, task.id, i), task) for task in tasks for i in range(size)]
        self.reporter.phase(f"round {number}: episodes", len(requests), self.engine)
        episodes = await scheduler.run(requests, self.reporter.episode)
        return [episodes[i : i + size] for i in range(0, len(episodes), size)]

    def learn(self, number: int, samples: Sequence[TrainingSample]) -> tuple[Optimizer, dict[str, float]]:
        """Fine-tune on the selected attempts with a fresh optimizer; return it and mean metrics."""
        settings = self.session.config.rft
        trained = [c for c in samples if c.outcome is RolloutOutcome.TRAINED]
        selected = [c.episode.trajectory for c in trained if c.reason != HINDSIGHT]
        weights = [settings.hindsight if c.reason == HINDSIGHT else 1.0 for c in trained]
        rows = [row_of_trajectory(c.episode.trajectory, w) for c, w in zip(trained, weights, strict=True)]
        size = settings.batch_size
        passes = settings.epochs if settings.steps is None else settings.steps  # a pass has at least one step
        orders = (_order(len(rows), self.session.config.run.seed, number, e) for e in range(passes))
        found = (order[i : i + size] for order in orders for i in range(0, len(order), size))
        batches = list(islice(found, settings.steps))
        model = self.session.config.model
        optimizer_settings = OptimizerSettings.from_config(settings, len(batches))
        optimizer = Optimizer(self.session.model, optimizer_settings, master_weights=model.master_weights)
        scorer = LogprobScorer(self.session.model, recompute=model.activation_checkpointing)
        total: Counter[str] = Counter()
        for batch in batches:
            metrics = sft_step(scorer, optimizer, [rows[i] for i in batch], settings.microbatch_tokens, weighted=True)
            total.update({name: value / len(batches) for name, value in metrics.items()})
        tasks = {trajectory.task_id for trajectory in selected}
        counts = {"rft/kept": len(selected), "rft/tasks_kept": len(tasks), "rft/updates": len(batches)}
        if settings.hindsight:
            counts["rft/hindsight"] = len(rows) - len(selected)
        return optimizer, dict(total) | {name: float(count) for name, count in counts.items()}

    async def sample_evaluation(self, plan: EvaluationPlan) -> tuple[Evaluation, list[Episode]]:
        """Evaluate the engine's current weights."""
        session = self.session
        sampling = SamplingPlan("evaluate", plan.temperature, plan.seed)
        scheduler = session_scheduler(session, self.engine, sampling, Ledger())
        name = f"round {plan.step}: evaluation, {plan.split}"
        tasks = session.world.tasks(plan.split)
        self.reporter.phase(name, plan.episodes_of(tasks), self.engine)
        return await evaluate(scheduler, tasks, plan, self.reporter.episode)

    def record(
        self, number: int, samples: Sequence[TrainingSample], metrics: Mapping[str, float], clock: StepTimings
    ) -> None:
        """Write rollouts, metrics and timings of a round."""
        trajectories = [sample.episode.trajectory for sample in samples]
        timings = clock.metrics(trajectories, scoring_concurrency(self.session.config))
        self.write(number, samples, metrics, timings)
        if not metrics["rft/updates"]:
            text = f"Round {number} has no successful attempts to train on: the weights are unchanged."
            log.warning(text)
            self.reporter.alarm(text)
        self.reporter.step(number, metrics, timings)

    def save(self, number: int, optimizer: Optimizer) -> None:
        """Write the round's checkpoint and remove the oldest ones."""
        state = TrainerState(number, optimizer.num_steps, self.ledger.state())
        checkpoints = self.folder.checkpoints
        save_checkpoint(checkpoints, self.session.model, self.session.tokenizer, optimizer, state)
        prune(checkpoints, self.session.config.rft.keep_checkpoints)


def select_samples(groups: Sequence[Sequence[Episode]], session: TrainingSession) -> list[TrainingSample]:
    """Return the samples in order; distinct successful attempts train."""
    episodes = [episode for group in groups for episode in group]
    solved = [
        success(session.world.rewards, one.trajectory)
        and one.trajectory.num_action_tokens > 0
        and len(one.trajectory.rows) == 1
        for one in episodes
    ]
    actions = [tuple(s.tokens for s in one.trajectory.segments if s.kind == "action") for one in episodes]
    keys = [(one.task.id, tokens) for one, tokens in zip(episodes, actions, strict=True)]
    fresh = keep_solved(rewards=[float(s) for s in solved], keys=keys).tolist()
    limit = session.config.rft.max_per_task
    num_selected: Counter[str] = Counter()
    samples = []
    for episode, is_solved, is_fresh in zip(episodes, solved, fresh, strict=True):
        sample = TrainingSample(episode, *_training_status(episode, is_solved, is_fresh))
        if sample.outcome is RolloutOutcome.TRAINED:
            num_selected[episode.task.id] += 1
            if limit is not None and num_selected[episode.task.id] > limit:
                sample = replace(sample, outcome=RolloutOutcome.DROPPED, reason="max_per_task")
        samples.append(sample)
    return samples


def _training_status(episode: Episode, is_solved: bool, is_fresh: bool) -> tuple[RolloutOutcome, str]:
    failure = episode.trajectory.failure
    if failure is not None:
        return RolloutOutcome.FAILED, failure.part
    if not is_solved:
        return RolloutOutcome.DROPPED, "unsolved"
    return (RolloutOutcome.TRAINED, "trained") if is_fresh else (RolloutOutcome.DROPPED, "duplicate")


def _order(num: int, seed: int, number: int, epoch: int) -> list[int]:
    order = list(range(num))
    random.Random(f"rft:{seed}:{number}:{epoch}").shuffle(order)
    return order


def run_rft(session: TrainingSession, folder: RunFolder, reporter: Reporter) -> list[Comparison]:
    """Run or resume the rounds in `folder`; return the evaluations before and after."""
    config = session.config
    done, ledger = 0, Ledger()
    if checkpoints := list_checkpoints(folder.checkpoints):
        done, path = checkpoints[-1]
        ledger = Ledger.restore(read_state(path).ledger)
        load_weights(path, session.model)
        log.info("resumed from %s", path)
    engine = make_engine(session)
    sync = WeightSync.of(config, session.model, engine, probe_tokens(session))
    save_config(folder, config)
    remove_later_steps(folder, done)
    trainer = RftTrainer(session, folder, sync, make_trackers(config, folder, done), reporter, ledger)
    with closing_parts(trainer):
        return asyncio.run(trainer.run(done, trainer.train))
