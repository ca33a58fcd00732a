"""Reward executors: compute rewards off the event loop, in separate processes or on a thread.

A process exits if scoring takes longer than `rollout.reward_timeout_s`. Raises WorldError for an error of a reward and
for a timeout, with its source location. Rewards that cannot be pickled (rewards of an episode, tasks of types defined
in this process) are computed on a thread of this process, with a warning.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol
from weakref import WeakKeyDictionary

from ludus.config.schema import Config
from ludus.envs.base import Environment, World
from ludus.errors import ConfigError, LudusError, WorldError
from ludus.rewards.base import Reward, check_scored_elsewhere
from ludus.rollouts.reward_process import (
    Part,
    ScoredEpisode,
    ScoreRequest,
    Verifiers,
    WorldLocation,
    added_verifiers,
    build,
    parts_of,
    score_request,
)
from ludus.types import Task, Trajectory
from ludus.untrusted.worker import TIMED_OUT, LimitedProcess, LimitExceeded, ProcessPool, UnreadableCall, run_in_thread

START_S = 120.0  # timeout for a process to build its world (s)
_FRAME = re.compile(r'File "([^"]*)", line (\d+) in (\S+)')

log = logging.getLogger("ludus.rewards")


class RewardExecutor(Protocol):
    """Interface of reward executors."""

    async def scored(
        self, world: World, environment: Environment | None, task: Task, trajectory: Trajectory
    ) -> Trajectory:
        """Return the trajectory with the rewards of its environment, or of the world if it is None.

        Adds to `timings.grading_s`. WorldError: a reward raises; RewardTimeout: scoring times out.
        """


class RewardFault(WorldError):
    """Raised if a reward timed out or its process exited: an infrastructure failure."""

    part = "reward"


class RewardTimeout(RewardFault):
    """Raised if scoring takes longer than `rollout.reward_timeout_s`."""


@dataclass
class ThreadRewardExecutor:
    """Compute rewards on a thread, one at a time. After a timeout the reward continues, and its result is ignored."""

    timeout_s: float = 120.0
    _locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = field(default_factory=WeakKeyDictionary)

    async def scored(
        self, world: World, environment: Environment | None, task: Task, trajectory: Trajectory
    ) -> Trajectory:
        verifiers = Verifiers(_rewards_of(world, environment))
        return with_rewards(trajectory, await self.run(verifiers, ScoreRequest(task, trajectory)))

    async def run(self, verifiers: Verifiers, request: ScoreRequest) -> ScoredEpisode:
        """Return the result of the verifiers. Raises as `RewardExecutor.scored`."""
        async with self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            work = asyncio.wrap_future(run_in_thread("rewards", partial(verifiers.run, request)))
            await asyncio.wait({work}, timeout=self.timeout_s)
            if work.done():
                return work.result()
            work.cancel()
            raise _timeout_error(request.task, self.timeout_s) from TimeoutError()


def _rewards_of(world: World, environment: Environment | None) -> Sequence[Reward]:
    return world.rewards if environment is None else environment.rewards


def with_rewards(trajectory: Trajectory, found: ScoredEpisode) -> Trajectory:
    """Return the trajectory with its rewards and their computing time."""
    return add_seconds(replace(trajectory, rewards=found.parts, reward=found.total), grading=found.seconds)


def add_seconds(trajectory: Trajectory, *, waiting: float = 0.0, grading: float = 0.0) -> Trajectory:
    """Return the trajectory with more time spent waiting for its rewards, and computing them."""
    before = trajectory.timings
    after = replace(before, scoring_s=before.scoring_s + waiting, grading_s=before.grading_s + grading)
    return replace(trajectory, timings=after)


def scoring_concurrency(config: Config) -> int:
    """Return the number of episodes of a run that can be scored concurrently."""
    cluster, processes = config.cluster, max(1, config.rollout.reward_processes)
    if not cluster.enabled:
        return processes
    if cluster.reward_workers:
        return cluster.reward_workers * cluster.scorings_per_worker
    return cluster.workers * processes


def _timeout_error(task: Task, timeout_s: float, stack: str = "") -> RewardTimeout:
    found = [_FRAME.search(line) for line in stack.splitlines()]
    frames = [frame.groups() for frame in found if frame]
    score = next((i for i, (_, _, name) in enumerate(frames) if name == "score"), 0)
    inner = frames[:score]
    where = f": {inner[-1][2]}, at {inner[0][0]}, line {inner[0][1]}" if inner else ""
    text = f"The rewards of task {task.id} took longer than {timeout_s:g} s{where}."
    return RewardTimeout(text, "Bound their work, or raise rollout.reward_timeout_s.")


@dataclass
class ProcessRewardExecutor:
    """Compute rewards in at most `processes` processes, started on demand; if 0, on a thread of this process."""

    location: WorldLocation
    processes: int = 1
    _pool: ProcessPool = field(init=False)
    _in_thread: ThreadRewardExecutor = field(init=False)
    _built: tuple[Part, ...] = field(default=(), init=False)
    """The rewards of the world that the processes have built."""
    _last_warning: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self._pool = ProcessPool(max(1, self.processes), self.location.modules, memory_bytes=0)
        self._in_thread = ThreadRewardExecutor(self.location.rollout.reward_timeout_s)

    @classmethod
    def of(cls, config: Config) -> ProcessRewardExecutor:
        sections = (config.env, config.rollout, config.sandbox, config.rewards)
        return cls(WorldLocation(*sections, os.getcwd(), tuple(sys.path)), config.rollout.reward_processes)

    async def scored(
        self, world: World, environment: Environment | None, task: Task, trajectory: Trajectory
    ) -> Trajectory:
        rewards, why = _rewards_of(world, environment), ""
        if environment is not None:
            try:
                check_scored_elsewhere(world.rewards, rewards, environment)
            except ConfigError as error:
                why = error.message
        request = ScoreRequest(task, trajectory)
        return with_rewards(trajectory, await self._run_verifiers(world, Verifiers(rewards), request, why))

    async def with_added(self, world: World, task: Task, trajectory: Trajectory) -> Trajectory:
        """Return the trajectory with parts and turn progress of `added_verifiers`, whose sum replaces the reward."""
        verifiers = added_verifiers(self.location.rewards, world)
        found = await self._run_verifiers(world, verifiers, ScoreRequest(task, trajectory, added=True))
        parts = {**trajectory.rewards, **found.parts}
        return replace(with_rewards(trajectory, found), rewards=parts, turn_progress=found.turns)

    async def _run_verifiers(
        self, world: World, verifiers: Verifiers, request: ScoreRequest, why: str = ""
    ) -> ScoredEpisode:
        """Return the result of the verifiers; a non-empty `why` is the reason to run them in this process."""
        if self.processes and not why:
            found = await self._pool.run(partial(self._score, parts_of(world), request))
            if isinstance(found, ScoredEpisode):
                return found
            why = found
        if self.processes and why != self._last_warning:
            self._last_warning = why
            log.warning("Rewards are computed in this process and may block it: %s", why)
        return await self._in_thread.run(verifiers, request)

    def _score(self, parts: tuple[Part, ...], request: ScoreRequest, process: LimitedProcess) -> ScoredEpisode | str:
        """Return the result of a process, or the reason why it cannot score the request."""
        task, timeout_s = request.task, self.location.rollout.reward_timeout_s
        if not process.is_running:
            try:
                self._built = process.call(partial(build, self.location), wall_s=START_S)
            except LimitExceeded as error:
                raise RewardFault("The reward process did not start.", "Check free memory.") from error
            except LudusError as error:
                process.close()
                return f"The world cannot be built in a reward process: {error.message}"
        if self._built != parts:
            return "The world built from the settings has different rewards from the run's."
        try:
            return process.call(partial(score_request, self.location, request), wall_s=timeout_s)
        except UnreadableCall as error:
            return f"Task {task.id} cannot be sent to another process ({error})."
        except LimitExceeded as error:
            if str(error).startswith(TIMED_OUT):
                raise _timeout_error(task, timeout_s, str(error)) from TimeoutError()
            raise RewardFault(f"The reward process of task {task.id} has exited.", "Check free memory.") from error
