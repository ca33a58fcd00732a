"""Load a run or a model for sampling."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ludus.cli.ui.terminal import silence_libraries
from ludus.config.schema import Config
from ludus.engines.base import Engine
from ludus.envs.base import World
from ludus.envs.registry import closing
from ludus.errors import UserError
from ludus.training.run.checkpoint import load_weights
from ludus.training.run.run_dir import RunFolder, latest_checkpoint, list_checkpoints
from ludus.training.run.session import TrainingSession, make_engine, open_session


@dataclass(frozen=True)
class LoadedRun:
    """A session, the training step of its weights (0: initial weights), and an engine with these weights."""

    session: TrainingSession
    step: int
    engine: Engine

    async def aclose(self) -> None:
        """Close the engine and the world."""
        await self.engine.close()
        async with closing(self.session.world):
            return


async def open_weights(
    config: Config, run: RunFolder | None = None, world: World | None = None, step: int | None = None
) -> LoadedRun:
    """Load the checkpoint of `step` or the newest one of `run`, or the configured model; UserError without it."""
    silence_libraries()
    if run is None:
        session, step = open_session(config, world=world), 0
    else:
        session, step = open_checkpoint(run, config, world, step)
    engine = make_engine(session)
    if step or config.engine.is_external:  # a server starts with its own weights
        trained = {name: p.detach() for name, p in session.model.named_parameters() if p.requires_grad}
        await engine.load_weights(step, trained)
    return LoadedRun(session, step, engine)


def open_checkpoint(
    run: RunFolder, config: Config, world: World | None = None, chosen: int | None = None
) -> tuple[TrainingSession, int]:
    """Return a session on the newest checkpoint of a run or that of step `chosen` (0: the initial model), and its step.

    A checkpoint of adapters is loaded on top of the initial model of the run.
    """
    if chosen == 0:
        model = config.model.model_copy(update={"lora": None})
        return open_session(config.model_copy(update={"model": model}), initial_model(run, config), world), 0
    newest, found = latest_checkpoint(run), dict(list_checkpoints(run.checkpoints))
    if chosen is not None and chosen not in found:
        steps = ", ".join(str(step) for step in found)
        text = f"The run {run.path} has no checkpoint of step {chosen}."
        raise UserError(text, f"Steps: 0 (initial model), {steps}.")
    step, path = newest if chosen is None else (chosen, found[chosen])
    if not (path / "adapter_config.json").is_file():
        model = config.model.model_copy(update={"lora": None})
        return open_session(config.model_copy(update={"model": model}), path, world), step
    session = open_session(config, initial_model(run, config), world)
    load_weights(path, session.model)
    return session, step


def initial_model(run: RunFolder, config: Config) -> Path | None:
    """Return the cold start of a run from scratch; None for a run that began with the configured model."""
    if not config.model.from_scratch:
        return None
    found = list_checkpoints(run.path / "cold_start" / "checkpoints")
    if not found:
        raise UserError(f"The run {run.path} has no stored initial model.", "Choose a step of a checkpoint.")
    return found[-1][1]
