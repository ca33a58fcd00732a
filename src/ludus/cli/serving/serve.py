"""Serve a checkpoint over HTTP with the API of OpenAI's and vLLM's servers."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from ludus.chat.render import TemplateRenderer
from ludus.cli.arguments import policy_config
from ludus.cli.ui.terminal import load_libraries, make_console, print_line
from ludus.config.load import load_config
from ludus.config.paths import check_model_folder
from ludus.config.schema import Config
from ludus.engines.base import seed_for
from ludus.engines.control_tokens import publish_token, token_of
from ludus.errors import UserError
from ludus.rollouts.episode import ChatSession, EngineChatSession
from ludus.rollouts.scheduler import sampling_params
from ludus.training.run.run_dir import RunFolder, latest_checkpoint, lock_run, sessions_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ludus.gateway.recording import SessionRecorder
    from ludus.gateway.service import CompletionService

_MAX_CONTEXT = 4096


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Serve until interrupted."""
    if args.record is not None and (args.control or args.idle_s <= 0 or args.max_sessions < 1):
        text = "--record needs --idle-s and --max-sessions above 0, and excludes --control."
        raise UserError(text, "Clients that open sessions must not have the control token.")
    config = _config(args.target, overrides)
    load_libraries()
    with needs_serve_extra():
        from ludus.gateway.app import make_app
        from ludus.gateway.endpoints import error_response
        from ludus.gateway.limits import http_server, model_limits, open_socket, url_of
    from ludus.training.run.session import default_threads, set_up_compute

    default_threads()
    set_up_compute(config)
    console = make_console()
    # The port is bound before the model is loaded, so that a busy port is reported at once.
    with nullcontext() if args.check else open_socket(args.host, args.port) as listener:
        step, service, model = _service(args, config)
        context = service.engine.context_tokens
        what = f"{service.model.name} (weights {step}, context {context} tokens)"
        if listener is None:
            asyncio.run(service.engine.close())
            print_line(console, f"{what} can be served.")
            return
        token = publish_token(listener.getsockname()[1], service.control_token)
        with token, _recording(args, config, service, model) as recorder:
            app = make_app(service, model, recorder)
            server = http_server(app, model_limits(context), error_response, lifespan=recorder is not None)
            print_line(console, f"Serving {what} at {url_of(listener)}")
            if service.control_token:
                print_line(console, f"Control token: {service.control_token}")
            if recorder is not None:
                print_line(console, f"Recording sessions to {args.record}. Session token: {recorder.token}")

            async def serve() -> None:
                try:
                    await server.serve(sockets=[listener])
                finally:
                    await service.engine.close()

            asyncio.run(serve())


@contextmanager
def _recording(
    args: argparse.Namespace, config: Config, service: CompletionService, model: PreTrainedModel
) -> Iterator[SessionRecorder | None]:
    """Lock the folder of recorded sessions during the block, and yield their recorder; None without --record."""
    if args.record is None:
        yield None
        return
    from ludus.engines.models.fingerprint import fingerprint_module
    from ludus.gateway.recording import RecordingLimits, SessionRecorder

    renderer, rollout = service.model.renderer, config.rollout
    if renderer is None:
        raise UserError("--record needs a model with a chat template.", "Serve it without --record.")

    def make_chat(name: str) -> ChatSession:
        seed, params = seed_for(config.run.seed, "session", name), sampling_params(rollout, rollout.temperature)
        return EngineChatSession(service.engine, renderer, params, rollout.max_seq_len, name, seed)

    path = args.target
    if (Path(path) / "config.toml").is_file():
        path = latest_checkpoint(RunFolder(Path(path)))[1]
    served = config.model.model_copy(
        update={"path": str(Path(path).resolve() if Path(path).is_dir() else path), "from_scratch": False}
    )
    stored = config.model_copy(update={"model": served, "run": config.run.model_copy(update={"dir": str(args.record)})})
    folder = sessions_folder(stored, fingerprint_module(model))
    with lock_run(folder):
        limits = RecordingLimits(rollout, args.idle_s, args.max_sessions)
        yield SessionRecorder(folder.path, make_chat, limits, token_of(args.token_file))


@contextmanager
def needs_serve_extra() -> Iterator[None]:
    """Raise UserError if an import in the block fails."""
    try:
        yield
    except ImportError as error:
        hint = "Install it: pip install 'ludus[serve]'."
        raise UserError(f"Serving needs the package {error.name}.", hint) from error


def _config(target: str, overrides: Sequence[str]) -> Config:
    if (Path(target) / "config.toml").is_file():
        latest_checkpoint(RunFolder(Path(target)))
        return policy_config(RunFolder(Path(target)), overrides)
    check_model_folder(target)
    return load_config(None, ["--model.path", target, *overrides])


def _load(target: str, config: Config) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, int]:
    """Return model, tokenizer and training step of a run's newest checkpoint, or of a model (step 0)."""
    from ludus.cli.ui.load_run import open_checkpoint
    from ludus.engines.models.loading import load_model, load_tokenizer

    if (Path(target) / "config.toml").is_file():
        session, step = open_checkpoint(RunFolder(Path(target)), config)
        return session.model, session.tokenizer, step
    return load_model(target, config.model.dtype, config.model.device), load_tokenizer(target), 0


def _service(args: argparse.Namespace, config: Config) -> tuple[int, CompletionService, PreTrainedModel]:
    from ludus.engines.embedded.engine import EngineSettings, LocalEngine
    from ludus.engines.models.loading import num_positions
    from ludus.engines.models.vision import image_tokens
    from ludus.gateway.service import CompletionService, served_model
    from ludus.training.run.session import SMALL_MODEL

    model, tokenizer, step = _load(args.target, config)
    longest = num_positions(model) or _MAX_CONTEXT
    context = args.context_tokens or min(longest, _MAX_CONTEXT)
    if not 2 <= context <= longest or min(args.max_batch, args.kv_cache_tokens, args.max_requests + 1) < 1:
        raise UserError(
            f"--context-tokens must be 2 to {longest}, --max-batch and --kv-cache-tokens above 0, "
            "and --max-requests at least 0.",
            "Remove them to use the defaults.",
        )
    settings = EngineSettings(
        context_tokens=context,
        max_batch=args.max_batch,
        kv_cache_tokens=args.kv_cache_tokens,
        max_requests=args.max_requests if args.record is None else 0,  # sessions have a limit each
        batch_invariant=config.rollout.reproducible,
        threads=1 if model.num_parameters() < SMALL_MODEL else 0,
    )
    engine = LocalEngine(model, tokenizer, settings, version=step, copy=False)
    name = args.name or Path(args.target).resolve().name
    images, parser = image_tokens(model), config.env.tool_parser
    renderer = TemplateRenderer(tokenizer, parser, images) if tokenizer.chat_template else None
    served = served_model(model, tokenizer, name, args.target, renderer)
    token = token_of(args.token_file) if args.control else ""
    return step, CompletionService(engine, served, token, frozenset([*(args.allow_host or ()), args.host])), model
