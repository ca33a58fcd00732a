"""The reward workers of a run, as the trainer sees them.

Takes trajectories that were played. Gives them with their rewards. A scoring whose worker is lost is done by
another one: nothing is played again for it, and one answer counts, as rewards are functions of the task and
the trajectory alone. One that is late would be late anywhere: it raises `RewardTimeout` at once, and its
worker, where it may go on for ever, ends what else it scores and is replaced. Raises what a reward raised,
and `ScoringLost` where worker after worker is lost over the same trajectory: whoever asked decides about
another attempt. A scoring that nobody waits for any more keeps its place to its end: a reward cannot be
interrupted, and the clock of the next one would run while it waits for the thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from ludus.cluster.handles import WorkerDied, WorkerHandle
from ludus.cluster.protocol import RewardScores, RewardSpec, ScoreJob
from ludus.cluster.worker_pool import PoolLimits, PoolMember, WorkerPool
from ludus.config.sections.cluster import ClusterConfig
from ludus.errors import WorldError
from ludus.rollout.reward_executor import RewardTimeout, graded, waited
from ludus.types import Task, Trajectory

TRIES = 3
"""Workers that may be lost over one trajectory."""

log = logging.getLogger("ludus.cluster")


class ScoringLost(WorldError):
    """No reward worker has lived through the scoring of an episode."""

    part = "reward"


@dataclass
class RewardWorkers:
    """Keeps them at their number; `start` makes the process of one. Belongs to the crowd's event loop."""

    config: ClusterConfig
    spec: RewardSpec
    start: Callable[[int], Awaitable[WorkerHandle]]
    limits: PoolLimits
    pool: WorkerPool = field(init=False)

    def __post_init__(self) -> None:
        self.pool = WorkerPool(
            "reward worker",
            self.config.reward_workers,
            self.start,
            self.limits,
            _comes_or_goes,
            _comes_or_goes,
        )

    async def scored(self, task: Task, trajectory: Trajectory) -> Trajectory:
        """The trajectory with its rewards, computed by the least busy worker."""
        lost: WorkerDied | None = None
        begin = time.perf_counter()
        for _ in range(TRIES):
            member = await self.pool.take(self.config.scorings_per_worker)
            asked = asyncio.create_task(self._asked(member, ScoreJob(task, trajectory)))
            self.pool.later(_end_of(asked))
            try:
                scores = await asyncio.shield(asked)
                found = replace(trajectory, rewards=scores.parts, reward=scores.total)
                return waited(graded(found, scores.seconds), time.perf_counter() - begin)
            except WorkerDied as error:
                if isinstance(error.__cause__, TimeoutError):
                    raise self._late(task) from TimeoutError()
                lost = error
                log.warning("the scoring of task %s, sample %d, was lost", task.id, trajectory.sample)
        assert lost is not None
        raise ScoringLost(
            f"{TRIES} reward workers were lost over task {task.id}: {lost.message}", lost.hint
        ) from lost

    def _late(self, task: Task) -> RewardTimeout:
        return RewardTimeout(
            f"The rewards of task {task.id} took longer than {self.config.scoring_timeout_s:g} s.",
            "Bound what they do, or see cluster.scoring_timeout_s.",
        )

    async def _asked(self, member: PoolMember, job: ScoreJob) -> RewardScores:
        """What a worker says, whose place is free again then; one that is late or lost is replaced."""
        try:
            found = await member.remote.call(job, self.config.scoring_timeout_s)
            assert isinstance(found, RewardScores)
            return found
        except WorkerDied as error:
            if isinstance(error.__cause__, TimeoutError):
                self.pool.retire(member, error)
            else:
                await self.pool.lose(member, error)
            raise
        finally:
            await self.pool.give_back(member)


async def _end_of(asked: asyncio.Task[RewardScores]) -> None:
    """Wait for it, whatever it meets; the pool ends it where it closes before."""
    try:
        await asyncio.wait({asked})
    finally:
        asked.cancel()
        asked.add_done_callback(lambda task: task.cancelled() or task.exception())


async def _comes_or_goes(member: PoolMember) -> None:
    """Nobody has to be told of a reward worker: only the trainer speaks to them."""
