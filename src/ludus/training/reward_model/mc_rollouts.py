"""Monte-Carlo rollouts from inside of recorded attempts: what a turn is worth, by what may come of it.

An environment has no way back, so the recorded actions are done again in a fresh one, and the model goes on
from there. That holds for worlds that answer equal actions equally; the tokens of another answer stop the
command.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from ludus.envs.registry import closing
from ludus.errors import ConfigError, UserError
from ludus.rollout.build import SamplingPlan
from ludus.rollout.chat_session import ChatSession, EngineChatSession
from ludus.rollout.ledger import Ledger, RolloutKey
from ludus.rollout.rollout_files import RolloutRecord
from ludus.rollout.scheduler import Episode, RolloutRequest
from ludus.training.run.session import TrainingSession, make_engine, session_scheduler
from ludus.types import Segment, Task, Trajectory

Told = tuple[Segment, ...]
"""The segments of an attempt up to and including an action."""


def play_on(session: TrainingSession, records: Sequence[tuple[str, RolloutRecord]], num: int) -> list[Trajectory]:
    """`num` rollouts from after each action of the attempts but each one's last, equal histories once.

    The session's model plays them at `rollout.temperature`. Raises UserError where the world has no such
    task, and WorldError where it does not answer as it did.
    """
    if session.config.engine.is_external:
        raise ConfigError(
            "reward_model.rollouts are played by the model that becomes the reward model, in this process.",
            "Leave engine.url out.",
        )
    told = {key: value for _, record in records for key, value in _beginnings(record.trajectory).items()}
    tasks = {task.id: task for task in session.world.tasks("train")}
    jobs, beginnings = [], {}
    for number, ((task_id, _), segments) in enumerate(told.items(), start=1):
        for sample in range(num):
            key = RolloutKey(number, task_id, sample)
            jobs.append(RolloutRequest(key, _task(tasks, task_id)))
            beginnings[number] = segments
    episodes = asyncio.run(_play(session, jobs, beginnings))
    return [e.trajectory for e in episodes if e.trajectory.failure is None]


def _beginnings(trajectory: Trajectory) -> dict[tuple[str, tuple[int, ...]], Told]:
    """The attempt up to each action but its last, by task and tokens."""
    actions = [i for i, segment in enumerate(trajectory.chain) if segment.kind == "action"]
    found = {}
    for i in actions[:-1]:
        told = trajectory.chain[: i + 1]
        found[trajectory.task_id, tuple(t for segment in told for t in segment.tokens)] = told
    return found


def _task(tasks: dict[str, Task], task_id: str) -> Task:
    if task_id not in tasks:
        raise UserError(f"The world has no task {task_id} to play on.", "Take the recipe and the settings of that run.")
    return tasks[task_id]


async def _play(session: TrainingSession, jobs: Sequence[RolloutRequest], beginnings: dict[int, Told]) -> list[Episode]:
    config, engine = session.config, make_engine(session)
    play = SamplingPlan("play on", config.rollout.temperature, config.run.seed)
    scheduler = session_scheduler(session, engine, play, Ledger())
    converse = scheduler.converse

    def go_on(job: RolloutRequest) -> ChatSession:
        conversation = converse(job)
        assert isinstance(conversation, EngineChatSession)
        return replace(conversation, told=beginnings[job.key.step])

    scheduler.converse = go_on
    try:
        async with closing(session.world):
            return await scheduler.run(jobs)
    finally:
        await engine.close()
