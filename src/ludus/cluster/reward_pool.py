"""Pool of reward workers.

If a worker dies, its trajectory is scored by another one; the episode is not repeated. Rewards depend on
task and trajectory alone, so a timeout is not retried: it raises `RewardTimeout`, and the worker, which may
hang, is drained and replaced. Propagates exceptions of rewards; raises `ScoringLost` if several workers die on the
same trajectory; the caller decides whether to retry. A cancelled scoring occupies its slot until it ends,
since a reward cannot be interrupted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from ludus.cluster.protocol import RewardScores, ScoreJob, WorkerDied, WorkerHandle
from ludus.cluster.worker_pool import PoolLimits, PoolMember, WorkerPool
from ludus.config.sections.cluster import ClusterConfig
from ludus.errors import WorldError
from ludus.rollouts.reward_executor import RewardTimeout, add_grading_time, add_wait_time
from ludus.types import Task, Trajectory

MAX_ATTEMPTS = 3
"""Maximum attempts to score one trajectory."""

log = logging.getLogger("ludus.cluster")


class ScoringLost(WorldError):
    """Raised if every reward worker that scored an episode died."""

    part = "reward"


@dataclass
class RewardWorkers:
    """Pool of reward workers; `start` launches one. Use only on the worker group's event loop."""

    config: ClusterConfig
    start: Callable[[int], Awaitable[WorkerHandle]]
    limits: PoolLimits
    pool: WorkerPool = field(init=False)

    def __post_init__(self) -> None:
        self.pool = WorkerPool("reward worker", self.config.reward_workers, self.start, self.limits)

    async def scored(self, task: Task, trajectory: Trajectory) -> Trajectory:
        """Return the trajectory with rewards, computed by the least busy worker."""
        lost: WorkerDied | None = None
        start_s = time.perf_counter()
        for _ in range(MAX_ATTEMPTS):
            member = await self.pool.take(self.config.scorings_per_worker)
            scoring = asyncio.create_task(self._score_on(member, ScoreJob(task, trajectory)))
            self.pool.run_in_background(_finish(scoring))
            try:
                scores = await asyncio.shield(scoring)
                found = replace(trajectory, rewards=scores.parts, reward=scores.total)
                return add_wait_time(add_grading_time(found, scores.seconds), time.perf_counter() - start_s)
            except WorkerDied as error:
                if isinstance(error.__cause__, TimeoutError):
                    raise RewardTimeout(
                        f"The rewards of task {task.id} took longer than {self.config.scoring_timeout_s:g} s.",
                        "Make them faster, or increase cluster.scoring_timeout_s.",
                    ) from TimeoutError()
                lost = error
                log.warning("a reward worker died while scoring task %s, sample %d", task.id, trajectory.sample)
        assert lost is not None
        message = f"{MAX_ATTEMPTS} reward workers died scoring task {task.id}: {lost.message}"
        raise ScoringLost(message, lost.hint) from lost

    async def _score_on(self, member: PoolMember, job: ScoreJob) -> RewardScores:
        """Send a job to a worker and free its slot; replace the worker on timeout or loss."""
        try:
            found = await member.remote.call(job, self.config.scoring_timeout_s)
            assert isinstance(found, RewardScores)
            return found
        except WorkerDied as error:
            if isinstance(error.__cause__, TimeoutError):
                self.pool.retire(member, error)
            else:
                await self.pool.replace_dead(member, error)
            raise
        finally:
            await self.pool.release(member)


async def _finish(scoring: asyncio.Task[RewardScores]) -> None:
    """Wait for a scoring, ignoring errors; cancel it if the pool is closed."""
    try:
        await asyncio.wait({scoring})
    finally:
        scoring.cancel()
        scoring.add_done_callback(lambda task: task.cancelled() or task.exception())
