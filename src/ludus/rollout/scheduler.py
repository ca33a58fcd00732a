"""Many episodes at once.

Takes jobs in order. Gives one `Episode` per job, in the order of the jobs; one that the infrastructure failed
for good comes back with stop reason `failed`. Waits with a bounded number of episodes in flight: the
next job starts when one ends. Retries infrastructure failures, and only those, in a fresh environment with
the same seed. Raises `WorldError` or `EngineError`, with the first failure's own words, once more episodes
have failed than `max_failure_rate` allows. Never drops a job silently: each attempt is in the ledger.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ludus.envs.base import World
from ludus.errors import EngineError, WorldError
from ludus.rollout.conversation import Conversation
from ludus.rollout.episode import EpisodeLimits, run_episode
from ludus.rollout.ledger import Ledger, Outcome, RolloutKey
from ludus.rollout.lockstep import LockstepEngine
from ludus.types import Failure, StopReason, Task, Trajectory


@dataclass(frozen=True, slots=True)
class Job:
    """One episode to play: which rollout it is, and its task."""

    key: RolloutKey
    task: Task


@dataclass(frozen=True)
class Episode:
    """A job that has ended. `key` is that of the last attempt."""

    key: RolloutKey
    task: Task
    trajectory: Trajectory


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Episodes in flight, attempts after a failure, and the share of jobs that may fail for good."""

    concurrency: int = 128
    retries: int = 2
    max_failure_rate: float = 0.2


ConversationFactory = Callable[[Job], Conversation]
"""Makes the conversation of one attempt; its engine sees the episode as `episode_name(job.key)`."""

InfrastructureError = WorldError | EngineError


def episode_name(key: RolloutKey) -> str:
    """A name that is unique to an attempt and sorts by step, task and sample."""
    return f"{key.step:07d}/{key.task_id}/{key.sample:04d}/{key.attempt}"


@dataclass
class _Run:
    """The state of one call of `run`."""

    pending: Iterator[tuple[int, Job]]
    allowed_failures: float
    done: dict[int, Episode] = field(default_factory=dict)
    failures: list[InfrastructureError] = field(default_factory=list)


@dataclass
class Scheduler:
    """Plays jobs. `lockstep`, where given, is the engine that the conversations speak to."""

    world: World
    converse: ConversationFactory
    episode_limits: EpisodeLimits
    limits: SchedulerLimits
    ledger: Ledger
    lockstep: LockstepEngine | None = None

    async def run(
        self, jobs: Sequence[Job], on_done: Callable[[Episode], None] | None = None
    ) -> list[Episode]:
        """Play all jobs; `on_done` is called as each ends."""
        run = _Run(iter(enumerate(jobs)), self.limits.max_failure_rate * len(jobs))
        num_workers = min(self.limits.concurrency, len(jobs))
        first = [self._take(run, None) for _ in range(num_workers)]
        try:
            async with asyncio.TaskGroup() as group:
                for taken in first:
                    group.create_task(self._work(run, taken, on_done))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors.exceptions[0].__cause__
        finally:
            for _, job in filter(None, first):
                self._swap(episode_name(job.key), None)
        return [run.done[i] for i in range(len(jobs))]

    async def _work(
        self,
        run: _Run,
        taken: tuple[int, Job] | None,
        on_done: Callable[[Episode], None] | None,
    ) -> None:
        while taken is not None:
            position, job = taken
            episode = run.done[position] = await self._play_with_retries(run, job)
            if on_done is not None:
                on_done(episode)
            taken = self._take(run, episode_name(episode.key))

    async def _play_with_retries(self, run: _Run, job: Job) -> Episode:
        """Play a job until an attempt succeeds or they have run out; the last one is still joined."""
        while True:
            self.ledger.start(job.key)
            try:
                environment = self.world.environment(job.task)
                conversation = self.converse(job)
                trajectory = await run_episode(
                    job.task, job.key.sample, environment, conversation, self.episode_limits
                )
                return Episode(job.key, job.task, trajectory)
            except (WorldError, EngineError) as error:
                self.ledger.finish(job.key, Outcome.FAILED, error.part)
                if job.key.attempt >= self.limits.retries:
                    return self._give_up(run, job, error)
                again = replace(job.key, attempt=job.key.attempt + 1)
                self._swap(episode_name(job.key), episode_name(again))
                job = replace(job, key=again)

    def _give_up(self, run: _Run, job: Job, error: InfrastructureError) -> Episode:
        run.failures.append(error)
        if len(run.failures) > run.allowed_failures:
            raise run.failures[0]
        failure = Failure(error.part, str(error), job.key.attempt + 1)
        tags = dict(job.task.tags)
        nothing = Trajectory(
            job.task.id, job.key.sample, (), (), StopReason.FAILED, failure=failure, tags=tags
        )
        return Episode(job.key, job.task, nothing)

    def _take(self, run: _Run, leaving: str | None) -> tuple[int, Job] | None:
        """The next job; it joins the lock-step in the same instant as the last one leaves."""
        taken = next(run.pending, None)
        self._swap(leaving, episode_name(taken[1].key) if taken else None)
        return taken

    def _swap(self, leaving: str | None, joining: str | None) -> None:
        if self.lockstep is not None:
            self.lockstep.swap(leaving, joining)
