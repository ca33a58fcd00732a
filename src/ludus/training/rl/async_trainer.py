"""Ways to connect sampling and learning other than one after the other.

`run_one_step` samples the next batch while it learns on this one. Each batch is of one version, that of the
step before its own; so it repeats bit for bit where synchronous training does. `AsyncTrainer` lets episodes
stream: the learner takes a batch when the admission lets one go, and new weights reach the engine between two
of its passes, or, where an episode is to stay with the weights that it began on, each engine of several once
its episodes have ended. Both learn on a thread of their own; the event loop, the ledger and the episodes stay
on the caller's.
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
from ludus.engines.base import (
    Engine,
    RemoteStats,
    RollingUpdate,
    SupportsRollingUpdate,
    Throttleable,
    counted,
)
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
"""Why an episode from before a resume was dropped: the settings that it was to train under are others now."""


async def run(loop: SyncTrainer, done: int, before: StreamState, waiting: StreamState) -> None:
    """Train from step `done` to the last, as `training.mode` says. `before` and `waiting` are of the run that
    is resumed: what had ended of its stream, or waits for the next step, goes on where the mode has such a
    thing, and is dropped where it does not."""
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
    """Learn on each batch while the next one is sampled; the weights wait for the end of both."""
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
            await counted(loop.engine)
            if step < last:
                sampling = asyncio.create_task(loop.sampler.sample(step + 1, order))
            with clock.phase("learn"):
                credits, learned = await loop.learning.learn(step, credits, thread)
            with clock.phase("rollout"):
                following = await sampling if sampling is not None else []
            clock.engine = (await counted(loop.engine)).metrics()
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
    """Cancel a task and wait for its end; what it says then is of no use to anyone."""
    if task is not None:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()


@dataclass
class StreamRunner:
    """Plays the jobs of a stream; the failures for good are counted anew for each step of `num_jobs`.

    While the learner is at one step, the jobs of several may begin: then they are counted among those.
    """

    sampler: RolloutCollector
    scheduler: Scheduler
    num_jobs: int
    budget: FailureBudget = field(init=False)

    def __post_init__(self) -> None:
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the failures of the last step."""
        self.budget = FailureBudget(self.num_jobs)

    async def play(self, job: RolloutRequest) -> Episode:
        """Play a job to its end, its rewards included."""
        budget = self.budget
        budget.begun += 1
        return await self.sampler.add_parts(await self.scheduler.play(job, budget), budget)


@dataclass
class AsyncTrainer:
    """A run whose episodes stream."""

    loop: SyncTrainer
    stream: GroupQueue
    source: PromptStream
    player: StreamRunner
    thread: LearnerThread
    limit: ConcurrencyController
    several: SupportsRollingUpdate | None = None
    """The engines, where an episode stays with the weights that it began on and each can take them alone."""
    rolling: RollingUpdate | None = field(default=None, init=False)
    proofs: list[SyncProof] = field(default_factory=list)
    """Of the engines that took weights since the last step."""
    transfers_s: list[float] = field(default_factory=list)
    """Seconds of the transfers beside the learner that have ended since then."""
    sending: asyncio.Task[None] | None = field(default=None, init=False)
    """Weights on their way to an engine elsewhere, or the proof of those here, beside the next step."""
    replay: ReplayBuffer = field(init=False)

    def __post_init__(self) -> None:
        config = self.loop.session.config
        self.replay = ReplayBuffer(config.staleness.replay, config.training.tasks_per_step)

    @classmethod
    def of(cls, loop: SyncTrainer, done: int, before: StreamState) -> AsyncTrainer:
        """The run that goes on after step `done` with what is on its way."""
        config, sampler = loop.session.config, loop.sampler
        training, staleness = config.training, config.staleness
        pace = StalenessSchedule(
            training.tasks_per_step, staleness.max_staleness, training.steps, staleness.over_age == "hold"
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
            in_flight=staleness.in_flight or limit.now,
            needed=sampler.algorithm.group_size,
            next_number=before.next_number,
            kept=before.groups,
            on_done=loop.reporter.episode,
        )
        several = None if staleness.interruptible else rolling_engines(loop.engine)
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
        """Train from step `done` to the last; `before` is of the run that is resumed."""
        loop = self.loop
        await loop.sync.publish(done)
        following: asyncio.Task[None] | None = None
        try:
            if self.several is not None:
                self.rolling = await self.several.roll(self.stream.admission.pace.max_staleness // 2)
                following = asyncio.create_task(follow(self.stream, self.rolling, done))
            for episode in self.stream.start():
                if episode.trajectory.failure is None:  # those that failed are in the totals
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
        """One batch: wait for it, learn, send the weights."""
        loop, clock = self.loop, StepTimings(beside=True)
        await counted(loop.engine)
        loop.reporter.phase(f"step {step}: episodes of the stream", None, loop.engine)
        ready = self.stream.admission.num_ready / loop.session.config.training.tasks_per_step
        with clock.phase("rollout"):
            batch = await self.stream.take()
            credits = await self._credit(step, batch)
        with clock.phase("learn"), self._unhurried():
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
        """Leave the learner more of what it shares with an engine of its process, where batches wait for it.

        Not where the episodes are to end before the engine takes new weights: they would take longer.
        """
        engine, interruptible = self.loop.engine, self.loop.session.config.staleness.interruptible
        return (
            self.stream.unhurried(engine.rest)
            if isinstance(engine, Throttleable) and interruptible
            else nullcontext()
        )

    def texts(self) -> Texts:
        """What a checkpoint keeps of the stream and of what may train again, as it is now."""
        stream = StreamState(self.stream.next_number, tuple(self.stream.on_their_way()))
        return lambda: {STREAM_FILE: stream.to_text(), REPLAY_FILE: self.replay.to_text()}

    async def _credit(self, step: int, batch: GroupBatch) -> list[TrainingSample]:
        groups = [group.episodes for group in (*batch.groups, *batch.others)]
        sampler = self.loop.sampler
        credits = sampler.normalised(await sampler.credit(step, groups))
        if (staleness := self.loop.session.config.staleness).over_age == "replay":
            credits = self.replay.take_late(credits, step, staleness.max_staleness)
        credits = sampler.as_batch(credits)
        self.loop.sampled = sampler.state
        self.source.begin_step()
        self.player.begin_step()
        await self._refuse_far(step)
        drawn = self.replay.draw(step, sampler.algorithm, sampler.overlong_limit, len(groups))
        return credits + sampler.again(drawn)

    async def _refuse_far(self, step: int) -> None:
        """Leave out what would be replayed of other runs and is too far from the policy by now."""
        least, learner = self.loop.session.config.staleness.min_ess, self.loop.learning.learner
        while foreign := self.replay.foreign(step, self.loop.sampler.algorithm):
            if not await self.thread(partial(refuse_far, self.replay, foreign, learner, least)):
                return

    async def _publish(self, step: int) -> tuple[SyncProof, ...]:
        """Send the weights, or leave them on their way; gives the proof where they have arrived."""
        sync, config = self.loop.sync, self.loop.session.config
        if self.rolling is not None and step < config.training.steps:
            await sync.offer(step, self.rolling, self.thread, self.proofs.append)
            self.stream.published(step, everywhere=False)
            return ()
        if step == config.training.steps or not (
            config.staleness.interruptible or keeps_adapter_versions(config)
        ):
            await self.stream.drain()  # at the end, so that members who were stopped are in the account
        else:
            await (self._send_beside if isinstance(self.loop.engine, RemoteStats) else self._prove_beside)(
                step
            )
            return ()
        await self._arrived()
        proof = await sync.prove(await sync.hand_over(step, self.thread))
        self.stream.published(step)
        return (proof,)

    async def _send_beside(self, step: int) -> None:
        """Have an engine elsewhere take a copy of the weights while the learner goes on to the next step.

        Episodes begin on the version before until it has; the next transfer waits for this one.
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
        """Have the engine of this process take the weights, and ask for its proof beside the next step."""
        await self._arrived()
        expected = await self.loop.sync.hand_over(step, self.thread)
        self.stream.published(step)

        self.sending = asyncio.create_task(self._beside(partial(self.loop.sync.prove, expected)))

    async def _beside(self, proving: Callable[[], Awaitable[SyncProof]]) -> None:
        """Keep a proof that comes beside the next step, whose batch raises what it meets."""
        try:
            self.proofs.append(await proving())
        except Exception as error:  # boundary: a learner that waits for a batch raises it
            self.stream.fail(error)
            raise

    async def _arrived(self) -> None:
        """Wait until the engine has what it was sent, and has proved it. Raises what it met."""
        if self.sending is not None:
            await self.sending

    def _proved(self, now: tuple[SyncProof, ...]) -> dict[str, float]:
        """The largest gap of the probes since the last step, and how many engines took weights one by one."""
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
        """The mean seconds of the transfers beside the learner that have ended since the last step."""
        found, self.transfers_s = self.transfers_s, []
        return {"sync/transfer_s": statistics.fmean(found)} if found else {}

    async def _engine_load(self) -> dict[str, float]:
        """What the engine did since the last step. One of this process that made no pass was idle."""
        stats = await counted(self.loop.engine)
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
        """Let more or fewer episodes fly, where that is left to measurement."""
        if self.loop.session.config.staleness.in_flight:
            return
        limited = self.stream.is_limited and not self.stream.held
        self.stream.in_flight = self.limit.after_step(clock.metrics([]), ready, self.stream.flow(), limited)


async def follow(stream: GroupQueue, engines: RollingUpdate, version: int) -> None:
    """Have a stream know the version on which episodes begin, and whatever a transfer meets."""
    try:
        while True:
            version = await engines.served(version)
            stream.serves(version)
    except Exception as error:  # boundary: a learner that waits for weights raises it
        stream.fail(error)


def rolling_engines(engine: Engine) -> SupportsRollingUpdate | None:
    """The engines, where they are several that can take weights one by one."""
    return engine if isinstance(engine, SupportsRollingUpdate) and engine.can_roll else None
