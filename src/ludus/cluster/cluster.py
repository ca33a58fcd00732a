"""A run's cluster, as training sees it: an engine to send weights to, and somewhere to play episodes."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ludus.cluster.event_loop_thread import EventLoopThread
from ludus.cluster.handles import Launcher
from ludus.cluster.local_launcher import LocalLauncher
from ludus.cluster.protocol import EngineSpec, PlayJob, RewardSpec, WorkerSpec
from ludus.cluster.supervisor import ClusterPlan, WorkerGroup
from ludus.cluster.worker_pool import PoolMember
from ludus.config.schema import Config
from ludus.config.sections.rollout import RolloutConfig
from ludus.engines.base import EngineStats, Request, RollingUpdate, WeightCheck, combined
from ludus.engines.remote.engine import ServerEngine
from ludus.engines.remote.http_client import RemoteEngineSettings
from ludus.engines.remote.rolling_update import RollingUpdates
from ludus.envs.base import World
from ludus.errors import ConfigError, UserError
from ludus.rollout.build import SamplingPlan, rollout_for
from ludus.rollout.reward_executor import START_S
from ludus.rollout.scheduler import Attempt, RolloutRequest
from ludus.training.run.session import TrainingSession, server_engine, server_settings
from ludus.types import Completion, Task, Trajectory

if TYPE_CHECKING:
    import torch


@dataclass
class ClusterEngine:
    """The engines of a cluster as one `Engine`. Dead ones are replaced while it waits."""

    crowd: WorkerGroup
    background: EventLoopThread
    server: ServerEngine
    _before: dict[int, EngineStats] = field(default_factory=dict)

    @property
    def context_tokens(self) -> int:
        """That of each of them."""
        return self.server.context_tokens

    @property
    def version(self) -> int:
        """That of the weights that were sent last."""
        return self.server.version

    @property
    def batch_invariant(self) -> bool:
        """What they say of themselves."""
        return self.server.batch_invariant

    async def generate(self, request: Request) -> Completion:
        """Sample one action; workers do so without this process."""
        return await self.background.do(self.crowd.ask(lambda server: server.generate(request)))

    async def generate_batch(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample one action for each request."""
        return await self.background.do(self.crowd.ask(lambda server: server.generate_batch(requests)))

    def release(self, episode: str) -> None:
        """Nothing: workers release what they play."""

    async def load_weights(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Have all engines take weights, with their proof. Raises as `ServerEngine.load_weights`."""
        await self.background.do(self.crowd.load_weights(version, state))

    @property
    def can_roll(self) -> bool:
        """Whether several engines are kept (one may be out), and they can take weights one by one."""
        plan = self.crowd.plan
        return self.server.can_roll if plan.engine is None else plan.config.engines > 1

    async def roll(self, lag: int) -> RollingUpdate:
        """Have engines take weights one by one from now on; see `ServerEngine.roll`."""
        return _FromOutside(self.crowd, await self.background.do(self.crowd.roll(lag)), self.background)

    async def fingerprint(self) -> str | None:
        """The digest of the weights in use, the same of all."""
        return await self.background.do(self.crowd.ask(lambda server: server.fingerprint()))

    async def score(self, token_ids: Sequence[int], *, adapter: str | None = None) -> list[float]:
        """Log-probability of each token; the engines must agree."""
        return await self.background.do(
            self.crowd.ask(lambda server: server.score(token_ids, adapter=adapter))
        )

    async def measure(self) -> None:
        """Ask the engines how it goes."""
        await self.background.do(self.crowd.measure())

    def stats(self, *, reset: bool = False) -> EngineStats:
        """Of the engines together, as of their last signs of life: of `measure`, or a second old at most."""
        if self.crowd.plan.engine is None:
            return self.server.stats(reset=reset)
        now = self.crowd.stats()
        found = combined(now, self._before)
        if reset:
            self._before = now
        return found

    async def close(self) -> None:
        """Nothing: the cluster closes what it has started."""


@dataclass(frozen=True)
class _FromOutside:
    """The engines that take weights one by one, asked from another event loop."""

    crowd: WorkerGroup
    rolling: RollingUpdates
    background: EventLoopThread

    async def offer(self, check: WeightCheck, state: Mapping[str, torch.Tensor]) -> None:
        await self.background.do(self.crowd.offer(check, state))

    async def served(self, beyond: int) -> int:
        return await self.background.do(self.rolling.served(beyond))

    async def catch_up(self) -> None:
        await self.background.do(self.rolling.catch_up())


@dataclass
class Cluster:
    """Engines and workers that sample for a run; see `open_cluster`."""

    config: Config
    world: World
    crowd: WorkerGroup
    background: EventLoopThread

    def engine(self) -> ClusterEngine:
        """The engines, once everything is ready. Raises what keeps it from that."""
        self.background.wait(self.crowd.open())
        assert self.crowd.server is not None
        return ClusterEngine(self.crowd, self.background, self.crowd.server)

    def attempts(self, play: SamplingPlan) -> Attempt:
        """What has an attempt played by a worker, whose trajectory comes back."""

        async def attempt(job: RolloutRequest) -> Trajectory:
            message, deadline_s = PlayJob(job, play), self.deadline_s(job.task)
            return await self.background.do(self.crowd.play(message, deadline_s))

        return attempt

    def scale(
        self, *, engines: int | None = None, workers: int | None = None, reward_workers: int | None = None
    ) -> None:
        """Have other numbers of them from now on; may be called from any thread.

        Returns when those that come are ready, or have not started: those are tried again. What leaves ends
        its work first, and takes nothing new. Raises UserError for a number below 1.
        """
        if min(n for n in (engines, workers, reward_workers, 1) if n is not None) < 1:
            raise UserError("A cluster keeps at least one of each kind.", "Give numbers from 1 on.")
        if reward_workers is not None and self.crowd.rewards is None:
            raise UserError("The workers of this run score by themselves.", "See cluster.reward_workers.")
        if engines is not None:
            self._check_starts_engines()
        self.background.wait(self.crowd.scale(engines, workers, reward_workers))

    def add_engine(self) -> None:
        """Start one more engine; returns when it is ready. Raises UserError where the run starts none."""
        self._check_starts_engines()
        self.background.wait(self.crowd.change_engines(1))

    def remove_engine(self, number: int | None = None) -> None:
        """End the engine of a number, or the least busy one, once its work has ended; none begins there.

        Raises UserError for one that there is not, and for the last one.
        """
        self._check_starts_engines()
        self.background.wait(self.crowd.change_engines(-1, number))

    def engines(self) -> list[PoolMember]:
        """The engines that are ready, by number."""
        return sorted(self.crowd.engines.members.values(), key=lambda member: member.number)

    def _check_starts_engines(self) -> None:
        if self.crowd.plan.engine is None:
            raise UserError("This run did not start the engines at engine.url.", "Change workers alone.")

    def deadline_s(self, task: Task) -> float:
        """The longest that an attempt can take if every limit of its parts is used up, and then some."""
        rollout, engine = rollout_for(self.world, self.config.rollout, task), self.config.engine
        spare_s = self.config.cluster.silence_s + 2 * rollout.environment_timeout_s + self._scoring_s(rollout)
        if rollout.episode_timeout_s is not None:
            return rollout.episode_timeout_s + spare_s
        return rollout.max_turns * (engine.timeout_s + rollout.environment_timeout_s) + spare_s

    def _scoring_s(self, rollout: RolloutConfig) -> float:
        """Of that the rewards, where workers compute them: all of a worker's episodes may end at once."""
        cluster = self.config.cluster
        if cluster.reward_workers:
            return 0.0
        before = math.ceil(cluster.episodes_per_worker / max(1, rollout.reward_processes))
        return START_S + before * rollout.reward_timeout_s


@contextmanager
def open_cluster(session: TrainingSession) -> Iterator[Cluster]:
    """The cluster that the settings ask for, for the time of a block; nothing of it is left afterwards.

    Raises UserError where it cannot be had.
    """
    config = session.config
    check_cluster(config)
    background = EventLoopThread("ludus-cluster")
    try:
        plan = plan_of(session)
        launcher = _launcher(plan)
        if launcher.host and not (config.engine.broadcast_host or config.engine.weights_folder):
            plan = plan_of(session, launcher.host)
        crowd = background.wait(_crowd(plan, launcher))
        try:
            yield Cluster(config, session.world, crowd, background)
        finally:
            background.wait(crowd.close())
    finally:
        background.close()


def check_cluster(config: Config) -> None:
    """Raise ConfigError for settings that a cluster does not go with."""
    streams = config.training.mode == "async"
    if config.engine.url and config.model.lora is not None and streams:
        raise ConfigError(
            "LoRA adapters at servers of your own (engine.url) change their names with each version, which "
            "episodes that stream on a cluster cannot follow.",
            "Leave engine.url out, or set training.mode = 'sync' or 'one_step'.",
        )


def plan_of(session: TrainingSession, broadcast_host: str = "") -> ClusterPlan:
    """What is to run for a session; weights go over a line from `broadcast_host`, where one is given."""
    config = session.config
    folder, source = os.getcwd(), session.source
    if Path(source).is_dir():
        source = str(Path(source).resolve())
    settings = server_settings(config.engine)
    token = settings.token if config.engine.url else secrets.token_urlsafe(24)
    worker = WorkerSpec(config, source, folder, token)
    reward = RewardSpec(config, folder) if config.cluster.reward_workers else None
    if config.engine.url:
        return ClusterPlan(
            config.cluster,
            None,
            worker,
            (config.engine.url,),
            _at_urls(config),
            sends_adapters=config.model.lora is not None,
            reward=reward,
        )
    engine = config.engine
    if broadcast_host:
        engine = engine.model_copy(update={"broadcast_host": broadcast_host})
    settings = replace(server_settings(engine), keeps_weights=True, token=token)
    engines = EngineSpec(config, source, folder, token)
    return ClusterPlan(config.cluster, engines, worker, (), _client(settings), reward=reward)


def _client(settings: RemoteEngineSettings) -> Callable[[list[str]], ServerEngine]:
    return lambda urls: ServerEngine(urls, "vllm", settings)


def _at_urls(config: Config) -> Callable[[list[str]], ServerEngine]:
    return lambda _: server_engine(config)


def _launcher(plan: ClusterPlan) -> Launcher:
    if plan.config.kind == "local":
        return LocalLauncher()
    from ludus.cluster.ray_launcher import RayLauncher

    return RayLauncher(plan.config, plan.needs)


async def _crowd(plan: ClusterPlan, launcher: Launcher) -> WorkerGroup:
    """Made in the loop that it belongs to."""
    return WorkerGroup(plan, launcher)
