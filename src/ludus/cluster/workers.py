"""Workers in other processes: an engine behind HTTP, a rollout worker, or a reward worker.

A `WorkerServer` hosts one worker. It sends one response per message, in order of completion, and never
raises: errors are returned as responses.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from ludus.chat.render import Renderer, TemplateRenderer
from ludus.cluster.protocol import (
    EngineSet,
    Heartbeat,
    LogForwarder,
    Message,
    RolloutJob,
    Started,
    WorkerCommand,
    WorkerResponse,
    WorkerSpec,
    failure_response,
)
from ludus.config.schema import Config
from ludus.config.sections.rollout import SandboxConfig
from ludus.engines.embedded.engine import LocalEngine
from ludus.engines.models.loading import load_model, load_tokenizer
from ludus.engines.remote.engine import ServerEngine
from ludus.envs.base import World
from ludus.envs.registry import build_world, sandbox_settings
from ludus.errors import LudusError, WorldError
from ludus.rollouts.ledger import Ledger
from ludus.rollouts.reward_executor import ProcessRewardExecutor
from ludus.rollouts.reward_process import ScoredEpisode, ScoreRequest, Verifiers
from ludus.rollouts.scheduler import SamplingPlan, Scheduler, engine_name, engine_scheduler
from ludus.sandbox import open_sandbox
from ludus.tools.base import shared_by
from ludus.training.run.session import add_lora, engine_settings, make_renderer, server_settings, set_up_compute

NO_VERSION = -1
"""Weight version of an engine before its first update; never sent by a trainer."""


@dataclass
class WorkerServer:
    """Server side of a worker process, reachable at `address`; sends log records with responses to commands."""

    spec: WorkerSpec
    address: str
    log_forwarder: LogForwarder | None = None
    _worker: EngineWorker | RolloutWorker | RewardWorker | None = field(default=None, init=False)
    _tasks: dict[int, asyncio.Task[object]] = field(default_factory=dict, init=False)

    async def call(self, number: int, message: Message) -> WorkerResponse:
        task = self._tasks[number] = asyncio.ensure_future(self._handle(message))
        try:
            await asyncio.wait({task})
            response = WorkerResponse(task.result())
        except asyncio.CancelledError:
            task.cancel()
            response = WorkerResponse(error=LudusError("The request was cancelled."))
        except Exception as error:  # boundary: the error is returned to the sender
            response = failure_response(error)
        finally:
            self._tasks.pop(number, None)
        if self.log_forwarder is None or not isinstance(message, WorkerCommand):
            return response
        return replace(response, records=self.log_forwarder.take())

    async def _handle(self, message: Message) -> object:
        if message is WorkerCommand.START:
            return self._start()
        if self._worker is not None:
            return await self._worker.do(message)
        if message is WorkerCommand.PING:
            return Heartbeat()
        raise LudusError(f"The {self.spec.role} has not been started.")

    def _start(self) -> Started:
        if os.path.isdir(self.spec.folder):
            os.chdir(self.spec.folder)  # the trainer's working directory, for relative paths
        set_up_compute(self.spec.config)
        match self.spec.role:
            case "engine":
                self._worker = EngineWorker(self.spec, self.address)
                return Started(self.address, os.getpid(), self._worker.url)
            case "worker":
                self._worker = RolloutWorker.of(self.spec)
            case "reward worker":
                self._worker = RewardWorker(self.spec.config)
        return Started(self.address, os.getpid())

    def cancel(self, number: int) -> None:
        """Cancel the handling of a message, if it is not done."""
        if number in self._tasks:
            self._tasks[number].cancel()


class EngineWorker:
    """Embedded engine of a run's model, served at `url`."""

    def __init__(self, spec: WorkerSpec, address: str) -> None:
        from ludus.gateway.app import make_app
        from ludus.gateway.endpoints import error_response
        from ludus.gateway.limits import http_server, model_limits, open_socket
        from ludus.gateway.service import CompletionService, served_model

        config, source = spec.config, spec.source
        tokenizer = load_tokenizer(source)
        model = load_model(source, config.model.dtype, config.model.device)
        if config.model.lora is not None:
            model = add_lora(model, config.model.lora)
        engine = LocalEngine(model, tokenizer, engine_settings(config, model), version=NO_VERSION, copy=False)
        renderer = TemplateRenderer(tokenizer, config.env.tool_parser) if tokenizer.chat_template else None
        served = served_model(model, tokenizer, "policy", source, renderer)
        self._service = CompletionService(engine, served, spec.token)
        listener = open_socket(address, 0)
        app = make_app(self._service, model)
        self._server = http_server(app, model_limits(engine.context_tokens), error_response)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        host = f"[{address}]" if ":" in address else address
        self.url = f"http://{host}:{listener.getsockname()[1]}"

    async def do(self, message: Message) -> object:
        match message:
            case WorkerCommand.PING:
                return Heartbeat(self._service.engine.stats(), self._service.num_unfinished)
            case WorkerCommand.SHUTDOWN:
                self._server.should_exit = True
                await self._serving
                await self._service.engine.close()
                return None
        raise LudusError(f"An engine does not support {type(message).__name__}.")


def sandbox_of(config: Config) -> SandboxConfig:
    """Return the sandbox settings of one worker. Workers on one machine share its concurrency and sessions evenly."""
    if config.cluster.kind == "ray":
        return config.sandbox
    concurrency = config.sandbox.concurrency or max(2, os.cpu_count() or 2)
    shares = {"concurrency": max(1, concurrency // config.cluster.workers)}
    max_sessions = open_sandbox(sandbox_settings(config.sandbox)).max_sessions
    if max_sessions is not None:
        shares["sessions"] = max(1, max_sessions // config.cluster.workers)
    return config.sandbox.model_copy(update=shares)


@dataclass
class RolloutWorker:
    """Run episodes on a set of engines. Also compute rewards, if the run has no reward workers."""

    spec: WorkerSpec
    world: World
    renderer: Renderer
    scoring: ProcessRewardExecutor | None
    _engine: ServerEngine | None = field(default=None, init=False)
    _serial: int = field(default=-1, init=False)
    _schedulers: dict[SamplingPlan, Scheduler] = field(default_factory=dict, init=False)
    _playing: int = field(default=0, init=False)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    @classmethod
    def of(cls, spec: WorkerSpec) -> RolloutWorker:
        config = spec.config
        world = build_world(config.env, config.rollout, sandbox_of(config))
        tokenizer = load_tokenizer(spec.source, needs_template=config.env.rendering == "chat")
        return cls(spec, world, make_renderer(config.env, tokenizer), ProcessRewardExecutor.of(config))

    async def do(self, message: Message) -> object:
        match message:
            case EngineSet():
                await self._update_engines(message)
            case RolloutJob():
                return await self._play(message)
            case WorkerCommand.PING:
                return Heartbeat(in_flight=self._playing)
            case WorkerCommand.SHUTDOWN:
                await self.world.close()
                if self._engine is not None:
                    await self._engine.close()
        return None

    async def _update_engines(self, engines: EngineSet) -> None:
        async with self._lock:
            if engines.serial <= self._serial or not engines.urls:
                return
            if self._engine is None:
                config = self.spec.config.engine
                settings = server_settings(config.model_copy(update={"token_file": None}))
                settings = replace(settings, token=self.spec.token)
                self._engine = await asyncio.to_thread(ServerEngine, engines.urls[:1], config.api, settings)
            self._engine.follow(engines.urls, engines.version, engines.adapter)
            self._serial = engines.serial

    async def _play(self, message: RolloutJob) -> object:
        scheduler = self._schedulers.get(message.plan) or self._scheduler(message.plan)
        if message.pin is not None and self._engine is not None:
            self._engine.pin(engine_name(message.plan, message.request.key), message.pin)
        self._playing += 1
        try:
            with shared_by(self.spec.config.cluster.workers):
                return await scheduler.attempt(message.request)
        finally:
            self._playing -= 1

    def _scheduler(self, play: SamplingPlan) -> Scheduler:
        """Create the scheduler of a plan, without lockstep: it would need the turns of other workers."""
        if self._engine is None:
            raise WorldError("A rollout was requested before the worker received engines.")
        rollout = self.spec.config.rollout.model_copy(update={"reproducible": False})
        scheduler = engine_scheduler(self.world, self._engine, self.renderer, rollout, play, Ledger())
        scheduler.scores = self.spec.config.cluster.reward_workers == 0
        if self.scoring is not None:
            scheduler.scoring = self.scoring
        return self._schedulers.setdefault(play, scheduler)


class RewardWorker:
    """Compute rewards on threads, so that a slow verifier does not block heartbeats."""

    def __init__(self, config: Config) -> None:
        self._world = build_world(config.env, config.rollout, config.sandbox)
        self._verifiers = Verifiers(self._world.rewards)
        self._threads = ThreadPoolExecutor(config.cluster.scorings_per_worker, "ludus-rewards")
        self._scoring = 0

    async def do(self, message: Message) -> object:
        match message:
            case ScoreRequest():
                return await self._score(message)
            case WorkerCommand.PING:
                return Heartbeat(in_flight=self._scoring)
            case WorkerCommand.SHUTDOWN:
                self._threads.shutdown(wait=False, cancel_futures=True)
                await self._world.close()
                return None
        raise LudusError(f"A reward worker does not support {type(message).__name__}.")

    async def _score(self, message: ScoreRequest) -> ScoredEpisode:
        self._scoring += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._verifiers.run, message)
        finally:
            self._scoring -= 1
