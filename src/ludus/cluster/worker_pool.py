"""Pool of workers of one kind and a fixed target size, and its use for reward workers.

The pool pings every member each second. One that times out or exits is killed and replaced. Members are listed only
between the calls of `joined` and `left`. If a replacement fails to start, the pool continues with fewer and retries.
If no member has ever started, or all are lost and the restart limit is exceeded, waiting callers raise `failed`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field

from ludus.cluster.protocol import Heartbeat, Role, Started, WorkerCommand, WorkerDied, WorkerHandle, failure_response
from ludus.config.sections.cluster import ClusterConfig
from ludus.errors import LudusError, WorldError
from ludus.rollouts.reward_executor import RewardTimeout, add_seconds, with_rewards
from ludus.rollouts.reward_process import ScoredEpisode, ScoreRequest
from ludus.types import Task, Trajectory

_HEARTBEAT_S = 1.0
_SHUTDOWN_S = 5.0
_DRAIN_S = 600.0
"""Timeout of draining a member."""
MAX_ATTEMPTS = 3
"""Maximum attempts of reward workers to score one trajectory."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class PoolMember:
    """Ready worker with `busy` requests in flight. A removed one finishes them if `is_draining`; else it is dead."""

    number: int
    remote: WorkerHandle
    started: Started
    busy: int = 0
    serial: int = -1
    is_draining: bool = False
    since: float = field(default_factory=time.monotonic)
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    watch: asyncio.Task[None] | None = None


@dataclass
class WorkerPool:
    """Workers by number. `start` launches the worker of a number; `joined` and `left` are called with a member.

    The count of consecutive losses resets if a member has been up for `proven_s`. Failed starts are retried after
    `wait_s`, doubled each time up to `longest_wait_s`.
    """

    kind: Role
    target: int
    start: Callable[[int], Awaitable[WorkerHandle]]
    config: ClusterConfig
    joined: Callable[[PoolMember], Awaitable[None]] | None = None
    left: Callable[[PoolMember], Coroutine[None, None, None]] | None = None
    proven_s: float = 600.0
    wait_s: float = 1.0
    longest_wait_s: float = 30.0
    members: dict[int, PoolMember] = field(default_factory=dict)
    num_lost: int = 0
    num_gone: int = 0
    """Number of members lost or removed."""
    failed: LudusError | None = None
    _number: int = 0
    _any_started: bool = False
    _closed: bool = False
    _consecutive_losses: int = 0
    _starting: set[asyncio.Task[None]] = field(default_factory=set)
    _failing: set[asyncio.Task[None]] = field(default_factory=set)
    _leaving: set[asyncio.Task[None]] = field(default_factory=set)
    _ending: set[asyncio.Task[None]] = field(default_factory=set)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def reconcile(self) -> None:
        """Start missing members and drain surplus ones."""
        if self.failed is not None or self._closed:
            return
        for _ in range(self.target - len(self.members) - len(self._starting)):
            _track(self._starting, self._add_member()).add_done_callback(self._failing.discard)
        surplus = max(0, len(self.members) - self.target)
        for member in sorted(self.members.values(), key=lambda m: m.busy)[:surplus]:
            self.drain(member)

    async def wait_until_full(self) -> None:
        """Wait until all members are ready, or one is and the others are being retried. Raises the pool's failure."""

        def holds() -> bool:
            tried = len(self.members) + len(self._failing)
            return len(self.members) >= self.target or (bool(self.members) and tried >= self.target)

        await self._until(holds)

    async def wait_for_any(self) -> None:
        """Wait until one member is ready. Raises the cause if the pool has failed."""
        await self._until(lambda: bool(self.members))

    async def take(self, most: int) -> PoolMember:
        """Reserve the least busy member with fewer than `most` requests in flight."""
        await self._until(lambda: any(m.busy < most for m in self.members.values()))
        member = min(self.members.values(), key=lambda m: (m.busy, m.number))
        member.busy += 1
        return member

    async def release(self, member: PoolMember) -> None:
        member.busy -= 1
        await self._notify()

    async def check(self) -> None:
        await asyncio.gather(*(self._ping(member) for member in tuple(self.members.values())))

    async def replace_dead(self, member: PoolMember, error: LudusError) -> None:
        """Kill and replace an unresponsive member, even if the caller is cancelled."""
        if self.members.get(member.number) is not member:
            return
        log.warning("%s %d died, starting a replacement: %s", self.kind, member.number, error)
        await self._record_loss(error, member)
        if self.left is not None:
            self.run_in_background(self.left(member))
        await asyncio.shield(_track(self._ending, self._end(member)))

    def retire(self, member: PoolMember, error: LudusError) -> None:
        """Drain and replace a member that cannot accept more work; this does not count as a loss."""
        if self.members.get(member.number) is not member:
            return
        log.warning("%s %d is replaced: %s", self.kind, member.number, error)
        self.drain(member)
        self.reconcile()

    async def handle_error(self, member: PoolMember, error: LudusError) -> None:
        """Replace the member of a failed request, unless the request timed out and the member responds to a ping."""
        if isinstance(error.__cause__, TimeoutError):
            await self._ping(member)
        else:
            await self.replace_dead(member, error)

    async def close(self) -> None:
        """Stop all members; kill those that do not stop."""
        self.target = 0
        self._closed = True
        for task in (*self._starting, *self._leaving):
            task.cancel()
        await asyncio.gather(*self._starting, *self._leaving, *self._ending, return_exceptions=True)
        members = tuple(self.members.values())
        for member in members:
            self._drop(member)
        await asyncio.gather(*(self._stop(member.remote) for member in members))

    async def _add_member(self) -> None:
        """Add one member; retry until it starts or the target size drops."""
        task, wait_s = asyncio.current_task(), self.wait_s
        assert task is not None
        while not await self._start() and self.failed is None:
            self._failing.add(task)
            await self._notify()
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, self.longest_wait_s)
            if len(self.members) + len(self._starting) > self.target:
                break
        self._starting.discard(task)
        self._failing.discard(task)
        self.reconcile()
        await self._notify()

    async def _start(self) -> bool:
        remote: WorkerHandle | None = None
        number = self._number
        self._number += 1
        try:
            remote = await self.start(number)
            started = await remote.call(WorkerCommand.START, self.config.startup_timeout_s)
            assert isinstance(started, Started)
            member = PoolMember(number, remote, started)
            await self._while_alive(member, self._join(member))
        except asyncio.CancelledError:
            if remote is not None:
                await remote.kill()
            raise
        except Exception as error:  # boundary: raised by callers that wait for a member
            if remote is not None:
                await remote.kill()
            cause = failure_response(error).error or LudusError(str(error))
            log.warning("%s %d did not start: %s", self.kind, number, cause)
            await self._record_loss(cause)
            return False
        return True

    async def _while_alive(self, member: PoolMember, work: Coroutine[None, None, None]) -> None:
        """Run work on a member until it stops responding to pings. Raises the error of the work or the ping."""

        async def until_unresponsive() -> LudusError:
            while True:
                await asyncio.sleep(_HEARTBEAT_S)
                try:
                    await self._heartbeat(member)
                except LudusError as error:
                    return error

        doing, unresponsive = asyncio.create_task(work), asyncio.create_task(until_unresponsive())
        try:
            await asyncio.wait({doing, unresponsive}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            doing.cancel()
            unresponsive.cancel()
            await asyncio.wait({doing, unresponsive})
        if doing.cancelled():
            raise unresponsive.result()
        doing.result()

    async def _join(self, member: PoolMember) -> None:
        """Admit and list a member in one step, so that it misses no later message."""
        if self.joined is not None:
            await self.joined(member)
        self._any_started = True
        self.members[member.number] = member
        member.watch = asyncio.create_task(self._watch(member))
        location = member.started
        log.info("%s %d runs at %s (%d)", self.kind, member.number, location.host, location.pid)

    async def _end(self, member: PoolMember) -> None:
        await member.remote.kill()
        self.reconcile()
        await self._notify()

    async def _record_loss(self, error: LudusError, member: PoolMember | None = None) -> None:
        """Count a loss. The pool fails if no member is left and losses continue, or if no first member started."""
        now = time.monotonic()
        if any(now - other.since >= self.proven_s for other in self.members.values()):
            self._consecutive_losses = 0
        self._consecutive_losses += 1
        self.num_lost += 1
        if member is not None:
            self._drop(member)
        if not self._any_started or (not self.members and self._consecutive_losses > self.config.restarts):
            self.failed = type(error)(f"The cluster has no {self.kind} left: {error.message}", error.hint)
            await self._notify()

    async def _watch(self, member: PoolMember) -> None:
        while self.members.get(member.number) is member:
            await self._ping(member)
            await asyncio.sleep(_HEARTBEAT_S)

    async def _ping(self, member: PoolMember) -> None:
        try:
            member.heartbeat = await self._heartbeat(member)
        except LudusError as error:
            self.run_in_background(self.replace_dead(member, error))

    async def _heartbeat(self, member: PoolMember) -> Heartbeat:
        heartbeat = await member.remote.call(WorkerCommand.PING, self.config.heartbeat_timeout_s)
        assert isinstance(heartbeat, Heartbeat)
        return heartbeat

    def _drop(self, member: PoolMember) -> None:
        self.members.pop(member.number, None)
        self.num_gone += 1
        if member.watch is not None and member.watch is not asyncio.current_task():
            member.watch.cancel()

    def drain(self, member: PoolMember) -> None:
        member.is_draining = True
        self._drop(member)
        self.run_in_background(self._drain(member))

    async def _drain(self, member: PoolMember) -> None:
        """Wait for the requests in flight of a member, then stop it."""
        try:
            async with asyncio.timeout(_DRAIN_S):
                if self.left is not None:
                    await self._while_alive(member, self.left(member))
                while (await self._heartbeat(member)).in_flight or member.busy:
                    await asyncio.sleep(_HEARTBEAT_S / 4)
        except (TimeoutError, LudusError) as error:
            log.warning("%s %d is stopped with requests in flight: %s", self.kind, member.number, error)
        finally:
            await self._stop(member.remote)

    async def _stop(self, remote: WorkerHandle) -> None:
        try:
            await remote.call(WorkerCommand.SHUTDOWN, _SHUTDOWN_S)
        except LudusError as error:
            log.info("a %s did not stop in time: %s", self.kind, error)
        finally:
            await remote.kill()

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.failed is not None or holds())
        if self.failed is not None:
            raise self.failed

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def run_in_background(self, work: Coroutine[None, None, None]) -> None:
        """Run work in the background until the pool closes."""
        _track(self._leaving, work)


def _track(tasks: set[asyncio.Task[None]], work: Coroutine[None, None, None]) -> asyncio.Task[None]:
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


class ScoringLost(WorldError):
    """Raised if every reward worker that scored an episode died."""

    part = "reward"


class RewardWorkers(WorkerPool):
    """Pool of reward workers. Use only on the worker group's event loop.

    If a worker dies, its trajectory is scored by another one; the episode is not repeated. Rewards depend on
    task and trajectory alone, so a timeout is not retried: it raises `RewardTimeout`, and the worker, which may
    hang, is drained and replaced. Propagates exceptions of rewards; raises `ScoringLost` if several workers die on the
    same trajectory; the caller decides whether to retry. A cancelled scoring occupies its slot until it ends,
    since a reward cannot be interrupted.
    """

    async def scored(self, task: Task, trajectory: Trajectory) -> Trajectory:
        """Return the trajectory with rewards, computed by the least busy worker."""
        lost: WorkerDied | None = None
        start_s = time.perf_counter()
        for _ in range(MAX_ATTEMPTS):
            member = await self.take(self.config.scorings_per_worker)
            scoring = asyncio.create_task(self._score_on(member, ScoreRequest(task, trajectory)))
            self.run_in_background(_finish(scoring))
            try:
                scores = await asyncio.shield(scoring)
                return add_seconds(with_rewards(trajectory, scores), waiting=time.perf_counter() - start_s)
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

    async def _score_on(self, member: PoolMember, job: ScoreRequest) -> ScoredEpisode:
        """Send a job to a worker and free its slot; replace the worker on timeout or loss."""
        try:
            found = await member.remote.call(job, self.config.scoring_timeout_s)
            assert isinstance(found, ScoredEpisode)
            return found
        except WorkerDied as error:
            if isinstance(error.__cause__, TimeoutError):
                self.retire(member, error)
            else:
                await self.replace_dead(member, error)
            raise
        finally:
            await self.release(member)


async def _finish(scoring: asyncio.Task[ScoredEpisode]) -> None:
    """Wait for a scoring, ignoring errors; cancel it if the pool is closed."""
    try:
        await asyncio.wait({scoring})
    finally:
        scoring.cancel()
        scoring.add_done_callback(lambda task: task.cancelled() or task.exception())
