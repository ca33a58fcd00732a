"""Workers in other processes: an engine behind HTTP, a rollout worker, or a reward worker.

A `WorkerServer` hosts one worker. It answers every message by its id, in order of completion, and never
raises: errors are responses.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from ludus.chat.render import Renderer, TemplateRenderer
from ludus.cluster.log_forwarding import LogForwarder
from ludus.cluster.protocol import (
    EngineSet,
    EngineSpec,
    Heartbeat,
    Message,
    Ping,
    PlayJob,
    RewardScores,
    RewardSpec,
    ScoreJob,
    Shutdown,
    Spec,
    Started,
    StartRole,
    UpdateEngines,
    WorkerResponse,
    WorkerSpec,
    failed,
)
from ludus.config.schema import Config
from ludus.config.sections.sandbox import SandboxConfig
from ludus.engines.embedded.engine import LocalEngine
from ludus.engines.models.loading import load_model, load_tokenizer
from ludus.engines.remote.engine import ServerEngine
from ludus.envs.base import World
from ludus.envs.registry import build_world, sandbox_settings
from ludus.errors import LudusError, WorldError
from ludus.rewards.base import Reward
from ludus.rollout.episode import scored
from ludus.rollout.ledger import Ledger
from ludus.rollout.reward_executor import ProcessRewardExecutor
from ludus.rollout.scheduler import SamplingPlan, Scheduler, engine_name, engine_scheduler
from ludus.sandbox import open_sandbox
from ludus.tools.base import shared_by
from ludus.training.run.session import add_lora, engine_settings, make_renderer, server_settings, set_up_compute

if TYPE_CHECKING:
    import uvicorn

    from ludus.gateway.service import CompletionService

UNSENT = -1
"""Version of an engine that has not received weights; no trainer sends it."""
_NAME = "policy"


class Worker(Protocol):
    """Interface of a worker."""

    async def do(self, message: Message) -> object:
        """Handle a message and return the response value."""
        ...


@dataclass
class WorkerServer:
    """Server side of a worker process, reachable at `address`.

    The log records of `log_forwarder`, if given, are sent with responses to heartbeats.
    """

    spec: Spec
    address: str
    log_forwarder: LogForwarder | None = None
    _role: Worker = field(init=False)
    _tasks: dict[int, asyncio.Task[object]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        match self.spec:
            case EngineSpec() as spec:
                self._role = EngineWorker(spec, self.address)
            case WorkerSpec() as spec:
                self._role = RolloutWorker(spec, self.address)
            case RewardSpec() as spec:
                self._role = RewardWorker(spec, self.address)

    async def call(self, number: int, message: Message) -> WorkerResponse:
        """Handle a message and return the response."""
        answer = await self._answer(number, message)
        if self.log_forwarder is None or not isinstance(message, StartRole | Ping | Shutdown):
            return answer
        return replace(answer, records=self.log_forwarder.take())

    async def _answer(self, number: int, message: Message) -> WorkerResponse:
        task = self._tasks[number] = asyncio.ensure_future(self._role.do(message))
        try:
            await asyncio.wait({task})
            return WorkerResponse(task.result())
        except asyncio.CancelledError:
            task.cancel()
            return WorkerResponse(error=LudusError("It was cancelled."))
        except Exception as error:  # boundary: the error is returned to the sender
            return failed(error)
        finally:
            self._tasks.pop(number, None)

    def cancel(self, number: int) -> None:
        """Cancel a message that is not done."""
        if number in self._tasks:
            self._tasks[number].cancel()


def _enter(folder: str) -> None:
    """Change to the trainer's folder if it exists here, so that relative paths match."""
    if os.path.isdir(folder):
        os.chdir(folder)


@dataclass
class EngineWorker:
    """Embedded engine of a run's model, served at `address`."""

    spec: EngineSpec
    address: str
    _service: CompletionService | None = field(default=None, init=False)
    _server: uvicorn.Server | None = field(default=None, init=False)
    _serving: asyncio.Task[None] | None = field(default=None, init=False)

    async def do(self, message: Message) -> object:
        """Handle start, ping and shutdown."""
        match message:
            case StartRole():
                return self._begin()
            case Ping() if self._service is not None:
                return Heartbeat(self._service.engine.stats(), self._service.num_under_way)
            case Shutdown():
                await self._stop()
                return None
        raise LudusError(f"An engine does not support {type(message).__name__}.")

    def _begin(self) -> Started:
        from ludus.gateway.app import make_app
        from ludus.gateway.endpoints import error_response
        from ludus.gateway.limits import http_server, listening, model_limits
        from ludus.gateway.service import CompletionService, served_model

        config, source = self.spec.config, self.spec.source
        _enter(self.spec.folder)
        set_up_compute(config)
        tokenizer = load_tokenizer(source)
        model = load_model(source, config.model.dtype, config.model.device)
        if config.model.lora is not None:
            model = add_lora(model, config.model.lora)
        settings = engine_settings(config, model)
        engine = LocalEngine(model, tokenizer, settings, version=UNSENT, copy=False)
        renderer = TemplateRenderer(tokenizer, config.env.tool_parser) if tokenizer.chat_template else None
        served = served_model(model, tokenizer, _NAME, source, renderer)
        self._service = CompletionService(engine, served, self.spec.token)
        listener = listening(self.address, 0)
        app = make_app(self._service, model)
        self._server = http_server(app, model_limits(engine.context_tokens), error_response)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        port = listener.getsockname()[1]
        shown = f"[{self.address}]" if ":" in self.address else self.address
        return Started(self.address, os.getpid(), f"http://{shown}:{port}")

    async def _stop(self) -> None:
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
        if self._service is not None:
            await self._service.engine.close()


def sandbox_of(config: Config) -> SandboxConfig:
    """Return the sandbox settings of one worker: its share of the machine's sandbox."""
    if config.cluster.on_ray:
        return config.sandbox
    places = config.sandbox.concurrency or max(2, os.cpu_count() or 2)
    shares = {"concurrency": max(1, places // config.cluster.workers)}
    room = open_sandbox(sandbox_settings(config.sandbox)).max_sessions
    if room is not None:
        shares["sessions"] = max(1, room // config.cluster.workers)
    return config.sandbox.model_copy(update=shares)


@dataclass
class RolloutWorker:
    """Environments and episodes, sampled with a set of engines.

    Computes rewards itself if the run has no reward workers.
    """

    spec: WorkerSpec
    address: str
    _world: World | None = field(default=None, init=False)
    _scoring: ProcessRewardExecutor | None = field(default=None, init=False)
    _renderer: Renderer | None = field(default=None, init=False)
    _engine: ServerEngine | None = field(default=None, init=False)
    _serial: int = field(default=-1, init=False)
    _schedulers: dict[SamplingPlan, Scheduler] = field(default_factory=dict, init=False)
    _playing: int = field(default=0, init=False)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def do(self, message: Message) -> object:
        """Handle start, engine updates, rollouts, ping and shutdown."""
        match message:
            case StartRole():
                return self._begin()
            case UpdateEngines(view=view):
                await self._follow(view)
            case PlayJob():
                return await self._play(message)
            case Ping():
                return Heartbeat(under_way=self._playing)
            case Shutdown():
                await self._stop()
        return None

    def _begin(self) -> Started:
        config, spec = self.spec.config, self.spec
        _enter(spec.folder)
        set_up_compute(config)
        self._world = build_world(config.env, config.rollout, sandbox_of(config))
        self._scoring = ProcessRewardExecutor.of(config)
        tokenizer = load_tokenizer(spec.source, needs_template=config.env.rendering == "chat")
        self._renderer = make_renderer(config.env, tokenizer)
        return Started(self.address, os.getpid())

    async def _follow(self, view: EngineSet) -> None:
        async with self._lock:
            if view.serial <= self._serial or not view.urls:
                return
            if self._engine is None:
                how = self.spec.config.engine
                self._engine = await asyncio.to_thread(
                    ServerEngine,
                    view.urls[:1],
                    how.api,
                    replace(server_settings(how.model_copy(update={"token_file": None})), token=self.spec.token),
                )
            self._engine.follow(view.urls, view.version, view.adapter)
            self._serial = view.serial

    async def _play(self, message: PlayJob) -> object:
        scheduler = self._schedulers.get(message.play) or self._scheduler(message.play)
        if message.pin is not None and self._engine is not None:
            self._engine.pin(engine_name(message.play, message.job.key), message.pin)
        self._playing += 1
        try:
            with shared_by(self.spec.config.cluster.workers):
                return await scheduler.attempt(message.job)
        finally:
            self._playing -= 1

    def _scheduler(self, play: SamplingPlan) -> Scheduler:
        """Return a scheduler without lockstep, since other workers' turns are unknown here."""
        if self._world is None or self._renderer is None or self._engine is None:
            raise WorldError("A rollout was requested before the worker received engines.")
        rollout = self.spec.config.rollout.model_copy(update={"reproducible": False})
        made = engine_scheduler(self._world, self._engine, self._renderer, rollout, play, Ledger())
        made.scores = self.spec.config.cluster.reward_workers == 0
        if self._scoring is not None:
            made.scoring = self._scoring
        return self._schedulers.setdefault(play, made)

    async def _stop(self) -> None:
        if self._world is not None:
            await self._world.close()
        if self._engine is not None:
            await self._engine.close()


@dataclass
class RewardWorker:
    """Rewards of a world, computed on threads so that a slow verifier does not block heartbeats."""

    spec: RewardSpec
    address: str
    _world: World | None = field(default=None, init=False)
    _threads: ThreadPoolExecutor = field(init=False)
    _scoring: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._threads = ThreadPoolExecutor(self.spec.config.cluster.scorings_per_worker, "ludus-rewards")

    async def do(self, message: Message) -> object:
        """Handle start, scoring, ping and shutdown."""
        match message:
            case StartRole():
                config = self.spec.config
                _enter(self.spec.folder)
                set_up_compute(config)
                self._world = build_world(config.env, config.rollout, config.sandbox)
                return Started(self.address, os.getpid())
            case ScoreJob():
                return await self._score(message)
            case Ping():
                return Heartbeat(under_way=self._scoring)
            case Shutdown():
                self._threads.shutdown(wait=False, cancel_futures=True)
                if self._world is not None:
                    await self._world.close()
                return None
        raise LudusError(f"A reward worker does not support {type(message).__name__}.")

    async def _score(self, message: ScoreJob) -> RewardScores:
        if self._world is None:
            raise WorldError("A scoring was requested before the reward worker was started.")
        self._scoring += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, _scores, self._world.rewards, message)
        finally:
            self._scoring -= 1


def _scores(rewards: Sequence[Reward], message: ScoreJob) -> RewardScores:
    begin = time.perf_counter()
    judged = scored(rewards, message.task, message.trajectory)
    return RewardScores(dict(judged.rewards), judged.reward, time.perf_counter() - begin)
