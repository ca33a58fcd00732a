"""Load a run or a model for sampling."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ludus.cli.ui.terminal import silence_libraries
from ludus.config.schema import Config
from ludus.engines.base import Engine
from ludus.errors import UserError
from ludus.training.run.checkpoint import list_checkpoints, load_weights
from ludus.training.run.run_dir import RunFolder
from ludus.training.run.session import TrainingSession, make_engine, open_session


@dataclass(frozen=True)
class LoadedRun:
    """A session, the training step of its weights (0 if untrained), and an engine with these weights."""

    session: TrainingSession
    step: int
    engine: Engine


async def open_weights(config: Config, run: RunFolder | None = None) -> LoadedRun:
    """Load the newest checkpoint of `run`, or the configured model. Raises UserError if there is none."""
    silence_libraries()
    session, step = (open_session(config), 0) if run is None else open_checkpoint(run, config)
    engine = make_engine(session)
    if step or config.engine.is_external:  # a server has the weights it was started with
        trained = {name: p.detach() for name, p in session.model.named_parameters() if p.requires_grad}
        await engine.load_weights(step, trained)
    return LoadedRun(session, step, engine)


def open_checkpoint(run: RunFolder, config: Config) -> tuple[TrainingSession, int]:
    """Return a session on the newest checkpoint of a run, and its step.

    A checkpoint of adapters is loaded on top of the initial model of the run.
    """
    found = list_checkpoints(run.checkpoints)
    if not found:
        raise UserError(
            f"The run {run.path} has no checkpoint yet.",
            "Wait for the first one (training.checkpoint_every), or name a model.",
        )
    step, path = found[-1]
    if not (path / "adapter_config.json").is_file():
        return open_session(_without_adapters(config), path), step
    session = open_session(config, _cold_start(run) if config.model.from_scratch else None)
    load_weights(path, session.model)
    return session, step


def _without_adapters(config: Config) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update={"lora": None})})


def _cold_start(run: RunFolder) -> Path:
    return list_checkpoints(run.path / "cold_start" / "checkpoints")[-1][1]
