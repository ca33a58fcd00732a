"""Attempts at training tasks that a stage samples for itself, with the weights that it begins with.

Which tasks are played and what is sampled depend on the seed alone, so that whoever is killed samples the
same again. Nothing is written here.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from ludus.engines.base import Engine
from ludus.envs.registry import closing
from ludus.rollout.build import SamplingPlan
from ludus.rollout.ledger import Ledger, RolloutKey
from ludus.rollout.scheduler import Episode, RolloutRequest
from ludus.training.collection.rollout_collector import EpisodeReporter
from ludus.training.rl.build import probe_tokens
from ludus.training.rl.validate import check_rollouts
from ludus.training.rl.weight_sync import WeightSync
from ludus.training.run.session import TrainingSession, make_engine, session_scheduler


@dataclass(frozen=True, slots=True)
class SampledAttempts:
    """How many are sampled: `samples` at each of `tasks` tasks, or of all where there are fewer."""

    tasks: int
    samples: int


class SilentReporter:
    """A reporter for episodes that nobody watches."""

    def phase(self, name: str, total: int | None, engine: Engine | None = None) -> None:
        """Nothing is shown."""

    def episode(self, episode: Episode) -> None:
        """Nothing is shown."""


def sample_attempts(
    session: TrainingSession, wanted: SampledAttempts, watch: EpisodeReporter | None = None
) -> list[Episode]:
    """Play them under the session's present weights; the attempts at a task follow one another.

    Raises ConfigError where the world pays for cheating, EngineError and WorldError as the scheduler does.
    """
    check_rollouts(session.config, session.world)
    engine = make_engine(session)
    try:
        return asyncio.run(_sample(session, wanted, engine, watch or SilentReporter()))
    finally:
        asyncio.run(engine.close())


async def _sample(
    session: TrainingSession, wanted: SampledAttempts, engine: Engine, watch: EpisodeReporter
) -> list[Episode]:
    config, world = session.config, session.world
    num = min(wanted.tasks, len(world.tasks("train")))
    tasks = world.order(config.run.seed, num, 1).take(0, num)
    jobs = [RolloutRequest(RolloutKey(0, task.id, i), task) for task in tasks for i in range(wanted.samples)]
    play = SamplingPlan("attempts", config.rollout.temperature, config.run.seed)
    async with closing(world):
        sync = WeightSync.of(config, session.model, engine, probe_tokens(session))
        await sync.publish(0)
        scheduler = session_scheduler(session, engine, play, Ledger())
        watch.phase("attempts", len(jobs), engine)
        return await scheduler.run(jobs, watch.episode)
