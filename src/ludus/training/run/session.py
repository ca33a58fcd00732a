"""What every command starts from: world, model, tokenizer and renderer of a configuration."""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ludus.chat.render import Renderer, TemplateRenderer
from ludus.chat.tags import PROTOCOLS, TagsRenderer
from ludus.config.schema import Config
from ludus.config.sections.model import LoraConfig
from ludus.config.sections.rollout import EngineConfig, EnvConfig, RolloutConfig
from ludus.engines.base import Engine
from ludus.engines.control_tokens import read_token
from ludus.engines.embedded.engine import EngineSettings, LocalEngine
from ludus.engines.embedded.radix_cache import PAGE
from ludus.engines.models.loading import load_model, load_tokenizer, num_positions
from ludus.engines.remote.engine import ServerEngine
from ludus.engines.remote.http_client import NoServerAvailable, RemoteEngineSettings, serve_command
from ludus.envs.base import World
from ludus.envs.registry import build_world
from ludus.errors import EngineError, UserError
from ludus.recipes import recipe_folder
from ludus.rollout.build import SamplingPlan, engine_scheduler
from ludus.rollout.ledger import Ledger
from ludus.rollout.reward_executor import ProcessRewardExecutor
from ludus.rollout.scheduler import Scheduler

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


SMALL_MODEL = 20_000_000
"""Parameters below which a decoding step is too short to be worth a second compute thread."""


@dataclass(frozen=True)
class TrainingSession:
    """The parts of a run that do not change while it runs (the model's weights do)."""

    config: Config
    world: World
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    renderer: Renderer
    source: str = ""
    """Where model and tokenizer came from: a folder or a name."""

    @functools.cached_property
    def scoring(self) -> ProcessRewardExecutor:
        """What computes the rewards of the episodes that are played here."""
        return ProcessRewardExecutor.of(self.config)


BUSY = 0.75
"""Processes that want a core, for each core, from which threads of this process compete with them."""


def set_up_compute(config: Config) -> None:
    """Set thread counts and seeds, and ask torch for deterministic kernels."""
    threads = config.run.threads or default_threads()
    torch.set_num_threads(threads)
    torch.manual_seed(config.run.seed)
    torch.use_deterministic_algorithms(config.rollout.reproducible, warn_only=True)


def busy_warning(config: Config) -> str:
    """A sentence if other processes want the cores that the learner's threads take; else empty.

    OpenMP threads that compete for a core wait for each other at every operation.
    """
    threads = config.run.threads or default_threads()
    cores, load = usable_cores(), os.getloadavg()[0]
    if threads == 1 or load <= BUSY * cores:
        return ""
    return (
        f"The machine is busy (load {load:.1f} on {cores} cores): {threads} compute threads that compete "
        "with other processes can be several times slower than one. Set --run.threads 1."
    )


def usable_cores() -> int:
    """The cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def default_threads() -> int:
    """What torch would take (one thread per core, or OMP_NUM_THREADS where that is set), at most 4."""
    return min(4, torch.get_num_threads())


def open_session(config: Config, weights: Path | None = None, world: World | None = None) -> TrainingSession:
    """Build world, model and renderer. `weights`, if given, is a checkpoint that takes the model's place;
    `world` is that of the settings, where it is there already.

    Raises UserError and its children for everything that a user can mend.
    """
    set_up_compute(config)
    world = world or build_world(config.env, config.rollout, config.sandbox)
    path = str(weights) if weights is not None else model_path(config)
    tokenizer = load_tokenizer(path, needs_template=config.env.rendering == "chat")
    model = load_model(path, config.model.dtype, config.model.device)
    if config.model.lora is not None:
        model = with_adapters(model, config.model.lora)
    return TrainingSession(config, world, model, tokenizer, make_renderer(config.env, tokenizer), path)


def model_path(config: Config) -> str:
    """Where the policy comes from: the configured path, or the world's cold start in the package."""
    if config.model.path is not None:
        return config.model.path
    folder = recipe_folder(config.env.name) / "cold_start" if config.env.name.isidentifier() else None
    if folder is None or not folder.is_dir():
        raise UserError(
            f"No model is given, and the world {config.env.name!r} ships no cold start.",
            "Set --model.path to a checkpoint or a model name, or make one with `ludus sft`.",
        )
    if config.env.rendering != "chat":
        raise UserError(
            "The packaged cold start speaks in its chat template, not in tags.",
            f"Make one that does: `ludus sft {config.env.name} --env.rendering {config.env.rendering}`.",
        )
    return str(folder)


def session_scheduler(
    session: TrainingSession,
    engine: Engine,
    play: SamplingPlan,
    ledger: Ledger,
    rollout: RolloutConfig | None = None,
) -> Scheduler:
    """What plays the session's episodes; `rollout`, where given, in the place of the session's settings."""
    how = rollout or session.config.rollout
    made = engine_scheduler(session.world, engine, session.renderer, how, play, ledger)
    return replace(made, scoring=session.scoring)


def make_renderer(env: EnvConfig, tokenizer: Any) -> Renderer:  # noqa: ANN401 (a transformers tokenizer)
    """The rendering that the settings name."""
    if env.rendering != "chat":
        return TagsRenderer(tokenizer, PROTOCOLS[env.rendering])
    return TemplateRenderer(tokenizer, env.tool_parser)


def make_engine(session: TrainingSession) -> Engine:
    """What samples: the configured server, or an engine in this process.

    Raises EngineError where a server does not answer.
    """
    if not session.config.engine.url:
        return local_engine(session)
    try:
        return server_engine(session.config)
    except NoServerAvailable as error:
        raise EngineError(
            error.message, f"Start it first: {serve_command(error.url, session.source)}"
        ) from error


def server_engine(config: Config) -> ServerEngine:
    """The servers of the settings. They hold whatever they were started with until weights are sent.

    With `model.lora` they keep that, and are sent adapters.
    """
    engine, lora = config.engine, config.model.lora
    scaling = None if lora is None else lora.alpha / lora.rank
    urls = (engine.url or "").split(",")
    settings = replace(
        server_settings(engine),
        keeps_adapters=keeps_adapter_versions(config),
        moves_episodes=config.staleness.moves,
    )
    return ServerEngine(urls, engine.dialect, settings, lora_scaling=scaling)


def server_settings(engine: EngineConfig) -> RemoteEngineSettings:
    """How servers are asked."""
    return RemoteEngineSettings(
        timeout_s=engine.timeout_s,
        patience_s=engine.patience_s,
        weights_folder=engine.weights_folder or "",
        broadcast_host=engine.broadcast_host or "",
        delta=engine.delta,
        token=read_token(Path(engine.token_file)) if engine.token_file else "",
    )


def local_engine(session: TrainingSession) -> LocalEngine:
    """An embedded engine with a copy of the session's weights, and room for all episodes in flight."""
    return LocalEngine(session.model, session.tokenizer, engine_settings(session.config, session.model))


def engine_settings(config: Config, model: PreTrainedModel) -> EngineSettings:
    """Those of an embedded engine that samples for a run."""
    rollout = config.rollout
    streams = config.training.mode == "async"
    limit = num_positions(model) or rollout.max_tokens
    return EngineSettings(
        context_tokens=min(limit, rollout.max_tokens),
        max_batch=rollout.concurrency + streams,  # with room for the probe of new weights
        cache_tokens=config.engine.cache_tokens or rollout.concurrency * (rollout.max_tokens + PAGE),
        max_requests=config.engine.max_requests,
        batch_invariant=rollout.reproducible and not streams,
        recompute_on_update=not streams or config.staleness.cache == "prefill",
        adapter_versions=keeps_adapter_versions(config),
        threads=1 if model.num_parameters() < SMALL_MODEL else 0,
    )


def keeps_adapter_versions(config: Config) -> bool:
    """Whether versions of an adapter live side by side, so that an episode that is to end on its version
    holds nothing up. Engines of a cluster take theirs one by one."""
    stays = config.training.mode == "async" and not config.staleness.interruptible
    return stays and config.model.lora is not None and config.cluster.kind == "none"


def with_adapters(model: PreTrainedModel, lora: LoraConfig) -> PreTrainedModel:
    """The model with trainable low-rank adapters, its own weights frozen. Needs the `lora` extra."""
    try:
        from peft import LoraConfig as PeftConfig
        from peft import get_peft_model
    except ImportError as error:
        raise UserError("LoRA needs the package peft.", "Install it: pip install 'ludus[lora]'.") from error
    config = PeftConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.target_modules, task_type="CAUSAL_LM"
    )
    adapted: PreTrainedModel = get_peft_model(model, config)
    return adapted
