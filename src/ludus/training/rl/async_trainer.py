"""One-step-off-policy and asynchronous training.

`run_one_step` samples the next batch while the learner trains on the current one. Each batch is sampled by
one version, one step old, so runs are as reproducible as synchronous ones. `AsyncTrainer` streams episodes:
the learner takes a batch when the staleness controller admits it. New weights are loaded between two forward
passes; if episodes must finish on the version they started with, each of several engines is updated once it
has drained. In both modes the learner runs on its own thread; the event loop, the ledger and the episodes
stay on the caller's.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from ludus.diagnostics.timings import StepTimings
from ludus.engines.base import Engine, RemoteStats, RollingUpdate, SupportsRollingUpdate, Throttleable, drain_stats
from ludus.rollout.ledger import RolloutOutcome
from ludus.rollout.scheduler import Episode, FailureBudget, RolloutRequest, Scheduler
from ludus.rollout.streaming.concurrency_control import ConcurrencyController, first_in_flight
from ludus.rollout.streaming.group_queue import GroupBatch, GroupQueue
from ludus.rollout.streaming.staleness_control import StalenessController, StalenessSchedule
from ludus.training.collection.prompt_stream import PromptStream
from ludus.training.collection.replay_buffer import REPLAY_FILE, ReplayBuffer
from ludus.training.collection.rollout_collector import RolloutCollector
from ludus.training.collection.staleness import staleness_metrics
from ludus.training.collection.stream_checkpoint import STREAM_FILE, StreamState
from ludus.training.credit.advantages import TrainingSample
from ludus.training.rl.learner_thread import LearnerThread
from ludus.training.rl.replay_sources import load_sources, refuse_far
from ludus.training.rl.sync_trainer import SyncTrainer, Texts, proof_metrics, task_order
from ludus.training.rl.weight_sync import SyncProof
from ludus.training.run.checkpoint import checkpoint_path, load_text
from ludus.training.run.session import keeps_adapter_versions

TOO_LATE = "too_late"
"""Drop reason of an episode from before a resume, sampled for settings that have changed."""


async def run(loop: SyncTrainer, done: int, before: StreamState, waiting: StreamState) -> None:
    """Train from step `done` to the last in the configured `training.mode`.

    `before` and `waiting` are the restored stream and the restored leftover episodes. They are dropped if the
    mode does not use them.
    """
    mode, ledger = loop.session.config.training.mode, loop.sampler.ledger
    gone = waiting if mode == "async" else before
    if gone.num_ended:
        ledger.drop_kept(done + 1, gone.num_ended, TOO_LATE)
    if mode == "async":
        await AsyncTrainer.of(loop, done, before).run(done, before)
        return
    late = [group.jobs[0] for group in before.groups if group.jobs[0].key.step <= done]
    memory = loop.sampler.memory
    loop.sampler.memory = replace(memory, owed=(*memory.owed, *(job.task.id for job in late)))
    loop.sampler.go_on_with(waiting.groups)
    try:
        await (loop.run(done) if mode == "sync" else run_one_step(loop, done))
    finally:
        if loop.sampler.partial is not None:
            await loop.sampler.partial.close()


async def run_one_step(loop: SyncTrainer, done: int) -> None:
    """Train on each batch while the next one is sampled; sync weights after both."""
    last = loop.session.config.training.steps
    order = task_order(loop.session.config, loop.session.world)
    await loop.sync.publish(done)
    if done >= last:
        return
    thread = LearnerThread(torch.get_num_threads())
    sampling: asyncio.Task[list[TrainingSample]] | None = None
    try:
        credits = await loop.sampler.sample(done + 1, order)
        for step in range(done + 1, last + 1):
            clock = StepTimings(beside=True)
            loop.sampled = loop.sampler.state
            await drain_stats(loop.engine)
            if step < last:
                sampling = asyncio.create_task(loop.sampler.sample(step + 1, order))
            with clock.phase("train"):
                credits, learned = await loop.learning.learn(step, credits, thread)
            with clock.phase("rollout"):
                following = await sampling if sampling is not None else []
            clock.engine = (await drain_stats(loop.engine)).metrics()
            with clock.phase("sync"):
                proof = await loop.sync.publish(step)
            learned |= proof_metrics(proof)
            metrics = await loop.report(step, credits, learned, clock)
            await loop.end_step(step, metrics)
            credits, sampling = following, None
    finally:
        await _end(sampling)
        thread.close()


async def _end(task: asyncio.Task[list[TrainingSample]] | asyncio.Task[None] | None) -> None:
    """Cancel a task and wait for it, ignoring its errors."""
    if task is not None:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()


@dataclass
class StreamRunner:
    """Run the rollout requests of a stream, with a failure budget for each step of `num_jobs`.

    Requests of several steps may start during one learner step; the budget covers all of them.
    """

    sampler: RolloutCollector
    scheduler: Scheduler
    num_jobs: int
    budget: FailureBudget = field(init=False)

    def __post_init__(self) -> None:
        self.begin_step()

    def begin_step(self) -> None:
        """Reset the failure budget."""
        self.budget = FailureBudget(self.num_jobs)

    async def play(self, job: RolloutRequest) -> Episode:
        """Run a request to its end, rewards included."""
        budget = self.budget
        budget.begun += 1
        return await self.sampler.add_parts(await self.scheduler.play(job, budget), budget)


@dataclass
class AsyncTrainer:
    """Train on streamed episodes."""

    loop: SyncTrainer
    stream: GroupQueue
    source: PromptStream
    player: StreamRunner
    thread: LearnerThread
    limit: ConcurrencyController
    several: SupportsRollingUpdate | None = None
    """The engines, if episodes keep their starting version and engines are updated one by one."""
    rolling: RollingUpdate | None = field(default=None, init=False)
    proofs: list[SyncProof] = field(default_factory=list)
    """Checks of the engines updated since the last step."""
    transfers_s: list[float] = field(default_factory=list)
    """Durations of background transfers that ended since the last step."""
    sending: asyncio.Task[None] | None = field(default=None, init=False)
    """Background weight transfer, or background check of an engine in this process."""
    replay: ReplayBuffer = field(init=False)

    def __post_init__(self) -> None:
        config = self.loop.session.config
        self.replay = ReplayBuffer(config.staleness.replay, config.training.prompts_per_step)

    @classmethod
    def of(cls, loop: SyncTrainer, done: int, before: StreamState) -> AsyncTrainer:
        """Build the trainer that continues after step `done` with the restored stream."""
        config, sampler = loop.session.config, loop.sampler
        training, staleness = config.training, config.staleness
        pace = StalenessSchedule(
            training.prompts_per_step, staleness.max_staleness, training.steps, staleness.on_stale == "wait"
        )
        order = task_order(config, loop.session.world)
        tasks = [group.jobs[0].task.id for group in before.groups]
        source = PromptStream(sampler, order, pace.groups_per_step, staleness.oversample, tasks)
        player = StreamRunner(sampler, sampler.scheduler(), pace.groups_per_step * sampler.group_size)
        limit = ConcurrencyController(
            first_in_flight(player.num_jobs),
            min(sampler.group_size, config.rollout.concurrency),
            config.rollout.concurrency,
        )
        stream = GroupQueue(
            admission=StalenessController(pace, done),
            source=source,
            play=player.play,
            in_flight=staleness.max_concurrent_rollouts or limit.now,
            needed=sampler.algorithm.group_size,
            next_number=before.next_number,
            kept=before.groups,
            on_done=loop.reporter.episode,
        )
        several = None if staleness.in_flight_weight_updates else rolling_engines(loop.engine)
        made = cls(loop, stream, source, player, LearnerThread(torch.get_num_threads()), limit, several)
        text = load_text(checkpoint_path(loop.folder.checkpoints, done), REPLAY_FILE) if done else None
        known = {task.id: task for task in order.tasks}
        if text is not None and staleness.replay.share:
            made.replay.restore(text, known)
        elif staleness.replay.share:
            vocab_size = len(loop.session.tokenizer)
            load_sources(made.replay, known, loop.learning.learner, vocab_size, staleness.min_ess)
        return made

    async def run(self, done: int, before: StreamState) -> None:
        """Train from step `done` to the last; `before` is the restored stream."""
        loop = self.loop
        await loop.sync.publish(done)
        following: asyncio.Task[None] | None = None
        try:
            if self.several is not None:
                self.rolling = await self.several.roll(self.stream.admission.pace.max_staleness // 2)
                following = asyncio.create_task(follow(self.stream, self.rolling, done))
            for episode in self.stream.start():
                if episode.trajectory.failure is None:  # failed episodes are in the totals
                    loop.sampler.ledger.start(episode.key)
            for episode in (*before.unwanted, *self.stream.late):
                loop.sampler.ledger.start(episode.key)
                loop.sampler.ledger.finish(episode.key, RolloutOutcome.DROPPED, TOO_LATE)
            for step in range(done + 1, loop.session.config.training.steps + 1):
                await self.step(step)
        finally:
            await _end(following)
            await _end(self.sending)
            await self.stream.close()
            self.thread.close()

    async def step(self, step: int) -> None:
        """Wait for a batch, train on it and send the weights."""
        loop, clock = self.loop, StepTimings(beside=True)
        await drain_stats(loop.engine)
        loop.reporter.phase(f"step {step}: waiting for episodes", None, loop.engine)
        ready = self.stream.admission.num_ready / loop.session.config.training.prompts_per_step
        with clock.phase("rollout"):
            batch = await self.stream.take()
            credits = await self._credit(step, batch)
        with clock.phase("train"), self._unhurried():
            credits, learned = await loop.learning.learn(step, credits, self.thread)
        with clock.phase("sync"):
            now = await self._publish(step)
            if step % loop.session.config.evaluation.every == 0:
                await (self._arrived() if self.rolling is None else self.rolling.catch_up())
        learned |= self._proved(now)
        self.replay.add(credits)
        learned |= self._staleness(step, credits) | self.replay.metrics(credits)
        clock.engine = await self._engine_load() | self._queues() | self._transfers()
        self._adjust(clock, ready)
        metrics = await loop.report(step, credits, learned, clock, self.thread)
        loop.sampled = loop.sampler.state
        await loop.end_step(step, metrics, self.thread, self.texts())

    def _unhurried(self) -> AbstractContextManager[None]:
        """Throttle an engine in this process while the learner trains and batches are waiting.

        Not used if episodes must finish before the engine takes new weights.
        """
        engine, interruptible = self.loop.engine, self.loop.session.config.staleness.in_flight_weight_updates
        return (
            self.stream.unhurried(engine.throttle)
            if isinstance(engine, Throttleable) and interruptible
            else nullcontext()
        )

    def texts(self) -> Texts:
        """Return the serializers of the stream and the replay buffer in their present state."""
        stream = StreamState(self.stream.next_number, tuple(self.stream.on_their_way()))
        return lambda: {STREAM_FILE: stream.to_text(), REPLAY_FILE: self.replay.to_text()}

    async def _credit(self, step: int, batch: GroupBatch) -> list[TrainingSample]:
        groups = [group.episodes for group in (*batch.groups, *batch.others)]
        sampler = self.loop.sampler
        credits = sampler.normalised(await sampler.credit(step, groups))
        if (staleness := self.loop.session.config.staleness).on_stale == "replay":
            credits = self.replay.take_late(credits, step, staleness.max_staleness)
        credits = sampler.as_batch(credits)
        self.loop.sampled = sampler.state
        self.source.begin_step()
        self.player.begin_step()
        await self._refuse_far(step)
        drawn = self.replay.draw(step, sampler.algorithm, sampler.overlong_limit, len(groups))
        return credits + sampler.again(drawn)

    async def _refuse_far(self, step: int) -> None:
        """Remove replay groups of other runs that are now too far from the policy."""
        least, learner = self.loop.session.config.staleness.min_ess, self.loop.learning.learner
        while foreign := self.replay.foreign(step, self.loop.sampler.algorithm):
            if not await self.thread(partial(refuse_far, self.replay, foreign, learner, least)):
                return

    async def _publish(self, step: int) -> tuple[SyncProof, ...]:
        """Send the weights, or start sending them; return the checks that have completed."""
        sync, config = self.loop.sync, self.loop.session.config
        if self.rolling is not None and step < config.training.steps:
            await sync.offer(step, self.rolling, self.thread, self.proofs.append)
            self.stream.published(step, everywhere=False)
            return ()
        if step == config.training.steps or not (
            config.staleness.in_flight_weight_updates or keeps_adapter_versions(config)
        ):
            await self.stream.drain()  # at the end, so that cancelled group members are counted
        else:
            await (self._send_beside if isinstance(self.loop.engine, RemoteStats) else self._prove_beside)(step)
            return ()
        await self._arrived()
        proof = await sync.prove(await sync.hand_over(step, self.thread))
        self.stream.published(step)
        return (proof,)

    async def _send_beside(self, step: int) -> None:
        """Send a copy of the weights to a remote engine in the background.

        Episodes start on the previous version until it arrives. The next transfer waits for this one.
        """
        await self._arrived()
        kept = await self.loop.sync.keep(step, self.thread)
        self.stream.published(step, everywhere=False)

        async def send() -> SyncProof:
            begin = time.perf_counter()
            proof = await self.loop.sync.deliver(kept)
            self.transfers_s.append(time.perf_counter() - begin)
            self.stream.serves(step)
            return proof

        self.sending = asyncio.create_task(self._beside(send))

    async def _prove_beside(self, step: int) -> None:
        """Load the weights into the engine of this process and check them in the background."""
        await self._arrived()
        expected = await self.loop.sync.hand_over(step, self.thread)
        self.stream.published(step)

        self.sending = asyncio.create_task(self._beside(partial(self.loop.sync.prove, expected)))

    async def _beside(self, proving: Callable[[], Awaitable[SyncProof]]) -> None:
        """Record a check that completes during the next step, whose batch raises its error."""
        try:
            self.proofs.append(await proving())
        except Exception as error:  # boundary: raised by the learner when it waits for a batch
            self.stream.fail(error)
            raise

    async def _arrived(self) -> None:
        """Wait until the last transfer is complete and checked. Raises its error."""
        if self.sending is not None:
            await self.sending

    def _proved(self, now: tuple[SyncProof, ...]) -> dict[str, float]:
        """Return the largest probe difference since the last step and the number of engines updated one by
        one."""
        before, self.proofs[:] = tuple(self.proofs), ()
        found = {} if self.rolling is None else {"sync/engines": float(len(before))}
        if before or now:
            found["sync/probe_gap"] = max(proof.probe_gap for proof in (*before, *now))
        return found

    def _staleness(self, step: int, credits: list[TrainingSample]) -> dict[str, float]:
        session = self.loop.session
        return staleness_metrics(
            credits, step, session.config.staleness, self.stream.forget_ended(), session.world.rewards[0].name
        )

    def _transfers(self) -> dict[str, float]:
        """Return the mean duration of the background transfers since the last step."""
        found, self.transfers_s = self.transfers_s, []
        return {"sync/transfer_s": statistics.fmean(found)} if found else {}

    async def _engine_load(self) -> dict[str, float]:
        """Return engine metrics since the last step.

        An engine of this process without a forward pass was idle.
        """
        stats = await drain_stats(self.loop.engine)
        known = stats.steps or isinstance(self.loop.engine, RemoteStats)
        return stats.metrics() if known else {"engine/busy_s": 0.0}

    def _queues(self) -> dict[str, float]:
        stream = self.stream
        return {
            "queue/in_flight": float(stream.num_in_flight),
            "queue/in_flight_limit": float(stream.in_flight),
            "queue/waiting": float(stream.num_waiting),
            "queue/groups_ready": float(stream.admission.num_ready),
            "queue/groups_on_their_way": float(len(stream.admission.on_their_way)),
            "queue/room": float(stream.admission.room),
        }

    def _adjust(self, clock: StepTimings, ready: float) -> None:
        """Adjust the number of concurrent episodes if it is set automatically."""
        if self.loop.session.config.staleness.max_concurrent_rollouts:
            return
        limited = self.stream.is_limited and not self.stream.held
        self.stream.in_flight = self.limit.after_step(clock.metrics([]), ready, self.stream.flow(), limited)


async def follow(stream: GroupQueue, engines: RollingUpdate, version: int) -> None:
    """Keep a stream informed of the version that new episodes use, and of transfer errors."""
    try:
        while True:
            version = await engines.served(version)
            stream.serves(version)
    except Exception as error:  # boundary: raised by the learner when it waits for weights
        stream.fail(error)


def rolling_engines(engine: Engine) -> SupportsRollingUpdate | None:
    """Return the engines if there are several and each supports rolling updates."""
    return engine if isinstance(engine, SupportsRollingUpdate) and engine.can_roll else None
