"""Supervise the engines, rollout workers and reward workers of a run, on the background event loop.

A new engine receives the current weights and is checked before any worker uses it; weights are not sent while
an engine joins. Workers receive a new weight version before any engine loads it, and each change of the set of
engines immediately. With rolling updates an attempt is pinned to one engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ludus.cluster.protocol import (
    EngineSet,
    Launcher,
    ResourceRequest,
    Role,
    RolloutJob,
    WorkerDied,
    WorkerHandle,
    WorkerSpec,
)
from ludus.cluster.worker_pool import PoolMember, RewardWorkers, WorkerPool
from ludus.config.sections.cluster import ClusterConfig
from ludus.engines.base import EngineStats, WeightCheck
from ludus.engines.remote.engine import ServerEngine
from ludus.engines.remote.rolling_update import RollingUpdates
from ludus.errors import EngineError, LudusError, UserError, WorldError
from ludus.rollouts.scheduler import engine_name
from ludus.rollouts.trees import map_paths
from ludus.types import Trajectory

if TYPE_CHECKING:
    import torch

_MEASURE_S = 2.0
_TRIES = 5
"""Number of attempts to send weights while engines die."""

Result = TypeVar("Result")


class WorkerLost(WorldError):
    """Raised if a worker died or timed out while running an episode."""

    part = "worker"


@dataclass(frozen=True)
class ClusterPlan:
    """Numbers and settings of the workers of a run. `connect` creates a client of the engines at given URLs.

    The engines at `urls` are external; if it is empty, the cluster starts engines.
    """

    spec: WorkerSpec
    connect: Callable[[list[str]], ServerEngine]
    urls: tuple[str, ...] = ()
    sends_adapters: bool = False

    @property
    def config(self) -> ClusterConfig:
        return self.spec.config.cluster

    @property
    def sizes(self) -> dict[Role, int]:
        engines = 0 if self.urls else self.config.engines
        return {"engine": engines, "worker": self.config.workers, "reward worker": self.config.reward_workers}

    def spec_of(self, role: Role) -> WorkerSpec:
        """Return the settings of a worker. Reward workers need no access to the engines."""
        return replace(self.spec, role=role, token="" if role == "reward worker" else self.spec.token)

    @property
    def needs(self) -> list[ResourceRequest]:
        return [self.spec_of(role).needs for role, count in self.sizes.items() for _ in range(count)]


@dataclass
class WorkerGroup:
    """The workers of a plan. Belongs to one event loop."""

    plan: ClusterPlan
    launcher: Launcher
    server: ServerEngine | None = None
    engines: WorkerPool = field(init=False)
    workers: WorkerPool = field(init=False)
    rewards: RewardWorkers | None = field(default=None, init=False)
    rolling: RollingUpdates | None = None
    _serial: int = 0
    _version: int | None = None
    _num_left: int = 0
    """Number of engines removed from the pool and from the client."""
    _closing: bool = False
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        config = self.plan.config
        count, start, on_change = self.plan.sizes["engine"], self._start, (self._engine_joined, self._engine_left)
        self.engines = WorkerPool("engine", count, partial(start, "engine"), config, *on_change)
        self.workers = WorkerPool("worker", config.workers, partial(start, "worker"), config, self._worker_joined)
        if config.reward_workers:
            self.rewards = RewardWorkers(
                "reward worker", config.reward_workers, partial(start, "reward worker"), config
            )

    @property
    def pools(self) -> list[WorkerPool]:
        return [self.engines, self.workers] + ([] if self.rewards is None else [self.rewards])

    async def open(self) -> None:
        """Start all workers and wait until they are ready. Raises the startup error."""
        if self.plan.urls:
            self.server = await asyncio.to_thread(self.plan.connect, list(self.plan.urls))
        for pool in self.pools:
            pool.reconcile()
        for pool in self.pools:
            await pool.wait_until_full()
        await self._send_engines()

    async def scale(self, *targets: int | None) -> None:
        """Apply the sizes of `pools` and wait for new members; removed ones drain first."""
        for pool, target in zip(self.pools, targets, strict=False):
            if target is not None:
                pool.target = target
                pool.reconcile()
        for pool in self.pools:
            await pool.wait_until_full()

    async def change_engines(self, by: int, number: int | None = None) -> None:
        """Change the number of engines by `by`; if it is -1, `number` selects the one to remove (None: the least busy).

        Raises UserError for an unknown number and for the last engine.
        """
        pool = self.engines
        if pool.target + by < 1:
            raise UserError("The last engine of a run cannot be removed.", "Add another engine first.")
        if number is not None and number not in pool.members:
            known = ", ".join(map(str, sorted(pool.members)))
            raise UserError(f"The run has no engine {number}.", f"Engines: {known}.")
        pool.target += by
        if number is not None:
            pool.drain(pool.members[number])
        pool.reconcile()
        await pool.wait_until_full()

    async def run_attempt(self, message: RolloutJob, deadline_s: float) -> Trajectory:
        """Run an attempt on the least busy worker. Raises its error or `WorkerLost`."""
        if not self.plan.urls:
            await self.engines.wait_for_any()
        member = await self.workers.take(self.plan.config.episodes_per_worker)
        name = engine_name(message.plan, message.request.key)
        try:
            if self.rolling is not None:
                message = replace(message, pin=await self.rolling.place(name))
            trajectory = await member.remote.call(message, deadline_s)
        except WorkerDied as error:
            await self.workers.handle_error(member, error)
            raise WorkerLost(error.message) from error
        finally:
            if self.rolling is not None:
                self.rolling.release(name)
            await self.workers.release(member)
        assert isinstance(trajectory, Trajectory)
        if (rewards := self.rewards) is None:
            return trajectory
        return await map_paths(trajectory, lambda path: rewards.scored(message.request.task, path))

    async def load_weights(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Send weights to all engines, including replacements that start during the transfer."""

        async def send(server: ServerEngine) -> None:
            async with self._lock:
                self._version = version
                if not self.plan.sends_adapters:
                    await self._send_engines()
                await server.load_weights(version, state)
                if self.plan.sends_adapters:
                    await self._send_engines()

        await self.query(send)

    async def roll(self, max_lag: int) -> RollingUpdates:
        assert self.server is not None
        self.rolling = await self.server.roll(max_lag, self._is_alive)
        return self.rolling

    async def push_weights(self, check: WeightCheck, state: Mapping[str, torch.Tensor]) -> None:
        """Publish weights that each engine loads once it has drained."""
        assert self.rolling is not None
        async with self._lock:
            self._version = check.version
            await self._send_engines()
            await self.rolling.push_weights(check, state)

    async def _is_alive(self, url: str) -> bool:
        """Return whether the engine at an address is alive, after a failure."""
        if self.plan.urls:
            return True
        await self.engines.check()
        await asyncio.sleep(0)
        return any(member.started.url == url for member in self.engines.members.values())

    async def query(self, what: Callable[[ServerEngine], Awaitable[Result]]) -> Result:
        """Query the engines; retry if an engine died or was removed during the query."""
        for attempt in range(_TRIES):
            if not self.plan.urls:
                await self.engines.wait_for_any()
            assert self.server is not None
            departures = self.engines.num_gone, self._num_left
            try:
                return await what(self.server)
            except EngineError:
                await self.engines.check()
                await asyncio.sleep(0)
                if (self.engines.num_gone, self._num_left) == departures or attempt == _TRIES - 1:
                    raise
        raise AssertionError("unreachable")

    async def measure(self) -> None:
        """Refresh the engines' statistics; skip engines that do not respond within 2 s."""
        if self.plan.urls and self.server is not None:
            await self.server.measure()
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(_MEASURE_S):
                await self.engines.check()

    def stats(self) -> dict[int, EngineStats]:
        members = tuple(self.engines.members.items())  # may be called from another thread
        return {number: member.heartbeat.stats for number, member in members}

    async def close(self) -> None:
        """Stop all workers, the client of the engines and the launcher."""
        self._closing = True
        if self.server is not None:
            await self.server.close()
        await asyncio.gather(*(pool.close() for pool in self.pools))
        await self.launcher.close()

    async def _start(self, role: Role, number: int) -> WorkerHandle:
        return await self.launcher.start(f"{role} {number}", self.plan.spec_of(role))

    async def _engine_joined(self, member: PoolMember) -> None:
        async with self._lock:
            if self.server is None:
                self.server = await asyncio.to_thread(self.plan.connect, [member.started.url])
            else:
                await self.server.join(member.started.url)
            await self._send_engines()

    async def _engine_left(self, member: PoolMember) -> None:
        if self.server is None or self._closing:
            return
        try:
            if member.is_draining and self.rolling is not None:
                await self.rolling.empty(member.started.url)
        finally:
            if not self._closing:
                self._num_left += 1
                self.server.leave(member.started.url)
                await self._send_engines()

    async def _worker_joined(self, member: PoolMember) -> None:
        """Admit a worker once it has the current set of engines."""
        while member.serial != self._serial:
            await self._send(member)

    async def _send_engines(self) -> None:
        self._serial += 1
        await asyncio.gather(*(self._send_or_replace(member) for member in tuple(self.workers.members.values())))

    async def _send_or_replace(self, member: PoolMember) -> None:
        try:
            await self._send(member)
        except WorkerDied as error:
            await self.workers.replace_dead(member, error)
        except LudusError:  # an engine in the set is already gone; the next set does not contain it
            return

    async def _send(self, member: PoolMember) -> None:
        """Send the set of engines to a worker, rotated by its number for load balancing."""
        serial = self._serial
        if self.server is not None:
            urls = tuple(self.server.urls)
            first = member.number % max(1, len(urls))
            engines = EngineSet(serial, urls[first:] + urls[:first], self._version, self.server.adapter)
            await member.remote.call(engines, self.plan.config.heartbeat_timeout_s)
        member.serial = serial
