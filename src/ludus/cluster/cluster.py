"""Cluster of a run as seen by the trainer: an engine that receives weights, and workers that run episodes."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ludus.cluster.local_launcher import LocalLauncher
from ludus.cluster.protocol import Launcher, RolloutJob, WorkerSpec
from ludus.cluster.supervisor import ClusterPlan, WorkerGroup
from ludus.cluster.worker_pool import PoolMember
from ludus.config.schema import Config
from ludus.engines.base import EngineStats, Request, RollingUpdate, WeightCheck, combined
from ludus.engines.remote.engine import ServerEngine
from ludus.engines.remote.rolling_update import RollingUpdates
from ludus.envs.base import World
from ludus.errors import ConfigError, UserError
from ludus.rollouts.reward_executor import START_S
from ludus.rollouts.scheduler import Attempt, RolloutRequest, SamplingPlan, rollout_for
from ludus.training.run.session import TrainingSession, server_engine, server_settings
from ludus.types import Completion, Task, Trajectory

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class EventLoopThread:
    """Background event loop, used from other threads."""

    def __init__(self, name: str) -> None:
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[object, object, T]) -> Future[T]:
        """Schedule a coroutine; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, work: Coroutine[object, object, T]) -> T:
        """Run a coroutine and block until it is done."""
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def do(self, work: Coroutine[object, object, T]) -> T:
        return await asyncio.wrap_future(self.start(work))

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._runner.close()  # cancels the remaining tasks


@dataclass
class ClusterEngine:
    """The engines of a cluster as one `Engine`. Dead engines are replaced during a call."""

    group: WorkerGroup
    background: EventLoopThread
    server: ServerEngine
    _before: dict[int, EngineStats] = field(default_factory=dict)

    @property
    def context_tokens(self) -> int:
        return self.server.context_tokens

    @property
    def version(self) -> int:
        return self.server.version

    @property
    def batch_invariant(self) -> bool:
        return self.server.batch_invariant

    async def generate(self, request: Request) -> Completion:
        return await self.background.do(self.group.query(lambda server: server.generate(request)))

    async def generate_batch(self, requests: Sequence[Request]) -> list[Completion]:
        return await self.background.do(self.group.query(lambda server: server.generate_batch(requests)))

    def release(self, episode: str) -> None:
        """Do nothing: workers release their own episodes."""

    async def load_weights(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Send weights to all engines and check them. Raises the errors of `ServerEngine.load_weights`."""
        await self.background.do(self.group.load_weights(version, state))

    @property
    def can_roll(self) -> bool:
        """Whether rolling updates are supported and several engines are configured, of which one may be down."""
        return self.server.can_roll if self.group.plan.urls else self.group.plan.config.engines > 1

    async def roll(self, max_lag: int) -> RollingUpdate:
        return _ThreadsafeRollingUpdate(self.group, await self.background.do(self.group.roll(max_lag)), self.background)

    async def fingerprint(self) -> str | None:
        return await self.background.do(self.group.query(lambda server: server.fingerprint()))

    async def score(self, token_ids: Sequence[int], *, adapter: str | None = None) -> list[float]:
        return await self.background.do(self.group.query(lambda server: server.score(token_ids, adapter=adapter)))

    async def measure(self) -> None:
        await self.background.do(self.group.measure())

    def stats(self, *, reset: bool = False) -> EngineStats:
        """Return the engines' total statistics as of the last `measure` or heartbeat (at most 1 s old)."""
        if self.group.plan.urls:
            return self.server.stats(reset=reset)
        before, now = self._before, self.group.stats()
        self._before = now if reset else before
        return combined(now, before)

    async def close(self) -> None:
        """Do nothing: `open_cluster` stops the engines it started."""


@dataclass(frozen=True)
class _ThreadsafeRollingUpdate:
    """Rolling updates of the engines for callers on another event loop."""

    group: WorkerGroup
    rolling: RollingUpdates
    background: EventLoopThread

    async def push_weights(self, check: WeightCheck, state: Mapping[str, torch.Tensor]) -> None:
        await self.background.do(self.group.push_weights(check, state))

    async def wait_for_version(self, beyond: int) -> int:
        return await self.background.do(self.rolling.wait_for_version(beyond))

    async def wait_until_current(self) -> None:
        await self.background.do(self.rolling.wait_until_current())


@dataclass
class Cluster:
    """Engines and workers that sample for a run; see `open_cluster`."""

    config: Config
    world: World
    group: WorkerGroup
    background: EventLoopThread

    def engine(self) -> ClusterEngine:
        """Start the cluster and return its engines once all workers are ready. Raises the startup error."""
        self.background.wait(self.group.open())
        assert self.group.server is not None
        return ClusterEngine(self.group, self.background, self.group.server)

    def attempts(self, play: SamplingPlan) -> Attempt:
        """Return a function that runs an attempt on a worker and returns its trajectory."""

        async def attempt(request: RolloutRequest) -> Trajectory:
            message, deadline_s = RolloutJob(request, play), self.deadline_s(request.task)
            return await self.background.do(self.group.run_attempt(message, deadline_s))

        return attempt

    def scale(
        self, *, engines: int | None = None, workers: int | None = None, reward_workers: int | None = None
    ) -> None:
        """Change the number of engines and workers; may be called from any thread.

        Returns when new members are ready or have failed to start (they are retried). Removed members finish
        their work first. Raises UserError for a number below 1.
        """
        if min(n for n in (engines, workers, reward_workers, 1) if n is not None) < 1:
            raise UserError("A cluster needs at least one worker of each kind.", "Use numbers of at least 1.")
        if reward_workers is not None and self.group.rewards is None:
            raise UserError("Rollout workers of this run compute rewards themselves.", "See cluster.reward_workers.")
        if engines is not None:
            self._check_starts_engines()
        self.background.wait(self.group.scale(engines, workers, reward_workers))

    def change_engines(self, by: int, number: int | None = None) -> None:
        """Start (`by` is 1) or drain and stop (-1) an engine, and wait for it; see `WorkerGroup.change_engines`.

        Raises UserError if the run starts no engines.
        """
        self._check_starts_engines()
        self.background.wait(self.group.change_engines(by, number))

    def engines(self) -> list[PoolMember]:
        return sorted(self.group.engines.members.values(), key=lambda member: member.number)

    def _check_starts_engines(self) -> None:
        if self.group.plan.urls:
            raise UserError("This run did not start the engines at engine.url.", "Change the number of workers only.")

    def deadline_s(self, task: Task) -> float:
        """Return the maximum duration of an attempt from its timeouts, with a margin, in seconds."""
        rollout, cluster = rollout_for(self.world, self.config.rollout, task), self.config.cluster
        spare_s = cluster.heartbeat_timeout_s + 2 * rollout.environment_timeout_s
        if not cluster.reward_workers:  # all episodes of a worker may end at the same time
            rounds = math.ceil(cluster.episodes_per_worker / max(1, rollout.reward_processes))
            spare_s += START_S + rounds * rollout.reward_timeout_s
        if rollout.episode_timeout_s is not None:
            return rollout.episode_timeout_s + spare_s
        return rollout.max_turns * (self.config.engine.timeout_s + rollout.environment_timeout_s) + spare_s


@contextmanager
def open_cluster(session: TrainingSession) -> Iterator[Cluster]:
    """Start the configured cluster and stop it at the end of the block. Raises UserError if it cannot be started."""
    config = session.config
    check_cluster(config)
    background = EventLoopThread("ludus-cluster")
    try:
        plan = plan_of(session)
        launcher: Launcher = LocalLauncher()
        if config.cluster.kind == "ray":
            from ludus.cluster.ray_launcher import RayLauncher

            launcher = RayLauncher(plan.config, plan.needs)
        if launcher.host and not (config.engine.broadcast_host or config.engine.weights_folder):
            plan = plan_of(session, launcher.host)
        group = WorkerGroup(plan, launcher)
        try:
            yield Cluster(config, session.world, group, background)
        finally:
            background.wait(group.close())
    finally:
        background.close()


def check_cluster(config: Config) -> None:
    """Raise ConfigError for settings that a cluster does not support."""
    if config.engine.is_external and config.model.lora is not None and config.training.streams:
        raise ConfigError(
            "LoRA adapters on external servers (engine.url) get a new name for each version, which "
            "streamed episodes on a cluster do not support.",
            "Unset engine.url, or set training.mode = 'sync' or 'one_step'.",
        )


def plan_of(session: TrainingSession, broadcast_host: str = "") -> ClusterPlan:
    """Return the cluster plan of a session; weights are broadcast from `broadcast_host` if it is set."""
    config, engine, source = session.config, session.config.engine, session.source
    if Path(source).is_dir():
        source = str(Path(source).resolve())
    settings = server_settings(engine.model_copy(update={"broadcast_host": broadcast_host or engine.broadcast_host}))
    token = settings.token if engine.is_external else secrets.token_urlsafe(24)
    spec = WorkerSpec("worker", config, source, os.getcwd(), token)
    if engine.is_external:
        return ClusterPlan(spec, lambda _: server_engine(config), tuple(engine.urls), config.model.lora is not None)
    settings = replace(settings, keeps_weights=True, token=token)
    return ClusterPlan(spec, lambda urls: ServerEngine(urls, "vllm", settings))
