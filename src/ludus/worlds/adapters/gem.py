"""Environments of gem-llm (import `gem`) for one player: games, puzzles, generated reasoning tasks.

The package draws from global generators, also in the middle of an episode, so each call is seeded.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Protocol

from ludus.envs.settings import read_settings
from ludus.envs.simulator_world import Observation, SimulatorWorld
from ludus.envs.tool_env import ToolLimits
from ludus.types import Task
from ludus.worlds.adapters.base import (
    AdapterSettings,
    BoundedSimulator,
    cannot_start,
    load_package,
    make_tasks,
    seeded_globally,
)


class GemSettings(AdapterSettings):
    """Settings of the world `gem` (`env.settings`)."""

    id: str = "game:GuessTheNumber-v0-easy"
    """Name of the environment."""
    success_reward: float = 1.0
    """An episode succeeds if the reward of its last turn is at least this."""


class GemEnv(Protocol):
    """Interface of an environment."""

    def reset(self, *, seed: int) -> tuple[object, Mapping[str, object]]: ...
    def step(self, action: str) -> tuple[object, float, bool, bool, Mapping[str, object]]: ...


class GemSimulator(BoundedSimulator):
    """One episode of an environment."""

    def __init__(self, package: ModuleType, settings: GemSettings, seed: int) -> None:
        super().__init__(settings.max_steps)
        self._package, self._settings, self._seed = package, settings, seed
        self._env: GemEnv | None = None

    def reset(self) -> str:
        with seeded_globally(f"{self._seed}/start"):
            env: GemEnv = self._package.make(self._settings.id, **self._settings.kwargs)
            seen, info = env.reset(seed=self._seed)
        self._env = env
        return _text(seen, info)

    def act(self, action: str) -> Observation:
        assert self._env is not None
        with seeded_globally(f"{self._seed}/{self.num_steps}"):
            try:
                seen, reward, terminated, truncated, info = self._env.step(action)
            except Exception:  # boundary: third-party environments raise on actions that they cannot read
                return Observation("The environment cannot read this action.", done=True, valid=False)
        done, value = bool(terminated or truncated), float(reward)
        self.success = float(done and value >= self._settings.success_reward)
        return Observation(_text(seen, info), value, done, valid=value >= 0)


def _text(seen: object, info: Mapping[str, object]) -> str:
    return "\n".join(filter(None, (str(seen).strip(), str(info.get("suffix", "")).strip())))


def make_gem_world(settings: Mapping[str, object], limits: ToolLimits) -> SimulatorWorld:
    """Build the world (the registered factory). Raises ConfigError, and UserError if the package is missing."""
    chosen = read_settings(GemSettings, settings)
    load_package("gem.envs", "gem-llm", "gem")
    package = load_package("gem", "gem-llm", "gem")
    try:
        GemSimulator(package, chosen, 0).reset()
    except Exception as error:  # boundary: constructors of third parties
        raise cannot_start(f"The environment {chosen.id}", error) from error

    def make(task: Task) -> GemSimulator:
        return GemSimulator(package, chosen, task.seed)

    system = "Follow the instructions of the environment."
    return SimulatorWorld("gem", make_tasks(chosen, system), make, has_expert=False)
