"""Asynchronous training on streamed episodes, optionally with replay of earlier groups.

The learner takes a batch when the staleness controller admits it. New weights are loaded between two forward
passes; if episodes must finish on the version they started with, each of several engines is updated once it
has drained. The learner runs on its own thread; the event loop, the ledger and the episodes stay on the
caller's.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from ludus.config.schema import Config
from ludus.diagnostics.timings import StepTimings
from ludus.engines.base import Engine, RemoteStats, RollingUpdate, SupportsRollingUpdate, Throttleable, drain_stats
from ludus.errors import ConfigError
from ludus.rollout.group_queue import GroupBatch, GroupQueue
from ludus.rollout.ledger import RolloutKey, RolloutOutcome
from ludus.rollout.rollout_files import RolloutRecord, read_rollouts
from ludus.rollout.scheduler import Episode, FailureBudget, RolloutRequest, Scheduler
from ludus.rollout.stream_control import ConcurrencyController, StalenessController, StalenessSchedule, first_in_flight
from ludus.training.collection.filters import staleness_metrics
from ludus.training.collection.prompt_stream import STREAM_FILE, PromptStream, StreamState
from ludus.training.collection.replay_buffer import REPLAY_FILE, ReplayBuffer
from ludus.training.collection.rollout_collector import RolloutCollector
from ludus.training.credit.advantages import TrainingSample
from ludus.training.learner.learner import Learner
from ludus.training.rl.sync_trainer import SyncTrainer, Texts, task_order
from ludus.training.rl.train_step import LearnerThread, cancel_and_wait, effective_share
from ludus.training.rl.weight_sync import SyncProof
from ludus.training.run.checkpoint import checkpoint_path, load_text
from ludus.training.run.session import keeps_adapter_versions
from ludus.types import Task

TOO_LATE = "too_late"
"""Drop reason of an episode from before a resume, sampled for settings that have changed."""


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

    async def run_one(self, job: RolloutRequest) -> Episode:
        """Run a request to its end, rewards included."""
        budget = self.budget
        budget.begun += 1
        return await self.sampler.add_extra_parts(await self.scheduler.run_one(job, budget), budget)


@dataclass
class AsyncTrainer:
    """Train on streamed episodes."""

    loop: SyncTrainer
    stream: GroupQueue
    source: PromptStream
    runner: StreamRunner
    thread: LearnerThread
    limit: ConcurrencyController
    engines: SupportsRollingUpdate | None = None
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
        runner = StreamRunner(sampler, sampler.scheduler(), pace.groups_per_step * sampler.group_size)
        limit = ConcurrencyController(
            first_in_flight(runner.num_jobs),
            min(sampler.group_size, config.rollout.concurrency),
            config.rollout.concurrency,
        )
        stream = GroupQueue(
            admission=StalenessController(pace, done),
            source=source,
            run_request=runner.run_one,
            in_flight=staleness.max_concurrent_rollouts or limit.now,
            needed=sampler.algorithm.group_size,
            next_number=before.next_number,
            restored=before.groups,
            on_done=loop.reporter.episode,
        )
        engines = None if staleness.in_flight_weight_updates else rolling_update_engines(loop.engine)
        trainer = cls(loop, stream, source, runner, LearnerThread(torch.get_num_threads()), limit, engines)
        text = load_text(checkpoint_path(loop.folder.checkpoints, done), REPLAY_FILE) if done else None
        known = {task.id: task for task in order.tasks}
        if text is not None and staleness.replay.share:
            trainer.replay.restore(text, known)
        elif staleness.replay.share:
            vocab_size = len(loop.session.tokenizer)
            load_sources(trainer.replay, known, loop.learning.learner, vocab_size, staleness.min_ess)
        return trainer

    async def run(self, done: int, before: StreamState) -> None:
        """Train from step `done` to the last; `before` is the restored stream."""
        loop = self.loop
        await loop.sync.publish(done)
        tracking: asyncio.Task[None] | None = None
        try:
            if self.engines is not None:
                self.rolling = await self.engines.roll(self.stream.admission.pace.max_staleness // 2)
                tracking = asyncio.create_task(track_version(self.stream, self.rolling, done))
            for episode in self.stream.start():
                if episode.trajectory.failure is None:  # failed episodes are in the totals
                    loop.sampler.ledger.start(episode.key)
            for episode in (*before.unwanted, *self.stream.late):
                loop.sampler.ledger.start(episode.key)
                loop.sampler.ledger.finish(episode.key, RolloutOutcome.DROPPED, TOO_LATE)
            for step in range(done + 1, loop.session.config.training.steps + 1):
                await self.step(step)
        finally:
            await cancel_and_wait(tracking)
            await cancel_and_wait(self.sending)
            await self.stream.close()
            self.thread.close()

    async def step(self, step: int) -> None:
        """Wait for a batch, train on it and send the weights."""
        loop, clock = self.loop, StepTimings(concurrent=True)
        await drain_stats(loop.engine)
        loop.reporter.phase(f"step {step}: waiting for episodes", None, loop.engine)
        ready = self.stream.admission.num_ready / loop.session.config.training.prompts_per_step
        with clock.phase("rollout"):
            batch = await self.stream.take()
            samples = await self._make_samples(step, batch)
        with clock.phase("train"), self._throttled():
            samples, learned = await loop.learning.learn(step, samples, self.thread)
        with clock.phase("sync"):
            now = await self._publish(step)
            if step % loop.session.config.evaluation.every == 0:
                await (self._wait_for_transfer() if self.rolling is None else self.rolling.wait_until_current())
        learned |= self._proof_metrics(now)
        self.replay.add(samples)
        learned |= self._staleness_metrics(step, samples) | self.replay.metrics(samples)
        clock.engine = await self._engine_metrics() | self._queue_metrics() | self._transfer_metrics()
        self._adjust_concurrency(clock, ready)
        metrics = await loop.report(step, samples, learned, clock, self.thread)
        loop.sampled = loop.sampler.state
        await loop.end_step(step, metrics, self.thread, self.texts())

    def _throttled(self) -> AbstractContextManager[None]:
        """Throttle an engine in this process while the learner trains and batches are waiting.

        Not used if episodes must finish before the engine takes new weights.
        """
        engine, interruptible = self.loop.engine, self.loop.session.config.staleness.in_flight_weight_updates
        return (
            self.stream.throttled(engine.throttle)
            if isinstance(engine, Throttleable) and interruptible
            else nullcontext()
        )

    def texts(self) -> Texts:
        """Return the serializers of the stream and the replay buffer in their present state."""
        stream = StreamState(self.stream.next_number, tuple(self.stream.in_progress()))
        return lambda: {STREAM_FILE: stream.to_text(), REPLAY_FILE: self.replay.to_text()}

    async def _make_samples(self, step: int, batch: GroupBatch) -> list[TrainingSample]:
        groups = [group.episodes for group in (*batch.groups, *batch.others)]
        sampler = self.loop.sampler
        samples = sampler.normalize_batch(await sampler.make_samples(step, groups))
        if (staleness := self.loop.session.config.staleness).on_stale == "replay":
            samples = self.replay.take_late(samples, step, staleness.max_staleness)
        samples = sampler.apply_batch_filters(samples)
        self.loop.sampled = sampler.state
        self.source.begin_step()
        self.runner.begin_step()
        await self._exclude_far(step)
        drawn = self.replay.draw(step, sampler.algorithm, sampler.overlong_limit, len(groups))
        return samples + sampler.replay_samples(drawn)

    async def _exclude_far(self, step: int) -> None:
        """Remove replay groups of other runs that are now too far from the policy."""
        least, learner = self.loop.session.config.staleness.min_ess, self.loop.learning.learner
        while foreign := self.replay.foreign(step, self.loop.sampler.algorithm):
            if not await self.thread(partial(exclude_far_groups, self.replay, foreign, learner, least)):
                return

    async def _publish(self, step: int) -> tuple[SyncProof, ...]:
        """Send the weights, or start sending them; return the checks that have completed."""
        sync, config = self.loop.sync, self.loop.session.config
        if self.rolling is not None and step < config.training.steps:
            await sync.push_weights(step, self.rolling, self.thread, self.proofs.append)
            self.stream.published(step, everywhere=False)
            return ()
        if step == config.training.steps or not (
            config.staleness.in_flight_weight_updates or keeps_adapter_versions(config)
        ):
            await self.stream.drain()  # at the end, so that cancelled group members are counted
        else:
            await (
                self._send_in_background if isinstance(self.loop.engine, RemoteStats) else self._check_in_background
            )(step)
            return ()
        await self._wait_for_transfer()
        proof = await sync.check(await sync.send_in_flight(step, self.thread))
        self.stream.published(step)
        return (proof,)

    async def _send_in_background(self, step: int) -> None:
        """Send a copy of the weights to a remote engine in the background.

        Episodes start on the previous version until it arrives. The next transfer waits for this one.
        """
        await self._wait_for_transfer()
        copied = await self.loop.sync.copy_weights(step, self.thread)
        self.stream.published(step, everywhere=False)

        async def send() -> SyncProof:
            begin = time.perf_counter()
            proof = await self.loop.sync.send_copy(copied)
            self.transfers_s.append(time.perf_counter() - begin)
            self.stream.serves(step)
            return proof

        self.sending = asyncio.create_task(self._run_in_background(send))

    async def _check_in_background(self, step: int) -> None:
        """Load the weights into the engine of this process and check them in the background."""
        await self._wait_for_transfer()
        expected = await self.loop.sync.send_in_flight(step, self.thread)
        self.stream.published(step)

        self.sending = asyncio.create_task(self._run_in_background(partial(self.loop.sync.check, expected)))

    async def _run_in_background(self, proving: Callable[[], Awaitable[SyncProof]]) -> None:
        """Record a check that completes during the next step, whose batch raises its error."""
        try:
            self.proofs.append(await proving())
        except Exception as error:  # boundary: raised by the learner when it waits for a batch
            self.stream.fail(error)
            raise

    async def _wait_for_transfer(self) -> None:
        """Wait until the last transfer is complete and checked. Raises its error."""
        if self.sending is not None:
            await self.sending

    def _proof_metrics(self, now: tuple[SyncProof, ...]) -> dict[str, float]:
        """Return the largest probe difference since the last step and the number of engines updated one by
        one."""
        before, self.proofs[:] = tuple(self.proofs), ()
        found = {} if self.rolling is None else {"sync/engines": float(len(before))}
        if before or now:
            found["sync/probe_gap"] = max(proof.probe_gap for proof in (*before, *now))
        return found

    def _staleness_metrics(self, step: int, samples: list[TrainingSample]) -> dict[str, float]:
        session = self.loop.session
        return staleness_metrics(
            samples, step, session.config.staleness, self.stream.pop_ended(), session.world.rewards[0].name
        )

    def _transfer_metrics(self) -> dict[str, float]:
        """Return the mean duration of the background transfers since the last step."""
        found, self.transfers_s = self.transfers_s, []
        return {"sync/transfer_s": statistics.fmean(found)} if found else {}

    async def _engine_metrics(self) -> dict[str, float]:
        """Return engine metrics since the last step.

        An engine of this process without a forward pass was idle.
        """
        stats = await drain_stats(self.loop.engine)
        known = stats.steps or isinstance(self.loop.engine, RemoteStats)
        return stats.metrics() if known else {"engine/busy_s": 0.0}

    def _queue_metrics(self) -> dict[str, float]:
        stream = self.stream
        return {
            "queue/in_flight": float(stream.num_in_flight),
            "queue/in_flight_limit": float(stream.in_flight),
            "queue/waiting": float(stream.num_waiting),
            "queue/groups_ready": float(stream.admission.num_ready),
            "queue/groups_on_their_way": float(len(stream.admission.in_progress)),
            "queue/room": float(stream.admission.room),
        }

    def _adjust_concurrency(self, clock: StepTimings, ready: float) -> None:
        """Adjust the number of concurrent episodes if it is set automatically."""
        if self.loop.session.config.staleness.max_concurrent_rollouts:
            return
        limited = self.stream.is_limited and not self.stream.held
        self.stream.in_flight = self.limit.after_step(clock.metrics([]), ready, self.stream.flow(), limited)


async def track_version(stream: GroupQueue, engines: RollingUpdate, version: int) -> None:
    """Keep a stream informed of the version that new episodes use, and of transfer errors."""
    try:
        while True:
            version = await engines.served(version)
            stream.serves(version)
    except Exception as error:  # boundary: raised by the learner when it waits for weights
        stream.fail(error)


def rolling_update_engines(engine: Engine) -> SupportsRollingUpdate | None:
    """Return the engines if there are several and each supports rolling updates."""
    return engine if isinstance(engine, SupportsRollingUpdate) and engine.can_roll else None


_CHECKED = 16
"""Groups per source that are checked before the first step, evenly spaced."""
_CHECKPOINT = re.compile(r"step-(\d{6,})")


def load_sources(
    replay: ReplayBuffer, tasks: Mapping[str, Task], learner: Learner, vocab_size: int, min_share: float
) -> None:
    """Add the groups of `staleness.replay.sources` to the buffer.

    Raises ConfigError if a source has no usable rollouts or its effective sample share under the learner's
    policy is below `min_share`; UserError if a file cannot be read.
    """
    for source in replay.config.sources:
        groups = _read_groups(source, tasks, vocab_size)
        if not groups:
            raise ConfigError(
                f"{source} has no usable rollouts. Needed: groups of two or more, of tasks in "
                "this world's train split, with log-probabilities, in this model's vocabulary.",
                "Remove it from staleness.replay.sources.",
            )
        chosen = groups[:: -(-len(groups) // _CHECKED)]
        share = effective_share([one.trajectory for group in chosen for one in group], learner)
        if share < min_share:
            raise ConfigError(
                f"The rollouts of {source} are too far from this policy to train on: their effective sample "
                f"share is {share:.2g}, below staleness.min_ess = {min_share:g}.",
                "Remove it from staleness.replay.sources, or start from weights that are closer to it.",
            )
        replay.add_source(source, groups)


def check_sources(config: Config) -> None:
    """Raise ConfigError for a source of `staleness.replay` without rollouts."""
    if config.training.streams and config.staleness.replay.share:
        for source in config.staleness.replay.sources:
            _rollout_files(source)


def exclude_far_groups(replay: ReplayBuffer, groups: Sequence[list[Episode]], learner: Learner, least: float) -> int:
    """Exclude the groups whose effective sample share is below `least`; return their number."""
    far = [group for group in groups if effective_share([e.trajectory for e in group], learner) < least]
    for group in far:
        replay.refuse(group)
    return len(far)


def _rollout_files(source: str) -> list[Path]:
    """Return the rollout files of a run, of a run up to a checkpoint, or a single file."""
    path = Path(source)
    if path.is_file():
        return [path]
    match = _CHECKPOINT.fullmatch(path.name)
    run, last = (path.parent.parent, int(match[1])) if match and path.is_dir() else (path, None)
    found = sorted((run / "rollouts").glob("step-*.jsonl.gz"))
    found = [one for one in found if last is None or int(one.name.split("-")[1].split(".")[0]) <= last]
    if not found:
        raise ConfigError(
            f"{source} has no rollouts to replay.",
            "staleness.replay.sources takes run folders, checkpoints of runs and files step-*.jsonl.gz.",
        )
    return found


def _read_groups(source: str, tasks: Mapping[str, Task], vocab_size: int) -> list[list[Episode]]:
    found: dict[tuple[Path, int, str], list[Episode]] = {}
    for path in _rollout_files(source):
        for record in read_rollouts(path):
            if record.group in tasks and _is_trainable(record, vocab_size):
                key = RolloutKey(record.step, record.group, record.trajectory.sample, record.attempt)
                group = found.setdefault((path, record.step, record.group), [])
                group.append(Episode(key, tasks[record.group], record.trajectory))
    return [group for group in found.values() if len(group) > 1]


def _is_trainable(record: RolloutRecord, vocab_size: int) -> bool:
    """Return whether a rollout has the fields that corrections need, and tokens of this model."""
    segments = record.trajectory.segments
    actions = [segment for segment in segments if segment.kind == "action"]
    whole = all(len(s.logprobs) == len(s.versions) == len(s.tokens) for s in actions)
    known = all(0 <= token < vocab_size for segment in segments for token in segment.tokens)
    return record.trajectory.failure is None and bool(actions) and whole and known
