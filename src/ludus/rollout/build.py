"""From settings to a scheduler: the one way in which training and evaluation play episodes."""

from __future__ import annotations

from dataclasses import dataclass

from ludus.chat.render import Renderer
from ludus.config.sections.rollout import RolloutConfig
from ludus.engines.base import Engine, seed_for
from ludus.envs.base import LimitsConcurrency, SetsBounds, World
from ludus.rollout.chat_session import ChatSession, EngineChatSession
from ludus.rollout.episode import EpisodeLimits
from ludus.rollout.ledger import Ledger, RolloutKey
from ludus.rollout.lockstep_engine import LockstepEngine
from ludus.rollout.scheduler import (
    ConversationFactory,
    RolloutRequest,
    Scheduler,
    SchedulerLimits,
    episode_name,
)
from ludus.types import SamplingParams, Task


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """What one round of episodes is for: it names the randomness, and sets the temperature.

    `branches`: its episodes branch as `rollout.branch` says.
    """

    purpose: str
    temperature: float
    seed: int
    branches: bool = False


def engine_name(play: SamplingPlan, key: RolloutKey) -> str:
    """What an engine calls an episode: a task may be trained on and evaluated at once."""
    return f"{play.purpose}/{episode_name(key)}"


def sampling_params(rollout: RolloutConfig, temperature: float) -> SamplingParams:
    """The sampling of one action; the conversation adds stops and seed."""
    return SamplingParams(
        temperature=temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        max_new_tokens=rollout.max_new_tokens,
    )


def episode_limits(rollout: RolloutConfig) -> EpisodeLimits:
    """The bounds of an episode."""
    return EpisodeLimits(
        max_turns=rollout.max_turns,
        max_tool_errors=rollout.max_tool_errors,
        timeout_s=rollout.episode_timeout_s,
        environment_timeout_s=rollout.environment_timeout_s,
    )


def rollout_for(world: World, rollout: RolloutConfig, task: Task) -> RolloutConfig:
    """The settings of an episode: the world's for the task, where it sets any, else the run's."""
    return world.rollout_of(task) if isinstance(world, SetsBounds) else rollout


def episodes_at_once(world: World, concurrency: int) -> int:
    """So many, or fewer where the sandbox has no room for as many sessions."""
    room = world.episodes_at_once if isinstance(world, LimitsConcurrency) else None
    return concurrency if room is None else min(concurrency, room)


def engine_scheduler(
    world: World,
    engine: Engine,
    renderer: Renderer,
    rollout: RolloutConfig,
    play: SamplingPlan,
    ledger: Ledger,
) -> Scheduler:
    """A scheduler whose episodes speak to `engine`, in lock-step where the settings ask for
    repeatable runs and the engine's bits depend on what is computed together."""
    lockstep = LockstepEngine(engine) if rollout.reproducible and not engine.batch_invariant else None
    if rollout.guided_tools:
        renderer.guide(())

    def converse(job: RolloutRequest) -> ChatSession:
        key, own = job.key, rollout_for(world, rollout, job.task)
        return EngineChatSession(
            engine=lockstep or engine,
            renderer=renderer,
            params=sampling_params(own, 0.0 if job.greedy else play.temperature),
            max_tokens=own.max_tokens,
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
    """A scheduler with the limits of the settings, for any kind of conversation."""
    return Scheduler(
        world=world,
        converse=converse,
        episode_limits=episode_limits(rollout),
        limits=SchedulerLimits(
            episodes_at_once(world, rollout.concurrency), rollout.retries, rollout.max_failure_rate
        ),
        ledger=ledger,
        lockstep=lockstep,
        limits_of=lambda task: episode_limits(rollout_for(world, rollout, task)),
    )
