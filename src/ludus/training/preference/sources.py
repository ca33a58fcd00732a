"""Sources of preference pairs: a file, the rollouts of a run, or newly sampled attempts.

Sampled tasks and attempts depend only on the seed, so an interrupted command can be repeated exactly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ludus.algorithms.preference import PREFERENCES
from ludus.config.sections.stages import UNPAIRED_LOSSES
from ludus.engines.base import Engine
from ludus.envs.registry import closing
from ludus.errors import UserError
from ludus.rollouts.ledger import Ledger, RolloutKey, RolloutOutcome
from ludus.rollouts.rollout_files import RolloutRecord
from ludus.rollouts.scheduler import Episode, RolloutRequest, SamplingPlan
from ludus.training.collection.rollout_collector import EpisodeReporter
from ludus.training.credit.advantages import TrainingSample
from ludus.training.preference.pairs import (
    PairMaker,
    PreferencePair,
    pairs_of_attempts,
    pairs_of_branches,
    pairs_of_file,
    pairs_of_rollouts,
    rollout_files,
    with_mismatched,
)
from ludus.training.rl.build import probe_tokens
from ludus.training.rl.validate import check_rollouts
from ludus.training.rl.weight_sync import WeightSync
from ludus.training.run.run_dir import RunFolder
from ludus.training.run.session import (
    TrainingSession,
    check_tokenizer,
    check_vocabulary,
    make_engine,
    session_scheduler,
)


async def _sample_attempts(session: TrainingSession, engine: Engine, reporter: EpisodeReporter | None) -> list[Episode]:
    """Sample `samples` attempts at `tasks` tasks, or all if there are fewer; attempts at a task are consecutive."""
    config, world, settings = session.config, session.world, session.config.preference
    num = min(settings.tasks, len(world.tasks("train")))
    tasks = world.order(config.run.seed, num, 1).take(0, num)
    requests = [RolloutRequest(RolloutKey(0, task.id, i), task) for task in tasks for i in range(settings.samples)]
    plan = SamplingPlan("attempts", config.rollout.temperature, config.run.seed)
    async with closing(world):
        await WeightSync.of(config, session.model, engine, probe_tokens(session)).publish(0)
        scheduler = session_scheduler(session, engine, plan, Ledger())
        if reporter is None:
            return await scheduler.run(requests)
        reporter.phase("attempts", len(requests), engine)
        return await scheduler.run(requests, reporter.episode)


@dataclass(frozen=True)
class GatheredPairs:
    """Pairs to train on, and the attempts that were sampled for them, if any."""

    pairs: Sequence[PreferencePair]
    sampled: Sequence[RolloutRecord] = ()


def gather_pairs(session: TrainingSession, reporter: EpisodeReporter | None = None) -> GatheredPairs:
    """Gather the configured pairs, before anything is written. Raises UserError if there are none.

    If no file or run is configured, the session's model samples attempts, reported to `reporter`. Raises ConfigError
    if the world rewards cheating, EngineError and WorldError as the scheduler.
    """
    settings, limit = session.config.preference, session.config.rollout.max_seq_len
    sampled: Sequence[RolloutRecord] = ()
    if settings.data is not None:
        pairs = pairs_of_file(Path(settings.data), session.renderer, limit, settings.loss in UNPAIRED_LOSSES)
        fault = f"No dialogue of {settings.data} fits into rollout.max_seq_len = {limit}."
    elif settings.run is not None:
        run = RunFolder(Path(settings.run))
        files = rollout_files(run.path)
        check_tokenizer(run, session)
        pairs = pairs_of_rollouts(files, settings.min_reward_gap, limit, _pair_maker(session))
        fault = f"No group of {settings.run} has two attempts with different rewards that make a pair."
    else:
        pairs, sampled = _sample_pairs(session, reporter)
        fault = "No task has two attempts of the model with different rewards that make a pair."
    if not pairs:
        raise UserError(fault, "See docs/use/stages.md, or lower preference.min_reward_gap.")
    check_vocabulary(max(max(side.tokens) for pair in pairs for side in pair.all_sides), session)
    return GatheredPairs(with_mismatched(pairs, limit) if PREFERENCES[settings.loss].mismatched else pairs, sampled)


def _sample_pairs(
    session: TrainingSession, reporter: EpisodeReporter | None
) -> tuple[list[PreferencePair], Sequence[RolloutRecord]]:
    """Return pairs of attempts by the session's model, and the records of all attempts."""
    settings, limit = session.config.preference, session.config.rollout.max_seq_len
    check_rollouts(session.config, session.world)
    engine = make_engine(session)
    try:
        episodes = asyncio.run(_sample_attempts(session, engine, reporter))
    finally:
        asyncio.run(engine.close())
    records = [TrainingSample(episode, *_initial_status(episode)).record for episode in episodes]
    pairs = _pair_maker(session)("step-000000", records, settings.min_reward_gap, limit)
    sides = {side.tokens for pair in pairs for side in pair.all_sides}
    return pairs, [
        replace(record, outcome=RolloutOutcome.TRAINED, reason="trained") if _is_in_pair(record, sides) else record
        for record in records
    ]


def _pair_maker(session: TrainingSession) -> PairMaker:
    return pairs_of_branches if session.config.preference.pairs == "steps" else pairs_of_attempts


def _is_in_pair(record: RolloutRecord, sides: Collection[tuple[int, ...]]) -> bool:
    """Return whether a record is a side of a pair, or continues one."""
    if record.trajectory.failure is not None:
        return False
    sequences = [path.trajectory.token_ids for path in record.trajectory.paths()]
    return any(tokens[: len(side)] == side for tokens in sequences for side in sides)


def _initial_status(episode: Episode) -> tuple[RolloutOutcome, str]:
    failure = episode.trajectory.failure
    return (RolloutOutcome.DROPPED, "no pair") if failure is None else (RolloutOutcome.FAILED, failure.part)
