"""Asynchronous training on streamed episodes, optionally with replay of earlier groups.

The learner takes a batch when the staleness controller admits it. New weights are loaded between two forward passes; if
episodes must finish on the version they started with, each of several engines is updated once it has drained.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch

from ludus.algorithms.algorithm import Need
from ludus.diagnostics.timings import StepTimings
from ludus.engines.base import RemoteStats, RollingUpdate, SupportsRollingUpdate, Throttleable, drain_stats
from ludus.rollouts.group_queue import GroupBatch, GroupQueue
from ludus.rollouts.ledger import RolloutOutcome
from ludus.rollouts.scheduler import Episode
from ludus.rollouts.stream_control import INITIAL_STEPS, ConcurrencyController, StalenessController, StalenessSchedule
from ludus.training.collection.filters import staleness_metrics
from ludus.training.collection.prompt_stream import STREAM_FILE, PromptStream, StreamState
from ludus.training.collection.replay_buffer import REPLAY_FILE, ReplayBuffer
from ludus.training.credit.advantages import TrainingSample
from ludus.training.credit.roles import SESSION
from ludus.training.rl.sync_trainer import SyncTrainer, task_order
from ludus.training.rl.train_step import LearnerThread, cancel_and_wait, effective_share
from ludus.training.run.checkpoint import checkpoint_path, load_text
from ludus.training.run.session import keeps_adapter_versions

TOO_LATE = "too_late"
"""Drop reason of an episode sampled before a resume that changed its settings."""


@dataclass
class AsyncTrainer:
    """Train on streamed episodes."""

    trainer: SyncTrainer
    stream: GroupQueue
    source: PromptStream
    thread: LearnerThread
    limit: ConcurrencyController
    replay: ReplayBuffer
    engines: SupportsRollingUpdate | None = None
    """The engines if they are several and updated one by one (episodes finish on their first version)."""
    rolling: RollingUpdate | None = field(default=None, init=False)
    gaps: list[float] = field(default_factory=list)
    """Differences on the probe (nats) of the engines updated since the last step."""
    transfers_s: list[float] = field(default_factory=list)
    """Durations of background transfers that ended since the last step."""
    sending: asyncio.Task[None] | None = field(default=None, init=False)
    """Background weight transfer, or background check of an engine in this process."""

    @classmethod
    def build(cls, trainer: SyncTrainer, done: int, before: StreamState) -> AsyncTrainer:
        config, collector = trainer.session.config, trainer.collector
        training, staleness = config.training, config.staleness
        waits, prompts = staleness.on_stale == "wait", training.prompts_per_step
        pace = StalenessSchedule(prompts, staleness.max_staleness, training.steps, waits)
        order = task_order(config, trainer.session.world)
        tasks = [group.requests[0].task.id for group in before.groups]
        source = PromptStream(collector, order, pace.groups_per_step, staleness.oversample, tasks)
        source.begin_step()
        start, most = INITIAL_STEPS * source.budget.num_requests, config.rollout.concurrency
        limit = ConcurrencyController(start, min(collector.group_size, most), most)
        stream = GroupQueue(
            admission=StalenessController(pace, done),
            source=source,
            run_request=source.run_one,
            in_flight=staleness.max_concurrent_rollouts or limit.limit,
            needed=collector.num_attempts,
            next_number=before.next_number,
            restored=before.groups,
            on_done=trainer.reporter.episode,
        )
        engine, rolls = trainer.engine, not staleness.in_flight_weight_updates
        engines = engine if rolls and isinstance(engine, SupportsRollingUpdate) and engine.can_roll else None
        thread = LearnerThread(torch.get_num_threads())
        replay = ReplayBuffer(staleness.replay, prompts, trainer.session.world.rewards[0].name)
        async_trainer = cls(trainer, stream, source, thread, limit, replay, engines)
        text = load_text(checkpoint_path(trainer.folder.checkpoints, done), REPLAY_FILE) if done else None
        tasks_by_id = {task.id: task for task in order.tasks}
        if staleness.replay.share and text is not None:
            replay.restore(text, tasks_by_id)
        elif staleness.replay.share:
            share, vocab_size = async_trainer._effective_share, len(trainer.session.tokenizer)
            min_group = 2 if collector.algorithm.advantage_spec.has(Need.GROUP) else 1
            replay.load_sources(tasks_by_id, vocab_size, share, staleness.min_ess, min_group)
            collector.set_role_average(SESSION, replay.session_rewards())
        return async_trainer

    async def run(self, done: int, before: StreamState) -> None:
        trainer = self.trainer
        await trainer.weight_sync.publish(done)
        tracking: asyncio.Task[None] | None = None
        try:
            if self.engines is not None:
                self.rolling = await self.engines.roll(self.stream.admission.schedule.max_staleness // 2)
                tracking = asyncio.create_task(track_version(self.stream, self.rolling, done))
            for episode in self.stream.start():
                if episode.trajectory.failure is None:  # failed episodes are in the totals
                    trainer.collector.ledger.start(episode.key)
            for episode in (*before.unwanted, *self.stream.late):
                trainer.collector.ledger.start(episode.key)
                trainer.collector.ledger.finish(episode.key, RolloutOutcome.DROPPED, TOO_LATE)
            for step in range(done + 1, trainer.session.config.training.steps + 1):
                await self.step(step)
        finally:
            await cancel_and_wait(tracking)
            await cancel_and_wait(self.sending)
            await self.stream.close()
            self.thread.close()

    async def step(self, step: int) -> None:
        trainer, clock = self.trainer, StepTimings(concurrent=True)
        await drain_stats(trainer.engine)
        trainer.reporter.phase(f"step {step}: waiting for episodes", None, trainer.engine)
        ready = self.stream.admission.num_ready / trainer.session.config.training.prompts_per_step
        with clock.phase("rollout"):
            batch = await self.stream.take()
            samples = await self._make_samples(step, batch)
        with clock.phase("train"), self._throttled():
            samples, learned = await trainer.train_step.run(step, samples, self.thread)
        with clock.phase("sync"):
            now = await self._publish(step)
            if step % trainer.session.config.evaluation.every == 0:
                await (self._wait_for_transfer() if self.rolling is None else self.rolling.wait_until_current())
        gaps, self.gaps = [*self.gaps, *now], []
        if self.rolling is not None:
            learned["sync/engines"] = float(len(gaps) - len(now))
        if gaps:
            learned["sync/probe_gap"] = max(gaps)
        self.replay.add(samples)
        success, staleness = trainer.session.world.rewards[0].name, trainer.session.config.staleness
        learned |= staleness_metrics(samples, step, staleness, self.stream.pop_ended(), success)
        learned |= self.replay.metrics(samples)
        clock.engine = await self._stream_metrics()
        if not staleness.max_concurrent_rollouts:  # adapted to learner and engine
            limited = self.stream.is_limited and not self.stream.held
            self.stream.in_flight = self.limit.after_step(clock.metrics([]), ready, self.stream.flow(), limited)
        metrics = await trainer.report(step, samples, learned, clock, self.thread)
        trainer.collector_state = trainer.collector.state
        stream = StreamState(self.stream.next_number, tuple(self.stream.in_progress()))
        await trainer.end_step(
            step, metrics, self.thread, lambda: {STREAM_FILE: stream.to_text(), REPLAY_FILE: self.replay.to_text()}
        )

    def _throttled(self) -> AbstractContextManager[None]:
        """Throttle an interruptible engine in this process while the learner trains and batches are waiting."""
        engine = self.trainer.engine
        if self.trainer.session.config.staleness.in_flight_weight_updates and isinstance(engine, Throttleable):
            return self.stream.throttled(engine.throttle)
        return nullcontext()

    async def _make_samples(self, step: int, batch: GroupBatch) -> list[TrainingSample]:
        groups = [group.episodes for group in (*batch.groups, *batch.others)]
        collector, staleness = self.trainer.collector, self.trainer.session.config.staleness
        samples = collector.normalize_batch(await collector.make_samples(step, groups))
        if staleness.on_stale == "replay":
            samples = self.replay.take_stale(samples, step, staleness.max_staleness)
        samples = collector.apply_batch_filters(samples, step)
        self.trainer.collector_state = collector.state
        self.source.begin_step()
        if self.replay.config.sources:
            share, least = self._effective_share, staleness.min_ess
            await self.thread(partial(self.replay.evict_low_ess, step, collector.algorithm, share, least))
        drawn = self.replay.draw(step, collector.algorithm, collector.overlong_limit, len(groups))
        return samples + collector.replay_samples(drawn)

    async def _publish(self, step: int) -> tuple[float, ...]:
        """Send the weights, if configured in the background; return the gap if they were checked."""
        sync, config = self.trainer.weight_sync, self.trainer.session.config
        is_last = step == config.training.steps
        if self.rolling is not None and not is_last:
            await sync.push_weights(step, self.rolling, self.thread, lambda gap: self.gaps.append(gap))
            self.stream.on_publish(step, everywhere=False)
            return ()
        if not is_last and (config.staleness.in_flight_weight_updates or keeps_adapter_versions(config)):
            await self._publish_in_background(step)
            return ()
        await self.stream.drain()  # at the end, so that cancelled group members are counted
        await self._wait_for_transfer()
        gap = await sync.check(await sync.send_in_flight(step, self.thread))
        self.stream.on_publish(step)
        return (gap,)

    async def _publish_in_background(self, step: int) -> None:
        """Send a copy of the weights to a remote engine, or check those of an engine here, in the background."""
        sync = self.trainer.weight_sync
        await self._wait_for_transfer()
        if not isinstance(self.trainer.engine, RemoteStats):
            expected = await sync.send_in_flight(step, self.thread)
            self.stream.on_publish(step)
            self.sending = asyncio.create_task(self._run_in_background(partial(sync.check, expected)))
            return
        copied = await sync.copy_weights(step, self.thread)
        self.stream.on_publish(step, everywhere=False)

        async def send() -> float:
            begin = time.perf_counter()
            gap = await sync.send_copy(*copied)
            self.transfers_s.append(time.perf_counter() - begin)
            self.stream.on_serve(step)
            return gap

        self.sending = asyncio.create_task(self._run_in_background(send))

    async def _run_in_background(self, check: Callable[[], Awaitable[float]]) -> None:
        """Run a check during the next step; its error is raised when the batch is taken."""
        try:
            gap = await check()  # `step` may replace the list meanwhile
            self.gaps.append(gap)
        except Exception as error:  # boundary: raised by the learner when it waits for a batch
            self.stream.fail(error)
            raise

    async def _wait_for_transfer(self) -> None:
        """Wait until the last transfer is complete and checked. Raises its error."""
        if self.sending is not None:
            await self.sending

    def _effective_share(self, episodes: Sequence[Episode]) -> float:
        return effective_share([episode.trajectory for episode in episodes], self.trainer.train_step.learner)

    async def _stream_metrics(self) -> dict[str, float]:
        """Return metrics of engine, queue and transfers since the last step; an engine here is idle without passes."""
        stats, stream = await drain_stats(self.trainer.engine), self.stream
        has_stats = stats.steps or isinstance(self.trainer.engine, RemoteStats)
        metrics = stats.metrics() if has_stats else {"engine/busy_s": 0.0}
        metrics |= {
            "queue/in_flight": float(stream.num_in_flight),
            "queue/in_flight_limit": float(stream.in_flight),
            "queue/waiting": float(stream.num_waiting),
            "queue/groups_ready": float(stream.admission.num_ready),
            "queue/groups_on_their_way": float(len(stream.admission.in_progress)),
            "queue/room": float(stream.admission.capacity),
        }
        transfers_s, self.transfers_s = self.transfers_s, []
        return metrics | ({"sync/transfer_s": statistics.fmean(transfers_s)} if transfers_s else {})


async def track_version(stream: GroupQueue, engines: RollingUpdate, version: int) -> None:
    """Forward the version of new episodes, and transfer errors, to the stream."""
    try:
        while True:
            version = await engines.wait_for_version(version)
            stream.on_serve(version)
    except Exception as error:  # boundary: raised by the learner when it waits for weights
        stream.fail(error)
