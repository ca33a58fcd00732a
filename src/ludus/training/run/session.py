"""Session shared by all commands: world, model, tokenizer and renderer of a configuration."""

from __future__ import annotations

import copy
import functools
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from ludus.chat.render import Renderer, TemplateRenderer
from ludus.chat.tags import PROTOCOLS, TagsRenderer
from ludus.config.paths import check_model_folder
from ludus.config.schema import Config
from ludus.config.sections.model import LoraConfig
from ludus.config.sections.rollout import EngineConfig, EnvConfig, RolloutConfig
from ludus.engines.base import DEFAULT, ROLE_ADAPTER, Engine
from ludus.engines.control_tokens import read_token
from ludus.engines.embedded.engine import EngineSettings, LocalEngine
from ludus.engines.embedded.kv_cache import PAGE
from ludus.engines.models.loading import load_model, load_tokenizer, num_positions
from ludus.engines.models.lora import FACTOR
from ludus.engines.models.vision import image_tokens, other_layers
from ludus.engines.remote.engine import ServerEngine
from ludus.engines.remote.http_client import RemoteEngineSettings, ServerUnreachable, serve_command
from ludus.engines.role_engines import RoleEngines
from ludus.envs.base import World
from ludus.envs.registry import build_world
from ludus.errors import EngineError, UserError
from ludus.gateway.agents import agent_server
from ludus.images import IMAGE_IDS
from ludus.plugins import check_result, find_plugin
from ludus.rollouts.ledger import Ledger
from ludus.rollouts.reward_executor import ProcessRewardExecutor
from ludus.rollouts.scheduler import SamplingPlan, Scheduler, engine_scheduler
from ludus.training.run.preflight import block_index, check_rows, model_path
from ludus.training.run.run_dir import RunFolder, policy_path

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


SMALL_MODEL = 20_000_000
"""Parameter count below which decoding is too fast to profit from a second compute thread."""
MAX_LOAD = 0.75
"""Load per core above which compute threads compete with other processes."""


@dataclass(frozen=True)
class TrainingSession:
    """Parts of a run that stay fixed (except for the model's weights)."""

    config: Config
    world: World
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    renderer: Renderer
    source: str = ""
    """Folder or name of model and tokenizer."""
    role_models: Mapping[str, PreTrainedModel] = field(default_factory=dict)
    """The separate models of roles (`model.roles`) by `Segment.policy`."""

    @functools.cached_property
    def scoring(self) -> ProcessRewardExecutor:
        return ProcessRewardExecutor.of(self.config)


def set_up_compute(config: Config) -> None:
    """Set thread counts and seeds, and enable deterministic kernels in torch."""
    torch.set_num_threads(config.run.threads or default_threads())
    torch.manual_seed(config.run.seed)
    torch.use_deterministic_algorithms(config.rollout.reproducible, warn_only=True)


def busy_warning(config: Config) -> str:
    """Return a warning if others use the cores of the learner's threads, which makes OpenMP slow; otherwise ""."""
    threads = config.run.threads or default_threads()
    cores, load = usable_cores(), os.getloadavg()[0]
    if threads == 1 or load <= MAX_LOAD * cores:
        return ""
    return (
        f"The machine is busy (load {load:.1f} on {cores} cores): {threads} compute threads competing "
        "with other processes can be several times slower than one. Set --run.threads 1."
    )


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@functools.cache
def default_threads() -> int:
    """Return torch's default (one thread per core, or OMP_NUM_THREADS), at most 4."""
    return min(4, torch.get_num_threads())


def open_session(config: Config, weights: Path | None = None, world: World | None = None) -> TrainingSession:
    """Build world (unless given), model (or the checkpoint `weights`) and renderer. Raises UserError."""
    set_up_compute(config)
    world = world or build_world(config.env, config.rollout, config.sandbox)
    path = str(weights) if weights is not None else model_path(config)
    tokenizer = load_tokenizer(path, needs_template=config.env.rendering == "chat")
    model = load_model(path, config.model.dtype, config.model.device)
    check_rows(path, len(tokenizer), model.get_input_embeddings().weight.shape[0])
    if config.model.lora is not None:
        model = add_lora(model, config.model.lora)
    others = load_role_models(config, tokenizer, weights)
    return TrainingSession(config, world, model, tokenizer, make_renderer(config.env, tokenizer, model), path, others)


def load_role_models(
    config: Config, tokenizer: PreTrainedTokenizerBase, checkpoint: Path | None
) -> dict[str, PreTrainedModel]:
    """Return the models of `model.roles` by policy: of the checkpoint, if it has them. Raises UserError."""
    models = {}
    for role, path in config.model.roles.items():
        policy = ROLE_ADAPTER + role
        if checkpoint is not None and (checkpoint / policy).is_dir():
            path = str(checkpoint / policy)
        check_model_folder(path)
        if load_tokenizer(path, needs_template=False).get_vocab() != tokenizer.get_vocab():
            hint = "Use a model with the policy's tokenizer, or one run for each model (examples/two_models.py)."
            raise UserError(f"The model {path} of model.roles.{role} has a different vocabulary from the policy.", hint)
        models[policy] = load_model(path, config.model.dtype, config.model.device)
    return models


def session_scheduler(
    session: TrainingSession, engine: Engine, plan: SamplingPlan, ledger: Ledger, rollout: RolloutConfig | None = None
) -> Scheduler:
    """Return the scheduler of the session's episodes; `rollout` overrides the session's settings."""
    settings = rollout or session.config.rollout
    scheduler = engine_scheduler(session.world, engine, session.renderer, settings, plan, ledger)
    return replace(scheduler, scoring=session.scoring, agents=agent_server(session.world, settings.agent))


def make_renderer(env: EnvConfig, tokenizer: Any, model: PreTrainedModel | None = None) -> Renderer:  # noqa: ANN401
    """Build the configured renderer; a vision-language `model` lets it render images."""
    if env.rendering != "chat":
        return TagsRenderer(tokenizer, PROTOCOLS[env.rendering])
    return TemplateRenderer(tokenizer, env.tool_parser, None if model is None else image_tokens(model))


def make_engine(session: TrainingSession) -> Engine:
    """Return the configured plug-in or servers, otherwise an embedded engine. Raises EngineError or ConfigError."""
    if name := session.config.engine.plugin:
        plugin = cast(Callable[[TrainingSession], Engine], find_plugin("engines", name, "engine.plugin", ()))
        engine = plugin(session)
        check_result(f"engine.plugin = {name}", engine, Engine)
        return engine
    if not session.config.engine.is_external:
        others = session.role_models.items()
        engines = {policy: local_engine(replace(session, model=model)) for policy, model in others}
        return RoleEngines(local_engine(session), engines) if engines else local_engine(session)
    try:
        return server_engine(session.config)
    except ServerUnreachable as error:
        raise EngineError(error.message, f"Start it first: {serve_command(error.url, session.source)}") from error


def server_engine(config: Config) -> ServerEngine:
    """Return the engine of the configured servers; with `model.lora` they receive adapters only."""
    engine, lora = config.engine, config.model.lora
    if lora is not None and lora.roles:
        raise UserError("model.lora.roles needs the embedded engine.", "Unset it or engine.url.")
    scaling = None if lora is None else lora.alpha / lora.rank
    keeps, moves = keeps_adapter_versions(config), config.staleness.moves
    settings = replace(server_settings(engine), keeps_adapters=keeps, moves_episodes=moves)
    return ServerEngine(engine.urls, engine.api, settings, lora_scaling=scaling)


def server_settings(engine: EngineConfig) -> RemoteEngineSettings:
    """Return the client settings of the servers."""
    return RemoteEngineSettings(
        timeout_s=engine.timeout_s,
        connect_timeout_s=engine.connect_timeout_s,
        weights_folder=engine.weights_folder or "",
        broadcast_host=engine.broadcast_host or "",
        delta=engine.weight_delta,
        token=read_token(Path(engine.token_file)) if engine.token_file else "",
    )


def local_engine(session: TrainingSession) -> LocalEngine:
    """Return an embedded engine with a copy of the weights and room for all concurrent episodes."""
    return LocalEngine(session.model, session.tokenizer, engine_settings(session.config, session.model))


def engine_settings(config: Config, model: PreTrainedModel) -> EngineSettings:
    """Return the settings of an embedded engine."""
    rollout, streams = config.rollout, config.training.streams
    return EngineSettings(
        context_tokens=min(num_positions(model) or rollout.max_seq_len, rollout.max_seq_len),
        max_batch=rollout.concurrency + streams,  # one extra for the weight check
        kv_cache_tokens=config.engine.kv_cache_tokens or rollout.concurrency * (rollout.max_seq_len + PAGE),
        max_requests=config.engine.max_requests,
        draft_tokens=config.engine.draft_tokens,
        batch_invariant=rollout.reproducible and not streams,
        recompute_on_update=not streams or config.staleness.kv_cache_on_update == "recompute",
        adapter_versions=keeps_adapter_versions(config),
        threads=1 if model.num_parameters() < SMALL_MODEL else 0,
    )


def keeps_adapter_versions(config: Config) -> bool:
    """Return whether adapter versions coexist, so that pinned episodes do not block updates (not on a cluster, and not
    with adapters of roles)."""
    lora, stays = config.model.lora, config.training.streams and not config.staleness.in_flight_weight_updates
    return stays and lora is not None and not lora.roles and not config.cluster.enabled


def add_lora(model: PreTrainedModel, lora: LoraConfig) -> PreTrainedModel:
    """Return the model with trainable LoRA adapters and frozen base weights. Needs the `lora` extra.

    The adapters of roles begin with the same factors as the default one.
    """
    num_blocks = model.config.get_text_config().num_hidden_layers
    if lora.first_block >= num_blocks:
        raise UserError(
            f"model.lora.first_block is {lora.first_block}, but the model has {num_blocks} blocks.",
            f"Set it to at most {num_blocks - 1}.",
        )
    try:
        from peft import LoraConfig as PeftConfig
        from peft import get_peft_model
    except ImportError as error:
        raise UserError("LoRA needs the package peft.", "Install it: pip install 'ludus[lora]'.") from error
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    lower = [name for name in linear if block_index(name, lora.first_block) < lora.first_block]
    config = PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=lora.target_modules,
        exclude_modules=[*other_layers(model), *lower] or None,
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, config)
    for role in lora.roles:
        adapted.add_adapter(ROLE_ADAPTER + role, copy.deepcopy(config))
    factors = {name: p for name, p in adapted.named_parameters() if FACTOR.fullmatch(name)}
    for name, factor in factors.items():
        factor.requires_grad_(True).data.copy_(factors[re.sub(rf"\.{ROLE_ADAPTER}[^.]+", f".{DEFAULT}", name)].data)
    return cast("PreTrainedModel", adapted)


def check_tokenizer(run: RunFolder, session: TrainingSession) -> None:
    """Raise UserError if a run sampled with another vocabulary, as far as its checkpoints show."""
    path = policy_path(run)
    if path is None:
        return
    vocabulary = load_tokenizer(str(path), needs_template=False).get_vocab()
    if vocabulary != session.tokenizer.get_vocab():
        hint = f"Train the model that sampled it, for example --model {path}."
        raise UserError(f"The run {run.path} sampled with a different vocabulary from this model's.", hint)


def check_vocabulary(sequences: Iterable[Sequence[int]], session: TrainingSession) -> None:
    """Raise UserError if a token of the sequences is outside the model's vocabulary and not of an image."""
    largest = max(token for tokens in sequences for token in tokens if token < IMAGE_IDS)
    size = session.model.get_input_embeddings().weight.shape[0]
    if largest >= size:
        hint = "Train the model that sampled them."
        raise UserError(f"The data contain the token {largest}, but the model has {size} tokens.", hint)
