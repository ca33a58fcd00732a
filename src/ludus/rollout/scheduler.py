"""Schedule many episodes concurrently.

Returns one `Episode` per request, in order; one with a permanent infrastructure failure has the stop reason
`failed`. Concurrency is bounded. Infrastructure failures, and only those, are retried in a fresh environment
with the same seed. Raises the first `WorldError` or `EngineError` once more episodes have failed than
`max_failure_rate` allows; then, and on cancellation, all running episodes are closed first. Every attempt and
every wall-clock limit that fired is recorded in the ledger.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace

from ludus.config.sections.rollout import BranchConfig
from ludus.engines.base import seed_for
from ludus.envs.base import World
from ludus.errors import EngineError, WorldError
from ludus.rewards.base import check_scored_elsewhere
from ludus.rollout.branching import play_tree
from ludus.rollout.chat_session import ChatSession, EngineChatSession, RestoreError
from ludus.rollout.episode import EpisodeLimits, fresh_environment, is_being_cancelled, play_episode
from ludus.rollout.ledger import Ledger, RolloutKey, RolloutOutcome
from ludus.rollout.lockstep_engine import LockstepEngine
from ludus.rollout.reward_executor import RewardExecutor, ThreadRewardExecutor, waited
from ludus.rollout.trees import attempts
from ludus.types import Failure, Segment, StopReason, Task, ToolStatus, Trajectory


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """Request for one episode: its key, its task, and whether it is greedy (temperature 0)."""

    key: RolloutKey
    task: Task
    greedy: bool = False


@dataclass(frozen=True)
class Episode:
    """Finished request. `key` is that of the last attempt; `greedy` as in the request."""

    key: RolloutKey
    task: Task
    trajectory: Trajectory
    greedy: bool = False


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Concurrency, retries, and the fraction of requests that may fail permanently."""

    concurrency: int = 128
    retries: int = 2
    max_failure_rate: float = 0.2


ConversationFactory = Callable[[RolloutRequest], ChatSession]
"""Makes the conversation of one attempt; a lock-step knows its episode as `episode_name(job.key)`."""

Attempt = Callable[[RolloutRequest], Awaitable[Trajectory]]
"""Plays one attempt at a job, somewhere. Raises WorldError or EngineError where the infrastructure fails."""

InfrastructureError = WorldError | EngineError

CANCELLED = "cancelled"
"""Drop reason of a cancelled episode."""


def episode_name(key: RolloutKey) -> str:
    """Return a unique name of an attempt that sorts by step, task and sample."""
    return f"{key.step:07d}/{key.task_id}/{key.sample:04d}/{key.attempt}"


@dataclass
class FailureBudget:
    """The failures for good among `num_jobs` jobs; where `begun` are more, among those."""

    num_jobs: int
    failures: list[InfrastructureError] = field(default_factory=list)
    begun: int = 0

    def add(self, error: InfrastructureError, max_failure_rate: float) -> None:
        """Add a failure. Raises an error of the first failure's type if the rate is exceeded."""
        self.failures.append(error)
        num = max(self.num_jobs, self.begun)
        if len(self.failures) > max_failure_rate * num + 1e-9:
            first = self.failures[0]
            raise type(first)(
                f"{len(self.failures)} of {num} episodes failed for good, more than "
                f"rollout.max_failure_rate allows. The first failure: {first.message}",
                first.hint,
            ) from first


@dataclass
class _Run:
    """The state of one call of `run`. `joined` are the names that the lock-step knows."""

    pending: Iterator[tuple[int, RolloutRequest]]
    budget: FailureBudget
    done: dict[int, Episode] = field(default_factory=dict)
    joined: set[str] = field(default_factory=set)


@dataclass
class Scheduler:
    """Plays jobs. `lockstep`, where given, is the engine that the conversations speak to.

    `limits_of`, where given, says the bounds of an episode in the place of `episode_limits`. `elsewhere`,
    where given, plays the attempts; account and retries stay here. `scoring` gives the trajectories their
    rewards; without `scores` somebody else does. With `branch` an episode that is not greedy is a tree.
    """

    world: World
    converse: ConversationFactory
    episode_limits: EpisodeLimits
    limits: SchedulerLimits
    ledger: Ledger
    lockstep: LockstepEngine | None = None
    limits_of: Callable[[Task], EpisodeLimits] | None = None
    elsewhere: Attempt | None = None
    scores: bool = True
    scoring: RewardExecutor = field(default_factory=ThreadRewardExecutor)
    branch: BranchConfig | None = None
    _places: asyncio.Semaphore | None = field(default=None, init=False)

    async def run(
        self, jobs: Sequence[RolloutRequest], on_done: Callable[[Episode], None] | None = None
    ) -> list[Episode]:
        """Run all requests; `on_done` is called as each ends."""
        run = _Run(iter(enumerate(jobs)), FailureBudget(len(jobs)))
        first = [self._take(run, None) for _ in range(min(self.limits.concurrency, len(jobs)))]
        try:
            async with asyncio.TaskGroup() as group:
                for taken in first:
                    group.create_task(self._work(run, taken, on_done))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors.exceptions[0].__cause__
        finally:
            for name in tuple(run.joined):
                self._swap(run, name, None)
        return [run.done[i] for i in range(len(jobs))]

    async def _work(
        self, run: _Run, taken: tuple[int, RolloutRequest] | None, on_done: Callable[[Episode], None] | None
    ) -> None:
        while taken is not None:
            position, job = taken

            def joins(leaving: str, joining: str) -> None:
                self._swap(run, leaving, joining)

            episode = run.done[position] = await self.play(job, run.budget, joins)
            if on_done is not None:
                on_done(episode)
            taken = self._take(run, episode_name(episode.key))

    async def play(
        self, job: RolloutRequest, budget: FailureBudget, on_retry: Callable[[str, str], None] | None = None
    ) -> Episode:
        """Play a job until an attempt succeeds or they have run out; then it is a failure of `budget`.

        `on_retry` is told the names of the attempt that failed and of the next one. An attempt that is
        cancelled ends in the ledger as dropped.
        """
        last = planned = job.key.attempt + self.limits.retries
        while True:
            self.ledger.start(job.key)
            try:
                played = await self._play(job)
                if is_being_cancelled():  # and the world has kept that to itself
                    raise asyncio.CancelledError
                return Episode(job.key, job.task, played, job.greedy)
            except asyncio.CancelledError:
                self.ledger.finish(job.key, RolloutOutcome.DROPPED, CANCELLED)
                raise
            except (WorldError, EngineError) as error:
                self._note_failure(job.key, error)
                last = max(last, planned + isinstance(error, RestoreError))  # to begin again once is no retry
                if is_being_cancelled():
                    raise asyncio.CancelledError from error
                if job.key.attempt >= last:
                    return self._give_up(budget, job, error)
                again = replace(job.key, attempt=job.key.attempt + 1)
                if on_retry is not None:
                    on_retry(episode_name(job.key), episode_name(again))
                job = replace(job, key=again)

    async def attempt(self, job: RolloutRequest) -> Trajectory:
        """Run one attempt in this process, in a fresh environment, without ledger."""
        async with self._room():
            return await self._attempt(job)

    def _room(self) -> AbstractAsyncContextManager[None]:
        """A place among the episodes that may be open at once, however they are started. Those of `run` are
        never more: in lock-step one that waits here would be waited for."""
        if self.world.episodes_at_once is None:
            return nullcontext()
        self._places = self._places or asyncio.Semaphore(self.limits.concurrency)
        return self._places

    async def _attempt(self, job: RolloutRequest) -> Trajectory:
        if self.branch is None or job.greedy:
            return await self._path(job, (), 0)
        return await play_tree(self.branch, lambda told, number: self._path(job, told, number))

    async def _path(self, job: RolloutRequest, told: tuple[Segment, ...], number: int) -> Trajectory:
        """Play a path of the episode's tree; 0 is the whole episode."""
        conversation = self.converse(job)
        if number:
            assert isinstance(conversation, EngineChatSession)
            seed = seed_for(conversation.seed, "branch", number)
            conversation = replace(conversation, told=told, seed=seed)
        environment = fresh_environment(self.world, job.task)
        limits = self.episode_limits if self.limits_of is None else self.limits_of(job.task)
        played = await play_episode(job.task, job.key.sample, environment, conversation, limits)
        if self.scores:
            begin = time.perf_counter()
            found = await self.scoring.scored(self.world, environment, job.task, played)
            return waited(found, time.perf_counter() - begin)
        check_scored_elsewhere(self.world.rewards, environment.rewards, environment)
        return played

    async def _play(self, job: RolloutRequest) -> Trajectory:
        trajectory = await (self.elsewhere or self.attempt)(job)
        every = attempts(trajectory)
        late = any(outcome.status is ToolStatus.TIMED_OUT for one in every for outcome in one.outcomes)
        if late or any(one.stop_reason is StopReason.TIMEOUT for one in every):
            self.ledger.note_clock_limit(job.key.step)
        return trajectory

    def _note_failure(self, key: RolloutKey, error: InfrastructureError) -> None:
        self.ledger.finish(key, RolloutOutcome.FAILED, error.part)
        if isinstance(error.__cause__, TimeoutError):
            self.ledger.note_clock_limit(key.step)

    def _give_up(self, budget: FailureBudget, job: RolloutRequest, error: InfrastructureError) -> Episode:
        budget.add(error, self.limits.max_failure_rate)
        failure = Failure(error.part, str(error), job.key.attempt + 1)
        tags = dict(job.task.tags)
        nothing = Trajectory(job.task.id, job.key.sample, (), (), StopReason.FAILED, failure=failure, tags=tags)
        return Episode(job.key, job.task, nothing, job.greedy)

    def _take(self, run: _Run, leaving: str | None) -> tuple[int, RolloutRequest] | None:
        """The next job; it joins the lock-step in the same instant as the last one leaves."""
        taken = next(run.pending, None)
        self._swap(run, leaving, episode_name(taken[1].key) if taken else None)
        return taken

    def _swap(self, run: _Run, leaving: str | None, joining: str | None) -> None:
        run.joined.discard(leaving or "")
        if joining is not None:
            run.joined.add(joining)
        if self.lockstep is not None:
            self.lockstep.swap(leaving, joining)
