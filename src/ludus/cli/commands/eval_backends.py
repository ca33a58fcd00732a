"""Backends of an evaluation: the embedded engine with weights, or an OpenAI-compatible endpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from ludus.config.schema import Config
from ludus.envs.base import World
from ludus.errors import ConfigError
from ludus.rollout.ledger import Ledger
from ludus.rollout.openai_client import OpenAIClient, OpenAIClientSettings, endpoint_chat_factory
from ludus.rollout.reward_executor import ProcessRewardExecutor
from ludus.rollout.scheduler import SamplingPlan, Scheduler, engine_scheduler, scheduler

if TYPE_CHECKING:
    from ludus.cli.ui.load_run import LoadedRun


class EvalBackend(Protocol):
    """The model that plays. `step` is the training step of its weights."""

    @property
    def world(self) -> World: ...

    @property
    def step(self) -> int: ...

    @property
    def notices(self) -> tuple[str, ...]:
        """Sampling parameters that were ignored, in sentences."""
        ...

    def scheduler(self, play: SamplingPlan) -> Scheduler:
        """Return a scheduler with a new ledger."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class EngineBackend:
    """Weights in the embedded engine."""

    world: World
    opened: LoadedRun
    notices: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Training step of the checkpoint."""
        return self.opened.step

    def scheduler(self, play: SamplingPlan) -> Scheduler:
        """Return the scheduler of training."""
        session = self.opened.session
        made = engine_scheduler(
            self.world, self.opened.engine, session.renderer, session.config.rollout, play, Ledger()
        )
        return replace(made, scoring=session.scoring)

    async def close(self) -> None:
        """Stop the engine."""
        await self.opened.engine.close()


@dataclass(frozen=True)
class OpenAIBackend:
    """A model behind a chat-completions endpoint. Needs no torch."""

    config: Config
    world: World
    endpoint: OpenAIClient
    scoring: ProcessRewardExecutor
    step: int = 0

    @property
    def notices(self) -> tuple[str, ...]:
        """The request fields that the server rejected."""
        return self.endpoint.notices

    def scheduler(self, play: SamplingPlan) -> Scheduler:
        """Return a scheduler with the same limits as for an engine."""
        rollout, parser = self.config.rollout, self.config.env.tool_parser
        named = "" if parser == "auto" else parser
        make_chat = endpoint_chat_factory(self.endpoint, rollout, play, named, self.world)
        return replace(scheduler(self.world, make_chat, rollout, Ledger()), scoring=self.scoring)

    async def close(self) -> None:
        """Close the connections."""
        await self.endpoint.close()


def endpoint_backend(config: Config, world: World, settings: OpenAIClientSettings) -> OpenAIBackend:
    """Return the backend of an endpoint. Raises ConfigError for a rendering other than chat."""
    if config.env.rendering != "chat":
        raise ConfigError(
            f"An endpoint needs chat messages, but env.rendering is {config.env.rendering!r}.",
            "Add --env.rendering chat.",
        )
    return OpenAIBackend(config, world, OpenAIClient(settings), ProcessRewardExecutor.of(config))
