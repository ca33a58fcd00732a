"""Build schedulers from settings, for training and evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from ludus.chat.render import Renderer
from ludus.config.sections.rollout import RolloutConfig
from ludus.engines.base import Engine, seed_for
from ludus.envs.base import World
from ludus.rollout.chat_session import ChatSession, EngineChatSession
from ludus.rollout.episode import EpisodeLimits
from ludus.rollout.ledger import Ledger, RolloutKey
from ludus.rollout.lockstep_engine import LockstepEngine
from ludus.rollout.scheduler import ConversationFactory, RolloutRequest, Scheduler, SchedulerLimits, episode_name
from ludus.types import SamplingParams, Task


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """Purpose of a round of episodes; determines seeds and temperature.

    `branches`: episodes branch according to `rollout.branch`.
    """

    purpose: str
    temperature: float
    seed: int
    branches: bool = False


def engine_name(play: SamplingPlan, key: RolloutKey) -> str:
    """Return the episode's id for the engine; a task may be trained and evaluated at the same time."""
    return f"{play.purpose}/{episode_name(key)}"


def sampling_params(rollout: RolloutConfig, temperature: float) -> SamplingParams:
    """Return the sampling parameters of an action, without stops and seed."""
    return SamplingParams(
        temperature=temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        max_new_tokens=rollout.max_tokens_per_turn,
    )


def episode_limits(rollout: RolloutConfig) -> EpisodeLimits:
    """Return the limits of an episode."""
    return EpisodeLimits(
        max_turns=rollout.max_turns,
        max_tool_errors=rollout.max_tool_errors,
        timeout_s=rollout.episode_timeout_s,
        environment_timeout_s=rollout.environment_timeout_s,
    )


def rollout_for(world: World, rollout: RolloutConfig, task: Task) -> RolloutConfig:
    """Return the world's rollout settings for a task, otherwise the run's."""
    return world.rollout_of(task) or rollout


def episodes_at_once(world: World, concurrency: int) -> int:
    """Return the concurrency, capped by the sandbox's sessions."""
    room = world.episodes_at_once
    return concurrency if room is None else min(concurrency, room)


def engine_scheduler(
    world: World, engine: Engine, renderer: Renderer, rollout: RolloutConfig, play: SamplingPlan, ledger: Ledger
) -> Scheduler:
    """Return a scheduler of episodes that sample from `engine`.

    If runs are reproducible and the engine is not batch-invariant, episodes advance turn by turn in lockstep.
    """
    lockstep = LockstepEngine(engine) if rollout.reproducible and not engine.batch_invariant else None
    if rollout.guided_tools:
        renderer.guide(())

    def converse(job: RolloutRequest) -> ChatSession:
        key, own = job.key, rollout_for(world, rollout, job.task)
        return EngineChatSession(
            engine=lockstep or engine,
            renderer=renderer,
            params=sampling_params(own, 0.0 if job.greedy else play.temperature),
            max_tokens=own.max_seq_len,
            episode=episode_name(key) if lockstep else engine_name(play, key),
            seed=seed_for(play.seed, play.purpose, key.step, key.task_id, key.sample),
            guided=rollout.guided_tools,
        )

    made = scheduler(world, converse, rollout, ledger, lockstep)
    if play.branches and rollout.branch.branches:
        made.branch = rollout.branch
    return made


def scheduler(
    world: World,
    converse: ConversationFactory,
    rollout: RolloutConfig,
    ledger: Ledger,
    lockstep: LockstepEngine | None = None,
) -> Scheduler:
    """Return a scheduler with the configured limits, for any kind of chat session."""
    return Scheduler(
        world=world,
        converse=converse,
        episode_limits=episode_limits(rollout),
        limits=SchedulerLimits(episodes_at_once(world, rollout.concurrency), rollout.retries, rollout.max_failure_rate),
        ledger=ledger,
        lockstep=lockstep,
        limits_of=lambda task: episode_limits(rollout_for(world, rollout, task)),
    )
