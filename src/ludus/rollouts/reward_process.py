"""Functions of the processes that compute rewards (`ludus.untrusted.worker`). Each builds the world once."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ludus.config.sections.rewards import RewardsConfig
from ludus.config.sections.rollout import EnvConfig, RolloutConfig, SandboxConfig
from ludus.envs.base import World
from ludus.envs.registry import WORLDS, build_world
from ludus.errors import LudusError
from ludus.plugins import plugin_line
from ludus.rewards.base import Reward
from ludus.rewards.code.turns import TurnVerifier
from ludus.rewards.registry import added_parts
from ludus.rollouts.episode import score_turns, scored
from ludus.types import Task, Trajectory

Part = tuple[str, float, bool, str]
"""Name, weight, whether it is an outcome reward, and world of a reward."""


@dataclass(frozen=True, slots=True)
class WorldLocation:
    """World to build, in the working directory `folder` with the module search path `path`."""

    env: EnvConfig
    rollout: RolloutConfig
    sandbox: SandboxConfig
    rewards: RewardsConfig
    folder: str
    path: tuple[str, ...]

    @property
    def modules(self) -> str:
        """The modules to import in advance, for `LimitedProcess.preload`."""
        names = {self.env.name, *(member.world or name for name, member in self.env.mixture.items())}
        worlds = (WORLDS[name].partition(":")[0] for name in sorted(names & WORLDS.keys()))
        return ",".join([__name__, *worlds])


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Score a trajectory by the rewards of the world or, if `added`, by those of the settings."""

    task: Task
    trajectory: Trajectory
    added: bool = False


@dataclass(frozen=True, slots=True)
class ScoredEpisode:
    """Rewards of a trajectory: parts, weighted sum, duration, and the turn verifier's results if it is enabled."""

    parts: dict[str, float]
    total: float
    seconds: float
    turns: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Verifiers:
    """Functions that score a trajectory: rewards, and the turn verifier if it is enabled."""

    rewards: Sequence[Reward]
    turns: TurnVerifier | None = None

    def run(self, request: ScoreRequest) -> ScoredEpisode:
        """Score a trajectory. Raises WorldError with the message of a verifier's error."""
        begin = time.perf_counter()
        found = scored(self.rewards, request.task, request.trajectory)
        turns = () if self.turns is None else score_turns(self.turns, request.task, request.trajectory)
        return ScoredEpisode(dict(found.rewards), found.reward, time.perf_counter() - begin, turns)


def added_verifiers(settings: RewardsConfig, world: World) -> Verifiers:
    """Return the verifiers added by the section `rewards`."""
    return Verifiers(added_parts(settings), world.turn_verifier if settings.verifies_turns else None)


def parts_of(world: World) -> tuple[Part, ...]:
    """Return the descriptions of the rewards of a world."""
    return tuple((part.name, part.weight, part.outcome, part.world) for part in world.rewards)


_BUILT: list[World] = []
"""The world of this process, after `build`."""


def build(location: WorldLocation) -> tuple[Part, ...]:
    """Build the world of this process and return the descriptions of its rewards. Raises LudusError."""
    sys.path[:] = location.path
    os.chdir(location.folder)
    try:
        _BUILT[:] = [build_world(location.env, location.rollout, location.sandbox)]
    except LudusError:
        raise
    except Exception as error:  # boundary: a world may raise anything
        where = plugin_line(error)
        raise LudusError(f"{type(error).__name__}: {error}{f' ({where})' if where else ''}") from error
    return parts_of(_BUILT[0])


def score_request(location: WorldLocation, request: ScoreRequest) -> ScoredEpisode:
    """Score a trajectory by the world of this process. Raises as `Verifiers.run`."""
    if not _BUILT:
        build(location)
    world = _BUILT[0]
    verifiers = added_verifiers(location.rewards, world) if request.added else Verifiers(world.rewards)
    return verifiers.run(request)
