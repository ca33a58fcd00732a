"""Load a run or a model for sampling."""

from __future__ import annotations

from dataclasses import dataclass

from ludus.cli.ui.terminal import silence_libraries
from ludus.config.schema import Config
from ludus.engines.base import Engine
from ludus.envs.base import World
from ludus.envs.registry import closing
from ludus.training.run.checkpoint import load_weights
from ludus.training.run.run_dir import RunFolder, latest_checkpoint, list_checkpoints
from ludus.training.run.session import TrainingSession, make_engine, open_session


@dataclass(frozen=True)
class LoadedRun:
    """A session, the training step of its weights (0: initial weights), and an engine with these weights."""

    session: TrainingSession
    step: int
    engine: Engine

    async def close(self) -> None:
        """Close the engine and the world."""
        await self.engine.close()
        async with closing(self.session.world):
            return


async def open_weights(config: Config, run: RunFolder | None = None, world: World | None = None) -> LoadedRun:
    """Load the newest checkpoint of `run`, or the configured model, with the configured world or `world`.

    Raises UserError without a checkpoint.
    """
    silence_libraries()
    session, step = (open_session(config, world=world), 0) if run is None else open_checkpoint(run, config, world)
    engine = make_engine(session)
    if step or config.engine.is_external:  # a server starts with its own weights
        trained = {name: p.detach() for name, p in session.model.named_parameters() if p.requires_grad}
        await engine.load_weights(step, trained)
    return LoadedRun(session, step, engine)


def open_checkpoint(run: RunFolder, config: Config, world: World | None = None) -> tuple[TrainingSession, int]:
    """Return a session on the newest checkpoint of a run, and its step.

    A checkpoint of adapters is loaded on top of the initial model of the run.
    """
    step, path = latest_checkpoint(run)
    if not (path / "adapter_config.json").is_file():
        model = config.model.model_copy(update={"lora": None})
        return open_session(config.model_copy(update={"model": model}), path, world), step
    from_scratch = config.model.from_scratch
    initial = list_checkpoints(run.path / "cold_start" / "checkpoints")[-1][1] if from_scratch else None
    session = open_session(config, initial, world)
    load_weights(path, session.model)
    return session, step
